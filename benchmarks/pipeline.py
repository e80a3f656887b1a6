"""A step through a pipeline beside the formula, with blocks that wait instead of computing, so that two cores can show it.

    python benchmarks/pipeline.py

Each block waits for a given time in its forward and for twice that in its backward. With m micro-batches over p stages a step
should take (m + p - 1) / m of the time in which a stage does its own work (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from lightning_seqpar import SeqParallelStrategy  # noqa: E402
from lightning_seqpar.testing import run_distributed  # noqa: E402

BLOCKS = 4
WORK = 0.040
"""Seconds of a block's forward."""
CASES = ((1, 4), (2, 2), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8), (4, 16))
"""Stages, and micro-batches."""
FIRST = 32
"""Micro-batches in which run-time checks are due, which all ranks make together."""


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: list[tuple[str, float, float]]) -> Tensor:
        ctx.spans = spans
        _work("forward", WORK, spans)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _work("backward", 2 * WORK, ctx.spans)
        return grad, None


def _work(what: str, seconds: float, spans: list[tuple[str, float, float]]) -> None:
    begin = time.monotonic()  # of the machine, so that ranks can be compared
    time.sleep(seconds)
    spans.append((what, begin, time.monotonic()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.spans: list[tuple[str, float, float]] = []
        self.waits = True

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.down(F.gelu(self.up(x)))
        return _Wait.apply(out, self.spans) if self.waits else out  # type: ignore[no-any-return, no-untyped-call]


class Model(L.LightningModule):
    """Blocks that wait between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(31, 8),
            nn.ModuleList(Block() for _ in range(BLOCKS)),
            nn.Linear(8, 31),
        )
        self.ends: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[0].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.ends.append(time.monotonic())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measure(stages: int, micro: int, steps: int) -> dict[str, Any]:
    """The median step of this rank, and what it did in the last one."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    model = Model()
    first = -(-FIRST // micro) + 1
    data = TensorDataset(torch.randint(31, (micro * (first + steps), 6), generator=torch.Generator().manual_seed(1)))
    strategy = SeqParallelStrategy(pp=stages, self_check=False, pp_layers=[BLOCKS // stages] * stages)
    trainer = L.Trainer(
        accelerator="cpu", devices=stages, strategy=strategy, max_steps=first + steps, accumulate_grad_batches=micro,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=1))
    ends = model.ends[-steps - 1 :]
    spans = [span for block in model.blocks for span in block.spans if ends[-2] < span[1] < ends[-1]]
    times = sorted(b - a for a, b in pairwise(ends))
    return {"seconds": times[len(times) // 2], "spans": sorted(spans, key=lambda span: span[1])}


def main() -> None:
    """Print the steps, the formula's, and a step of four stages."""
    steps, found = 3, []
    picture: list[list[tuple[str, float, float]]] = []
    for stages, micro in CASES:
        told = run_distributed(measure, stages, stages, micro, steps, timeout=600)
        own = micro * BLOCKS // stages * 3 * WORK
        formula = own * (micro + stages - 1) / micro
        found.append({"stages": stages, "micro": micro, "own": own, "formula": formula, "step": told[0]["seconds"]})
        if (stages, micro) == (4, 8):
            begin = min(span[1] for one in told for span in one["spans"])
            picture = [[(what, a - begin, b - begin) for what, a, b in one["spans"]] for one in told]
    print(json.dumps({"steps": found, "spans": picture}))


if __name__ == "__main__":
    main()
