"""Train on GPUs and on one of them, and compare; ``make gpu`` on a machine with two or more.

    python tests/gpu.py                    every case that the devices suffice for, as a table
    python tests/gpu.py --accelerator cpu  the same over gloo, to see that this script itself is right

Losses, gradients and weights in float64 are those of one process up to 1e-9, save where a case says otherwise. In steps in which
no check is due nothing of the package may make the host wait for a device. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

import lightning_seqpar
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers.fit import fit

PACKAGE = Path(lightning_seqpar.__file__).parent
STEPS = 20


@dataclass(frozen=True)
class Case:
    """What is trained: the model, the strategy's fields, more of ``fit``'s, and how far it may lie from one process."""

    name: str
    devices: int
    strategy: dict[str, Any]
    model: str = "GPT"
    arguments: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    limit: float = 1e-9


HALF = {"precision": "bf16-mixed"}
CASES = [
    Case("tp 2", 2, {"tp": 2, "regather": False}),
    Case("tp 2, clipped", 2, {"tp": 2}, more={"clip": 0.1}),
    Case("tp 2, without sp", 2, {"tp": 2, "sp": False}),
    Case("tp 2, in chunks", 2, {"tp": 2, "loss_chunk": 16}, arguments={"tied": False}),
    Case("tp 2, recomputed", 2, {"tp": 2, "recompute": "full"}),
    Case("tp 2, compiled", 2, {"tp": 2, "compile": True}),
    Case("tp 2, fused heads that ranks share", 2, {"tp": 2}, "Zoo", {"kind": "fused_mqa"}),
    Case("tp 2, by hand", 2, {"tp": 2}, "ManualTwo", {"style": "keep"}),
    Case("dp 2, fsdp", 2, {"tp": 1, "data_parallel": "fsdp"}),
    Case("tp 2, bf16-mixed", 2, {"tp": 2}, more=HALF, limit=5e-2),
    Case("dp 2 x tp 2", 4, {"tp": 2}),
    Case("dp 2 x tp 2, fsdp", 4, {"tp": 2, "data_parallel": "fsdp"}),
    Case("tp 4", 4, {"tp": 4}),
]


class Waits(Callback):
    """Where the package made the host wait for a device, in steps 17 to 20, as CUDA tells it."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._warnings = warnings.catch_warnings()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 16 and torch.cuda.is_available():
            self._warnings.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
            self._warnings.__exit__(None, None, None)

    def _note(self, message: Any, *args: Any) -> None:
        if "synchroniz" in str(message):
            own = [frame for frame in traceback.extract_stack() if PACKAGE in Path(frame.filename).parents]
            torch_optim = any("torch/optim" in frame.filename for frame in traceback.extract_stack())
            if own and not torch_optim:
                self.places.append(f"{Path(own[-1].filename).relative_to(PACKAGE)}:{own[-1].lineno}")


def train(case: Case, accelerator: str, alone: bool, out: Path) -> None:
    """Train one case here: the first rank writes its trace, and where the host waited."""
    waits, how = Waits(), {"world": 1} if alone else {"world": case.devices, "strategy": case.strategy}
    trace = fit(case.model, case.arguments, **how, steps=STEPS, callbacks=[waits], accelerator=accelerator, **case.more)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"trace": vars(trace), "waits": sorted(set(waits.places))}, out)


def run(case: Case, accelerator: str, alone: bool, folder: Path) -> dict[str, Any] | str:
    """Train one case in processes of its own: what they wrote, or the end of what they said."""
    out = folder / "out.pt"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--train", case.name, str(out), "--accelerator", accelerator]
    done = subprocess.run(
        [*command, *(["--alone"] if alone else [])],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode or not out.exists():
        return "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
    return dict(torch.load(out, weights_only=False, map_location="cpu"))


def judge(case: Case, accelerator: str, folder: Path) -> tuple[bool, str]:
    """Whether a case is right, and a line on it."""
    alone, ours = run(case, accelerator, True, folder), run(case, accelerator, False, folder)
    for which, found in (("one process", alone), ("ours", ours)):
        if isinstance(found, str):
            return False, f"{which} failed:\n{found}"
    traces = [Trace(**found["trace"]) for found in (alone, ours)]
    if case.more.get("precision"):  # an adaptive optimizer makes of rounding in a gradient that is zero a step as large as any
        traces = [Trace(losses=trace.losses) for trace in traces]
    report = compare(*traces, case.limit)
    waits = f"the host waits at {', '.join(ours['waits'])}" if ours["waits"] else "no waits"
    worst = f"{report.worst.quantity}: {report.worst.error:.1e} (limit {report.worst.limit:.0e}, {report.worst.where})"
    return report.ok and not ours["waits"], f"{worst}; {waits}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--train", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(next(c for c in CASES if c.name == given.train[0]), given.accelerator, given.alone, Path(given.train[1]))
        return 0
    devices = torch.cuda.device_count() if given.accelerator == "cuda" else 4
    if devices < 2:
        print(f"make gpu: torch sees {devices} CUDA devices, and tp 2 takes two; run it where there are two or more")
        return 1
    wrong = 0
    print("| case | devices | | against one process |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in [case for case in CASES if given.only in case.name]:
            if case.devices > devices:
                print(f"| {case.name} | {case.devices} | not run | there are {devices} |", flush=True)
                continue
            is_right, line = judge(case, given.accelerator, Path(folder))
            wrong += not is_right
            print(f"| {case.name} | {case.devices} | {'right' if is_right else 'WRONG'} | {line} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
