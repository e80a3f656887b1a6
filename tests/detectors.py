"""Which detectors see a fault of the engine: the self-check before training, the checks of a run, and verify.

    make detectors                 the faults beside tests in the packages that compute; writes runs/detectors.md
    make detectors ARGS=gather     those with 'gather' in their name

Each fault is put into a copy of the repository. There some models train at tp 2, two of them with dp 2, twice: as they are, for
the self-check; and without it, for the checks of a run, and for verify, which sees a run that ends and compares one that goes on
with one process. Models follow each other until two detectors of three have seen the fault. What was found is kept in
runs/detectors.json, so that a run goes on where another one ended; delete a fault there, or the file, to have it tried again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch  # noqa: F401
import torch  # imported once, for all forks
import transformers  # noqa: F401

from tests import mutants

PACKAGES = ("activations", "distributed", "layout", "nn", "parallel", "region", "styles")
"""The packages that compute, whose faults are shown."""
ELSEWHERE = ("cp:", "pp:", "turns:", "stacks:", "fsdp", "verify:", "habits:", "compile")
"""Beginnings of the names of faults that these topologies do not run."""
FORKS = multiprocessing.get_context("fork")


DETECTORS = ("self-check", "run", "verify")
KEPT = mutants.ROOT / "runs" / "detectors.json"
HEADS = ("the self-check", "checks of a run", "verify")


class Setup(NamedTuple):
    """A model of tests/helpers with its arguments, the number of ranks, and arguments of the strategy and the training."""

    model: str
    arguments: dict[str, Any]
    world: int
    strategy: dict[str, Any]
    training: dict[str, Any]


SETUPS = {
    "gpt": Setup("GPT", {}, 4, {"tp": 2, "regather": False}, {"accumulate": 2, "clip": 0.5}),
    "gqa": Setup("Zoo", {"kind": "mqa"}, 2, {"tp": 2, "recompute": "full", "loss_chunk": 4}, {}),
    "experts": Setup("Zoo", {"kind": "routed_moe"}, 4, {"tp": 2, "data_parallel": "fsdp"}, {"clip": 0.5}),
    "heads": Setup("Zoo", {"kind": "head_norm"}, 2, {"tp": 2, "sp": False}, {}),
    "tied": Setup("Zoo", {"kind": "tied"}, 2, {"tp": 2, "tile_mlp": 3}, {"accumulate": 2}),
}


def on_ranks(folder: str, name: str, setup: Setup, seen: set[str]) -> list[str]:
    """On a rank: which detectors see something, with one model, of those that have not seen the fault with another one."""
    from lightning_seqpar.verify.parity import Trace, compare
    from lightning_seqpar.verify.self_check import SelfCheckError
    from tests.helpers.fit import fit

    found: set[str] = set()

    def train(**more: Any) -> Trace | None:
        strategy = {**setup.strategy, **more}
        try:
            return fit(
                setup.model, setup.arguments, world=setup.world, strategy=strategy, **{"steps": 2, **setup.training}
            )
        except SelfCheckError:
            found.add("self-check")
        except Exception:  # whatever ends a run
            found.add("run")
            if torch.distributed.get_rank() == 0:
                traceback.print_exc()
        return None

    if "self-check" not in seen:
        train()
    if not {"run", "verify"} <= seen:
        trace = train(self_check=False)
        if trace is None or not compare(Trace.load(Path(folder, f"{name}.pt")), trace).ok:
            found.add("verify")  # its exit status is 1 in both cases
    return sorted(found)


def references(folder: str) -> None:
    """Train each model in one process, and write what it did."""
    from tests.helpers.fit import fit

    for name, setup in SETUPS.items():
        # One process reads the samples of both replicas.
        fit(setup.model, setup.arguments, **{"steps": 2, **setup.training}).save(Path(folder, f"{name}.pt"))


def attempt(place: str, folder: str, answer: Connection) -> None:
    """In a process of its own: import the package of the copy, try the models, and answer with what was seen."""
    os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
    sys.path[:0] = [place, f"{place}/examples", f"{place}/benchmarks"]
    found: set[str] = set()
    try:
        from lightning_seqpar.strategy import strategy
        from lightning_seqpar.trial import ranks

        assert Path(strategy.__file__).is_relative_to(place)
        # Ranks are forks of this process, which has imported all that they need.
        with mock.patch.object(ranks.mp, "get_context", return_value=FORKS):
            for name, setup in SETUPS.items():
                if len(found) < 2:
                    told = ranks.run_distributed(on_ranks, setup.world, folder, name, setup, found, timeout=240.0)
                    found |= {seen for each in told for seen in each}
    except Exception:  # a package that can't be imported, or ranks that wait for each other
        traceback.print_exc()
        found.add("run")
    answer.send(sorted(found))


def run(mutant: mutants.Mutant | None, folder: str) -> list[str]:
    """Run one fault in a copy of the repository, or none."""
    with tempfile.TemporaryDirectory() as place, open(os.devnull, "w") as silent:
        mutants.copy_repository(Path(place))
        if mutant is not None:
            mutants.apply(mutant, Path(place, "lightning_seqpar"))
        ours, theirs = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=quietly, args=(silent.fileno(), attempt, place, folder, theirs))
        process.start()
        process.join()
        return list(ours.recv()) if ours.poll() else ["run"]


def quietly(silent: int, work: Callable[..., None], *args: Any) -> None:
    """Do ``work`` without its output."""
    if "VERBOSE" not in os.environ:
        os.dup2(silent, 1)
        os.dup2(silent, 2)
    work(*args)


def chosen(words: list[str]) -> list[mutants.Mutant]:
    """The faults that are shown, with all these words in their names."""
    known = mutants.definitions(mutants.ROOT / "lightning_seqpar")
    return [
        mutant
        for mutant in mutants.all_mutants()
        if mutants.place_of(mutant, known).file.relative_to(mutants.ROOT / "lightning_seqpar").parts[0] in PACKAGES
        and not mutant.name.startswith(ELSEWHERE)
        and all(word in mutant.name for word in words)
    ]


def table(seen: dict[str, list[str]]) -> str:
    """How many faults each detector sees, and which."""
    tried = {mutant.name: seen[mutant.name] for mutant in chosen([]) if mutant.name in seen}
    shown = {name: found for name, found in tried.items() if found}
    counts = " | ".join(str(sum(detector in found for found in shown.values())) for detector in DETECTORS)
    lines = [
        "# Who sees a fault of the engine",
        "",
        f"`make detectors` puts faults, each of which a test sees, into the packages that compute ({', '.join(PACKAGES)}), and "
        f"trains {len(SETUPS)} small models with each: {len(tried)} of {len(chosen([]))} faults were tried. "
        "Models follow each other until two detectors have seen the fault, so counts are lower bounds. The fault of a guard "
        "leaves the guard out: crosses say who sees what it refuses.",
        "",
        "| | tests | " + " | ".join(HEADS) + " |",
        "|---" * (2 + len(HEADS)) + "|",
        f"| faults seen, of {len(tried)} | {len(tried)} | {counts} |",
        "",
        "| fault | " + " | ".join(HEADS) + " |",
        "|---" * (1 + len(HEADS)) + "|",
        *(
            f"| {name} | " + " | ".join("x" if one in found else "" for one in DETECTORS) + " |"
            for name, found in shown.items()
        ),
        "",
        f"Their tests alone see the others, with these models: {'; '.join(name for name in tried if name not in shown)}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    seen: dict[str, list[str]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
        first = FORKS.Process(target=quietly, args=(silent.fileno(), references, folder))
        first.start()
        first.join()
        if wrong := run(None, folder):
            print(f"without a fault something is seen: {wrong}")
            return 1
        for mutant in chosen(sys.argv[1:]):
            if mutant.name in seen:
                continue
            seen[mutant.name] = run(mutant, folder)
            print(f"{mutant.name:<66} {', '.join(seen[mutant.name] or '-')}", flush=True)
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(seen, indent=1) + "\n")
            KEPT.with_suffix(".md").write_text(table(seen))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
