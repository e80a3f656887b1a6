"""Optimizers that are refused because they update an element from other elements, which may lie on other ranks."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_seqpar.releases import MUON, MockOptimizer

ELEMENTWISE_OPTIMIZERS: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)
"""Optimizers that update each element from its own value, gradient and state alone: they do the same on a shard."""


class OptimizerGuard:
    """Refuses optimizers that are not known to be element-wise where parameters are divided.

    Known are :data:`ELEMENTWISE_OPTIMIZERS` and subclasses that leave their update alone. Others can be vouched for, by
    an attribute ``elementwise = True`` or by the import path of their class in ``vouched``; each of those is tried once.
    """

    def __init__(self, vouched: Sequence[str] = ()) -> None:
        self._vouched = tuple(vouched)
        self._tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def refuse_mixing(self, optimizers: Sequence[Optimizer], tp: int) -> None:
        """Refuse optimizers that are not known to be element-wise."""
        for optimizer in optimizers:
            if tp > 1 and not _leaves_alone(optimizer, ELEMENTWISE_OPTIMIZERS) and not self._passes(optimizer):
                raise ValueError(
                    f"{_path(type(optimizer))} with tp={tp}: it is not known to update each element by itself, and shards would "
                    f"change its result; use one of torch.optim's {_listed(ELEMENTWISE_OPTIMIZERS)}. If it does so "
                    f"say: elementwise_optimizers=['{_path(type(optimizer))}'], or elementwise = True on its class; "
                    "then it is tried on small tensors"
                )

    def refuse_in_stages(self, optimizers: Sequence[Optimizer], pp: int) -> None:
        """Refuse optimizers that are not known to update each parameter by itself."""
        known = (*ELEMENTWISE_OPTIMIZERS, optim.Adafactor, *MUON, optim.SparseAdam)
        for optimizer in optimizers:
            if pp > 1 and not _leaves_alone(optimizer, known) and not self._passes(optimizer):
                raise ValueError(
                    f"{_path(type(optimizer))} with pp={pp}: it is not known to update each parameter by itself, and each stage "
                    f"has its own; use one of torch.optim's {_listed(known)}"
                )

    def _passes(self, optimizer: Optimizer) -> bool:
        """Whether somebody vouches for an optimizer; it is tried, if it was not yet."""
        named = any(_is_named(kind, path) for kind in type(optimizer).__mro__ for path in self._vouched)
        if not named and getattr(optimizer, "elementwise", False) is not True:
            return False
        if optimizer not in self._tried:
            _check_elementwise(optimizer)
            self._tried.add(optimizer)
        return True


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _listed(kinds: Sequence[type]) -> str:
    return ", ".join(one.__name__ for one in kinds)


def _is_named(kind: type, path: str) -> bool:
    """Whether an import path leads to a class; packages often offer one under a shorter path than its own."""
    module, _, name = path.rpartition(".")
    return _path(kind) == path or getattr(sys.modules.get(module), name, None) is kind


_UPDATES = ("step", "_init_group", "_group_tensors_by_device_and_dtype")  # the methods by which torch's optimizers update


def _leaves_alone(optimizer: Optimizer, known: Sequence[type]) -> bool:
    """Whether an optimizer is of a known class, or of a subclass that defines no method by which the known one updates."""
    kinds = type(optimizer).__mro__
    base = next((kind for kind in kinds if kind in (*known, MockOptimizer)), None)
    if base is None:
        return False
    # torch gives each class a step of its own that wraps the inherited one.
    made = ((getattr(kinds[0], name), getattr(base, name)) for name in _UPDATES if hasattr(base, name))
    return all(inspect.unwrap(one) is inspect.unwrap(other) for one, other in made)


_SHAPES = ((8,), (8, 6), (4, 6, 2), (4, 2, 6, 2))  # of the small tensors, by their number of dims; the first two dims are cut
_SCALES = (1.0, 100.0, 1e-3, 1.0, 10.0)  # of the gradients, step by step: a bound by a norm shows with large ones


def _check_elementwise(optimizer: Optimizer) -> None:
    """Step copies of an optimizer on small tensors, whole and in halves, by its own hyperparameters."""
    name, use = _path(type(optimizer)), f"use one of torch.optim's {_listed(ELEMENTWISE_OPTIMIZERS)}"
    try:
        with torch.random.fork_rng(devices=[]):
            alike = [_is_alike(optimizer, dim) for dim in (0, 1)]
    except Exception as error:  # of the optimizer's own code
        raise ValueError(
            f"{name} is vouched for as elementwise, and can't be tried on small tensors ({type(error).__name__}: {error}); one "
            f"that is elementwise needs nothing but parameters and gradients, and makes its state in its steps. Or {use}"
        ) from None
    if not all(alike):
        raise ValueError(
            f"{name} is not elementwise, though it is vouched for: a few steps on a small tensor and on its halves differ. "
            f"Shards would change its result; {use}"
        )


def _is_alike(optimizer: Optimizer, dim: int) -> bool:
    """Whether steps on halves along ``dim`` (of tensors that have it) give what steps on the whole do."""
    source = torch.Generator().manual_seed(3)

    def drawn(like: Tensor, shape: Sequence[int]) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=source, dtype=torch.float64).to(like.device, dtype)

    def cut(x: Tensor, half: int | None) -> Tensor:
        return x if half is None else x.chunk(2, min(dim, x.ndim - 1))[half].contiguous()

    groups = []
    for group in optimizer.param_groups:
        like = {min(max(p.ndim, 1), len(_SHAPES)): p for p in group["params"]}
        groups.append([drawn(like[ndim], _SHAPES[ndim - 1]) for ndim in sorted(like)])
    starts = [start for group in groups for start in group]
    trials = []
    for half in (None, 0, 1):
        held = [[nn.Parameter(cut(start, half).clone()) for start in group] for group in groups]
        copied = _copied(optimizer, held)
        if callable(train := getattr(copied, "train", None)):  # schedule-free ones step in that mode alone
            train()
        trials.append((half, [p for group in held for p in group], copied))
    limit = 1e-6 if all(start.dtype == torch.float64 for start in starts) else 1e-2
    moved = 0.0
    for scale in _SCALES:
        grads = [scale * drawn(start, start.shape) for start in starts]
        for half, parameters, trained in trials:
            _step(trained, parameters, [cut(grad, half) for grad in grads])
        for start, whole, *halves in zip(starts, *(parameters for _, parameters, _ in trials), strict=True):
            parts = torch.cat([half.detach() for half in halves], min(dim, start.ndim - 1))
            update = float((whole.detach() - start).abs().max())
            moved = max(moved, update)
            if float((whole.detach() - parts).abs().max()) > limit * update + 1e-14:
                return False
    if not moved:
        raise ValueError("its steps change nothing")
    return True


def _step(optimizer: Optimizer, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    """Step an optimizer with gradients that depend on the parameters, as those of a closure do."""

    def closure() -> Tensor:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad + 0.5 * parameter.detach()
        return torch.zeros((), dtype=grads[0].dtype, device=grads[0].device)

    closure()
    step: Callable[..., Any] = optimizer.step
    step(*[closure][: len(inspect.signature(step).parameters)])


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters of a group, with a rate that changes something: a warm-up begins at zero."""
    rest = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    if "lr" in rest and not float(rest["lr"]) >= 1e-4:
        rest["lr"] = torch.full_like(rest["lr"], 1e-2) if isinstance(rest["lr"], Tensor) else 1e-2
    return rest


def _copied(optimizer: Optimizer, parameters: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """A copy of an optimizer, and of those inside it, that holds other parameters and no state."""
    held = [optimizer, *(value for value in vars(optimizer).values() if isinstance(value, Optimizer))]
    memo: dict[int, Any] = {id(one.state): defaultdict(dict) for one in held}
    for one in held:
        memo |= {id(value): OrderedDict() for key, value in vars(one).items() if key.endswith("_hooks")}
    groups = [{**_rates(group), "params": [*own]} for group, own in zip(optimizer.param_groups, parameters, strict=True)]
    memo |= {id(one.param_groups): groups for one in held}
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update({key: copy.deepcopy(value, memo) for key, value in vars(optimizer).items() if key != "step"})
    return made
