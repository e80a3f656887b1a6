"""One way, trained in a process of its own per rank; rank 0 writes what was measured as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/child.py '{"way": "ours", "dim": 128}' out.json
"""

from __future__ import annotations

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

from lightning_seqpar.measure import StepMeter  # noqa: E402

CHECKED = 17  # steps until run-time checks have become rare; they are taken with short batches
SHORT = 32


def resident(key: str) -> int:
    """Bytes of this process in memory (``VmRSS``), or the most so far (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def used(peak: bool = False) -> int:
    """Bytes that this rank uses, on its GPU where it has one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    return resident("VmHWM" if peak else "VmRSS")


def forget_peak() -> None:
    """Peaks count from now on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


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


def run(
    way: str,
    dim: int,
    length: int,
    batch: int = 4,
    layers: int = 4,
    vocab: int = 512,
    steps: int = 10,
    recompute: bool = False,
    counts: bool = False,
    memory: bool = False,
) -> dict[str, Any]:
    """Train this rank's part and say what was measured.

    Args:
        steps: timed steps, behind one of full length that is not.
        counts: count what is kept and sent in place of timing.
        memory: measure this rank's peak.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tp = int(os.environ["WORLD_SIZE"])
    clock, meter = Clock(memory), StepMeter(batch=CHECKED)
    module, strategy = peers.make(way, tp, dim, layers, vocab, recompute=recompute)
    numbers = torch.Generator().manual_seed(0)
    lengths = [SHORT] * CHECKED + [length] * (1 if counts else steps + 1)
    data = [torch.randint(0, vocab, (batch, one + 1), generator=numbers) for one in lengths]
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
        callbacks=[meter if counts else clock],
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    if counts:
        return {"kept": meter.saved_bytes, "calls": meter.calls, "sent": meter.bytes}
    return clock.measured(CHECKED + 1)


if __name__ == "__main__":
    told = run(**json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(told))
