"""Ours beside what people would pick instead: step time, host time, bytes kept and sent, memory of the loss, longest sequence.

    make bench                                      everything; writes benchmarks/results
    python benchmarks/bench.py --parts steps kept --dims 512

Every way trains the same module through the stock Trainer, launched in turn, round by round; a way's time is compared
with that of torch's DTensor in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from peers import ALONE  # noqa: E402
from tables import write  # noqa: E402

WAYS = ("ours", "ours, gathered kept", "ours, no sp", "dtensor", "dtensor, no sp", "ddp")
SHAPES = {
    128: ({"length": 128, "steps": 30},),
    512: ({"length": 512, "steps": 10}, {"length": 128, "steps": 12}),
    1024: ({"length": 256, "steps": 10}, {"length": 128, "steps": 10}),
}
"""Of each dim: positions of a sequence and timed steps of a launch; 4 sequences, 4 layers, a vocabulary of 512."""
BUDGET = 128 * 2**20


def launch(ranks: int, **task: Any) -> dict[str, Any]:
    """Train one way on so many ranks; what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        # Memory that is given back shows at once, at any size.
        calm = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"} if task.get("memory") else {}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **calm}
        done = subprocess.run(
            [*command, str(HERE / "child.py"), json.dumps(task), str(out)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{ranks} ranks of {task} failed:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
    print(f"{time.strftime('%H:%M:%S')} {ranks} × {task}: {shown}", file=sys.stderr, flush=True)
    return found


def steps(given: argparse.Namespace) -> dict[str, Any]:
    """ms of a step at tp 2, in each round; and at tp 1 beside plain Lightning. Shapes that are not asked for stay as they were."""
    found: dict[str, Any] = given.before.get("steps", {}).get("found", {})
    ways = (*WAYS, ALONE)
    for dim in given.dims:
        for shape in (one for one in SHAPES[dim] if one["length"] in (given.lengths or (one["length"],))):
            times = found[f"{dim}, 4 × {shape['length']} tokens"] = {way: [] for way in ways}
            for _ in range(given.rounds):
                for way in ways:
                    times[way].append(launch(2, way=way, dim=dim, **shape)["ms"])
    if given.lengths:
        return found
    smallest = min(given.dims)
    found["one rank"] = {"ours": [], "plain": []}
    for _ in range(given.rounds):
        for way, times in found["one rank"].items():
            times.append(launch(1, way=way, dim=smallest, **SHAPES[smallest][0])["ms"])
    return found


def host(given: argparse.Namespace) -> dict[str, Any]:
    """ms of the main thread's own time in a step, with almost nothing to compute."""
    found: dict[str, Any] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way in WAYS:
            found[way].append(launch(2, way=way, dim=128, length=16, batch=1, steps=40)["host_ms"])
    return found


def kept(given: argparse.Namespace) -> dict[str, Any]:
    """Bytes kept for the backward, and what a step sends."""
    dim = 512 if 512 in given.dims else max(given.dims)
    ways = [*WAYS, "plain"]
    return {
        f"{dim}/{tp}/{way}": launch(1 if way == "plain" else tp, way=way, dim=dim, length=512, counts=True)
        for tp in given.tp
        for way in ways
        if not (way in ("plain", "ddp") and tp != given.tp[0])
    }


def loss(given: argparse.Namespace) -> dict[str, Any]:
    """Peak over what lies between steps, with a vocabulary that makes all else small."""
    ways = ("plain", "dtensor", "ours", "ours, loss in chunks")
    task = {"dim": 128, "length": 1024, "batch": 1, "layers": 1, "vocab": 131_072, "steps": 1, "memory": True}
    return {way: launch(1 if way == "plain" else 2, way=way, **task) for way in ways}


def length(given: argparse.Namespace) -> dict[str, Any]:
    """Peaks at growing lengths, until a budget is spent."""
    found: dict[str, Any] = {}
    task = {"dim": 256, "batch": 1, "steps": 1, "memory": True}
    cases = [("plain", 1), *((way, tp) for tp in given.tp for way in ("ours", "dtensor")), ("ddp", given.tp[0])]
    for recompute in (False, True):
        for way, tp in cases:
            peaks: dict[str, float] = {}
            at = 1024
            while at <= 16384:
                peaks[str(at)] = launch(tp, way=way, length=at, recompute=recompute, **task)["step"]
                if peaks[str(at)] > BUDGET:
                    break
                at *= 2
            found[f"{way}/{tp}/{'recompute' if recompute else 'kept'}"] = peaks
    return {"budget": BUDGET, "peaks": found}


def scale(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds that one of thousands of ranks takes for its topology, groups, plan and swap (torch's fake backend)."""
    code = HERE / "scale.py"
    return {
        str(world): json.loads(
            subprocess.run([sys.executable, str(code), str(world)], capture_output=True, check=True).stdout
        )
        for world in (64, 512, 4096)
    }


def overlap(given: argparse.Namespace) -> dict[str, Any]:
    """A step beside one whose collectives are waited for at once; and what the profiler sees of a true one."""
    code, env = HERE / "overlap.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    return {
        what: json.loads(
            subprocess.run(
                [sys.executable, str(code), what], capture_output=True, check=True, env=env
            ).stdout.splitlines()[-1]
        )
        for what in ("steps", "trace")
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "kept": kept,
    "scale": scale,
    "overlap": overlap,
    "loss": loss,
    "host": host,
    "steps": steps,
    "length": length,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--dims", nargs="+", type=int, default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, help="of the shapes whose steps are timed; else all")
    parser.add_argument("--tp", nargs="+", type=int, default=[2, 4], help="sizes at which memory is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "bench.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    given.before = results
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo, one thread per rank"
    cpus = f"{os.cpu_count()} cores, {platform.machine()}"
    for part in given.parts:
        machine = f"{device}; {cpus}; torch {torch.__version__}, lightning {L.__version__}, Python {platform.python_version()}"
        results[part] = {"machine": machine, "rounds": given.rounds, "found": PARTS[part](given)}
        file.write_text(json.dumps(results, indent=1) + "\n")  # other parts' results stay as they were
        write(results, given.out)


if __name__ == "__main__":
    main()
