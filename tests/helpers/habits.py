"""Habits of people who train with Lightning, as a table: what each is, how one writes it, and what it yields.

A habit runs on one process without the strategy and on the ranks of a topology; what it returns must be the same. Where the ranks
refuse it, the table has the sentence. ``tests/end_to_end/test_trainer_habits.py`` runs the table, ``python -m tests.write_trainer``
makes docs/trainer.md of it. A row is a function under ``@habit``.
"""

from __future__ import annotations

import csv
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_seqpar import grad_norm
from lightning_seqpar.verify.parity import gather_weights
from tests.helpers import models
from tests.helpers.habit_runs import TOPOLOGIES, Habit, Learner, Place, Yield

HABITS: list[Habit] = []
MANUAL = r"pp=2 with automatic_optimization=False: .*use automatic optimization"
FINDER = r"LearningRateFinder with pp=2: .*look for the rate with pp=1"
COPIED = r"Averaging with pp=2: it copies all weights"
WRITTEN = "single memory location"
"""How stages refuse several of them."""
EVERYWHERE = tuple(one for one in TOPOLOGIES if one != "pp2")


def habit(name: str, written: str, **more: Any) -> Callable[[Callable[[Place], Yield]], Callable[[Place], Yield]]:
    """Add a function to the table."""

    def added(run: Callable[[Place], Yield]) -> Callable[[Place], Yield]:
        assert not {name, run.__name__} & {word for one in HABITS for word in (one.name, one.slug)}
        HABITS.append(Habit(name, written, run, **more))
        return run

    return added


# ---- the course of a training --------------------------------------------------------------------------------------


@habit("gradient accumulation", "`Trainer(accumulate_grad_batches=2)`", suite=EVERYWHERE, check=True)
def accumulation(place: Place) -> Yield:
    return place.train(Learner(), accumulate_grad_batches=2, max_epochs=1, count=40)


@habit("`GradientAccumulationScheduler`", "`GradientAccumulationScheduler({0: 1, 1: 2})`")
def accumulation_scheduled(place: Place) -> Yield:
    return place.train(Learner(), GradientAccumulationScheduler({0: 1, 1: 2}), max_epochs=2, count=32)


class CallsItself(Learner):
    """As Lightning's docs write it: forward returns logits, and the steps call ``self``. Embedding and head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head.weight = self.model.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


@habit(
    "steps that call `self(x)`",
    "`forward` returns logits; `loss = F.cross_entropy(self(x), y)` in `training_step`, `self(x)` in the other steps",
    suite=tuple(TOPOLOGIES),
    check=True,
)
def calls_itself(place: Place) -> Yield:
    module = CallsItself()
    out = place.train(module, val=8)
    trainer = out["trainer"]
    out["val"] = trainer.callback_metrics["val"]
    out["test"] = trainer.test(module, place.loader(8, seed=7), verbose=False)
    return out


class ByHand(Learner):
    """Two optimizers and two schedulers; gradients are clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            scheduler.step()
            self.untoggle_optimizer(optimizer)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        blocks = set(self.model.blocks.parameters())
        rest = [p for p in self.parameters() if p not in blocks]
        optimizers = [torch.optim.SGD(list(self.model.blocks.parameters()), 0.1), torch.optim.AdamW(rest, 0.01)]
        return optimizers, [lr_scheduler.StepLR(one, 1, 0.5) for one in optimizers]


@habit(
    "manual optimization, two optimizers",
    "`self.automatic_optimization = False`, `toggle_optimizer`, `manual_backward`, `clip_gradients`, `scheduler.step()`",
    suite=("tp2", "dp2xtp2"),
    in_stages=MANUAL,
)
def by_hand(place: Place) -> Yield:
    # DDP waits for the gradients of what the other optimizer trains, as without this strategy.
    options = {"fields": {"ddp": {"find_unused_parameters": True}}} if place.topology in ("dp2xtp2", "cp2", "tp2xcp2") else {}
    return place.train(ByHand(), **options)


@habit("gradient clipping by norm", "`Trainer(gradient_clip_val=0.1)`", suite=("tp2", "fsdp2xtp2"))
def clipped_by_norm(place: Place) -> Yield:
    return place.train(Learner(), gradient_clip_val=0.1)


@habit("gradient clipping by value", '`Trainer(gradient_clip_val=0.01, gradient_clip_algorithm="value")`')
def clipped_by_value(place: Place) -> Yield:
    return place.train(Learner(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


class ClipsItself(Learner):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2 / (1 + self.global_step), gradient_clip_algorithm="norm")


@habit("clipping of one's own", "`configure_gradient_clipping` that calls `self.clip_gradients`")
def clips_itself(place: Place) -> Yield:
    return place.train(ClipsItself())


class ClipsByTorch(Learner):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@habit(
    "`clip_grad_norm_` in a hook",
    "`torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)` in `on_before_optimizer_step`",
    suite=("tp2", "fsdp2xtp2"),
    refused=r"gradients were clipped by torch\.nn\.utils\.clip_grad_norm_.*use self\.clip_gradients",
    remark="it knows nothing of shards: `self.clip_gradients(optimizer, 0.1)`, or `Trainer(gradient_clip_val=0.1)`",
    in_stages=r"gradients of each stage were scaled by another number .*use self\.clip_gradients",
)
def clips_by_torch(place: Place) -> Yield:
    return place.train(ClipsByTorch())


class KnowsItsNorm(Learner):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", grad_norm(self))


@habit(
    "the gradient's norm",
    '`self.log("norm", lightning_seqpar.grad_norm(self))` in `on_before_optimizer_step`',
    remark="Lightning's own `grad_norm` sees this rank's part, and warns; this one is right under any strategy",
)
def knows_its_norm(place: Place) -> Yield:
    out = place.train(KnowsItsNorm())
    return {**out, "norm": out["trainer"].callback_metrics["norm"]}


class ByGroup(Learner):
    """No weight decay on norms and biases; the blocks' rate decays by depth."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0, "lr": 0.02 if "blocks.0" in name else 0.01}
            for name, p in self.named_parameters()
        ]
        return torch.optim.AdamW(groups)


@habit("weight-decay groups", '`AdamW([{"params": ..., "weight_decay": 0.1}, {"params": ..., "weight_decay": 0.0}])`')
def by_group(place: Place) -> Yield:
    return place.train(ByGroup())


class Scheduled(Learner):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.kind == "step":
            total = self.trainer.estimated_stepping_batches
            config: Any = {"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.3, total), "interval": "step"}
        elif self.kind == "epoch":
            config = {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 3), "frequency": 1}
        else:
            config = {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5), "monitor": "val"}
        return {"optimizer": optimizer, "lr_scheduler": config}


@habit(
    "learning-rate schedulers",
    '`{"scheduler": OneCycleLR(...), "interval": "step"}`, by epoch, `ReduceLROnPlateau` with `monitor`',
)
def scheduled(place: Place) -> Yield:
    out = {}
    for kind in ("step", "epoch", "plateau"):
        found = place.train(Scheduled(kind), max_epochs=3, count=16, val=8)
        out[kind] = {**found, "rate": found["trainer"].optimizers[0].param_groups[0]["lr"]}
    return out


@habit("`EarlyStopping`", '`EarlyStopping("val", patience=1)`')
def stopped_early(place: Place) -> Yield:
    class Worsens(Learner):
        lr = 1.5

    stopping = EarlyStopping("val", patience=1, min_delta=0.05)
    out = place.train(Worsens(), stopping, val=8, max_epochs=8)
    trainer = out["trainer"]
    return {**out, "epoch": trainer.current_epoch, "stopped": stopping.stopped_epoch, "best": stopping.best_score}


@habit("`overfit_batches`", "`Trainer(overfit_batches=2)`")
def overfitted(place: Place) -> Yield:
    return place.train(Learner(), overfit_batches=2, max_epochs=2)


@habit(
    "`limit_*_batches`",
    "`Trainer(limit_train_batches=2, limit_val_batches=0.5, limit_test_batches=1, limit_predict_batches=1)`",
)
def limited(place: Place) -> Yield:
    module = Learner()
    limits: Any = {"limit_train_batches": 2, "limit_val_batches": 0.5, "limit_test_batches": 1, "limit_predict_batches": 1}
    out = place.train(module, **limits, max_epochs=2, val=32)
    trainer = out["trainer"]
    out["val"] = trainer.callback_metrics["val"]
    out["test"] = trainer.test(module, place.loader(24, seed=7), verbose=False)
    out["predicted"] = len(trainer.predict(module, place.loader(24, seed=7)))
    return out


class CountsValidations(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append((trainer.global_step, float(trainer.callback_metrics["val"])))


@habit("`val_check_interval`", "`Trainer(val_check_interval=1)`, `0.5`, `check_val_every_n_epoch=2`, `num_sanity_val_steps`")
def validated_between(place: Place) -> Yield:
    out = {}
    for how in (
        {"val_check_interval": 2},
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    ):
        counts = CountsValidations()
        out[str(how)] = place.train(Learner(), counts, max_epochs=2, count=16, val=8, **how)
        out[str(how)]["seen"] = counts.seen
    return out


@habit("`fast_dev_run`", "`Trainer(fast_dev_run=2)`")
def tried(place: Place) -> Yield:
    return place.train(Learner(), fast_dev_run=2, val=24)


@habit("`Timer`", '`Timer(duration="00:01:00:00", interval="step")`')
def timed(place: Place) -> Yield:
    return place.train(Learner(), Timer("00:01:00:00", interval="step"))


@habit("loaders made anew", "`Trainer(reload_dataloaders_every_n_epochs=1)`, `train_dataloader` in the module")
def reloaded(place: Place) -> Yield:
    class Loads(Learner):
        def train_dataloader(self) -> Any:
            return place.loader(16, seed=self.current_epoch)

    module = Loads()
    trainer = place.trainer(seen := place.losses(), reload_dataloaders_every_n_epochs=1, max_epochs=2)
    trainer.fit(module)
    return {**place.ended(module, seen)}


# ---- what looks for settings ---------------------------------------------------------------------------------------


@habit("learning-rate finder", "`Tuner(trainer).lr_find(model)`", suite=("tp2", "dp2xtp2"), in_stages=FINDER)
def rate_found(place: Place) -> Yield:
    module = Learner()
    trainer = place.trainer(seen := place.losses())
    finder = Tuner(trainer).lr_find(module, place.loader(64), num_training=24, max_lr=100.0)
    found = {
        "lr": list(finder.results["lr"]),
        "loss": list(finder.results["loss"]),
        "suggested": finder.suggestion(),
        "set": module.lr,
    }
    seen.losses.clear()
    trainer.fit(module, place.loader())
    return {**found, **place.ended(module, seen)}


@habit("`LearningRateFinder`", "`LearningRateFinder(num_training_steps=14)`", in_stages=FINDER)
def rate_found_first(place: Place) -> Yield:
    finder = LearningRateFinder(num_training_steps=14, early_stop_threshold=None)
    module = Learner()
    out = place.train(module, finder, count=64)
    return {**out, "lr": module.lr, "suggested": finder.optimal_lr.suggestion()}


class Sized(Learner):
    """Has the loader itself, as the batch-size finder wants it."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return models.loader(self.batch_size, count=96)

    def val_dataloader(self) -> Any:
        return models.loader(self.batch_size, count=16)


@habit(
    "batch-size finder",
    '`Tuner(trainer).scale_batch_size(model, mode="power")`, `BatchSizeFinder`',
    refused=dict.fromkeys(TOPOLOGIES, "not supported with distributed strategies"),
    in_stages="not supported with distributed strategies",
    remark="Lightning refuses it for every strategy of several processes",
)
def size_found(place: Place) -> Yield:
    module = Sized()
    size = Tuner(place.trainer()).scale_batch_size(module, mode="power", steps_per_trial=1, max_trials=3)
    return {"size": size, "set": module.batch_size, "weights": gather_weights(module)}


# ---- looking on ----------------------------------------------------------------------------------------------------


@habit("profilers", '`Trainer(profiler="simple")`, `"advanced"`, `PyTorchProfiler()`')
def profiled(place: Place) -> Yield:
    out = {}
    for kind in (SimpleProfiler, AdvancedProfiler, PyTorchProfiler):
        where = Path(place.folder, kind.__name__)
        more: Any = {"emit_nvtx": False, "export_to_chrome": False} if kind is PyTorchProfiler else {}
        out[kind.__name__] = place.train(Learner(), profiler=kind(str(where), "profile", **more), max_steps=1)
        out[kind.__name__]["written"] = any("profile" in path.name for path in where.iterdir())
    return out


@habit("`detect_anomaly`", "`Trainer(detect_anomaly=True)`", suite=("tp2", "pp2"))
def watched_for_anomalies(place: Place) -> Yield:
    try:
        return place.train(Learner(), detect_anomaly=True)
    finally:
        torch.autograd.set_detect_anomaly(False)


@habit("`deterministic`", "`Trainer(deterministic=True)`")
def determined(place: Place) -> Yield:
    try:
        return place.train(Learner(), deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


@habit("`LearningRateMonitor`", '`LearningRateMonitor("step", log_momentum=True)`')
def rates_monitored(place: Place) -> Yield:
    logger = CSVLogger(place.folder, name="rates")
    monitor = LearningRateMonitor("step", log_momentum=True)
    out = place.train(Scheduled("step"), monitor, max_epochs=1, logger=logger, log_every_n_steps=1)
    out["trainer"].strategy.barrier()
    return {**out, "rates": table_of(logger)}


def table_of(logger: CSVLogger) -> list[dict[str, Any]]:
    """The lines of the one file that a CSVLogger wrote."""
    (path,) = Path(logger.root_dir).glob("version_*/metrics.csv")
    with path.open() as lines:
        return [{key: float(value) for key, value in line.items() if value} for line in csv.DictReader(lines)]


class Logs(Learner):
    """Logs by step and by epoch, of training and validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log_dict({"twice": 2 * loss, "step": float(batch_idx)}, on_step=False, on_epoch=True, sync_dist=True)
        return loss


@habit(
    "`CSVLogger`",
    "`CSVLogger(folder)`, `self.log(..., on_step=True, on_epoch=True, sync_dist=True)`",
    remark="loggers of services (`WandbLogger`, `MLFlowLogger`, ...) are given the same, on rank 0 alone",
)
def logged_as_table(place: Place) -> Yield:
    logger = CSVLogger(place.folder)
    out = place.train(Logs(), logger=logger, log_every_n_steps=1, max_epochs=2, count=16, val=8)
    out["trainer"].strategy.barrier()
    return {**out, "logged": table_of(logger), "metrics": {k: float(v) for k, v in out["trainer"].callback_metrics.items()}}


@habit("`TensorBoardLogger`", "`TensorBoardLogger(folder)`, `self.logger.experiment.add_scalar(...)`")
def logged_for_tensorboard(place: Place) -> Yield:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Draws(Logs):
        def on_train_epoch_end(self) -> None:
            self.logger.experiment.add_scalar("by hand", float(self.trainer.callback_metrics["loss_epoch"]), self.current_epoch)

    logger = TensorBoardLogger(place.folder, name="board")
    out = place.train(Draws(), logger=logger, log_every_n_steps=1, max_epochs=2, count=16, val=8)
    out["trainer"].strategy.barrier()
    (path,) = Path(place.folder, "board").glob("version_*/events*")
    events = EventAccumulator(str(path))
    events.Reload()
    logged = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])}
    return {**out, "logged": logged}


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@habit(
    "`ModelCheckpoint(save_top_k)`", '`ModelCheckpoint(monitor="val", save_top_k=2, save_last=True)`, `test(ckpt_path="best")`'
)
def best_kept(place: Place) -> Yield:
    saving = ModelCheckpoint(f"{place.folder}/best", "{epoch}-{val:.6f}", monitor="val", save_top_k=2, save_last=True)
    module = Scheduled("epoch")
    out = place.train(module, saving, val=8, max_epochs=4, enable_checkpointing=True)
    tested = out["trainer"].test(module, place.loader(16, seed=7), ckpt_path="best", verbose=False)
    best = torch.load(saving.best_model_path, weights_only=False)
    names = sorted(path.name for path in Path(place.folder, "best").iterdir())
    scores = {Path(path).name: float(score) for path, score in saving.best_k_models.items()}
    momenta = [state["momentum_buffer"] for state in best["optimizer_states"][0]["state"].values()]
    return {**out, "tested": tested, "files": names, "scores": scores, "best": dict(best["state_dict"]), "momenta": momenta}


@habit("resuming", '`trainer.fit(model, ckpt_path="last.ckpt")`, `save_hyperparameters`, `load_from_checkpoint`')
def resumed(place: Place) -> Yield:
    class Sized(ByGroup):
        def __init__(self, dim: int) -> None:
            super().__init__(dim=dim)
            self.save_hyperparameters()

    place.train(Sized(8))["trainer"].save_checkpoint(path := f"{place.folder}/first.ckpt")
    out = place.train(Sized(8), count=48, max_steps=6, fit={"ckpt_path": path})
    out["loaded"] = dict(Sized.load_from_checkpoint(path).state_dict())
    return out


# ---- evaluation ----------------------------------------------------------------------------------------------------


class Measured(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.counted, self.mean, self.accuracies = SumMetric(), MeanMetric(), []
        self.several = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}, prefix="several_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.counted(len(batch[0]))
        self.log("counted", self.counted, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, (tokens,) = self.model(batch[0][:, :-1]), batch
        right = (logits.argmax(-1) == tokens[:, 1:]).double().sum(1)  # torchmetrics counts in float32
        self.mean.update(right)
        self.several(right)
        self.log_dict(self.several)

    def on_validation_epoch_end(self) -> None:
        self.accuracies.append(float(self.mean.compute()))
        self.log("accuracy", self.accuracies[-1])
        self.mean.reset()


@habit("torchmetrics", '`self.acc = Accuracy(...)`, `self.log("acc", self.acc)`, `MetricCollection`', suite=("tp2", "dp2xtp2"))
def measured(place: Place) -> Yield:
    module = Measured()
    out = place.train(module, max_epochs=2, val=16)
    found = {name: float(value) for name, value in out["trainer"].callback_metrics.items() if name != "accuracy"}
    return {**out, "found": found, "accuracies": module.accuracies}


class Writes(BasePredictionWriter):
    """Writes a file for each batch and each replica, or one for each replica."""

    def __init__(self, folder: str, interval: str) -> None:
        super().__init__(interval)
        self.folder = Path(folder, interval)
        self.folder.mkdir(exist_ok=True)

    def _write(self, trainer: Any, name: str, indices: Any, predictions: Any) -> None:
        path = self.folder / f"{name}-{getattr(trainer.strategy, 'dp_rank', 0)}.pt"
        assert not path.exists()
        torch.save(dict(zip(indices, predictions, strict=True)), path)

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *more: Any) -> None:
        self._write(trainer, str(more[1]), batch_indices, prediction)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self._write(trainer, "all", [i for batch in batch_indices[0] for i in batch], torch.cat(predictions))

    def read(self) -> dict[int, Tensor]:
        found = [item for path in self.folder.iterdir() for item in torch.load(path).items()]
        assert len(found) == len(dict(found)), "each sample is predicted once"
        return dict(sorted(found, key=lambda item: item[0]))


@habit(
    "prediction writers",
    '`BasePredictionWriter(write_interval="batch")`, `"epoch"`; `trainer.predict`',
    remark="the first rank of each replica writes",
    suite=("tp2", "dp2xtp2"),
)
def predictions_written(place: Place) -> Yield:
    module, out = Learner(), {}
    for interval in ("batch", "epoch"):
        writer = Writes(place.folder, interval)
        trainer = place.trainer(writer)
        trainer.predict(module, place.loader(23))  # replicas have different numbers of samples
        trainer.strategy.barrier()
        out[interval] = writer.read()
    return out


@habit(
    "`self.all_gather`",
    "`self.all_gather(features, sync_grads=True)` in a contrastive loss; `self.all_gather(x)` in an evaluation",
    remark="gathers over the replicas: `[dp, ...]`; with one replica as on one process",
)
def gathered(place: Place) -> Yield:
    class Contrasts(Learner):
        def loss(self, batch: Any) -> Tensor:
            features = self.model(batch[0]).mean(1)
            every = self.all_gather(features, sync_grads=True)
            every = every.transpose(0, 1).flatten(0, 1) if place.replicas > 1 else every  # in the order of the samples
            return F.cross_entropy(every @ every.T, torch.arange(len(every)))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            every = self.all_gather(batch[0])
            self.log("seen", float(every.numel()), sync_dist=True)

    out = place.train(Contrasts(), val=16)
    return {**out, "seen": out["trainer"].callback_metrics["seen"], "val": out["trainer"].callback_metrics["val"]}


# ---- what changes weights and gradients ----------------------------------------------------------------------------


class HasBackbone(Learner):
    @property
    def backbone(self) -> nn.Module:
        return self.model.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@habit("`BackboneFinetuning`", "`BackboneFinetuning(unfreeze_backbone_at_epoch=1)`")
def finetuned(place: Place) -> Yield:
    finetuning = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.5)
    out = place.train(HasBackbone(), finetuning, max_epochs=3)
    return {**out, "rates": [group["lr"] for group in out["trainer"].optimizers[0].param_groups]}


class SecondByHand(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.again = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.kept, self.again = batch, True
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def on_after_backward(self) -> None:
        if self.again:
            self.again = False
            self.manual_backward(0.5 * self.loss([self.kept[0].flip(1)]))


@habit(
    "a second backward in a hook, by hand",
    "`self.manual_backward(other_loss)` in `on_after_backward`",
    suite=("tp2", "fsdp2xtp2"),
    in_stages=MANUAL,
)
def twice_by_hand(place: Place) -> Yield:
    return place.train(SecondByHand())


class Clamps(Learner):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.model.blocks.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.model.head.weight.mul_(0.9).clamp_(min=-0.3)


class Normed(Learner):
    """A batch norm beside the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Sequential(nn.Linear(31, 4), nn.BatchNorm1d(4))

    def loss(self, batch: Any) -> Tensor:
        counts = F.one_hot(batch[0], 31).to(self.beside[0].weight.dtype).mean(1)
        return super().loss(batch) + self.beside(counts).pow(3).mean()


@habit(
    "`sync_batchnorm`",
    "`Trainer(sync_batchnorm=True)`",
    suite=("dp2xtp2",),
    in_stages=r"no longer the same on all stages of the pipeline",
)
def norms_synced(place: Place) -> Yield:
    module = Normed()
    out = place.train(module, sync_batchnorm=True, val=16)
    norm = module.beside[1]
    return {**out, "mean": norm.running_mean, "variance": norm.running_var}


@habit(
    "clamping weights between batches",
    "`p.data.clamp_(-c, c)` in `on_train_batch_end`",
    suite=("tp2", "fsdp2xtp2"),
    in_stages=WRITTEN,
)
def clamped(place: Place) -> Yield:
    return place.train(Clamps(), max_steps=4, count=32)


class Doubled(Learner):
    """In float64 from the start: Lightning's averages are copied before its precision converts the model."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


def averaged(place: Place, callback: Callable[[], Any], form: str = "single") -> Yield:
    """Trained with an average of the weights; what a checkpoint holds, and a run that goes on from it."""
    saving = ModelCheckpoint(f"{place.folder}/{form}", "{epoch}", save_top_k=-1)
    options = {"max_epochs": 2, "val": 8, "count": 16, "fields": {"checkpoint": {"format": form}}}
    counts = CountsValidations()
    out = place.train(Doubled(), callback(), saving, counts, enable_checkpointing=True, **options)
    out["validated"] = counts.seen
    out["trainer"].strategy.barrier()
    path = Path(place.folder, form, "epoch=0.ckpt")
    again = place.train(Doubled(), callback(), fit={"ckpt_path": str(path)}, **options)
    out["resumed"] = {key: again[key] for key in ("losses", "weights")}
    if form == "single":
        saved = torch.load(path, weights_only=False)
        out["saved"] = {key: dict(saved[key]) for key in ("state_dict", "current_model_state") if key in saved}
        states = [state for state in saved["callbacks"].values() if "average_model_state" in state]
        out["saved"]["by callbacks"] = [dict(state["average_model_state"]) for state in states]
    return out


@habit(
    "`WeightAveraging`, `EMAWeightAveraging`",
    "`EMAWeightAveraging(decay=0.9)`",
    remark="the average is one of shards; checkpoints hold it whole",
    suite=("tp2", "fsdp2xtp2"),
    in_stages=COPIED,
)
def averages_of_weights(place: Place) -> Yield:
    return {
        "swa": averaged(place, WeightAveraging, "sharded"),
        "ema": averaged(place, lambda: EMAWeightAveraging(decay=0.6, update_starting_at_step=1)),
    }


@habit(
    "`StochasticWeightAveraging`",
    "`StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)`",
    remark="the average is one of shards; checkpoints hold it whole",
    in_stages=COPIED,
)
def stochastic_averages(place: Place) -> Yield:
    return averaged(place, lambda: StochasticWeightAveraging(0.05, 1, annealing_epochs=2))


class OwnAverage(Callback):
    """An exponential average as people write it: in a dict by name, put in for validation."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.shadow[name].mul_(0.7).add_(parameter.detach(), alpha=0.3)

    def _swap(self, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            kept = parameter.detach().clone()
            parameter.data.copy_(self.shadow[name])
            self.shadow[name] = kept

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._swap(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._swap(pl_module)


@habit(
    "an average of one's own, in a callback",
    "`self.shadow = {n: p.clone() for n, p in pl_module.named_parameters()}`",
    remark="an average of shards, as long as the callback does not save it",
    in_stages=WRITTEN,
)
def own_average(place: Place) -> Yield:
    out = place.train(Learner(), OwnAverage(), max_epochs=2, val=8)
    return {**out, "val": out["trainer"].callback_metrics["val"]}


class SavesOwnAverage(OwnAverage):
    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}


@habit(
    "an average of one's own, saved by the callback",
    '`state_dict` of the callback: `{"shadow": self.shadow}`',
    refused=r"\['shadow'\]\['model\.[a-z.0-9]+'\]: code of yours saves this rank's part of model\..*EMAWeightAveraging",
    remark="use `EMAWeightAveraging`, or make the average in `__init__` as a module of the model",
    in_stages=WRITTEN,
)
def saves_own_average(place: Place) -> Yield:
    out = place.train(Learner(), SavesOwnAverage())
    out["trainer"].save_checkpoint(f"{place.folder}/own.ckpt")
    return out


class AveragesInside(Learner):
    """An average that is a module of the model, made in ``__init__`` and validated."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.6))
        self.average.requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.model)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (tokens,) = batch
        logits = self.average(tokens[:, :-1])
        self.log("val", F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


@habit(
    "an average inside the model",
    "`self.ema = AveragedModel(self.net)` in `__init__`",
    in_stages=r"the step does not run the blocks of average\.module",
)
def averages_inside(place: Place) -> Yield:
    out = place.train(AveragesInside(), max_epochs=2, val=8)
    out["trainer"].save_checkpoint(path := f"{place.folder}/inside.ckpt")
    saved = torch.load(path, weights_only=False)["state_dict"]
    return {**out, "val": out["trainer"].callback_metrics["val"], "saved": dict(saved)}


# ---- works or refuses with a way -----------------------------------------------------------------------------------


class Optimized(Learner):
    def __init__(self, made: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.made = made

    def configure_optimizers(self) -> Any:
        return self.made(self)


MIXES = (
    r"is not known to update each element by itself, and shards would change its result; use one of torch\.optim's SGD, Adam"
)


def optimizer_habit(name: str, written: str, made: Callable[[Any], torch.optim.Optimizer], remark: str, **more: Any) -> None:
    """A row for an optimizer that mixes the elements of a parameter, or several parameters."""

    def run(place: Place) -> Yield:
        return place.train(Optimized(made))

    run.__name__ = name.lower().replace("-", "")
    habit(name, written, refused=MIXES, remark=remark, **more)(run)


optimizer_habit(
    "Adafactor",
    "`torch.optim.Adafactor(...)`",
    lambda m: torch.optim.Adafactor(m.parameters()),
    "its second moments are means over rows and columns; AdamW is elementwise, and with fsdp its moments are split. At cp 2 it "
    "runs; it blows up the rounding of a key's bias, whose gradient is zero, as under DDP",
    left_out=("cp2",),
)


@habit("Muon", "`torch.optim.Muon(...)`", remark="each rank updates some of the matrices, whole")
def muon(place: Place) -> Yield:
    return place.train(Optimized(lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2])))


optimizer_habit(
    "L-BFGS",
    "`torch.optim.LBFGS(...)`",
    lambda m: torch.optim.LBFGS(m.parameters()),
    "products over all parameters. At cp 2 it runs; its search blows up rounding, as under DDP",
    left_out=("cp2",),
    in_stages=r"is not known to update each parameter by itself",
)


@habit(
    "`ModelPruning`",
    '`ModelPruning("l1_unstructured", amount=0.5)`',
    refused=r"ModelPruning with .*prune before or after the training",
    remark="prune before or after the training",
    in_stages=r"ModelPruning with .*prune before or after the training",
)
def pruned(place: Place) -> Yield:
    return place.train(Learner(), ModelPruning("l1_unstructured", amount=0.5))


class Penalised(Learner):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


@habit(
    "an L2 term in the loss",
    "`loss + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())`",
    refused={
        "tp2": r"weight decay belongs into the optimizer",
        "dp2xtp2": r"weight decay belongs into the optimizer",
        "fsdp2xtp2": r"the step reads a parameter of a block outside of that block's forward \(a norm of weights in the loss",
        "tp2xcp2": r"weight decay belongs into the optimizer",
    },
    remark="weight decay belongs into the optimizer",
    suite=("tp2", "fsdp2xtp2"),
    in_stages=r"stage 1 reads model\.blocks\.0\..*, which is on stage 0",
)
def penalised(place: Place) -> Yield:
    return place.train(Penalised())


NO_PENALTY = {
    **dict.fromkeys(("tp2", "dp2xtp2", "fsdp2xtp2", "tp2xcp2"), r"gradient penalty|create_graph"),
    "cp2": r"would find a copy, that is not in the graph; take the gradient by x\.whole\(\)",
}


class PenalisesGradients(Learner):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def loss(self, batch: Any) -> Tensor:
        kept: list[Tensor] = []
        module = self.get_submodule(self.where)
        handle = module.register_forward_hook(lambda module, args, out: kept.append(out))
        with sdpa_kernel(SDPBackend.MATH):  # torch has no second derivative of the others
            loss = super().loss(batch)
        handle.remove()
        (grad,) = torch.autograd.grad(loss, kept[0], create_graph=True)
        return loss + 0.1 * grad.pow(2).sum()


@habit(
    "a gradient penalty",
    "`torch.autograd.grad(loss, x, create_graph=True)`",
    suite=("tp2", "fsdp2xtp2"),
    refused=NO_PENALTY,
    remark="sharded layers have no second derivative; take a difference of two losses",
    in_stages=r"detached at every block, which raised RuntimeError: The differentiated Tensor",
)
def penalises_gradients(place: Place) -> Yield:
    return place.train(PenalisesGradients("model.tokens"))


@habit(
    "a gradient penalty on the head's input",
    "the same, with `x` behind the blocks",
    refused=NO_PENALTY,
    remark="the vocabulary's head and loss have none either; at tp 2 it runs with `vocab=False`",
)
def penalises_the_head(place: Place) -> Yield:
    return place.train(PenalisesGradients("model.norm"))


# ---- running -----------------------------------------------------------------------------------------


def by_name(name: str) -> Habit:
    """A row of the table."""
    return next(one for one in HABITS if one.name == name)


def plain(out: Any) -> Any:
    """What a habit yields, without the trainers in it."""
    return {key: plain(value) for key, value in out.items() if key != "trainer"} if type(out) is dict else out


def run_at(habit: Habit, topology: str, folder: str) -> Yield | str:
    """What a habit yields at a place, or the text of its error with where it was raised."""
    own = Path(folder, topology, str(HABITS.index(habit)))
    own.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    try:
        out = habit.run(Place(topology, str(own), habit.check))
        return plain(out)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"


def run_on_ranks(names: list[str], topology: str, folder: str) -> None:
    """Run habits one after the other on this rank. Each leaves a file, so that one that hangs hides none before it."""
    for name in names:
        found = run_at(by_name(name), topology, folder)
        torch.save(found, found_at(folder, topology, name, torch.distributed.get_rank()))


def found_at(folder: str, topology: str, name: str, rank: int) -> Path:
    """The file of what a rank found."""
    return Path(folder, f"{topology}-{HABITS.index(by_name(name))}-{rank}.pt")
