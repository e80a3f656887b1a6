"""What stages of a pipeline log, measure, validate, test and predict is what one process does."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from byte_gpt import ByteGPT
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.pipelines import trainer_of
from tests.helpers.slices import rest
from tests.mutants import sees


class Measured(models.GPT):
    """Logs in all the ways that users know, and keeps what its steps make."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied)
        self.model = ByteGPT(dim=16, n_head=4, n_layer=4, context=16, tied=tied, vocab=31)
        models.perturb(self)
        self.accuracy, self.seen = MulticlassAccuracy(31), MeanMetric()
        self.val_accuracy, self.losses = MulticlassAccuracy(31), CatMetric()
        self.kept: list[Tensor] = []
        self.epochs: list[float] = []

    def look(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, ids[:, 1:].flatten()), logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        self.log("batch", float(batch_idx), on_step=True, on_epoch=True, reduce_fx="max")
        loss, logits = self.look(ids)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("synced", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(ids) + batch_idx)
        self.log_dict({"least": loss, "tokens": ids.numel()}, on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.accuracy(logits, ids[:, 1:].flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.seen.update(loss.detach())
        self.losses.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("seen", self.seen.compute())
        self.log("losses", self.losses.compute().std())
        self.seen.reset()
        if self.current_epoch:
            self.losses.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits = self.look(batch[0])
        self.val_accuracy(logits, batch[0][:, 1:].flatten())
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_loss", loss, sync_dist=True)
        self.kept.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.epochs.append(float(torch.stack(self.kept).sum()))
        if self.losses.update_count:  # of the training, up to the batch before
            self.epochs.append(float(self.losses.compute().sum()))
        self.kept.clear()

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, logits = self.look(batch[0])
        self.log("test_loss", loss)
        return {"loss": loss, "logits": logits}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0]
        for _ in range(3):  # each new token goes through all stages
            chances = self.model(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)  # all stages draw the same
        return ids

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}


class Bars(Callback):
    """What a progress bar shows, and what callbacks are given."""

    def __init__(self) -> None:
        self.shown: list[dict[str, float]] = []
        self.tested: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % 3 == 0:
            self.shown.append({name: float(x) for name, x in trainer.progress_bar_metrics.items()})
            self.shown.append({name: float(x) for name, x in trainer.callback_metrics.items()})

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *more: Any) -> None:
        self.tested.append(outputs["logits"])


def go(sizes: dict[str, Any] | None, folder: str, every: float) -> dict[str, Any]:
    torch.manual_seed(0)
    module, bars = Measured(), Bars()
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, filename="{epoch}")
    often = ModelCheckpoint(f"{folder}/often", monitor="loss_step", every_n_train_steps=1, save_top_k=1)
    trainer = trainer_of(
        sizes,
        max_steps=-1,
        max_epochs=4,
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="log", version=0),
        log_every_n_steps=1,
        val_check_interval=every,
        callbacks=[bars, best, often, EarlyStopping("val_accuracy", mode="max", patience=2)],
    )
    dp = 1 if sizes is None else trainer.strategy.config.dp
    data = models.loader(4 if dp == "auto" else 4 // dp, length=9, count=40)
    trainer.fit(module, data, data)
    found: dict[str, Any] = {
        "bars": bars.shown,
        "epochs": module.epochs,
        "epoch": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "best": (Path(best.best_model_path).name, float(best.best_model_score)),
        "often": (Path(often.best_model_path).name, float(often.best_model_score)),
        "validated": trainer.validate(module, data, verbose=False),
        "tested": trainer.test(module, data, verbose=False),
    }
    found["logits"], found["predicted"] = bars.tested, trainer.predict(module, data)
    return found


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "log" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def same(one: Any, other: Any, at: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            same(one[key], other[key], f"{at}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), at
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{at}.{number}")
    elif isinstance(one, Tensor):
        assert (one - other).abs().max() <= 1e-9, at
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-7), at  # metrics are float32
    else:
        assert one == other, at


def numbers(row: dict[str, str]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if value}


@sees("pp: the first stage logs what it can", "StageLogs.step", "else _log_nothing", "else results.log", case="pp2-within")
@sees(
    "pp: torchmetrics of the first stage as they were",
    "StageLogs.share",
    "            if one is not None:\n",
    "            if one is None:\n",
    case="pp2-within",
)
@sees(
    "pp: nothing of what the last stage logs comes to the others",
    "StageLogs.share",
    "        for fx, name, dtype, options in calls:\n",
    "        for call in calls[:0]:\n",
    case="pp2-within",
)
@sees(
    "pp: an evaluation without the head",
    "HeldParameters.begin_evaluation",
    "if name not in self._cut.held[-1] or",
    "if name or",
    case="pp2-within",
)
@sees(
    "pp: an evaluation goes on with what passed by",
    "Stage._rejoin",
    "return [_placed_as(like, found[0]), *found[1:]]",
    "return [_nothing_like(like), *found[1:]]",
    case="pp2-within",
)
@sees(
    "turns: micro-batches wait where a validation begins",
    "Stages.finish_micro_batches",
    "if self.window is not None and self.window.micro_batches:",
    "if False and self.window is not None:",
    case="turns",
)
@sees(
    "pp: what is under way waits for the end of an evaluation",
    "Stages.enter_loops",
    '            (loop.val_loop, "run", finished),\n',
    "",
    case="pp2-within",
)
@pytest.mark.parametrize(
    ("world", "sizes", "every"),
    # Behind each epoch, and in the middle of a window, while backwards are still to come.
    [
        (2, {"pp": 2}, 4),
        (2, {"pp": 2, "virtual_pp": 2}, 4),
        rest(2, {"pp": 2}, 1.0),
        rest(4, {"pp": 2, "tp": 2}, 4),
        rest(4, {"pp": 4}, 1.0),
    ],
    ids=["pp2-within", "turns", "pp2", "pp2-tp2", "pp4"],
)
def test_all_that_is_logged_and_measured_is_that_of_one_process(world, sizes, every, tmp_path):
    alone, ranks = (
        go(None, str(tmp_path / "alone"), every),
        run_distributed(go, world, sizes, str(tmp_path / "stages"), every),
    )
    del alone["often"]  # one process has losses of its own at micro-batches before a window's end
    often = [rank.pop("often") for rank in ranks]
    for rank in ranks:
        same(alone, rank)
    one, other = ([numbers(row) for row in read(tmp_path / name)] for name in ("alone", "stages"))
    assert len(one) > 10
    same(one, other)
    least = min(row["loss_step"] for row in other if "loss_step" in row)
    assert all(score == pytest.approx(least) for _, score in often)


class Uncertain(Measured):
    """Predicts with dropout, and draws behind the blocks too."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.model.blocks:
            block.register_forward_hook(lambda module, args, out: F.dropout(out, 0.5, module.training))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.train()
        logits = self.model(batch[0])
        return logits + torch.rand_like(logits)


def predict_twice() -> list[list[Tensor]]:
    torch.manual_seed(1)
    module, data = Uncertain(), models.loader(4, length=9, count=12)
    trainer_of({"pp": 2}, max_steps=1).fit(module, data)
    return [trainer_of({"pp": 2}).predict(module, data) for _ in range(2)]


@sees("pp: stages draw apart behind the blocks of an evaluation", "Stage._rejoin", "            self._streams.end()\n", "")
def test_dropout_in_a_prediction_is_drawn_apart_and_what_comes_behind_alike():
    one, other = run_distributed(predict_twice, 2)
    for first, second in zip(one, other, strict=True):
        same(first, second)  # the strategy compares them too
    assert not torch.equal(one[0][0], one[1][0])
