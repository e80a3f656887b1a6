"""Habits of people who know Lightning: each works as on one process, or is refused with a sentence that names a way."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torchmetrics import MeanMetric, SumMetric

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, Trace, compare, gather_weights
from tests.helpers import models, zoo
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees


def trainer_of(tp: int, **kwargs: Any) -> L.Trainer:
    """A trainer on all ranks of the world, or on one process without the strategy; three steps unless told otherwise."""
    fields = kwargs.pop("fields", {})
    strategy = SeqParallelStrategy(tp=tp, **fields) if dist.is_initialized() else "auto"
    world = dist.get_world_size() if dist.is_initialized() else 1
    return quiet_trainer(devices=world, strategy=strategy, **{"max_steps": 3, **kwargs})


def loader(tp: int, count: int = 24) -> Any:
    """Batches of 8 over all replicas."""
    return models.loader(8 * tp // dist.get_world_size() if dist.is_initialized() else 8, count=count)


def trained(module: L.LightningModule, tp: int, count: int = 24, **kwargs: Any) -> Trace:
    recorder = ParityRecorder()
    trainer = trainer_of(tp, **{**kwargs, "callbacks": [recorder, *kwargs.pop("callbacks", [])]})
    trainer.fit(module, loader(tp, count))
    return recorder.trace


class Plain(zoo.Zoo):
    def __init__(self, kind: str = "einsum") -> None:
        super().__init__(kind, optimizer="sgd")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.log("val", loss := self.loss(batch))
        return loss

    def loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        return nn.functional.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


# ---- steps that Lightning calls otherwise --------------------------------------------------------------------------


class FromIterator(Plain):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        return self.loss(batch) * (1 + batch_idx)


class BeforeTransfer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.asked, self.batches, self.loaders = 0, [], 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.asked += 1
        self.batches.append(dataloader_idx)
        return {"ids": batch[0]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss([batch["ids"]])


class Manual(Plain):
    """Two optimizers and two schedulers, configured by a function of the instance; the step reads gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float] = []
        self.configure_optimizers = lambda: self.two()  # type: ignore[method-assign]

    def on_train_start(self) -> None:
        record = record_of(self)  # where the copies differ, the plan is widened to whole sequences
        assert record is None or all(region.sp for region in record.regions)

    def two(self) -> Any:
        parameters = list(self.parameters())
        optimizers = [torch.optim.SGD(parameters[:5], 0.1), torch.optim.SGD(parameters[5:], 0.2)]
        self.made = [StepLR(one, 1, gamma=0.5) for one in optimizers]
        return optimizers, self.made

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, two = self.optimizers()
        first, second = self.lr_schedulers()
        assert first is self.made[0]
        assert isinstance(one, torch.optim.SGD)
        assert self.optimizers(use_pl_optimizer=False)[1] is second.optimizer
        one.zero_grad()
        two.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        whole = self.net.h[0].ln1.weight.grad  # it sees shards of the sequence: a sum over the ranks
        self.norms.append(float(whole.norm()))
        # A second loss that depends on a gradient: it must be whole on the copies too.
        self.manual_backward(self.loss(batch) * whole.norm().detach())
        for each in (one, two, first, second):
            each.step()
        return loss.detach()


class TwiceFound(LearningRateFinder):
    """Finds the rate at the first and the second epoch, as Lightning's docs have it for fine-tuning."""

    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch < 2:
            self.lr_find(trainer, pl_module)


class Rated(Plain):
    lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Thawing(Plain):
    """Only the head trains in the first epoch, everything from the second on."""

    def __init__(self, kind: str, trains: str = "head", at: int = 1) -> None:
        super().__init__(kind)
        self.at = at
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trains in name)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.at:
            self.requires_grad_(True)


class Late(ParityRecorder):
    """Records the gradients of the second epoch's first step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.current_epoch == 1:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)


def thawed(tp: int, module: L.LightningModule) -> Trace:
    recorder = Late()
    trainer_of(tp, max_steps=-1, max_epochs=2, callbacks=[recorder]).fit(module, loader(tp))
    return recorder.trace


def rates(tp: int, folder: str) -> Trace:
    finder = TwiceFound(num_training_steps=14, update_attr=True, attr_name="lr", early_stop_threshold=None)
    module = Rated()
    trace = trained(module, tp, 72, callbacks=[finder], default_root_dir=folder, max_steps=-1, max_epochs=3)
    assert module.lr != Rated.lr
    return trace


TRAINED: dict[str, Callable[[int, str], Any]] = {
    "an iterator": lambda tp, folder: trained(FromIterator(), tp),
    "a hook before transfer": lambda tp, folder: trained(BeforeTransfer(), tp),
    "manual": lambda tp, folder: trained(Manual(), tp),
    "rates": rates,
    "thawing raw parameters": lambda tp, folder: thawed(tp, Thawing("raw_attention")),
    "thawing between norms": lambda tp, folder: thawed(tp, Thawing("head_norm", "ln")),
}


def outcomes(table: str, names: list[str], tp: int, folder: str) -> dict[str, Any]:
    """What each case of a table returns, or the text of its error, which is the same on all ranks."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = globals()[table][name](tp, folder)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@sees("habits: a step reads parts of gradients on the copy", "observe_run", "            sync.flush()\n", "            pass\n")
@sees(
    "habits: a backward within a step is recorded with its forward",
    "ForwardTrace.run_backward",
    "self._is_paused = True",
    "pass",
)
@sees(
    "habits: a step reads no gradients on the copy",
    "ExampleSearch._ways",
    "for reads_gradients in (False, True) if",
    "for reads_gradients in (False,) if",
)
@sees(
    "habits: schedulers of the class, not of the instance",
    "trainer_view:_configured",
    "model.configure_optimizers()",
    "type(model).configure_optimizers(model)",
)
@sees("habits: updates before a rate is found pass for others", "Steps.train", "record.versions.clear()", "pass")
@sees(
    "habits: a batch before its transfer",
    "_of_loop",
    "batch = module._on_before_batch_transfer(batch, dataloader_idx=0)",
    "pass",
)
@sees("habits: an iterator taken for a batch", "Example.of_step", "(batch, 0, 0), {}, iterates=True", "(batch, 0, 0), {}")
@pytest.mark.more
def test_what_users_write_trains_as_in_one_process(tmp_path):
    expected = outcomes("TRAINED", list(TRAINED), 1, str(tmp_path))
    for found in run_distributed(outcomes, 2, "TRAINED", list(TRAINED), 2, str(tmp_path)):
        for name in TRAINED:
            assert not isinstance(found[name], str), f"{name}: {found[name]}"
            compare(expected[name], found[name]).raise_if_failed()


# ---- the rest of a run ---------------------------------------------------------------------------------------------


class Holding(Callback):
    """Holds what callbacks hold; copies all callbacks while training runs."""

    def __init__(self) -> None:
        self.mean, self.held, self.copies = SumMetric(), [], []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.held = [trainer, pl_module]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(1.0)
        self.copies = [copy.deepcopy(trainer.callbacks)]


def copied_callbacks(tp: int, folder: str) -> Any:
    holding, saving = Holding(), ModelCheckpoint(f"{folder}/copied{tp}", save_last=True)
    fields = {"checkpoint": {"format": "sharded", "async_save": True}}
    trainer = trainer_of(tp, callbacks=[holding, saving], enable_checkpointing=True, fields=fields)
    trainer.fit(Plain(), loader(tp))
    ((own, _, *_),) = holding.copies
    return float(own.mean.compute()), float(holding.mean.compute()), type(pickle.loads(pickle.dumps(own.mean)))


class Timed(Plain):
    """Validates by the clock; rank 1's is ahead by an hour when training starts."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            assert math.isinf(self.trainer._last_val_time)
            self.trainer._last_val_time = self.trainer._train_start_time - 3600

    def on_validation_start(self) -> None:
        self.validated.append(self.trainer.global_step)


def by_the_clock(tp: int, folder: str) -> Any:
    module = Timed()
    trainer = trainer_of(tp, val_check_interval="00:00:30:00", check_val_every_n_epoch=None, num_sanity_val_steps=0)
    trainer.fit(module, loader(tp, 24), loader(tp, 8))
    return module.validated


class Unoptimized(Plain):
    def configure_optimizers(self) -> None:
        return None


def resumed(tp: int, folder: str, module: Callable[[], Any], **kwargs: Any) -> Any:
    """Three steps, a checkpoint, two more from it: the states of optimizers in it, and the weights."""
    path = f"{folder}/{module.__name__} {tp} {sorted(kwargs)}"
    trainer = trainer_of(tp, **kwargs)
    trainer.fit(module(), loader(tp))
    trainer.save_checkpoint(path)
    whole = module()
    trainer_of(tp, **{**kwargs, "max_steps": 5}).fit(whole, loader(tp, 48), ckpt_path=path)
    states = torch.load(path, weights_only=False)["optimizer_states"] if Path(path).is_file() else None
    return states, gather_weights(whole)


class Emptied(Plain):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


SHARDED = {"fields": {"checkpoint": {"format": "sharded"}}}


def without_optimizer(tp: int, folder: str) -> Any:
    return [resumed(tp, folder, Unoptimized)[0], resumed(tp, folder, Unoptimized, **SHARDED)[0]]


def refuses_pickling(tp: int, folder: str) -> Any:
    module, said = Plain(), []
    trainer = trainer_of(tp)
    pickle.dumps(trainer)
    trainer.fit(module, loader(tp))
    for thing in (module, module.net.h[0], module.net.h[0].mlp.fc1, trainer):
        try:
            torch.save(thing, io.BytesIO())
        except RuntimeError as error:
            said.append(str(error))
    return said, {name: tuple(p.shape) for name, p in copy.deepcopy(module).named_parameters()} == {
        name: tuple(p.shape) for name, p in module.named_parameters()
    }


class Predicting(Plain):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        return self.net(batch[0])


def evaluated(tp: int, folder: str) -> Any:
    several = [models.loader(4, count=8), models.loader(2, count=4, seed=5)]
    metrics = trainer_of(tp).validate(Plain(), several, verbose=False)
    predicted = trainer_of(tp).predict(Predicting(), several)
    return metrics, [[float(one.sum()) for one in of_loader] for of_loader in predicted]


WRONG = [
    {"pattern": "net.h.*", "style": "blocks"},
    {"pattern": "net.h.*.{attn,mlp}", "style": "gather"},
    {"pattern": "net.h.*.attn.{wq,wk,wv}", "style": "column"},
    {"pattern": "net.h.*.attn.wo", "style": "row"},
    {"pattern": "net.h.*.attn", "style": "set", "divide": ["num_heads", "num_kv_heads"]},
    {"pattern": "net.h.*.mlp.fc1", "style": "column"},
    {"pattern": "net.h.*.mlp.fc2", "style": "row"},
    {"pattern": "net.h.*.attn.q_norm.weight", "style": "gradient", "summed": False},
]


def wrong_gradient_of_the_frozen(tp: int, folder: str) -> Any:
    """A rule of the user's that is wrong for a frozen parameter's gradient alone."""
    said: list[str] = []
    for at in (5, 1):  # the first stays frozen
        trainer = trainer_of(tp, max_steps=-1, max_epochs=2, fields={"plan": {"base": "none", "rules": WRONG}, "sp": False})
        module = Thawing("head_norm", "head", at)
        try:
            trainer.fit(module, loader(tp))
            said.append("trained")
        except RuntimeError as error:
            said.append(str(error))
    return said


class CountsFrozen(Plain):
    """Counts in a frozen parameter, in place: what asks for gradients can't be changed so."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(()), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count.add_(1)
        return self.loss(batch)


class Traces(BeforeTransfer):
    def train_dataloader(self) -> Any:
        self.loaders += 1
        return loader(2)


def traces_left(tp: int, folder: str) -> Any:
    module = Traces()
    trainer_of(tp).fit(module)
    return module.asked, len(module.batches), module.loaders


class Fronted(Plain):
    def build(self, kind: str) -> nn.Module:
        net = super().build(kind)
        net.h.insert(0, zoo.FeedForward(16, 32))
        net.front = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 16))
        net.wte.register_forward_hook(lambda module, args, out: net.front(out))
        return net


def fronted(tp: int, folder: str) -> Any:
    module = Fronted()
    trace = trained(module, tp)
    record = record_of(module)
    return trace, None if record is None else sorted(m.name for m in record.matches if m.rule.style == "blocks")


MANNERS: dict[str, Callable[[int, str], Any]] = {
    "copied": copied_callbacks,
    "clock": by_the_clock,
    "no optimizer": without_optimizer,
    "emptied": lambda tp, folder: resumed(tp, folder, Emptied),
    "pickled": refuses_pickling,
    "evaluated": evaluated,
    "wrong when it thaws": wrong_gradient_of_the_frozen,
    "counts": lambda tp, folder: trained(CountsFrozen(), tp),
    "traces": traces_left,
    "fronted": fronted,
}


@sees("habits: a clock of one rank is not everybody's", "Loops._agree_on_time", "all=False", "all=True")
@sees("habits: frozen parameters are not proved", "detached_copy", "    if not frozen:\n", "    if False:\n")
@sees("habits: what was proved frozen may thaw", "ShardedModel.check_frozen", "sorted(self.stay_frozen)", "()")
@sees(
    "habits: no copy with what is frozen left so",
    "ExampleSearch._ways",
    "for frozen in (False, True) if",
    "for frozen in (False,) if",
)
@sees("habits: evaluation loaders read at once", "_peek", "if in_turn and", "if False and")
@sees("habits: an example leaves counts", "examples:_state_kept", "back.append(functools.partial(held.update, counts))", "pass")
@sees("habits: an example leaves items in lists", "examples:_state_kept", "back += [functools.partial(items", "[(items")
@sees("habits: an MLP in front taken for a block", "find_stacks", "outermost = _without_lone_mlps(trace, outermost)", "pass")
@sees("habits: shards are pickled", "guard_pickling", "PickleGuard(why)", "None")
@sees(
    "habits: a copied metric syncs over the world",
    "_Copyable.__deepcopy__",
    "memo[id(self.process_group)] = self.process_group",
    "memo[id(self.process_group)] = None",
)
@sees("habits: emptied optimizer states are another model's", "Saver._load_optimizers", "if not states:", "if False:")
@pytest.mark.more
def test_the_rest_of_a_run(tmp_path):
    alone = outcomes("MANNERS", ["emptied", "evaluated", "counts", "traces", "fronted"], 1, str(tmp_path))
    for rank, found in enumerate(run_distributed(outcomes, 2, "MANNERS", list(MANNERS), 2, str(tmp_path))):
        assert found["copied"] == (3.0, 3.0, SumMetric)
        assert found["clock"] == [2]  # one rank's clock decides for both, once
        assert found["no optimizer"] == [[{}], None]
        states, weights = found["emptied"]
        assert states == []
        assert all(torch.allclose(weights[name], one, rtol=0, atol=1e-9) for name, one in alone["emptied"][1].items())
        said, copies_well = found["pickled"]
        assert len(said) == 4
        assert all("would write shards" in one and "trainer.save_checkpoint" in one and "unshard" in one for one in said)
        assert copies_well
        metrics, predicted = found["evaluated"]
        assert metrics == [pytest.approx(one, rel=1e-9) for one in alone["evaluated"][0]]
        assert predicted == [pytest.approx(one, rel=1e-9) for one in alone["evaluated"][1]]
        stays, thaws = found["wrong when it thaws"]
        assert stays == "trained"
        assert ": it trains now, and the plan could be proved only with it frozen (the gradient of net.h." in thaws
        assert "attn.q_norm.weight is" in thaws
        compare(alone["counts"], found["counts"]).raise_if_failed()
        asked, batches, loaders = found["traces"]
        assert (asked, batches, loaders) == alone["traces"], rank
        compare(alone["fronted"][0], found["fronted"][0]).raise_if_failed()
        assert found["fronted"][1] == ["net.h.1", "net.h.2"]


# ---- tensor parallelism off ----------------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, as packages have it: no call of the base class, and a state dict of its own layout."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self.fast, self.param_groups, self.defaults, self.state = fast, fast.param_groups, fast.defaults, fast.state
        self.slow = [p.detach().clone() for p in self.parameters]
        self.count = 0

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        out = self.fast.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, self.parameters, strict=True):
                p.data.copy_(slow.lerp_(p.detach(), 0.5))
        return out

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.fast.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        fast = self.fast.state_dict()
        return {"fast_state": fast["state"], "groups": fast["param_groups"], "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fast.load_state_dict({"state": state["fast_state"], "param_groups": state["groups"]})
        for slow, saved in zip(self.slow, state["slow"], strict=True):
            slow.copy_(saved)
        self.count = state["count"]


class LooksAhead(Plain):
    def configure_optimizers(self) -> Any:
        return Lookahead(super().configure_optimizers())


class Metered(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


def pickled(tp: int, folder: str) -> Any:
    """A trainer before and behind ``fit``, and a strategy out of a pickle that trains."""
    trainer, module = trainer_of(tp), Metered()
    pickle.dumps(trainer)
    trainer.fit(module, loader(tp))
    again = pickle.loads(pickle.dumps(trainer))
    again.fit_loop.epoch_loop.max_steps = 5
    again.fit(module, loader(tp, 48))
    return again.global_step, again.strategy.groups.size("dp"), type(pickle.loads(pickle.dumps(module)).mean)


ALONE: dict[str, Callable[[int, str], Any]] = {
    "looks ahead": lambda tp, folder: resumed(tp, folder, LooksAhead),
    "looks ahead, in parts": lambda tp, folder: resumed(tp, folder, LooksAhead, **SHARDED),
    "copied": copied_callbacks,
    "pickled": pickled,
}


@sees(
    "habits: a pickled trainer has this run's groups",
    "ParallelGroups.__getstate__",
    '{**vars(self), "_fake": True, "_groups": {}, "_twins": {}, "_made": [], "pp_channels": ()}',
    "dict(vars(self))",
)
@sees(
    "habits: every layout of a state dict is torch's",
    "_is_torchs_layout",
    "return isinstance(entries, Mapping) and all(",
    "return True or all(",
)
@sees("habits: tensors of a layout of its own stay unread", "read_whole", "opened.take(meta, {}, rank)", "{}")
def test_what_tp_1_runs_too(tmp_path):
    expected = outcomes("ALONE", ["looks ahead"], 1, str(tmp_path))["looks ahead"]
    for found in run_distributed(outcomes, 2, "ALONE", list(ALONE), 1, str(tmp_path)):
        for name in ("looks ahead", "looks ahead, in parts"):
            assert not isinstance(found[name], str), f"{name}: {found[name]}"
            weights = found[name][1]
            assert all(torch.allclose(weights[one], p, rtol=0, atol=1e-9) for one, p in expected[1].items())
        assert found["copied"] == (6.0, 6.0, SumMetric)  # the sum of two replicas, of a copy too
        assert found["pickled"] == (5, 2, MeanMetric)
