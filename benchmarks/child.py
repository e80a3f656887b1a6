"""One way, trained in a process of its own per rank; each writes what it measured, or why it failed, as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/child.py '{"way": "ours", "dim": 128}' folder
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
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
from lightning.pytorch.callbacks import Callback  # noqa: E402
from memory import forget_peak, limit, used  # noqa: E402

from lightning_seqpar.measure import StepMeter  # noqa: E402

CHECKED = 17  # steps until run-time checks have become rare; they are taken with short batches
SHORT = (2, 33)


class Clock(Callback):
    """When each step began, by the wall and by this thread's own time (waiting for other ranks left out); memory, if asked."""

    def __init__(self, memory: bool) -> None:
        self.wall: list[float] = []
        self.host: list[float] = []
        self.start, self.peak, self.memory = used(), 0, memory

    def on_train_batch_start(self, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.memory and len(self.wall) == CHECKED + 1:
            self.held = used()
            forget_peak()
        self.wall.append(time.perf_counter())
        self.host.append(time.thread_time())

    def on_train_end(self, *args: Any) -> None:
        if self.memory:
            self.peak = used(peak=True)
        self.on_train_batch_start()

    def measured(self, warm: int) -> dict[str, float]:
        """Medians in ms; bytes over those at the start, and over those between steps."""
        found = {
            name: statistics.median(b - a for a, b in itertools.pairwise(times[warm:])) * 1e3
            for name, times in (("ms", self.wall), ("host_ms", self.host))
        }
        if self.memory:
            found |= {"peak": float(self.peak - self.start), "step": float(self.peak - self.held)}
        return found


class StartupClock(Callback):
    """When the first step and each after it began, and the peaks of the time before and of the steps."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]
        self.startup_peak = 0
        forget_peak()

    def on_train_batch_start(self, *args: Any) -> None:
        if len(self.times) == 1:
            self.startup_peak = used(peak=True)
            forget_peak()
        self.times.append(time.perf_counter())

    def on_train_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())
        self.training_peak = used(peak=True)

    def measured(self) -> dict[str, float]:
        """Seconds until the first step and of a later one (the median), and both peaks in bytes of the whole process."""
        start, first, *later = self.times
        return {
            "startup_s": first - start,
            "step_s": statistics.median(b - a for a, b in itertools.pairwise(later)),
            "startup_peak": float(self.startup_peak),
            "training_peak": float(self.training_peak),
        }


def run(
    way: str,
    dim: int = 0,
    length: int = 128,
    batch: int = 4,
    layers: int = 4,
    vocab: int = 512,
    model: str | None = None,
    steps: int = 10,
    recompute: bool = False,
    counts: bool = False,
    memory: bool = False,
    startup: bool = False,
    room: int | None = None,
) -> dict[str, Any]:
    """Train this rank's part and say what was measured.

    Args:
        way: a way of ``peers.make``.
        dim: features of the decoder of ``peers.py``; likewise ``layers`` and ``vocab``.
        length: tokens of a sequence.
        batch: sequences of a batch.
        model: a model of ``hf_models.MODELS`` in place of that decoder.
        steps: timed steps, behind one of full length that is not.
        recompute: recompute the decoder's blocks, by its own code.
        counts: count what is kept and sent in place of timing.
        memory: measure this rank's peak.
        startup: measure the time and the peak before the first step in place of steps.
        room: bytes past which an allocation fails; None for no limit.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if room is not None and not torch.cuda.is_available():
        limit(room)
    tp = int(os.environ["WORLD_SIZE"])
    module, strategy = peers.make(way, tp, model or (dim, layers, vocab), recompute=recompute)
    words = module.vocab
    numbers = torch.Generator().manual_seed(0)
    full = (batch, length + 1)
    sizes = [full] * steps if startup else [SHORT] * CHECKED + [full] * (1 if counts else steps + 1)
    data = [torch.randint(0, words, size, generator=numbers) for size in sizes]
    clock, meter = Clock(memory), StepMeter(batch=CHECKED)
    callback: Callback = meter if counts else clock
    if startup:
        gc.collect()
        callback = starting = StartupClock()
    trainer = L.Trainer(
        accelerator="auto",
        devices=1 if tp == 1 or way == peers.ALONE else int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1 if way == peers.ALONE else tp // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=len(data),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[callback],
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    if startup:
        return dict(starting.measured())
    if counts:
        return {"kept": meter.saved_bytes, "calls": meter.calls, "sent": meter.bytes}
    return dict(clock.measured(CHECKED + 1))


if __name__ == "__main__":
    out = Path(sys.argv[2], f"{int(os.environ['RANK']):05}.json")
    try:
        told = run(**json.loads(sys.argv[1]))
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        why = said if isinstance(error, peers.NoPlanError) else f"{type(error).__name__}: {said}"
        out.write_text(json.dumps({"error": why}))
        raise
    out.write_text(json.dumps(told))
