"""Train on GPUs and in one process, and compare; ``make gpu`` on a machine with one GPU or more.

    python tests/gpu.py                    every case, as a table
    python tests/gpu.py --only "fsdp;ring"  those with one of these in their name
    python tests/gpu.py --accelerator cpu  the same on CPUs, to see that this script itself is right

With fewer GPUs than ranks the ranks share one over gloo, each as a node of its own, by way of the CPU; with enough of them it is
nccl. Losses, gradients and weights in float64 are those of one process up to 1e-9, save where a case says otherwise. In steps in
which no check is due nothing of the package may make the host wait for a device. At last one rank alone is played with collectives
that come late, and must come to the same bits (``tests/helpers/races.py``).

Exit code 1 if anything is not so. On GPUs the table is written to benchmarks/results/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.region import offload
from lightning_seqpar.releases import COMPILES_APART, HAS_FSDP
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import flash, races, shared_device
from tests.helpers.fit import fit
from tests.helpers.host_waits import DeviceWaits, WaitsOfSteps
from tests.helpers.processes import environment, free_port

STEPS = 20
PATIENCE = 900
"""Seconds for a start, whatever it has to train."""


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

    @property
    def compares_losses(self) -> bool:
        """And nothing else: an adaptive optimizer makes of rounding in a gradient that is zero a step as large as any."""
        return "precision" in self.more

    @property
    def lacks(self) -> str:
        """What is not installed, or too old, for it."""
        fsdp, compiles = self.strategy.get("data_parallel", "ddp") != "ddp", self.strategy.get("compile", False)
        if "float8" in self.strategy and find_spec("torchao") is None:
            return "torchao"
        return "torch 2.13" if (fsdp and not HAS_FSDP) or (compiles and not COMPILES_APART) else ""

    @property
    def reference(self) -> str:
        """What one process trains for it: the same for many cases."""
        return repr((self.model, self.arguments, self.more))


UNTIED, DEEP = {"tied": False}, {"layers": 4}
HALF, TRUE_HALF, FP16 = ({"precision": name} for name in ("bf16-mixed", "bf16-true", "16-mixed"))
LOSSES = {"precision": "32-true"}  # as a default Trainer trains; of float32 the losses alone are compared
CASES = [
    Case("tp 2, gathered kept", 2, {"tp": 2, "regather": False}),
    Case("tp 2, clipped", 2, {"tp": 2}, more={"clip": 0.1}),
    Case("tp 2, without sp", 2, {"tp": 2, "sp": False}),
    Case("tp 2, vocabulary whole", 2, {"tp": 2, "vocab": False}),
    Case("tp 2, loss in chunks", 2, {"tp": 2, "loss_chunk": 16}, arguments=UNTIED),
    *(Case(f"tp 2, recompute {what}", 2, {"tp": 2, "recompute": what}) for what in ("activations", "selective", "full")),
    Case("tp 2, tiles", 2, {"tp": 2, "tile_mlp": 4}),
    Case("tp 2, fused heads that ranks share", 2, {"tp": 2}, "Zoo", {"kind": "fused_mqa"}),
    Case("tp 2, experts", 2, {"tp": 2}, "Zoo", {"kind": "dense_moe"}),
    Case("tp 2, routed experts", 2, {"tp": 2}, "Zoo", {"kind": "routed_moe"}),
    Case("tp 2, by hand", 2, {"tp": 2}, "ManualTwo", {"style": "keep"}),
    Case("dp 2", 2, {"tp": 1}),
    Case("dp 2, fsdp", 2, {"tp": 1, "data_parallel": "fsdp"}),
    Case("cp 2, Ulysses", 2, {"cp": 2, "cp_method": "ulysses"}),
    Case("cp 2, ring", 2, {"cp": 2, "cp_method": "ring"}),
    Case("pp 2", 2, {"pp": 2}),
    Case("pp 2, interleaved", 2, {"pp": 2, "virtual_pp": 2}, arguments=DEEP, more={"accumulate": 2}),
    Case("tp 2, 16-mixed", 2, {"tp": 2}, more=FP16, limit=5e-2),
    Case("tp 2, bf16-mixed", 2, {"tp": 2}, more=HALF, limit=5e-2),
    Case("tp 2, bf16-true", 2, {"tp": 2}, more=TRUE_HALF, limit=1e-1),
    Case("tp 2, compiled", 2, {"tp": 2, "compile": True}),
    Case("tp 2, compiled, bf16-mixed", 2, {"tp": 2, "compile": True}, more=HALF, limit=5e-2),
    Case("tp 2, activations on the CPU", 2, {"tp": 2, "offload": "activations"}),
    Case("tp 2, activations on the CPU, recomputed", 2, {"tp": 2, "offload": "activations", "recompute": "full"}),
    *(
        Case(f"{axis} 2, flash-attn", 2, {axis: 2}, "helpers.packed:Packed", {"kind": kind}, HALF, 5e-2)
        for axis, kind in (("tp", "documents"), ("cp", "one tensor"))
        if flash.REAL
    ),
    *(
        Case(f"{axis} 2, FlexAttention {kind}", 2, {axis: 2}, "helpers.flex:Flexed", {"kind": kind}, HALF, 5e-2)
        for axis, kind in (("tp", "alibi"), ("tp", "mask of heads"), ("cp", "grouped"))
    ),
    *(Case(f"tp 2, float8 {one}", 2, {"tp": 2, "float8": one}, more=HALF, limit=1e-1) for one in ("tensorwise", "rowwise")),
    Case("tp 4", 4, {"tp": 4}),
    Case("tp 4, without sp", 4, {"tp": 4, "sp": False}),
    Case("dp 2 x tp 2", 4, {"tp": 2}),
    Case("dp 2 x tp 2, fsdp", 4, {"tp": 2, "data_parallel": "fsdp"}),
    Case("dp 4, hsdp", 4, {"data_parallel": "hsdp", "fsdp": {"shard_size": 2}}),
    Case("tp 2 x cp 2", 4, {"tp": 2, "cp": 2}),
    Case("pp 2 x tp 2", 4, {"pp": 2, "tp": 2}),
    Case("GPT-2 124 M, tp 2", 2, {"tp": 2}, "gpu:RealSize", {"name": "GPT-2 124 M"}, LOSSES, 1e-5),
    Case("llama 0.55 B, 128k words, tp 2", 2, {"tp": 2}, "gpu:RealSize", {"name": "llama 0.55 B, 128k words"}, LOSSES, 1e-5),
]


class RealSize(L.LightningModule):
    """A model of transformers at its size, on the batches of these tests."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import hf_models

        torch.manual_seed(0)
        self.model = hf_models.build(name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Place:
    """Where ranks run: on devices of their own, or on one that they share."""

    accelerator: str
    devices: int

    def shares(self, ranks: int) -> bool:
        """Whether so many ranks have no device each."""
        return ranks > 1 and ranks > self.devices


# ---- in the processes ----------------------------------------------------------------------------------------------


def train(cases: Sequence[Case], accelerator: str, out: Path, *, alone: bool, shared: bool) -> None:
    """Train one case after the other here; the first rank writes the trace of each, and where the host waited."""
    offload.LEAST = 1  # these models are small
    for case in cases:
        waits = WaitsOfSteps(DeviceWaits() if accelerator == "cuda" else None)
        how: dict[str, Any] = {"world": 1}
        if not alone:
            how = {"world": case.devices, "nodes": case.devices if shared else 1, "strategy": dict(case.strategy)}
        if shared:
            shared_device.register()
            how["strategy"]["process_group_backend"] = shared_device.NAME
        began = time.perf_counter()
        given = {"steps": STEPS, "callbacks": [waits], "accelerator": accelerator, "length": 12} | case.more
        trace = fit(case.model, case.arguments, **how, **given)
        if int(os.environ.get("RANK", "0")) == 0:
            if case.compares_losses:
                trace = Trace(losses=trace.losses)
            told = {"trace": vars(trace), "waits": sorted(set(waits.waits.found)), "by_scaler": waits.waits.by_scaler > 0}
            torch.save({**told, "seconds": time.perf_counter() - began}, out / "part")
            (out / "part").rename(out / f"{case.name}.pt")
        torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- in the one that starts them -----------------------------------------------------------------------------------


class Start:
    """Processes that train some cases, of as many ranks each, one after the other."""

    def __init__(self, cases: Sequence[Case], place: Place, folder: Path, *, alone: bool) -> None:
        ranks = 1 if alone else cases[0].devices
        shared, port = place.shares(ranks), str(free_port())
        names = [part for case in cases for part in ("--train", case.name)]
        flags = [*names, "--accelerator", place.accelerator, "--out", str(folder), *["--alone"] * alone, *["--shared"] * shared]
        self._logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        self._procs, self._until = [], time.monotonic() + PATIENCE
        for rank, log in enumerate(self._logs):
            env = {"PYTHONFAULTHANDLER": "1"}  # a rank that dies tells where it was
            if ranks > 1:
                local, per_node, node = (0, 1, rank) if shared else (rank, ranks, 0)
                env |= {
                    "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(per_node),
                    "GROUP_RANK": str(node), "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                    "TORCHELASTIC_RUN_ID": port,
                }  # fmt: skip
            with log.open("w") as output:
                self._procs.append(
                    subprocess.Popen(
                        [sys.executable, __file__, *flags], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                        cwd=ROOT, env=environment(**env),
                    )
                )  # fmt: skip

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *error: Any) -> None:
        for proc in self._procs:
            proc.kill()
            proc.wait()

    def has_ended(self) -> bool:
        """Whether all processes have ended, or one has failed, or the time is up; half a second is waited for that."""
        try:
            return [proc.wait(0.5 / len(self._procs)) for proc in self._procs] != []
        except subprocess.TimeoutExpired:
            return any(proc.poll() for proc in self._procs) or time.monotonic() > self._until

    def failure(self) -> str:
        """Why it failed; nothing if it did not."""
        for proc in self._procs:  # the first to end may be one that another's end has ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                proc.wait(15)
        said = [self._told(rank, proc.poll()) for rank, proc in enumerate(self._procs) if proc.poll() != 0]
        return max(said, key=lambda told: "died" in told, default="")

    def _told(self, rank: int, status: int | None) -> str:
        how = "did not end" if status is None else f"ended with {status}"
        if status is not None and status < 0:
            how = f"died by {signal.Signals(-status).name}"
        lines = self._logs[rank].read_text().strip().splitlines()
        errors = [line for line in lines if "Error" in line or "File" in line] or lines[-3:]
        return f"rank {rank} {how}: {' '.join(' '.join(errors[-2:]).split())[:600]}"


def train_all(cases: Sequence[Case], place: Place, folder: Path, *, alone: bool) -> Iterator[tuple[Case, dict[str, Any] | str]]:
    """What came of each case, as soon as it is there. Behind one that ends its processes the rest is started anew."""
    left = list(cases)
    while left:
        with Start(left, place, folder, alone=alone) as started:
            ended = False
            while left and not ended:
                ended = started.has_ended()
                while left and (found := folder / f"{left[0].name}.pt").exists():
                    yield left.pop(0), dict(torch.load(found, weights_only=False, map_location="cpu"))
                    found.unlink()
            if left:
                yield left.pop(0), started.failure() or "its processes ended without a result"


def judge(case: Case, alone: dict[str, Any] | str, ours: dict[str, Any] | str) -> tuple[bool, list[str]]:
    """Whether a case is right, and its columns."""
    for which, found in (("one process", alone), ("ours", ours)):
        if isinstance(found, str):
            return False, [f"{which}: {found}", "–", "–"]
    assert isinstance(alone, dict)
    assert isinstance(ours, dict)
    traces = [Trace(**found["trace"]) for found in (alone, ours)]
    report = compare(traces[0], traces[1], case.limit)
    worst = f"{report.worst.error:.1e} of {report.worst.limit:.0e} ({report.worst.quantity})"
    waits = "; ".join(ours["waits"]) or ("torch's scaler" if ours["by_scaler"] else "none")
    return report.ok and not ours["waits"], [worst, waits, f"{ours['seconds']:.0f} s"]


def race(names: Iterable[str], accelerator: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Each race by name, whether late collectives changed nothing, and its columns."""
    for name, told in races.in_a_process(list(names), accelerator).items():
        count, apart, seconds = told if not isinstance(told, str) else (0, [told], 0.0)
        first = f"{len(apart)} things differ, first {apart[0]}" if apart else f"the same bits behind {count} late collectives"
        yield f"late collectives: {name}", not apart, [told if isinstance(told, str) else first, "–", f"{seconds:.0f} s"]


def device_names(place: Place) -> str:
    """The devices, for the table."""
    if place.accelerator == "cpu":
        return f"CPU, {os.cpu_count()} cores, {platform.machine()}"
    names = [torch.cuda.get_device_name(at) for at in range(place.devices)]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


def chosen(names: Iterable[str], only: str) -> list[str]:
    """The names that have one of ``only``'s parts, between semicolons, in them."""
    return [name for name in names if any(part in name for part in only.split(";"))]


def report(cases: Sequence[Case], race_names: Sequence[str], place: Place, folder: Path) -> Iterator[tuple[str, bool]]:
    """The lines of the table, one after the other, and whether each is right."""
    for case in cases:
        if case.lacks:
            yield f"| {case.name} | {case.devices} | not run | it needs {case.lacks} | – | – |", True
    cases = [case for case in cases if not case.lacks]
    references = {case.reference: case for case in cases}
    alone = {case.reference: found for case, found in train_all([*references.values()], place, folder, alone=True)}
    for ranks in sorted({case.devices for case in cases}):
        how = "one device" if place.shares(ranks) else f"{ranks} devices"
        for case, ours in train_all([case for case in cases if case.devices == ranks], place, folder, alone=False):
            is_right, columns = judge(case, alone[case.reference], ours)
            yield _line(case.name, f"{ranks} on {how}", is_right, columns), is_right
    for name, is_right, columns in race(race_names, place.accelerator) if race_names else ():
        yield _line(name, "1 plays", is_right, columns), is_right


def _line(name: str, ranks: str, is_right: bool, columns: Sequence[str]) -> str:
    return f"| {' | '.join([name, ranks, 'right' if is_right else 'WRONG', *columns])} |"


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="cases with one of these, between semicolons, in their name")
    parser.add_argument("--out", type=Path, help="where the table is written; on GPUs benchmarks/results/gpu.md")
    parser.add_argument("--train", action="append", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.train:
        by_name = {case.name: case for case in CASES}
        train([by_name[name] for name in given.train], given.accelerator, given.out, alone=given.alone, shared=given.shared)
        return 0
    place = Place(given.accelerator, torch.cuda.device_count() if given.accelerator == "cuda" else 1)
    if not place.devices:
        print("make gpu: torch sees no CUDA device; run it where there is one, or with ARGS='--accelerator cpu'")
        return 1
    names = chosen([case.name for case in CASES], given.only)
    lacked = {"fsdp": not HAS_FSDP, "compiled": not COMPILES_APART}
    race_names = [
        name for name in races.CASES if not lacked.get(name, False) and chosen([f"late collectives: {name}"], given.only)
    ]
    head = ["| case | ranks | | furthest from one process | host waits | time |", "|---|---|---|---|---|---|"]
    print("\n".join(head), flush=True)
    lines, wrong = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for line, is_right in report([case for case in CASES if case.name in names], race_names, place, Path(folder)):
            print(line, flush=True)
            lines.append(line)
            wrong += not is_right
    print(f"\n{len(lines) - wrong} of {len(lines)} as they should be")
    out = given.out or (ROOT / "benchmarks" / "results" / "gpu.md" if given.accelerator == "cuda" else None)
    if out is not None and lines:
        where = (
            f"{device_names(place)}; torch {torch.__version__}, Lightning {L.__version__}, Python {platform.python_version()}"
        )
        text = ["# Parity on a GPU", "", f"`make gpu` wrote this on {datetime.date.today()}: {where}.", "", *head, *lines]
        out.write_text("\n".join([*text, "", f"{len(lines) - wrong} of {len(lines)} right.", ""]))
    return int(wrong > 0 or not lines)


if __name__ == "__main__":
    sys.exit(main())
