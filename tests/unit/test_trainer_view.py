"""Steps that use their trainer, on a copy of their module: what they read is true, and what they do has no effect."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.lazy_copy import CantCopyError, LazyCopies
from lightning_seqpar.inference.model_copy import detached_copy
from lightning_seqpar.inference.trainer_view import (
    NoExampleError,
    OneRankOnly,
    PlainBackwardError,
    attach_view,
    describe_failure,
)
from tests.mutants import sees


class Recording(Logger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 7

    @property
    def experiment(self) -> list[Any]:
        return self.told

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.told.append(metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.told.append(params)

    def log_picture(self, picture: Any) -> None:
        self.told.append(picture)


class Counting(Callback):
    """A callback with a state of every kind."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.losses: list[float] = []
        self.nested = {"a": [1]}
        self.mean = MeanMetric()
        self.settings = SimpleNamespace(scale=2.0)
        self.file = open(__file__)  # noqa: SIM115
        self.closed = False

    def add(self, loss: Tensor) -> None:
        with self.lock:
            self.losses.append(float(loss.detach()))
            self.count = len(self.losses)

    def __del__(self) -> None:
        self.closed = True


class Data(L.LightningDataModule):
    """A data module with a data set, its own numbers, and a count of what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"scale": 2.0})
        self.rows = TensorDataset(torch.arange(24.0).view(12, 2))
        self.mean = torch.ones(2)
        self.numbers = np.ones(3)
        self.asked = 0

    @property
    def classes(self) -> int:
        return len(self.rows) // 4

    def normalised(self, x: Tensor) -> Tensor:
        self.asked += 1
        self.mean += 1
        self.numbers += 1
        return x - self.mean.to(x.dtype)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, 2)


class Using(L.LightningModule):
    """A step that uses everything that a trainer has."""

    history: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.metric = MeanMetric()
        self.outputs: list[Tensor] = []
        self.found: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer, data = self.trainer, self.trainer.datamodule
        x = data.normalised(batch[0])
        loss = self.layer(x).square().mean() * data.hparams.scale / data.classes
        counting = next(one for one in trainer.callbacks if isinstance(one, Counting))
        counting.add(loss)
        counting.nested["a"].append(2)
        counting.mean.update(loss.detach())
        counting.settings.scale = 3.0
        trainer.callbacks.append(Callback())
        trainer.should_stop = True
        trainer.save_checkpoint("nothing.ckpt")
        with trainer.profiler.profile("part"):
            self.metric(loss.detach())
        self.outputs.append(loss)
        self.history.append(float(loss.detach()))
        self.print("not seen")
        self.log("loss", loss, sync_dist=True)
        self.log_dict({"again": loss})
        for logger in self.loggers:
            logger.log_metrics({"loss": 1.0}, 3)
        self.logger.log_picture("a picture")
        self.logger.experiment.add_scalar("loss", 1.0, 3)
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.step()
        scheduler.step()
        strategy = trainer.strategy
        strategy.barrier()
        self.found = {
            "rate": (optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0], trainer.optimizers[0].param_groups[0]["lr"]),
            "epoch": (self.current_epoch, self.global_step, trainer.current_epoch, trainer.max_epochs),
            "batches": (trainer.num_training_batches, trainer.estimated_stepping_batches, len(trainer.train_dataloader)),
            "logger": (self.logger.name, self.logger.version, isinstance(self.logger, Recording), len(self.loggers)),
            "collectives": (strategy.broadcast(5), strategy.reduce_boolean_decision(True), strategy.reduce(3)),
            "metrics": dict(trainer.callback_metrics),
            "itself": trainer.lightning_module is self and isinstance(trainer, L.Trainer),
        }  # fmt: skip
        return loss + self.all_gather(loss, sync_grads=True).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, self.trainer.estimated_stepping_batches)]


def prepared(module: L.LightningModule, **kwargs: Any) -> L.Trainer:
    """A trainer whose ``fit`` stopped where its strategy was set up, as when an example is sought."""

    class Stop(Exception):
        pass

    class Stopping(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            raise Stop

    trainer = L.Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Counting(), Stopping()],
        **{"logger": Recording(), "max_epochs": 3, **kwargs},
    )
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.datamodule = Data()  # type: ignore[attr-defined]
    trainer._data_connector.attach_data(module, datamodule=trainer.datamodule)  # type: ignore[attr-defined]
    return trainer


def copy_of(module: L.LightningModule) -> Any:
    trainer = module.trainer
    copied = copy.deepcopy(module, {id(trainer): None})
    attach_view(copied, trainer)
    return copied


def state_of(trainer: Any) -> Any:
    data, counting = trainer.datamodule, trainer.callbacks[0]
    return copy.deepcopy(
        [
            *(data.asked, data.mean.tolist(), data.numbers.tolist(), counting.losses, counting.nested),
            *(counting.settings.scale, list(vars(counting)), float(counting.mean.weight), len(trainer.callbacks)),
            *(trainer.should_stop, trainer.logger.told, counting.closed, counting.file.closed, Using.history),
        ]
    )


EXAMPLE = Example("a batch", "training_step", ([torch.ones(2, 2)], 0), {})


@sees(
    "a step before training writes to the user's own objects",
    "LazyCopies._copy",
    "        if isinstance(value, dict | list",
    "        if isinstance(value, list):\n            return value\n        if isinstance(value, dict | list",
)
@sees(
    "a step before training grows a list of the user's class",
    "own_containers",
    "module.__dict__.setdefault(name, copy.copy(value))",
    "pass",
)
@sees(
    "a step before training logs",
    "_view.changes",
    'return {**dict.fromkeys(names, _nothing), "experiment": experiment}',
    "return {}",
)
def test_a_step_uses_all_that_its_trainer_has_without_any_effect(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = Using()
    trainer = prepared(module)
    before = state_of(trainer)
    copied = copy_of(module)
    for _ in range(2):
        EXAMPLE.run(copied).backward()
    assert state_of(trainer) == before
    assert module.outputs == []
    assert module.found == {}
    assert float(module.metric.weight) == 0
    assert all(p.grad is None for p in module.parameters())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
    assert len(copied.outputs) == 2
    assert float(copied.metric.weight) == 2
    assert copied.found == {
        "rate": (0.1, 0.1, 0.1),
        "epoch": (0, 0, 0, 3),
        "batches": (6, 18, 6),
        "logger": ("recording", 7, True, 1),
        "collectives": (5, True, 3),
        "metrics": {},
        "itself": True,
    }


@sees(
    "what replicas gather is one entry before training",
    "_of_strategy.all_gather",
    "torch.stack([tensor] * size)",
    "tensor.unsqueeze(0)",
)
def test_what_replicas_gather_has_an_entry_of_each():
    class Gathering(Using):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self.layer(batch[0])
            gathered = self.all_gather({"out": out}, sync_grads=True)["out"]
            self.shapes = [tuple(gathered.shape), tuple(self.all_gather(batch_idx).shape)]
            return gathered.sum()

    module = Gathering()
    trainer = prepared(module)
    trainer.strategy.dp_size = 3  # type: ignore[attr-defined]
    copied = copy_of(module)
    EXAMPLE.run(copied).backward()
    assert copied.shapes == [(3, 2, 2), (3,)]


def step_that(do: Any, **options: Any) -> Any:
    """A copy whose step does something before it computes its loss."""

    class Doing(Using):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            do(self)
            return self.layer(batch[0]).sum()

    module = Doing()
    prepared(module, **options)
    return copy_of(module)


def test_no_logger_is_no_logger_and_an_experiment_is_not_begun(tmp_path):
    def ask(module: Any) -> None:
        assert module.logger is None
        assert module.loggers == []

    def draw(module: Any) -> None:
        module.logger.experiment.log_metrics({"loss": 1.0})
        module.logger.log_metrics({"loss": 1.0}, 1)
        module.logger.save()
        assert str(module.logger.save_dir) == str(tmp_path)

    EXAMPLE.run(step_that(ask, logger=False))
    EXAMPLE.run(step_that(draw, logger=CSVLogger(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_the_closure_of_a_manual_step_gives_the_loss():
    class Manual(Using):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                loss = self.layer(batch[0]).square().sum()
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            with optimizer.toggle_model():
                optimizer.step(closure=closure)
            self.clip_gradients(optimizer, 1.0)

    module = Manual()
    prepared(module)
    loss = EXAMPLE.run(copy_of(module))
    assert torch.allclose(loss, module.layer(torch.ones(2, 2)).square().sum().double())


def test_what_cannot_be_given_is_named_with_the_line():
    with pytest.raises(CantCopyError) as caught:
        EXAMPLE.run(step_that(lambda self: self.trainer.callbacks[0].file))
    told = describe_failure(caught.value)
    assert "self.trainer.callbacks[0].file is a TextIOWrapper, which can't be copied" in told
    assert "test_trainer_view.py, line" in told
    assert "self.trainer.callbacks[0].file" in told.partition(", line")[2]
    with pytest.raises(NoExampleError, match=r"the step calls self\.trainer\.fit, which can't run on a copy"):
        EXAMPLE.run(step_that(lambda self: self.trainer.fit(self)))


@sees(
    "an example waits for ranks that are not there",
    "OneRankOnly.__torch_dispatch__",
    'if func.namespace in ("c10d", "_c10d_functional"):',
    "if False:",
)
def test_a_collective_that_one_rank_would_wait_in_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        copied = step_that(lambda self: dist.all_reduce(torch.ones(1)))
        with pytest.raises(NoExampleError, match=r"the step calls torch\.distributed itself \(allreduce\)"), OneRankOnly():
            EXAMPLE.run(copied)
        with OneRankOnly():
            EXAMPLE.run(step_that(lambda self: self.trainer.strategy.reduce(torch.ones(1))))
    finally:
        dist.destroy_process_group()


# ---- copies that are made as they are read -------------------------------------------------------------------------


class Slotted:
    __slots__ = ("items", "unset")

    def __init__(self) -> None:
        self.items = [1]


class Registered:
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Registered.known.append(cls)


class Holder(Registered):
    def __init__(self) -> None:
        self.itself = self
        self.big = np.zeros(2**23 + 1)
        self.slotted = Slotted()
        self.method = self.grow
        self.list: list[Any] = [[1], (2, [3])]
        self.path = Path("here")

    def grow(self) -> int:
        self.list.append(4)
        return len(self.list)


def test_a_copy_reads_like_its_object_and_keeps_what_is_written():
    holder = Holder()
    copied = LazyCopies({}).of(holder, "it")
    assert copied.itself is copied
    assert isinstance(copied, Holder)
    assert copied.path == Path("here")
    assert copied.method() == 3
    assert copied.grow() == 4
    assert len(holder.list) == 2
    copied.slotted.items.append(2)
    copied.list[0].append(2)
    copied.list[1][1].append(2)
    assert holder.slotted.items == [1]
    assert holder.list == [[1], (2, [3])]
    assert not hasattr(copied.slotted, "unset")
    with pytest.raises(ValueError, match="read-only"):
        copied.big[0] = 1
    assert vars(copied).keys() == vars(holder).keys()
    assert Registered.known == [Holder]


@sees("what a step does to its batch is done to all later runs", "own_tensors", "tensor.clone()", "tensor")
def test_a_step_may_change_its_batch_in_place():
    class Shifting(L.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch["ids"].add_(1)
            return (self.scale * batch["labels"]).sum()

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    ids = torch.arange(4)
    example = Example("the test", "training_step", ({"ids": ids, "labels": ids}, 0), {})
    losses = [float(example.run(copy.deepcopy(Shifting())).detach()) for _ in range(2)]
    assert losses == [10.0, 10.0]  # the labels are the ids themselves
    assert ids.tolist() == [0, 1, 2, 3]


class ByItself(L.LightningModule):
    """A manual step that neither Lightning nor the strategy hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (self.scale * batch).sum().backward()


def test_a_manual_step_with_a_plain_backward_is_told_what_to_call():
    example = Example("the test", "training_step", (torch.ones(2), 0), {})
    with pytest.raises(PlainBackwardError, match=r"training_step calls loss\.backward\(\), .*: call self\.manual_backward"):
        example.run(ByItself())


class Roundabout(nn.Module):
    """Reaches its own parts by a weak reference, a proxy, a closure and a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.body = nn.Linear(3, 3)
        self.reference = weakref.ref(self)
        self.__dict__["proxy"] = weakref.proxy(self)  # as an attribute it would be a module inside itself
        self.project = lambda x: self.head(x)
        self.embed = self.body.forward

    def forward(self, x: Tensor) -> Tensor:
        whole = self.reference()
        assert whole is self
        return self.project(self.embed(x) @ self.proxy.body.weight)


@sees(
    "weak references and closures of a copy lead to the model itself", "detached_copy", "    point_to_copy(copied, memo)\n", ""
)
def test_a_copy_that_reaches_its_parts_in_roundabout_ways_is_the_one_that_runs():
    model = Roundabout()
    copied = detached_copy(model, torch.device("cpu"))
    copied(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert model.reference() is model


def keep(kept: dict[str, Tensor], module: nn.Module, args: Any, out: Tensor) -> None:
    kept["last"] = out


class Keeper:
    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.owner.kept["last"] = out


class Keeps(nn.Module):
    """Reads what a hook has kept of a part's output."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, self.kept = nn.Linear(3, 3), nn.Linear(3, 2), {}
        kept, me, apart = self.kept, weakref.ref(self), []
        self.read = lambda: apart.pop() if apart else self.kept["last"]
        hooks = {
            "lambda": lambda module, args, out: self.kept.update(last=out),
            "default": lambda module, args, out, kept=kept: kept.update(last=out),
            "partial": functools.partial(keep, kept),
            "object": Keeper(self),
            "weak": lambda module, args, out: me().kept.update(last=out),
            "list": lambda module, args, out: apart.append(out),
        }
        self.body.register_forward_hook(hooks[how])

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.head(self.read())


@sees(
    "hooks of a copy lead to the model itself",
    "_Leads._function",
    "led = [self._held(one) for one in held]",
    "led = held",
    case="lambda-False",
)
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("how", ["lambda", "default", "partial", "object", "weak", "list"])
def test_hooks_of_a_copy_keep_what_the_copy_makes(how, ran):
    model = Keeps(how)
    if ran:
        model(torch.ones(1, 3))
    before = dict(model.kept)
    copied = detached_copy(model, torch.device("cpu"))
    copied(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert model.kept == before
    assert model(torch.ones(1, 3)).dtype == torch.float32  # the copy's activations have not come to the model


class Frozen(dict[str, Any]):
    """Settings that are not to be changed, as packages have them."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


def test_settings_that_refuse_changes_are_copied_and_what_they_hold_leads_to_the_copy():
    model = Roundabout()
    model.settings = Frozen(width=3, heads=[1, 2], project=model.project)
    copied = detached_copy(model, torch.device("cpu"))
    assert {**copied.settings, "project": None} == {"width": 3, "heads": [1, 2], "project": None}
    copied.settings["project"](torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert model.head.weight.grad is None
    assert copied.head.weight.grad is not None
