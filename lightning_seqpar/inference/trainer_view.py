"""What a step finds where it reaches for its trainer, while it runs on a copy of its module.

It reads what it would read in training, and what it does there has no effect: nothing is logged, stepped, saved or sent.
All replicas are taken to have the copy's own batch, so that values which travel between them are known without sending any.
"""

from __future__ import annotations

import functools
import linecache
import math
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.autograd import Watch, is_higher_order
from lightning_seqpar.inference.lazy_copy import LazyCopies, own_containers
from lightning_seqpar.releases import (
    CombinedLoader,
    DummyExperiment,
    configure_optimizers,
    configure_schedulers_automatic_opt,
    configure_schedulers_manual_opt,
    fabric,
    parse_num_batches,
    pl,
)


class NoExampleError(ValueError):
    """No example input was found, or none ends in something with a gradient."""


class PlainBackwardError(NoExampleError):
    """A training step runs its backward itself, past Lightning."""


def attach_view(model: nn.Module, trainer: pl.Trainer | None) -> None:
    """Let the steps of a copy use the trainer, without any effect on it (see the module's docstring)."""
    own_containers(model)
    if isinstance(model, pl.LightningModule) and trainer is not None:
        view = _view(model, trainer)
        for module in model.modules():
            if isinstance(module, pl.LightningModule):
                module.__dict__["_trainer"] = view


def answer_harmlessly(
    model: pl.LightningModule,
    logged: list[tuple[str, Any]],
    losses: list[Tensor],
    at_once: Callable[[Tensor], None] | None = None,
) -> None:
    """Replace what a step calls on its module, in place, so that running a step on a copy has no effects.

    ``logged`` gets the names and values that the step logs, and ``losses`` what it passes to ``manual_backward``, whose gradients
    ``at_once`` computes for a step that reads them.
    """

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logged.append((name, value))

    def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.extend(values.items())

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)
        if at_once is not None:
            at_once(loss)

    configured = _configured(model)
    answers: dict[str, Any] = {
        "log": log,
        "log_dict": log_dict,
        "manual_backward": backward,
        "optimizers": lambda use_pl_optimizer=True: _one_or_all(
            [_wrapped(one) if use_pl_optimizer else one for one in configured()[0]]
        ),
        "lr_schedulers": lambda: _one_or_all([config.scheduler for config in configured()[1]]) or None,
        **dict.fromkeys(("print", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"), _nothing),
    }
    for module in model.modules():
        if isinstance(module, pl.LightningModule):
            module.__dict__.update(answers)


def describe_failure(error: BaseException) -> str:
    """What an example raised, in a line: its type, its first line, and where in the user's code."""
    lines = str(error).splitlines() or ["(it has no message)"]
    kind = "" if isinstance(error, NoExampleError) else f"{type(error).__name__}: "
    paths = sysconfig.get_paths()
    foreign = (*(paths[name] for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]), "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(foreign)]
    if not own and not str(error):
        own = frames[-1:]  # where it was raised is all there is to tell
    if not own:
        return f"{kind}{lines[0]}"
    line = linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
    return f"{kind}{lines[0]} ({Path(own[-1].filename).name}, line {own[-1].lineno}: {line})"


class OneRankOnly(Watch):
    """A mode in which ``torch.distributed`` is not used: an example is sought on one rank, which would wait for the others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[-1].split(".")[0].strip("_")
            raise NoExampleError(
                f"the step calls torch.distributed itself ({name}), and an example is sought on one rank alone: use "
                "self.all_gather, or self.trainer.strategy's reduce, broadcast and barrier, which speak of replicas"
            )
        return func(*args, **(kwargs or {}))


# ---- optimizers and schedulers -------------------------------------------------------------------------------------


def _without_steps(real: Any) -> None:
    """Let an optimizer or a scheduler of the copy do nothing when it is stepped, in place; an optimizer runs its closure."""

    def step(*args: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        closure = closure or next((arg for arg in args if callable(arg)), None)
        return None if closure is None else closure()

    real.step = step
    if hasattr(real, "zero_grad"):
        real.zero_grad = _nothing  # gradients are those of the example alone


def _wrapped(optimizer: Any) -> pl.core.optimizer.LightningOptimizer:
    """Lightning's wrapper of an optimizer of the copy, which does nothing either."""
    wrapped = (
        optimizer
        if isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        else pl.core.optimizer.LightningOptimizer(optimizer)
    )
    vars(wrapped).update(step=optimizer.step, zero_grad=_nothing, toggle_model=lambda *given, **named: nullcontext())
    return wrapped


def _configured(model: pl.LightningModule) -> Callable[[], tuple[list[Any], list[Any]]]:
    """What gives the optimizers and schedulers that a copy configures, which it does when a step first asks for them."""

    @functools.cache
    def configure() -> tuple[list[Any], list[Any]]:
        answer: Any = model.configure_optimizers()
        optimizers, schedulers, monitor = configure_optimizers(answer) if answer is not None else ([], [], None)
        configs: list[Any] = (
            configure_schedulers_automatic_opt(schedulers, monitor)
            if model.automatic_optimization
            else configure_schedulers_manual_opt(schedulers)
        )
        for one in (*optimizers, *(config.scheduler for config in configs)):
            _without_steps(one)
        return optimizers, configs

    return configure


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


# ---- the trainer ---------------------------------------------------------------------------------------------------


def _view(model: pl.LightningModule, trainer: pl.Trainer) -> Any:
    """What stands for the trainer: it reads like the real one, and has the copy where that has the module."""
    real = trainer.strategy._lightning_module
    given: dict[int, Callable[[], Any]] = {}
    if real is not None:
        for name, module in real.named_modules(remove_duplicate=False):
            given[id(module)] = functools.partial(model.get_submodule, name)
        for name, parameter in real.named_parameters(remove_duplicate=False):
            given[id(parameter)] = functools.partial(model.get_parameter, name)
    configured = _configured(model)
    steps: dict[str, Any] = {
        "optimizers": property(lambda self: [*configured()[0]]),
        "lr_scheduler_configs": property(lambda self: [*configured()[1]]),
    }

    def changes(cls: type) -> dict[str, Any]:
        if issubclass(cls, pl.Trainer):
            return {**_of_trainer(), **steps}
        if issubclass(cls, pl.strategies.Strategy):
            wrapped = property(lambda self: [_wrapped(one) for one in configured()[0]])
            return {**_of_strategy(), **steps, "_lightning_optimizers": wrapped}
        if issubclass(cls, fabric.loggers.logger.Logger):
            names = [name for name in dir(cls) if name.startswith("log_") and callable(getattr(cls, name, None))]
            names += ["save", "finalize", "after_save_checkpoint", "watch", "unwatch"]
            experiment = property(lambda self: DummyExperiment())
            return {**dict.fromkeys(names, _nothing), "experiment": experiment}
        if issubclass(cls, pl.profilers.Profiler):
            return dict.fromkeys(("start", "stop", "describe"), _nothing)
        return {"print": _nothing} if issubclass(cls, pl.callbacks.ProgressBar) else {}

    return LazyCopies(given, changes).of(trainer, "self.trainer")


def _of_trainer() -> dict[str, Any]:
    def runs(name: str) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise NoExampleError(f"the step calls self.trainer.{name}, which can't run on a copy of the module")

        return run

    def train_dataloader(self: Any) -> Any:
        if self.fit_loop._combined_loader is not None:
            return self.fit_loop._combined_loader.iterables
        if "_peeked" not in self.__dict__:
            self._peeked = self.fit_loop._data_source.dataloader()
        return self._peeked

    def num_training_batches(self: Any) -> int | float:
        if self.fit_loop.max_batches != float("inf"):
            return self.fit_loop.max_batches  # type: ignore[no-any-return]
        # The loop has not read its loader yet, which it does with collectives.
        loader = self.train_dataloader
        try:
            combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
            count = max(len(one) for one in combined.flattened)
        except (TypeError, NotImplementedError):
            return float("inf")
        length = math.ceil(count / _replicas(self.strategy))
        return parse_num_batches(pl.trainer.states.RunningStage.TRAINING, length, self.limit_train_batches)

    return {
        **{name: runs(name) for name in ("fit", "validate", "test", "predict")},
        **dict.fromkeys(("save_checkpoint", "print"), _nothing),
        "train_dataloader": property(train_dataloader),
        "num_training_batches": property(num_training_batches),
    }


def _of_strategy() -> dict[str, Any]:
    """What the strategy's stand-in answers by itself: collectives as if every rank had the copy's values."""

    def size_of(self: Any, group: Any) -> int:
        is_world = group is None or not isinstance(group, ProcessGroup) or group is torch.distributed.group.WORLD
        return _replicas(self) if is_world else group.size()

    def all_gather(self: Any, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        size = size_of(self, group)
        if size == 1:
            return tensor
        with nullcontext() if sync_grads else torch.no_grad():
            return torch.stack([tensor] * size)

    def reduce(self: Any, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, Tensor) and str(reduce_op).lower().endswith("sum"):
            tensor.data.mul_(size_of(self, group))  # in place and unseen by autograd, as the sum of the replicas is
        return tensor

    def same(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    return {
        **dict.fromkeys(("barrier", "save_checkpoint", "remove_checkpoint", "teardown", "backward"), _nothing),
        **dict.fromkeys(("broadcast", "reduce_boolean_decision"), same),
        "all_gather": all_gather,
        "reduce": reduce,
    }


def _replicas(strategy: Any) -> int:
    """Over how many ranks the strategy gathers and reduces: the replicas, or the world where it knows none."""
    return int(getattr(strategy, "dp_size", getattr(strategy, "world_size", 1)))
