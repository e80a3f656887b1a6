"""A step through a pipeline beside the formula, with blocks that wait instead of computing, so that two cores can show it.

    python benchmarks/pipeline.py

Each block waits for a given time in its forward and for twice that in its backward. With m micro-batches over p stages a step
should take (m + (p - 1) / v) / m of the time in which a stage does its own work, where each has v chunks of blocks
(arXiv 2104.04473, section 2.2).
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

BLOCKS = 8
WORK = 0.020
"""Seconds of a block's forward."""
CASES = (
    *((1, 1, 4), (2, 1, 2), (2, 1, 4), (2, 1, 8), (2, 1, 16), (4, 1, 4), (4, 1, 8), (4, 1, 16)),
    *((2, 2, 2), (2, 2, 4), (2, 2, 8), (2, 4, 4), (4, 2, 4), (4, 2, 8), (4, 2, 16)),
)
"""Stages, chunks of each, and micro-batches."""
PICTURES = ((4, 1, 8), (4, 2, 8))
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


def measure(stages: int, chunks: int, micro: int, steps: int) -> dict[str, Any]:
    """The median step of this rank, and what it did in the last but one: what, which chunk, which micro-batch, begin and end."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    model = Model()
    first = -(-FIRST // micro) + 1
    data = TensorDataset(torch.randint(31, (micro * (first + steps), 6), generator=torch.Generator().manual_seed(1)))
    in_chunk = BLOCKS // (stages * chunks)
    strategy = SeqParallelStrategy(
        pp=stages, virtual_pp=chunks if stages > 1 else None, self_check=False, pp_layers=[in_chunk] * stages * chunks
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=stages, strategy=strategy, max_steps=first + steps, accumulate_grad_batches=micro,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=1))
    ends = model.ends[-steps - 1 :]
    found: dict[tuple[str, int, int], tuple[float, float]] = {}
    for at, block in enumerate(model.blocks):
        spans = [span for span in block.spans if ends[-3] < span[1] < ends[-2]]  # the last may be one of checks
        for what in ("forward", "backward"):
            for number, (_, begin, end) in enumerate(span for span in spans if span[0] == what):
                key = what, at // (in_chunk * stages), number
                first, last = found.get(key, (begin, end))
                found[key] = min(first, begin), max(last, end)
    times = sorted(b - a for a, b in pairwise(ends))
    return {"seconds": times[len(times) // 2], "spans": [(*key, *span) for key, span in found.items()]}


def main() -> None:
    """Print the steps, the formula's, and steps of four stages."""
    steps, found = 3, []
    pictures = []
    for stages, chunks, micro in CASES:
        told = run_distributed(measure, stages, stages, chunks, micro, steps, timeout=600)
        own = micro * BLOCKS // stages * 3 * WORK
        formula = own * (micro + (stages - 1) / chunks) / micro
        step = told[0]["seconds"]
        found.append({"stages": stages, "chunks": chunks, "micro": micro, "own": own, "formula": formula, "step": step})
        print(found[-1], file=sys.stderr, flush=True)
        if (stages, chunks, micro) in PICTURES:
            start = min(begin for one in told for *_, begin, _ in one["spans"])
            pictures.append([[(*key, a - start, b - start) for *key, a, b in one["spans"]] for one in told])
    print(json.dumps({"steps": found, "pictures": pictures}))


if __name__ == "__main__":
    main()
