"""What starting costs: seconds from ``fit`` to the first step and the memory of a rank, with the self-check and without.

    python benchmarks/startup.py                                   all of SHAPES, each in fresh processes (20 minutes)
    python benchmarks/startup.py --shapes "GPT-2 124 M" --cases self-check self_check=False

A part of ``make bench`` too. Peaks are of the whole process, in ``fit``: until the first step begins, and in the steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from launch import FailedRunError, Launcher  # noqa: E402
from tables import startup_table  # noqa: E402

STEPS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "dim 512, 8,192 words": {"dim": 512, "vocab": 8192, "length": 512},
    "GPT-2 124 M": {"model": "GPT-2 124 M", "length": 128, "batch": 1},
    "llama 0.55 B, 50k words": {"model": "llama 0.55 B, 50k words", "length": 128, "batch": 1},
    "llama 0.55 B, 128k words": {"model": "llama 0.55 B, 128k words", "length": 128, "batch": 1},
    "llama 1.1 B, 50k words": {"model": "llama 1.1 B, 50k words", "length": 128, "batch": 1},
    "llama 1.1 B, 128k words": {"model": "llama 1.1 B, 128k words", "length": 128, "batch": 1},
}
"""Of each shape, the arguments of ``child.run`` that make it."""
CASES = {"self_check=False": "ours, unchecked", "self-check": "ours", "dtensor": "dtensor", "ddp": "ddp"}
"""Of each row, the way that is trained."""
OURS = ("self_check=False", "self-check")


def measure(launch: Launcher, shape: str, cases: tuple[str, ...] = tuple(CASES)) -> dict[str, dict[str, Any] | str]:
    """Figures of a shape by case, the largest of both ranks'; a sentence where a case does not run.

    Args:
        launch: trains a way.
        shape: a key of :data:`SHAPES`.
        cases: keys of :data:`CASES`.
    """
    found: dict[str, dict[str, Any] | str] = {}
    for case in cases:
        task = {"way": CASES[case], "startup": True, "steps": STEPS, **SHAPES[shape]}
        try:
            found[case] = launch(2, note=case, **task)
        except FailedRunError as error:
            found[case] = str(error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=list(OURS), choices=list(CASES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launch = Launcher(Path(folder))
        for shape in given.shapes:
            lines = startup_table({shape: measure(launch, shape, tuple(c for c in CASES if c in given.cases))})
            print("\n".join(lines), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
