"""What a step costs the host: Python calls, counted exactly, in a step in which no check is due."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from counting import PythonCalls
from lightning.pytorch.callbacks import Callback

import lightning_seqpar
from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees

DUE, STEADY = 16, 17
"""Steps: checks are due in the first 16, and at powers of two."""
OURS = str(Path(lightning_seqpar.__file__).parent) + "/"
WATCHERS = {"verify/guards/while_training.py", "parallel/grad_checks.py"}
"""Modules of nothing but checks."""


class CallCounter(Callback):
    """Counts the Python calls of some steps, from the first hook of a batch to its last, by file.

    Args:
        steps: their numbers, from 1 on.
    """

    def __init__(self, *steps: int) -> None:
        self.calls = {step: PythonCalls() for step in steps}
        self._counted: PythonCalls | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._counted = self.calls.get(trainer.global_step + 1)
        if self._counted is not None:
            self._counted.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        if self._counted is not None:
            self._counted.__exit__()

    def by_file(self) -> dict[int, Counter[str]]:
        """The calls of each of those steps."""
        return {
            step: Counter({file.removeprefix(OURS): made for file, made in counted.by_file.items()})
            for step, counted in self.calls.items()
        }


def count_calls(layers: int) -> dict[int, Counter[str]]:
    """The calls of a training at tp 2, or on one process."""
    counter = CallCounter(DUE, STEADY)
    world = dist.get_world_size() if dist.is_initialized() else 1
    strategy: Any = SeqParallelStrategy(tp=2) if world > 1 else "auto"
    trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=STEADY, max_epochs=-1, callbacks=[counter])
    trainer.fit(models.GPT(layers=layers), models.loader(4))
    return counter.by_file()


@pytest.fixture(scope="module")
def calls() -> dict[str, list[dict[int, Counter[str]]]]:
    """Of models of two and of four blocks, on one process and on two."""
    return {
        "one": [count_calls(layers) for layers in (2, 4)],
        "two": [run_distributed(count_calls, 2, layers)[0] for layers in (2, 4)],
    }


@sees(
    "a graph is walked in every step",
    "Steps._before_backward",
    '            if self.schedule.is_due("training"):\n                if is_loss:',
    "            if True:\n                if is_loss:",
)
@sees("gradients are compared in every step", "Steps.check_step", "if self._gradients_may_change or due:", "if True:")
def test_no_check_runs_where_none_is_due(calls):
    for found in calls["two"]:
        assert found[DUE].keys() >= WATCHERS
        assert not found[STEADY].keys() & WATCHERS


@sees(
    "the host does more beside the blocks",
    "Steps.check_step",
    "(due or count != self._counts.get(id(optimizer)))",
    "(due or count)",
)
def test_calls_of_a_step_beside_its_blocks(calls):
    """What a model of no blocks would make: that of two, less the difference to four. Beyond the plain Trainer's own."""
    beside = {kind: 2 * two[STEADY].total() - four[STEADY].total() for kind, (two, four) in calls.items()}
    assert beside["two"] - beside["one"] <= 350, beside


def test_calls_of_a_block(calls):
    two, four = calls["two"]
    assert (four[STEADY].total() - two[STEADY].total()) / 2 <= 373
