"""Ours beside what people would pick instead: step time, bytes kept for the backward, collectives.

    make bench                                    everything; writes benchmarks/results
    python benchmarks/bench.py --parts kept --dims 512

Every way trains the same module through the stock Trainer, launched in turn, round by round; a way's time is compared
with that of torch's DTensor in the same round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import platform
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
import torch.distributed as dist  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402

from lightning_seqpar.measure import StepMeter  # noqa: E402
from lightning_seqpar.testing import run_distributed  # noqa: E402

LAYERS, BATCH, VOCAB = 4, 4, 512
WAYS = ("ours", "ours, gathered kept", "ours, no sp", "dtensor", "dtensor, no sp", "ddp")
BASE = "dtensor"
CHECKED = 18  # steps until run-time checks have become rare


class Clock(Callback):
    """When each step began."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.times.append(time.perf_counter())

    on_train_end = on_train_batch_start


def train(way: str, dim: int, length: int, steps: int, callbacks: list[Callback]) -> None:
    """Train on this rank."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module, strategy = peers.make(way, dim, LAYERS, VOCAB)
    tokens = torch.randint(0, VOCAB, (BATCH * steps, length + 1), generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        accelerator="auto",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    trainer.fit(module, torch.utils.data.DataLoader(tokens, BATCH))


def timed(way: str, dim: int, length: int, steps: int) -> float:
    """Median of the step, in ms."""
    clock = Clock()
    train(way, dim, length, CHECKED + steps, [clock])
    ends = clock.times[CHECKED:]
    return statistics.median(b - a for a, b in itertools.pairwise(ends)) * 1e3


def kept(way: str, dim: int, length: int) -> tuple[float, dict[str, int], dict[str, int]]:
    """MiB kept for the backward, and the collectives of a step with their bytes."""
    meter = StepMeter(batch=CHECKED)
    train(way, dim, length, CHECKED + 1, [meter])
    return meter.saved_bytes / 2**20, meter.calls, meter.bytes


def measure_steps(dims: list[int], rounds: int, length: int, steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dim in dims:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in WAYS:
                times[way].append(max(run_distributed(timed, 2, way, dim, length, steps, timeout=1200)))
                print(f"dim {dim}, round {number + 1}: {way} {times[way][-1]:.1f} ms", file=sys.stderr, flush=True)
        found[str(dim)] = times
    return found


def measure_kept(dims: list[int], sizes: list[int], length: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dim in dims:
        for tp in sizes:
            for way in WAYS:
                saved, calls, sent = run_distributed(kept, tp, way, dim, length, timeout=1200)[0]
                found[f"{dim}/{tp}/{way}"] = {"MiB": saved, "calls": calls, "bytes": sent}
                print(f"dim {dim}, tp {tp}: {way} {saved:.1f} MiB, {calls}", file=sys.stderr, flush=True)
    return found


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"{results['machine']}; {LAYERS} layers, batch {BATCH} × {results['length']}, vocabulary {VOCAB}, float32, AdamW"
    ]
    for dim, times in results.get("steps", {}).items():
        lines += [
            "",
            f"## Step time, dim {dim}, tp 2",
            "",
            "| way | ms, median | min–max | of DTensor's |",
            "|---|---|---|---|",
        ]
        for way, own in times.items():
            ratios = [a / b for a, b in zip(own, times[BASE], strict=True)]
            lines.append(
                f"| {way} | {statistics.median(own):.1f} | {min(own):.1f}–{max(own):.1f} | {statistics.median(ratios):.2f} |"
            )
    if "kept" in results:
        lines += ["", "## Kept for the backward, and sent in a step", ""]
        lines += ["| dim | tp | way | MiB | of DTensor's | calls | MiB sent |", "|---|---|---|---|---|---|---|"]
        for key, one in results["kept"].items():
            dim, tp, way = key.split("/")
            base = results["kept"][f"{dim}/{tp}/{BASE}"]["MiB"]
            calls, sent = sum(one["calls"].values()), sum(one["bytes"].values()) / 2**20
            lines.append(
                f"| {dim} | {tp} | {way} | {one['MiB']:.1f} | {one['MiB'] / base:.2f} | {calls} | {sent:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["steps", "kept"], choices=["steps", "kept"])
    parser.add_argument("--dims", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--tp", nargs="+", type=int, default=[2, 4], help="sizes at which kept bytes are counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each launch")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo, one thread per rank"
    results: dict[str, Any] = {
        "machine": f"{device}; torch {torch.__version__}, lightning {L.__version__}, Python {platform.python_version()}",
        "length": given.length,
    }
    if "steps" in given.parts:
        results["steps"] = measure_steps(given.dims, given.rounds, given.length, given.steps)
    if "kept" in given.parts:
        results["kept"] = measure_kept(given.dims, given.tp, given.length)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    (given.out / "bench.md").write_text(tables(results))
    print(tables(results))


if __name__ == "__main__":
    main()
