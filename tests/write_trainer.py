"""Writes docs/trainer.md: runs every habit of the table at every topology and says what came of it.

    python -m tests.write_trainer             after a change of the table; takes some minutes

Nothing is written if a habit does not do what the table says.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from lightning_seqpar.testing import run_distributed
from tests.helpers.habit_runs import TOPOLOGIES, Habit, judge
from tests.helpers.habits import HABITS, found_at, run_at, run_on_ranks

DOC = Path(__file__).resolve().parent.parent / "docs" / "trainer.md"
HEAD = """\
# What a Trainer does under this strategy

Written by `python -m tests.write_trainer`, which runs each row on one process without the strategy and on the ranks of each
topology. A number is the largest difference (relative to the largest element, absolute below 1) of all that is compared:
losses, weights, and what the feature itself yields, such as the rate that was suggested, what was logged, the best checkpoints
and what is in them, or the predictions that were written. "Refused" means that it stops with a sentence that names a way; the
remark has it in short, and [pipelines](pipeline.md#what-is-refused) what `pp` refuses. "-": not compared, for what the remark
says. `tests/end_to_end/test_trainer_habits.py` holds this table
to 1e-9: tp 2 and some of the rest in `make test`, all of it in `make parity`.

"""
TITLES = {
    "tp2": "tp 2",
    "dp2xtp2": "dp 2 × tp 2",
    "fsdp2xtp2": "fsdp (dp 2 × tp 2)",
    "cp2": "cp 2",
    "tp2xcp2": "tp 2 × cp 2",
    "pp2": "pp 2",
}


def start_of_line(habit: Habit) -> str:
    """The cells of a habit's line that do not come of a run."""
    return f"| {habit.name} | {habit.written} |"


def table(cells: Mapping[tuple[str, str], str]) -> str:
    """The document.

    Args:
        cells: by name and topology what came of a habit.
    """
    lines = [f"| feature | how it is written | {' | '.join(TITLES.values())} | remark |", f"|{'---|' * (3 + len(TITLES))}"]
    for habit in HABITS:
        found = " | ".join(cells[habit.name, topology] for topology in TITLES)
        lines.append(f"{start_of_line(habit)} {found} | {habit.remark} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Run everything and write the document; 1 if a habit fails."""
    warnings.simplefilter("ignore")
    cells: dict[tuple[str, str], str] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        alone = {habit.name: run_at(habit, "alone", folder) for habit in HABITS}
        for topology, (world, _) in TOPOLOGIES.items():
            there = [habit for habit in HABITS if topology not in habit.left_out]
            run_distributed(run_on_ranks, world, [habit.name for habit in there], topology, folder, timeout=900.0)
            cells.update({(habit.name, topology): "-" for habit in HABITS if habit not in there})
            for habit in there:
                worst = 0.0
                for rank in range(world):
                    found = torch.load(found_at(folder, topology, habit.name, rank), weights_only=False)
                    wrong, error = judge(habit, topology, alone[habit.name], found)
                    worst = max(worst, error)
                    if wrong:
                        failed = True
                        print(f"{habit.name}, {topology}, rank {rank}: {wrong}", file=sys.stderr)
                cells[habit.name, topology] = "refused" if habit.refusal(topology) else f"{worst:.0e}"
    if not failed:
        DOC.write_text(table(cells))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
