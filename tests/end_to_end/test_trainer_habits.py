"""Every habit of the table, on one process and on ranks: losses, weights and what the feature itself yields."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers.habit_runs import LIMIT, TOPOLOGIES, judge
from tests.helpers.habits import HABITS, by_name, found_at, run_at, run_on_ranks
from tests.mutants import sees
from tests.write_trainer import DOC, start_of_line

RARE = (pytest.mark.matrix, pytest.mark.timeout(1200))
CASES = [
    pytest.param(one.name, topology, id=f"{topology}-{one.slug}", marks=() if topology in one.suite else RARE)
    for topology in TOPOLOGIES
    for one in HABITS
    if topology not in one.left_out
]


@functools.cache
def alone(name: str, folder: str) -> Any:
    return run_at(by_name(name), "alone", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("habits"))


@pytest.fixture(scope="module")
def runs(request, folder):
    """Runs all chosen habits of a topology on its ranks, a dozen to a start, when the first of them is asked for."""
    chosen = [
        item.callspec.params for item in request.session.items if item.module is request.module and hasattr(item, "callspec")
    ]

    @functools.cache
    def run(topology: str) -> str:
        names, failures = [params["name"] for params in chosen if params["topology"] == topology], ""
        for few in (names[first : first + 12] for first in range(0, len(names), 12)):
            try:
                run_distributed(run_on_ranks, TOPOLOGIES[topology][0], few, topology, folder, timeout=240.0)
            except RankFailedError as error:
                failures += str(error)
        return failures

    return run


@sees(
    "habits: an average of weights stays whole",
    "ModelSetup.share_out_averages",
    "                shard_average(average, record)\n",
    "",
    case="tp2-averages_of_weights",
)
@sees(
    "habits: an average of weights is saved in shards",
    "ModelSetup.share_out_averages",
    "                save_whole(average, functools.partial(to_whole, record))\n",
    "",
    case="tp2-averages_of_weights",
)
@sees(
    "habits: an average in a folder stays unread",
    "Saver._with_averages",
    "        if self._opened is None:\n",
    "        if True:\n",
    case="tp2-averages_of_weights",
)
@sees(
    "habits: a callback saves shards",
    "Saver.save",
    "            refuse_saved_shards(checkpoint, record)\n",
    "            pass\n",
    case="tp2-saves_own_average",
)
@sees(
    "habits: a gradient of a loss passes for a constant",
    "once_differentiable",
    "        if not torch.is_grad_enabled():\n",
    "        if not torch.is_grad_enabled() or not any(isinstance(g, Tensor) and g.requires_grad for g in grads):\n",
    case="tp2-penalises_the_head",
)
@sees(
    "habits: a rate is found by one replica's losses",
    "Loops.begin_training",
    "            share_losses_of_finders(env.callbacks)\n",
    "            pass\n",
    case="dp2xtp2-rate_found",
)
@sees(
    "habits: a gradient penalty ends with torch's words",
    "refuse_second_derivative",
    '    if "once_differentiable" in str(error):\n',
    "    if False:\n",
    case="tp2-penalises_gradients",
)
@sees(
    "habits: rows that are logged end with torch's words",
    "Steps.run_step",
    '("DTensor", "sharding strategy")',
    '("DTensor",)',
    case="fsdp2xtp2-penalised",
)
@sees(
    "an optimizer that comes later not looked at",
    "Steps.check_optimizers",
    "self._optimizer_guard.refuse_mixing(plain, self.shards if plain else 1)",
    "self._optimizer_guard.refuse_mixing(plain, 1)",
    case="tp2-adafactor",
)
@sees(
    "pp: stages clip by their own norms",
    "Steps.check_step",
    "            self._comparisons.add(self._scales.check())\n",
    "",
    case="pp2-clips_by_torch",
)
@sees(
    "pp: a buffer that one stage writes passes while training",
    "Stages._end_window",
    "            check_buffers_of_stages(record, self._env.groups, self._env.device)\n",
    "            pass\n",
    case="pp2-norms_synced",
)
@sees(
    "stacks: blocks that the step does not run are cut",
    "trace_cut",
    "if one.stack.blocks[0] not in called",
    "if not called",
    case="pp2-averages_inside",
)
@sees(
    "pp: what stands for the loss has a gradient that is no number",
    "Stage.run",
    'self._anchor + float("nan")',
    'self._anchor * float("nan")',
    case="pp2-watched_for_anomalies",
)
@pytest.mark.parametrize(("name", "topology"), CASES)
def test_habit(name, topology, runs, folder):
    failure, habit = runs(topology), by_name(name)
    expected = None if habit.refusal(topology) else alone(name, folder)
    for rank in range(TOPOLOGIES[topology][0]):
        path = found_at(folder, topology, name, rank)
        assert Path(path).is_file(), f"{name}: rank {rank} did not end\n{failure[-2000:]}"
        wrong, _ = judge(habit, topology, expected, torch.load(path, weights_only=False))
        assert not wrong, f"{name}, rank {rank}: {wrong}"


def test_the_document_has_every_habit():
    text = DOC.read_text()
    for habit in HABITS:
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {habit.name} |"))
        assert line.startswith(start_of_line(habit)), "run python -m tests.write_trainer"
        assert line.endswith(f"| {habit.remark} |")
        cells = line.removeprefix(start_of_line(habit)).split("|")
        for cell, topology in zip(cells, TOPOLOGIES, strict=False):
            if topology in habit.left_out:
                assert cell.strip() == "-", (line, topology)
                continue
            assert cell.strip() == "refused" if habit.refusal(topology) else 0 <= float(cell) <= LIMIT, (line, topology)
    assert text.count("\n| ") == len(HABITS) + 1
