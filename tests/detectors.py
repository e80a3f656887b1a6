"""Which detectors see a fault of the engine: the self-check before training, the checks of a run, and verify.

    make detectors                 the faults beside tests in the packages that compute; writes runs/detectors.md
    make detectors ARGS=gather     those with 'gather' in their name

Each fault is put into a copy of the repository. There some models train at tp 2, two of them with dp 2, twice: as they are, for
the self-check; and without it, for the checks of a run, and for verify, which sees a run that ends and compares one that goes on
with one process. Models follow each other until two detectors of three have seen the fault; one that does not run the faulty lines
is left out. What was found is kept in runs/detectors.json, so that a run goes on where another one ended; delete a fault there, or
the file, to have it tried again.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import lightning.pytorch  # noqa: F401
import torch  # imported once, for all forks
import transformers  # noqa: F401

from tests import mutants
from tests.detector_setups import SETUPS, WHY_UNSEEN, Setup, rare

PACKAGES = ("activations", "distributed", "layout", "nn", "parallel", "region", "styles")
"""The packages that compute, whose faults are shown."""
ELSEWHERE = ("cp:", "pp:", "turns:", "stacks:", "fsdp", "verify:", "habits:", "compile")
"""Beginnings of the names of faults that these topologies do not run."""
FORKS = multiprocessing.get_context("fork")


DETECTORS = ("self-check", "run", "verify")
KEPT = mutants.ROOT / "runs" / "detectors.json"
RAN: set[tuple[str, int]] = set()
"""The lines of the package, by file and number, that were run in this process where it follows them."""
HEADS = ("the self-check", "checks of a run", "verify")


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
    if RAN:
        Path(folder, f"{name}-{torch.distributed.get_rank()}.json").write_text(json.dumps(sorted(RAN)))
    return sorted(found)


def follow_lines(package: str) -> None:
    """Note the lines of the package that this process runs, and its forks run, in :data:`RAN`."""

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return step if file.startswith(package) else None

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        RAN.add((frame.f_code.co_filename.removeprefix(package), frame.f_lineno))
        return step

    sys.settrace(enter)
    threading.settrace(enter)


def references(folder: str, setups: dict[str, Setup]) -> None:
    """Train each model in one process, and write what it did."""
    from tests.helpers.fit import fit

    for name, setup in setups.items():
        # One process reads the samples of both replicas.
        fit(setup.model, setup.arguments, **{"steps": 2, **setup.training}).save(Path(folder, f"{name}.pt"))


def attempt(place: str, folder: str, setups: dict[str, Setup], answer: Connection) -> None:
    """In a process of its own: import the package of the copy, try these models, and answer with what was seen."""
    os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
    sys.path[:0] = [place, f"{place}/examples", f"{place}/benchmarks"]
    found: set[str] = set()
    try:
        from lightning_seqpar.strategy import strategy
        from lightning_seqpar.trial import ranks

        assert Path(strategy.__file__).is_relative_to(place)
        # Ranks are forks of this process, which has imported all that they need.
        with mock.patch.object(ranks.mp, "get_context", return_value=FORKS):
            for name, setup in setups.items():
                if len(found) < 2:
                    told = ranks.run_distributed(on_ranks, setup.world, folder, name, setup, found, timeout=240.0)
                    found |= {seen for each in told for seen in each}
    except Exception:  # a package that can't be imported, or ranks that wait for each other
        traceback.print_exc()
        found.add("run")
    answer.send(sorted(found))


def run(mutant: mutants.Mutant | None, folder: str, setups: dict[str, Setup], follows: bool = False) -> list[str]:
    """Run one fault in a copy of the repository with these models, or none; ``follows`` the lines that they run."""
    with tempfile.TemporaryDirectory() as place, open(os.devnull, "w") as silent:
        mutants.copy_repository(Path(place))
        package = Path(place, "lightning_seqpar")
        if mutant is not None:
            mutants.apply(mutant, package)
        ours, theirs = FORKS.Pipe(duplex=False)

        def work() -> None:
            if follows:
                follow_lines(f"{package}/")
            attempt(place, folder, setups, theirs)

        process = FORKS.Process(target=quietly, args=(silent.fileno(), work))
        process.start()
        process.join()
        return list(ours.recv()) if ours.poll() else ["run"]


def who_runs(mutant: mutants.Mutant, span: mutants.Span, ran: dict[str, set[tuple[str, int]]]) -> list[str]:
    """The models that run a line of the faulty statements; all of them where it is not in the body of a function.

    Args:
        mutant: the fault.
        span: its place.
        ran: the lines that each model runs.
    """
    source = span.file.read_text()
    before = "".join(source.splitlines(keepends=True)[: span.first])
    text = source[len(before) :].partition(mutant.old)[0]
    first = before.count("\n") + text.count("\n") + 1
    last = first + mutant.old.rstrip("\n").count("\n")
    lines: set[int] = set()
    for function in ast.walk(ast.parse(source)):
        if (
            not isinstance(function, ast.FunctionDef)
            or not function.body[0].lineno <= last
            or first > (function.end_lineno or 0)
        ):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.stmt) and node is not function:
                body = getattr(node, "body", None)
                end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
                if node.lineno <= last and max(end, node.lineno) >= first:
                    lines |= set(range(node.lineno, max(end, node.lineno) + 1))
    file = str(span.file.relative_to(mutants.ROOT / "lightning_seqpar"))
    return [name for name in SETUPS if not lines or not ran[name].isdisjoint((file, line) for line in lines)]


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


def table(seen: dict[str, list[str] | None]) -> str:
    """The page of docs: how many faults each detector sees, and which."""
    tried = [mutant.name for mutant in chosen([]) if mutant.name in seen]
    run = {name: found for name in tried if (found := seen[name]) is not None}
    shown = [name for name in run if run[name]]
    several = sum(len(run[name]) > 1 for name in shown)
    unseen = {why: [name for name in run if not run[name] and name in names] for why, names in WHY_UNSEEN.items()}
    others = [name for name in run if not run[name] and not any(name in names for names in unseen.values())]
    unseen["need another module, type, topology or habit than these models have"] = others
    counts = " | ".join(str(sum(detector in run[name] for name in shown)) for detector in DETECTORS)
    lines = [
        "# Who sees a fault of the engine",
        "",
        "`make detectors` puts faults, each of which a test sees, into the packages that "
        f"compute ({', '.join(PACKAGES)}), and trains small models with each, by default at tp 2: "
        f"{len(tried)} of {len(chosen([]))} faults were tried. {len(SETUPS)} models are tried with all (two with dp 2), and "
        "follow each other until two detectors have seen the fault, so counts are lower bounds; what none of these shows is "
        "tried with a model that does what the fault needs, if it can be seen in numbers. The fault of a guard leaves the guard "
        f"out: crosses say who sees what it refuses. No model runs the lines of {len(tried) - len(run)} faults, which the second "
        "table leaves out.",
        "",
        "| | tests | " + " | ".join(HEADS) + " |",
        "|---" * (2 + len(HEADS)) + "|",
        f"| faults seen, of {len(run)} that are run | {len(run)} | {counts} |",
        "",
        f"{len(shown)} of {len(run)} are seen by a detector beside the tests, {several} by two or more.",
        "",
        "| fault | " + " | ".join(HEADS) + " |",
        "|---" * (1 + len(HEADS)) + "|",
        *(f"| {name} | " + " | ".join("x" if one in run[name] else "" for one in DETECTORS) + " |" for name in shown),
        "",
        "Their tests alone see the others:",
        "",
        *(f"- {len(names)} {why}: {'; '.join(names)}." for why, names in unseen.items() if names),
    ]
    return "\n".join(lines) + "\n"


def lines_of(folder: str) -> dict[str, set[tuple[str, int]]] | None:
    """Train the models without a fault; the lines that each runs, or None where something is seen."""
    ran = {}
    for name, setup in SETUPS.items():
        if wrong := run(None, folder, {name: setup}, follows=True):
            print(f"without a fault something is seen with {name}: {wrong}")
            return None
        ran[name] = {
            (file, line) for told in Path(folder).glob(f"{name}-*.json") for file, line in json.loads(told.read_text())
        }
    return ran


def main() -> int:
    seen: dict[str, list[str] | None] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    todo = [mutant for mutant in chosen(sys.argv[1:]) if mutant.name not in seen]
    ours, theirs = FORKS.Pipe(duplex=False)
    FORKS.Process(target=lambda: theirs.send(rare())).start()  # it imports the package, which this process must not
    setups_of = ours.recv()
    needs = {mutant.name: setups_of[mutant.name] for mutant in todo if mutant.name in setups_of}
    known = mutants.definitions(mutants.ROOT / "lightning_seqpar")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
        first = FORKS.Process(target=quietly, args=(silent.fileno(), references, folder, SETUPS | needs))
        first.start()
        first.join()
        ran = lines_of(folder) if len(needs) < len(todo) else {}
        if ran is None:
            return 1
        for mutant in todo:
            setup = needs.get(mutant.name)
            if setup is not None:
                if bool(run(None, folder, {mutant.name: setup})) is not setup.refused:
                    print(f"{mutant.name:<66} its model is {'trained' if setup.refused else 'refused'} without it")
                    continue
                setups = {mutant.name: setup}
            else:
                setups = {name: SETUPS[name] for name in who_runs(mutant, mutants.place_of(mutant, known), ran)}
            seen[mutant.name] = run(mutant, folder, setups) if setups else None
            shown = "no model runs it" if seen[mutant.name] is None else ", ".join(seen[mutant.name] or "-")
            print(f"{mutant.name:<66} {shown}", flush=True)
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(seen, indent=1) + "\n")
            KEPT.with_suffix(".md").write_text(table(seen))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
