"""Ours beside what people would pick instead: step time, start-up, host time, bytes kept and sent, memory, longest sequence.

    make bench                                      everything; writes benchmarks/results
    python benchmarks/bench.py --parts steps kept --shapes 512-8k
    python benchmarks/bench.py --resume             go on with a run that was interrupted

Every way trains the same module through the stock Trainer, launched in turn, round by round; a way's time is compared
with that of torch's DTensor in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import startup as starting  # noqa: E402
from launch import FailedRunError, Launcher  # noqa: E402
from memory import of_machine  # noqa: E402
from peers import ALONE, LONG, METHODS  # noqa: E402
from tables import write  # noqa: E402

WAYS = ("ours", "ours, gathered kept", "ours, activations", "ours, no sp", "ours, compiled", "dtensor", "dtensor, no sp", "ddp")
PEERS = ("ours", "dtensor", "dtensor, no sp", "ddp")


@dataclass(frozen=True)
class Shape:
    """A model, its batches, and how its steps are timed.

    Attributes:
        title: for the tables.
        task: the arguments of ``child.run`` that make it.
        steps: timed steps of a launch.
        rounds: launches of each way, at most.
        ways: what trains it.
        kept: tensor-parallel sizes at which kept and sent bytes are counted.
    """

    title: str
    task: dict[str, Any]
    steps: int
    rounds: int = 3
    ways: tuple[str, ...] = PEERS
    kept: tuple[int, ...] = (2,)


SHAPES = {
    "512-8k": Shape(
        "dim 512, 8,192 words, 4 × 512 tokens",
        {"dim": 512, "vocab": 8192, "length": 512},
        steps=8,
        ways=(*WAYS, ALONE),
        kept=(2, 4),
    ),
    "512-32k": Shape("dim 512, 32,000 words, 4 × 128 tokens", {"dim": 512, "vocab": 32_000, "length": 128}, steps=8, rounds=2),
    "1024-32k": Shape(
        "dim 1024, 32,000 words, 4 × 128 tokens", {"dim": 1024, "vocab": 32_000, "length": 128}, steps=6, rounds=2
    ),
    "gpt2": Shape("GPT-2 124 M, 1 × 128 tokens", {"model": "GPT-2 124 M", "length": 128, "batch": 1}, steps=8, rounds=2),
    "llama": Shape(
        "llama 0.55 B, 128,256 words, 1 × 128 tokens",
        {"model": "llama 0.55 B, 128k words", "length": 128, "batch": 1},
        steps=4,
        rounds=1,
        kept=(),
    ),
}
STARTED = ("dim 512, 8,192 words", "GPT-2 124 M", "llama 0.55 B, 128k words")
"""The shapes of ``startup.py`` whose start is a part of the benchmark."""
BUDGET = 128 * 2**20
LONG_BUDGET = 32 * 2**20

Found = dict[str, Any]
Keep = Callable[[Found], None]


def steps(given: argparse.Namespace, keep: Keep) -> Found:
    """ms of a step at tp 2, in each round; and at tp 1 beside plain Lightning. Shapes that are not asked for stay as they were."""
    titles = {shape.title for shape in SHAPES.values()}
    found = {title: times for title, times in given.before("steps").items() if title in {*titles, "one rank"}}
    for shape in given.shapes:
        times: dict[str, list[float] | str] = {way: [] for way in shape.ways}
        found[shape.title] = times
        for _ in range(min(given.rounds, shape.rounds)):
            for way in shape.ways:
                if isinstance(own := times[way], list):
                    try:
                        own.append(given.launch(2, way=way, steps=shape.steps, **shape.task)["ms"])
                    except FailedRunError as error:
                        times[way] = str(error)
        keep(found)
    if (shape := SHAPES["512-32k"]) in given.shapes:
        alone: dict[str, list[float]] = {"ours": [], "plain": []}
        for _ in range(min(given.rounds, shape.rounds)):
            for way, told in alone.items():
                told.append(given.launch(1, way=way, steps=shape.steps, **shape.task)["ms"])
        found["one rank"] = {"shape": shape.title, "times": alone}
    return found


def host(given: argparse.Namespace, keep: Keep) -> Found:
    """ms of the main thread's own time in a step, with almost nothing to compute."""
    found: Found = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way in WAYS:
            found[way].append(given.launch(2, way=way, dim=128, length=16, batch=1, steps=40)["host_ms"])
    return found


def kept(given: argparse.Namespace, keep: Keep) -> Found:
    """Bytes kept for the backward, and what a step sends."""
    titles = {shape.title for shape in SHAPES.values()}
    found = {key: one for key, one in given.before("kept").items() if key.partition("|")[0] in titles}
    for shape in given.shapes:
        for tp in shape.kept:
            for way in (*(way for way in shape.ways if way != ALONE), "plain"):
                if way in ("plain", "ddp") and tp != shape.kept[0]:
                    continue
                try:
                    ranks = 1 if way == "plain" else tp
                    counted = given.launch(ranks, way=way, counts=True, **shape.task)
                except FailedRunError as error:
                    counted = str(error)
                found[f"{shape.title}|{tp}|{way}"] = counted
        keep(found)
    return found


def startup(given: argparse.Namespace, keep: Keep) -> Found:
    """Seconds and peaks until the first step, with the self-check and without, beside the peers'."""
    found: Found = {}
    for shape in STARTED:
        found[shape] = starting.measure(given.launch, shape)
        keep(found)
    return found


def loss(given: argparse.Namespace, keep: Keep) -> Found:
    """Peak over what lies between steps, with a vocabulary that makes all else small."""
    ways = ("plain", "dtensor", "ours", "ours, loss in chunks")
    task = {"dim": 128, "length": 1024, "batch": 1, "layers": 1, "vocab": 131_072, "steps": 1, "memory": True}
    return {way: given.launch(1 if way == "plain" else 2, way=way, **task) for way in ways}


def length(given: argparse.Namespace, keep: Keep) -> Found:
    """Peaks at growing lengths, until a budget is spent; a small vocabulary, so that only the blocks count."""
    found: Found = {}
    task = {"dim": 256, "batch": 1, "steps": 1, "memory": True}
    cases = [("plain", 1), *((way, tp) for tp in (2, 4) for way in ("ours", "dtensor")), ("ddp", 2)]
    for recompute in (False, True):
        for way, tp in cases:
            peaks: dict[str, float] = {}
            at = 1024
            while at <= 16384:
                peaks[str(at)] = given.launch(tp, way=way, length=at, recompute=recompute, **task)["step"]
                if peaks[str(at)] > BUDGET:
                    break
                at *= 2
            found[f"{way}/{tp}/{'recompute' if recompute else 'kept'}"] = peaks
    return {"budget": BUDGET, "peaks": found}


def context(given: argparse.Namespace, keep: Keep) -> Found:
    """A step with the sequence dealt out over 2 and 4 ranks: ms, peak, bytes kept and sent, at growing lengths, by method."""
    found: Found = {}
    task = {"dim": 64, "batch": 1, "layers": 1}
    for at in (1024, 4096, 16_384, 65_536):
        for ranks in (2, 4):
            for way in METHODS:
                key = f"{ranks}|{at}|{way}"
                try:
                    timed = given.launch(ranks, way=way, length=at, steps=1, memory=True, **task)
                    found[key] = {**timed, **given.launch(ranks, way=way, length=at, counts=True, **task)}
                except FailedRunError as error:
                    found[key] = str(error)
            keep(found)
    return found


def longest(given: argparse.Namespace, keep: Keep) -> Found:
    """Peaks at growing lengths, until a budget is spent: a deep decoder with a vocabulary, on one process and on four ranks."""
    found: Found = {}
    task = {"dim": 64, "batch": 1, "layers": 16, "vocab": 2048, "steps": 1, "memory": True}
    cases = [("plain", 1, False, 128), ("plain", 1, True, 512), ("ddp", 4, True, 512)]
    cases += [("dtensor", 4, False, 512), ("dtensor", 4, True, 2048)]
    cases += [(way, 4, False, 8192 if "tiles" in way else 512) for way in LONG]
    for way, ranks, recompute, at in cases:
        peaks: dict[str, float] = {}
        found[f"{way}{', recomputed by the model' * recompute}|{ranks}"] = peaks
        while at <= 65_536:
            peaks[str(at)] = given.launch(ranks, way=way, length=at, recompute=recompute, **task)["step"]
            if peaks[str(at)] > LONG_BUDGET:
                break
            at *= 2
        keep({"budget": LONG_BUDGET, "peaks": found})
    return {"budget": LONG_BUDGET, "peaks": found}


def scale(given: argparse.Namespace, keep: Keep) -> Found:
    """Seconds that one of thousands of ranks takes for its topology, groups, plan and swap (torch's fake backend)."""
    worlds = (64, 512, 4096)
    return {str(world): script("scale.py", "world", str(world)) for world in worlds}


def overlap(given: argparse.Namespace, keep: Keep) -> Found:
    """A step beside one whose collectives are waited for at once; and what the profiler sees of a true one."""
    return {what: script("overlap.py", what) for what in ("steps", "trace")}


def pipeline(given: argparse.Namespace, keep: Keep) -> Found:
    """Steps through a pipeline of blocks that wait, beside the formula; and when each stage works in one of them."""
    return script("pipeline.py")


def checks(given: argparse.Namespace, keep: Keep) -> Found:
    """Steps in which checks are due, beside those in which none is."""
    return script("checks.py")


def script(name: str, *args: str) -> Found:
    """What a script of this folder prints, in a process of its own."""
    command, env = [sys.executable, str(HERE / name), *args], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=env)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


PARTS: dict[str, Callable[[argparse.Namespace, Keep], Found]] = {
    "kept": kept,
    "startup": startup,
    "steps": steps,
    "scale": scale,
    "overlap": overlap,
    "loss": loss,
    "host": host,
    "length": length,
    "context": context,
    "pipeline": pipeline,
    "checks": checks,
    "longest": longest,
}


def run(given: argparse.Namespace, parts: Iterable[str]) -> list[str]:
    """Measure parts and write the results after each shape of one; the parts that failed."""
    file = given.out / "bench.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    given.before = lambda part: dict(results.get(part, {}).get("found", {}))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo, one thread per rank"
    machine = (
        f"{device}; {os.cpu_count()} cores, {of_machine('MemTotal') / 2**30:.0f} GiB, {platform.machine()}; "
        f"torch {torch.__version__}, lightning {L.__version__}, Python {platform.python_version()}"
    )
    failed = []
    for part in parts:

        def keep(found: Found, part: str = part) -> None:
            results[part] = {"machine": machine, "rounds": given.rounds, "found": found}
            file.write_text(json.dumps(results, indent=1) + "\n")  # other parts' results stay as they were
            write(results, given.out)

        begin = time.monotonic()
        try:
            keep(PARTS[part](given, keep))
        except Exception:  # the other parts are worth having
            traceback.print_exc()
            failed.append(part)
        print(f"{part}: {(time.monotonic() - begin) / 60:.1f} minutes", file=sys.stderr, flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="of steps and kept")
    parser.add_argument("--rounds", type=int, default=3, help="at most; large shapes take fewer")
    parser.add_argument("--resume", action="store_true", help="launches that an interrupted run did are not done again")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    given.shapes = [SHAPES[name] for name in given.shapes]
    given.out.mkdir(parents=True, exist_ok=True)
    journal = given.out / "journal"
    if not given.resume:
        shutil.rmtree(journal, ignore_errors=True)
    journal.mkdir(exist_ok=True)
    given.launch = Launcher(journal)
    if failed := run(given, given.parts):
        sys.exit(f"failed: {', '.join(failed)}; mend it and go on with --resume")
    shutil.rmtree(journal)


if __name__ == "__main__":
    main()
