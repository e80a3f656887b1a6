"""Stages of a pipeline trained by a Trainer: gradients, norms, weights and checkpoints of one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from lightning_seqpar import unshard
from lightning_seqpar.strategy import stages
from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers import models
from tests.helpers.fit import class_named
from tests.helpers.habit_runs import StepLosses
from tests.helpers.pipelines import trainer_of
from tests.helpers.slices import rest
from tests.mutants import sees


def losses_given(sizes: dict[str, Any] | None) -> list[float]:
    """What callbacks are given where windows end, of 2 and of 1 batches in turn; of one process the sum over the window."""
    seen = StepLosses()
    trainer = trainer_of(sizes, callbacks=[seen], accumulate_grad_batches=2, max_steps=4, limit_train_batches=3)
    trainer.fit(class_named("GPT")(tied=True, layers=4).double(), models.loader(4, length=9, count=12))
    return seen.losses


@sees(
    "callbacks are given no loss on stages that compute none",
    "Stages.enter_loops",
    '            (loop.automatic_optimization, "run", with_loss),\n',
    "",
    case="pp2",
)
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "virtual_pp": 2}], ids=["pp2", "turns"])
def test_callbacks_are_given_the_loss_of_the_window_on_every_stage(sizes):
    expected = losses_given(None)
    assert len(expected) == 4
    for found in run_distributed(losses_given, 2, sizes):
        assert found == pytest.approx(expected, rel=1e-9)


class AuxiliaryLater(models.GPT):
    """Reads the first block's output from its second step on, which the last stage does not have."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        model, (tokens,) = self.model, batch
        x = model.tokens(tokens[:, :-1]) + model.positions(torch.arange(tokens.shape[1] - 1))
        first = x = model.blocks[0](x)
        for block in list(model.blocks)[1:]:
            x = block(x)
        loss = F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())
        return loss if not batch_idx else loss + first.square().mean()


def told_of_nan() -> list[str]:
    trainer = trainer_of({"pp": 2}, max_steps=2)
    with mock.patch.object(stages, "rank_zero_warn") as told:
        trainer.fit(AuxiliaryLater().double(), models.loader(4, length=9, count=12))
    return [one.args[0] for one in told.call_args_list]


def test_a_loss_that_reads_what_its_stage_does_not_have_is_told_of():
    for told, *_ in run_distributed(told_of_nan, 2):  # in each window
        assert "the loss is NaN. With pp=2 an activation between the blocks is NaN on stages that did not make it" in told


def go_on(sizes: dict[str, Any] | None, folder: str, start: str | None) -> dict[str, torch.Tensor]:
    """Train for two updates, or from a checkpoint to the fourth; save, and give the plain model back."""
    module = class_named("GPT")(tied=True, layers=4)
    trainer = trainer_of(sizes, max_steps=2 if start is None else 4)
    trainer.fit(module, models.loader(4, length=9, count=80), ckpt_path=start, weights_only=False)
    trainer.save_checkpoint(f"{folder}/{0 if start is None else 1}.ckpt")
    unshard(module)
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@sees(
    "pp: a checkpoint has the first stage's moments alone",
    "_of_all_stages",
    "if not any(one.stages for one in layout.values()):",
    "if layout:",
    case="pp2",
)
@sees(
    "the place in an epoch stays where plain Lightning reads it",
    "take_places",
    '    places: list[Any] = loop.pop("combined_loader", [])\n',
    '    places: list[Any] = loop.get("combined_loader", [])\n',
    case="pp2",
)
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(2, {"pp": 2}), (4, {"pp": 2, "tp": 2}), (2, {"pp": 2, "virtual_pp": 2})],
    ids=["pp2", "pp2-tp2", "turns"],
)
def test_checkpoints_are_those_of_one_process(world, sizes, tmp_path):
    for name in ("alone", "stages"):
        (tmp_path / name).mkdir()
    expected = [go_on(None, str(tmp_path / "alone"), start) for start in (None, str(tmp_path / "alone" / "0.ckpt"))]
    # Each goes on from the other's.
    first = run_distributed(go_on, world, sizes, str(tmp_path / "stages"), None)
    second = run_distributed(go_on, world, sizes, str(tmp_path / "stages"), str(tmp_path / "alone" / "0.ckpt"))
    own = go_on(None, str(tmp_path / "alone"), str(tmp_path / "stages" / "0.ckpt"))
    for found, weights in ((first, expected[0]), (second, expected[1]), ([own], expected[1])):
        for one in found:
            assert one.keys() == weights.keys()
            assert max((one[n] - x).abs().max() for n, x in weights.items()) <= 1e-9
    files = [torch.load(tmp_path / name / "0.ckpt", weights_only=False) for name in ("alone", "stages")]
    alone, stages = (file["optimizer_states"][0]["state"] for file in files)
    assert alone.keys() == stages.keys()
    assert all((stages[at][key] - x).abs().max() <= 1e-9 for at, entry in alone.items() for key, x in entry.items())
    assert files[0]["state_dict"].keys() == files[1]["state_dict"].keys()


class Ends(Callback):
    """Ends a training in the middle of a window."""

    def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
        trainer.should_stop = trainer.fit_loop.epoch_loop.batch_idx == 4


def end_and_go_on(sizes: dict[str, Any] | None) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = class_named("GPT")(tied=True)
    trainer_of(sizes, callbacks=[Ends()]).fit(module, models.loader(4, length=9, count=40))
    trainer_of(sizes).fit(module, models.loader(4, length=7, count=40))
    trainer = trainer_of(sizes)
    (tested,) = trainer.test(TestedLater(module), models.loader(4, length=9, count=8), verbose=False)
    unshard(trainer.lightning_module)
    return tested["test"], {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class TestedLater(L.LightningModule):
    """A part of it was trained before, as another module."""

    def __init__(self, trained: Any) -> None:
        super().__init__()
        self.net = unshard(trained).model

    def test_step(self, batch: Any, batch_idx: int) -> None:
        (ids,) = batch
        self.log("test", F.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@sees(
    "pp: what a training leaves under way comes to the next",
    "Loops.end_training",
    "        self._steps.stages.finish_micro_batches()\n",
    "",
    case="pp2",
)
@pytest.mark.parametrize(("world", "sizes"), [(2, {"pp": 2}), rest(4, {"pp": 2, "tp": 2})], ids=["pp2", "pp2-tp2"])
def test_what_a_training_leaves_in_the_middle_of_a_window_does_not_come_to_the_next(world, sizes):
    loss, weights = end_and_go_on(None)
    for found, own in run_distributed(end_and_go_on, world, sizes):
        assert found == pytest.approx(loss, rel=1e-6)
        assert max((own[n] - x).abs().max() for n, x in weights.items()) <= 1e-9


class Keeps(models.GPT):
    """Zeroes gradients before every other update alone."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def keep(tied: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Keeps(tied)
    sizes = {"pp": 2} if torch.distributed.is_initialized() else None
    trainer_of(sizes, accumulate_grad_batches=1, gradient_clip_val=None).fit(module, models.loader(4, length=9, count=16))
    unshard(module)
    return [parameter.detach().clone() for parameter in module.parameters()]


@sees(
    "pp: a kept gradient of tied weights is summed once more",
    "Stages.run_when_due",
    "            stage.refuse_kept()\n",
    "            pass\n",
)
def test_gradients_that_are_kept_are_right_or_told():
    expected = keep(False)
    for found in run_distributed(keep, 2, False):
        assert max((a - b).abs().max() for a, b in zip(expected, found, strict=True)) <= 1e-9
    with pytest.raises(RankFailedError, match=r"model\.tokens\.weight: its gradient was kept from the step before"):
        run_distributed(keep, 2, True)
