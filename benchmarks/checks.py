"""What checks cost a step: ``python benchmarks/checks.py``.

A llama-like decoder of four layers on two gloo ranks trains by the stock Trainer, with ``check_every=2``. Of each run, seconds of
steps with an even number, in which checks are due, beside the odd ones between them, from 17 on.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import lightning as L  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_seqpar import SeqParallelStrategy  # noqa: E402
from lightning_seqpar.testing import run_distributed  # noqa: E402

STEPS = 31
SHAPES = {"2 × 256, width 256": (256, 256), "4 × 512, width 512": (512, 512)}
"""Positions and features."""


class Decoder(peers.Module):
    """A decoder that notes when each step ends."""

    def on_train_start(self) -> None:
        self.ends = [time.perf_counter()]

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def measure(length: int, dim: int) -> list[float]:
    """Seconds of each step of a run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    model = Decoder(dim, 4, 1024)
    samples = dim // 128
    tokens = torch.randint(1024, (samples * STEPS, length), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_steps=STEPS, logger=False,
        strategy=SeqParallelStrategy(tp=2, check_every=2, self_check=False), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(tokens, batch_size=samples))
    return [b - a for a, b in zip(model.ends, model.ends[1:], strict=False)]


def main() -> None:
    """Print, for each shape, the ratios of the steps' medians."""
    found = {}
    for name, (length, dim) in SHAPES.items():
        times = run_distributed(measure, 2, length, dim, timeout=600)[0]
        unchecked = statistics.median(times[16::2])
        found[name] = {"unchecked": unchecked, "due": statistics.median(times[17::2]) / unchecked}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
