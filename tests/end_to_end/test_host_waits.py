"""No step waits for the device: neither for what the last one found, nor for numbers on their way to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.fit import class_named, quiet_trainer
from tests.helpers.host_waits import WaitsOfSteps
from tests.helpers.slices import rest
from tests.mutants import sees

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clipped by norm": ("GPT", {}, {"gradient_clip_val": 0.1}, {}),
    "no vocabulary, no sp": ("GPT", {"tied": False}, {}, {"vocab": False, "sp": False}),
    "two optimizers by hand": ("ManualTwo", {"style": "keep"}, {}, {}),
    "shared kv heads": ("Zoo", {"kind": "fused_mqa"}, {"gradient_clip_val": 0.1}, {}),
    "gradients exchanged": ("Edits", {}, {"accumulate_grad_batches": 2}, {}),
    "in chunks, recomputed": ("GPT", {}, {}, {"loss_chunk": 16, "recompute": "full"}),
}


PLACES = [
    (2, 2, {}, tuple(CASES)),
    (4, 2, {"data_parallel": "fsdp"}, ("clipped by norm", "two optimizers by hand")),
    (2, 1, {"pp": 2}, ("clipped by norm",)),
    (4, 2, {"pp": 2}, ("clipped by norm",)),
    rest(4, 2, {}, ("two optimizers by hand",)),
    rest(4, 4, {}, ("shared kv heads",)),
]
"""World, tp, fields of the strategy, and the cases that are run there."""


def waits(tp: int, fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, list[str]]:
    found, world = {}, dist.get_world_size()
    for name in names:
        model, given, trainer, more = CASES[name]
        steps = WaitsOfSteps()
        strategy = SeqParallelStrategy(tp=tp, self_check=False, regather=True, **fields, **more)
        quiet_trainer(devices=world, strategy=strategy, max_steps=20, callbacks=[steps], **trainer).fit(
            class_named(model)(**given), models.loader(4, count=4 * 48 * world)
        )
        found[name] = sorted(set(steps.waits.found))
    return found


@sees(
    "the host waits for what has arrived",
    "GradSync._sum",
    "        if late is not None and not all(arrived):\n",
    "        if late is not None:\n",
)
@sees("indices of shared heads sent in every step", "GradSync._shared_part", "if partial.shared is None or", "if True or")
@sees(
    "indices of what a rank holds first sent in every step",
    "ModelLayout.first_held",
    "if key not in self._first_held:",
    "if True:",
)
@sees("pp: masks compared in every step", "Steps.run_step", "stage.compares = schedule.walks_graphs", "stage.compares = True")
@sees("pp: the loss of a window is read", "StageLogs.share", "if ends_window and checks and", "if ends_window and")
@sees(
    "pp: a stage waits for what others have of other stages' parameters",
    "GradSync.__init__",
    " and layout[name].is_on(stage)]",
    "]",
)
@sees("the host waits for the losses", "LossWatch.take", "LateNumbers(summed)", "LateNumbers(torch.tensor(summed.tolist()))")
@pytest.mark.parametrize(("world", "tp", "fields", "names"), PLACES)
@pytest.mark.more
def test_no_step_waits_for_the_device(world, tp, fields, names):
    for found in run_distributed(waits, world, tp, fields, names):
        assert found == {name: [] for name in names}


class ApartAt(models.GPT):
    """One rank changes a gradient that all hold whole, in a step in which no check is due."""

    def __init__(self, at: int, scales: bool = False) -> None:
        super().__init__(tied=False)
        self.at, self.scales = at, scales

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == self.at and dist.get_rank() == 1:
            assert self.model.norm.weight.grad is not None
            for parameter in self.parameters() if self.scales else [self.model.norm.weight]:
                parameter.grad *= 2


def step_of_error(at: int, scales: bool = False) -> tuple[int, str]:
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, self_check=False), max_steps=20)
    try:
        trainer.fit(ApartAt(at, scales), models.loader(4, count=96))
    except RuntimeError as error:
        return trainer.global_step, str(error)
    return trainer.global_step, "trained"


@sees(
    "gradients compared and never read", "Steps._read_comparisons", "            comparison()\n", "            del comparison\n"
)
@sees("a comparison of the last step not read", "Steps.settle", "        self._read_comparisons(everything=True)\n", "")
def test_gradients_that_differ_end_the_run_a_step_later():
    for at, ends in ((16, 17), (19, 20)):  # the last step too
        for step, told in run_distributed(step_of_error, 2, at):
            assert step == ends, told
            assert "every rank holds it whole, but the gradients that reach the optimizer differ across tp by 5.0e-01" in told
            assert "this step took another way than the first batch" in told
    told = run_distributed(step_of_error, 2, 16, True)[0][1]
    assert "By one number for all parameters, so gradients were clipped by torch.nn.utils.clip_grad_norm_" in told


class StreamsOf(Callback):
    """Steps in which the region's streams are not switched."""

    def __init__(self) -> None:
        self.still: list[int] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if not record_of(pl_module).regions[0].streams.draws:
            self.still.append(trainer.global_step)


def switched(dropout: float, begins: int) -> list[int]:
    streams = StreamsOf()
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, self_check=False), max_steps=20, callbacks=[streams])
    trainer.fit(DropsLate(dropout, begins), models.loader(4, count=96))
    return streams.still


class DropsLate(models.GPT):
    """Drops in its second block from some step on."""

    def __init__(self, dropout: float, begins: int) -> None:
        super().__init__()
        self.dropout, self.begins = dropout, begins
        self.model.blocks[1].mlp.up = torch.nn.Sequential(self.model.blocks[1].mlp.up, torch.nn.Dropout(0.0))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.blocks[1].mlp.up[1].p = self.dropout if self.trainer.global_step >= self.begins else 0.0


@sees("streams not switched once a step drew nothing", "WatchSchedule.expects_draws", "else self._drawn", "else frozenset()")
@sees(
    "streams switched in steps that draw nothing",
    "Steps.run_step",
    "expects = schedule.expects_draws(loop)",
    'expects = schedule.expects_draws("validation")',
)
@pytest.mark.more
def test_streams_are_switched_where_something_draws():
    # A draw that comes unexpected is seen at the end of its step.
    expected = {(0.0, 0): [16, 17, 18, 19], (0.5, 0): [], (0.5, 17): [16, 17]}
    for (dropout, begins), found in expected.items():
        assert run_distributed(switched, 2, dropout, begins) == [found] * 2, (dropout, begins)
