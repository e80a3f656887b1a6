"""Fail on purpose at random moments of a run, under both launchers, and see how it ends.

    python tests/faults.py               every kind, 20 times under each launcher; writes docs/faults.md (an hour and more)
    python tests/faults.py --count 5     fewer; --kinds KILL STOP for some of them

Exit code 1 if a run did not end, left a process, or ended without saying why.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from tests.helpers.ill_run import PLACES
from tests.helpers.processes import environment, hear_sigint, survivors

TIMEOUT = 30
"""Seconds that a collective waits in these runs: the start of two processes on a busy machine takes some of them."""
STEPS = 8
LAUNCHERS = {
    "Lightning": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}
KINDS = {
    "raise": "an exception",
    "KILL": "kill -9",
    "STOP": "kill -STOP, as a machine that hangs",
    "stall": "a hook that never returns",
    "TERM": "SIGTERM to one rank: a checkpoint, and the end",
    "INT": "Ctrl-C to all ranks",
    "restart": "kill -9 under torchrun --max-restarts: trained to the end by itself",
}
SAYS = {
    "raise": r"ValueError: on purpose",
    "KILL": r"rank {rank} .*(killed by SIGKILL|is missing)|lost another rank|Signal 9|did not meet|main process .* is gone",
    "STOP": r"rank {rank} (is missing: rank \d waited in \w+|.*did not answer)|main process .* (was stopped|is gone)|did not meet",
    "stall": r"rank {rank} (is missing: rank \d waited in \w+|.*did not answer)|did not meet",
    "TERM": r"ended by SIGTERM|SIGTERM|exitcode  : 143|killed by SIGTERM|Signal 15",
    "INT": r"interrupted|KeyboardInterrupt|Signal 2|died",
    "restart": r"torchrun started the run again",
}


@dataclass
class Found:
    """How one run ended."""

    status: int | None
    after: float
    told: str
    orphans: int
    weights: list[float]
    left: list[str] = field(default_factory=list)
    wrong: str = ""


def run(launcher: str, kind: str, place: str, batch: int, rank: int, folder: str, **env: str) -> Found:
    """Start a run, wait for its end, and look at what is left."""
    tag = f"faults-{os.getpid()}-{time.monotonic_ns()}"
    command = [
        *LAUNCHERS[launcher],
        *(["--max-restarts", "1"] if kind == "restart" else []),
        "-m",
        "tests.helpers.ill_run",
    ]
    happens = {"restart": "KILL", "stall": "pause"}.get(kind, kind)
    env |= {"BAD": f"{happens}:{rank}", "PLACE": place, "AT": str(batch), "FOLDER": folder, "TIMEOUT": str(TIMEOUT)}
    env |= {"STEPS": str(STEPS), "EVERY": "2", "VALIDATE": "1", "RAISED": "1"}
    proc = subprocess.Popen(
        command, env=environment(SEQPAR_TAG=tag, PYTHONPATH=f"{ROOT}:{ROOT / 'examples'}", **env), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=hear_sigint,
    )  # fmt: skip
    try:
        told, status = proc.communicate(timeout=TIMEOUT + 150)[0], proc.returncode
    except subprocess.TimeoutExpired:
        status = None
    ended = time.time()
    orphans = survivors(tag)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    if status is None:
        told = proc.communicate()[0]
    struck = [float(at) for at in re.findall(r"STRUCK ([\d.]+)", told)]
    weights = [float(one) for one in re.findall(r"WEIGHTS \S+ ([\d.]+)", told)]
    left = [path.name for path in Path(folder).iterdir()] if Path(folder).exists() else []
    return Found(status, ended - struck[0] if struck else 0.0, told, len(orphans), weights, left)


def trial(launcher: str, kind: str, seed: int, undisturbed: Sequence[float]) -> Found:
    """One run that is struck at a random moment: what is wrong with its end, if anything."""
    chance = random.Random(f"{launcher} {kind} {seed}")
    place, batch, rank = chance.choice(PLACES), chance.randrange(6), chance.randrange(2)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):  # on a busy machine two processes may not meet in time: nothing was tried then
            found = run(launcher, kind, place, batch, rank, folder)
            if "STRUCK" in found.told or "did not meet" not in found.told:
                break
        where = f"{launcher}, {kind} at {place}, batch {batch}, rank {rank}"
        if found.status is None:
            found.wrong = f"{where}: it did not end"
        elif found.orphans:
            found.wrong = f"{where}: {found.orphans} processes were left"
        elif "STRUCK" not in found.told:
            found.wrong = f"{where}: nothing was struck\n{found.told[-2000:]}"
        elif kind == "restart":
            if found.status or sorted(found.weights) != sorted_near(found.weights, undisturbed):
                found.wrong = f"{where}: it ended with {found.status} and {found.weights}\n{found.told[-3000:]}"
        elif not found.status:
            found.wrong = f"{where}: it ended with 0"
        elif not re.search(SAYS[kind].format(rank=rank), found.told):
            found.wrong = f"{where}: it does not say why\n{found.told[-3000:]}"
        elif any("unfinished" in name for name in found.left) and kind != "KILL":
            found.wrong = f"{where}: half a checkpoint is left: {found.left}"
        elif kind == "TERM" and found.left and found.status == 143:
            newest = max((name for name in found.left if name.endswith(".ckpt")), key=step_of, default="")
            again = run(
                launcher, "none", "nowhere", 0, 0, folder, **({"RESUME": str(Path(folder, newest))} if newest else {})
            )
            if sorted(again.weights) != sorted_near(again.weights, undisturbed):
                found.wrong = f"{where}: resumed from {newest}: {again.weights}\n{again.told[-2000:]}"
        return found


def step_of(name: str) -> int:
    return int(re.findall(r"step=(\d+)", name)[0])


def sorted_near(got: Sequence[float], expected: Sequence[float]) -> list[float]:
    """What was got, sorted, if it is what was expected up to rounding; else what was expected."""
    near = len(got) == len(expected) and all(
        abs(a - b) <= 1e-9 * abs(b) for a, b in zip(sorted(got), sorted(expected), strict=True)
    )
    return sorted(got if near else expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run("Lightning", "none", "nowhere", 0, 0, folder).weights
    assert len(undisturbed) == 2
    rows, wrong = [], []
    for kind in given.kinds:
        for launcher in LAUNCHERS:
            if kind == "restart" and launcher != "torchrun":
                continue
            with ThreadPoolExecutor(4 if kind in ("STOP", "stall") else 2) as pool:  # these wait for most of their time
                found = list(pool.map(lambda seed: trial(launcher, kind, seed, undisturbed), range(given.count)))  # noqa: B023
            bad = [one.wrong for one in found if one.wrong]
            wrong += bad
            longest = max(one.after for one in found)
            late = "" if kind == "restart" else f"{longest:.0f} s"
            rows.append(f"| {KINDS[kind]} | {launcher} | {len(found)} | {len(found) - len(bad)} | {late} |")
            print(rows[-1], *bad, sep="\n", flush=True)
    text = (
        "# Failing on purpose\n\nMade by `make faults`: two ranks at tp 2 train eight steps with validations and checkpoints. At "
        f"a random place of a random batch something happens to one of them. Collectives wait {TIMEOUT} s at most. A run counts as "
        "ended well if it ends by itself with a status other than 0, says which rank failed or is missing (and in which collective "
        "the others waited), and leaves no process and no half checkpoint. Behind SIGTERM the run that resumes from the "
        "checkpoint, and the run that torchrun starts again, must end with the weights of an undisturbed one (1e-9).\n\n"
        "| what happens | started by | tried | ended well | longest until the end |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\n"
        "torchrun gives processes that it ends 30 seconds before it kills them: a stopped one takes that long.\n"
    )
    if given.kinds == list(KINDS):
        (ROOT / "docs" / "faults.md").write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
