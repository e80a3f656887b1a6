"""Optimizers that are refused because they update an element from other elements, which may lie on other ranks."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_seqpar.parallel.whole_matrices import can_keep
from lightning_seqpar.releases import MUON, MockOptimizer

ELEMENTWISE_OPTIMIZERS: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)
"""Optimizers that update each element from its own value, gradient and state alone: they do the same on a shard."""


KNOWN_ELEMENTWISE = (
    *("lion_pytorch.Lion", "schedulefree.AdamWScheduleFree", "schedulefree.SGDScheduleFree", "schedulefree.RAdamScheduleFree"),
    *("pytorch_optimizer.Lion", "pytorch_optimizer.AdEMAMix", "pytorch_optimizer.ScheduleFreeAdamW"),
    *("pytorch_optimizer.ScheduleFreeSGD", "pytorch_optimizer.ScheduleFreeRAdam", "timm.optim.Lion"),
)
KNOWN_WHOLE = ("pytorch_optimizer.Muon", "pytorch_optimizer.Lamb", "timm.optim.Muon", "timm.optim.Lamb")
"""Of other packages, those that update each element, or each matrix, by itself; they are tried as those that are vouched for."""


def _is_quantised(optimizer: Optimizer) -> bool:
    """Whether it keeps moments of few bits, with a scale for each block of numbers, but for small tensors."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    kinds = [path for path in map(_path, type(optimizer).__mro__) if path.startswith(("bitsandbytes.", "torchao."))]
    return any(bits != 32 or re.search(r"(8bit|4bit|Fp8)", path) for path in kinds)


class OptimizerGuard:
    """Refuses optimizers that are wrong where parameters are divided.

    Right are those that update each element by itself: :data:`ELEMENTWISE_OPTIMIZERS` and subclasses that leave their update
    alone. Right by whole matrices are those that update each parameter by itself (``torch.optim.Muon``). Others are tried once on
    small tensors: subclasses of the former, known ones of other packages, and those that are vouched for, by an attribute
    ``elementwise = True`` or ``whole_matrices = True``, or by the import path of their class in ``vouched`` or ``whole``.
    """

    def __init__(self, vouched: Sequence[str] = (), whole: Sequence[str] = ()) -> None:
        self._vouched = {"elementwise": (*KNOWN_ELEMENTWISE, *vouched), "whole_matrices": (*KNOWN_WHOLE, *whole)}
        self._agreed: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()  # those that were tried

    def refuse_mixing(self, optimizers: Sequence[Optimizer], shards: int, *, alone: bool = False) -> None:
        """Refuse what is not right where each rank holds one of ``shards`` parts; ``alone`` also what needs the whole."""
        for optimizer in optimizers:
            kind = _path(type(optimizer))
            if shards == 1 or self._is_elementwise(optimizer) or (not alone and self.needs_whole(optimizer)):
                continue
            if _is_quantised(optimizer):
                raise ValueError(
                    f"{kind} where parameters are divided over {shards} ranks: it keeps moments in blocks of 8 or 4 bits with a "
                    "scale each, which shards would cut elsewhere; use its kind of 32 bits, or one of torch.optim's with "
                    "data_parallel='fsdp', by which moments are divided too"
                )
            if alone and self.needs_whole(optimizer):
                raise ValueError(
                    f"{kind} needs whole matrices, and is stepped apart from the strategy: return it from configure_optimizers, or "
                    "give it to fabric.setup_optimizers"
                )
            raise ValueError(
                f"{kind} where parameters are divided over {shards} ranks: it is not known to update each element by itself, and "
                f"shards would change its result; use one of torch.optim's {_listed((*ELEMENTWISE_OPTIMIZERS, *MUON))}. If it "
                f"updates each element by itself say elementwise_optimizers=['{kind}'], or elementwise = True on its class; "
                f"if each parameter by itself, of which it needs the whole, say whole_matrix_optimizers=['{kind}'], or "
                "whole_matrices = True. Then it is tried on small tensors"
            )

    def refuse_in_stages(self, optimizers: Sequence[Optimizer], pp: int) -> None:
        """Refuse optimizers that are not known to update each parameter by itself."""
        known = (*ELEMENTWISE_OPTIMIZERS, optim.Adafactor, *MUON, optim.SparseAdam)
        for optimizer in optimizers:
            if pp == 1 or _leaves_alone(optimizer, known) or _is_quantised(optimizer):
                continue
            if self._is_elementwise(optimizer) or self.needs_whole(optimizer):
                continue
            raise ValueError(
                f"{_path(type(optimizer))} with pp={pp}: it is not known to update each parameter by itself, and each stage "
                f"has its own; use one of torch.optim's {_listed(known)}. If it does so say whole_matrices = True on its class"
            )

    def needs_whole(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer updates each parameter by itself, and needs the whole of it."""
        return _leaves_alone(optimizer, MUON) or self._passes(optimizer, "whole_matrices")

    def _is_elementwise(self, optimizer: Optimizer) -> bool:
        return _leaves_alone(optimizer, ELEMENTWISE_OPTIMIZERS) or self._passes(optimizer, "elementwise")

    def _passes(self, optimizer: Optimizer, how: str) -> bool:
        """Whether somebody vouches for an optimizer, or it derives from torch's; it is tried, if it was not yet."""
        if _is_quantised(optimizer):
            return False
        vouched = self._is_vouched_for(optimizer, how)
        derives = how == "elementwise" and isinstance(optimizer, ELEMENTWISE_OPTIMIZERS)
        if not vouched and (not derives or self._is_vouched_for(optimizer, "whole_matrices")):
            return False
        if optimizer not in self._agreed:
            agreed = True
            try:
                _try(optimizer, how)
            except ValueError:
                if vouched:
                    raise
                agreed = False
            self._agreed[optimizer] = agreed
        return self._agreed[optimizer]

    def _is_vouched_for(self, optimizer: Optimizer, how: str) -> bool:
        named = any(_is_named(kind, path) for kind in type(optimizer).__mro__ for path in self._vouched[how])
        return named or getattr(optimizer, how, False) is True


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
_SCALES = (1.0, 1.0, 1.0, 100.0, 1e-3, 1.0, 10.0)  # of the gradients, step by step: a bound by a norm shows with large ones


_SIZES = (1.0, 1e-2)  # of the parameters: a bound by their norm shows with small ones


def _try(optimizer: Optimizer, how: str) -> None:
    """Step copies of an optimizer on small tensors, whole and in parts, by its own hyperparameters."""
    name, use = _path(type(optimizer)), f"use one of torch.optim's {_listed((*ELEMENTWISE_OPTIMIZERS, *MUON))}"
    what, needs = "elementwise", "parameters and gradients"
    if how == "whole_matrices":
        what, needs = "one that updates each parameter by itself", "parameters, gradients, numbers and moments of their shapes"
    try:
        with torch.random.fork_rng(devices=[]):
            dims = (0, 1) if how == "elementwise" else (None,)
            alike = [_is_alike(optimizer, dim, size) for dim in dims for size in _SIZES]
    except Exception as error:  # of the optimizer's own code
        raise ValueError(
            f"{name} is taken as {what}, and can't be tried on small tensors ({type(error).__name__}: {error}); one "
            f"that is needs nothing but {needs}, and makes its state in its steps. Or {use}"
        ) from None
    if not all(alike):
        parts = "a small tensor and on its halves" if how == "elementwise" else "small tensors together and on each alone"
        raise ValueError(
            f"{name} is not {what}, as which it is taken: a few steps on {parts} differ. Shards would change its result; {use}"
        )


def _is_alike(optimizer: Optimizer, dim: int | None, size: float) -> bool:
    """Whether, of parameters of this size, steps on parts give what steps on all do.

    Parts are halves along ``dim`` (of tensors that have it), or with None every other tensor.
    """
    source = torch.Generator().manual_seed(3)

    def drawn(like: Tensor, shape: Sequence[int]) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=source, dtype=torch.float64).to(like.device, dtype)

    def part(tensors: list[Tensor], half: int | None) -> list[Tensor]:
        if half is None:
            return tensors
        return tensors[half::2] if dim is None else [x.chunk(2, min(dim, x.ndim - 1))[half].contiguous() for x in tensors]

    groups = []
    for group in optimizer.param_groups:
        like = {min(max(p.ndim, 1), len(_SHAPES)): p for p in group["params"]}
        twice = [ndim for ndim in sorted(like) for _ in range(1 if dim is not None else 2)]
        groups.append([size * drawn(like[ndim], _SHAPES[ndim - 1]) for ndim in twice])
    starts = [start for group in groups for start in group]
    trials = []
    for half in (None, 0, 1):
        held = [[nn.Parameter(start.clone()) for start in part(group, half)] for group in groups]
        copied = _copied(optimizer, held)
        if callable(train := getattr(copied, "train", None)):  # schedule-free ones step in that mode alone
            train()
        trials.append((half, [p for group in held for p in group], copied))
    limit = 1e-6 if all(start.dtype == torch.float64 for start in starts) else 1e-2
    moved = 0.0
    steady = [drawn(start, start.shape) for start in starts]  # a rate that is found from how far steps lead grows by it
    for scale in _SCALES:
        grads = [scale * (drawn(start, start.shape) + way) for start, way in zip(starts, steady, strict=True)]
        for half, parameters, trained in trials:
            _step(trained, parameters, part(grads, half))
        whole, *halves = (parameters for _, parameters, _ in trials)
        if dim is None:
            _refuse_state(trials[0][2])
            joined = [halves[at % 2][at // 2].detach() for at in range(len(whole))]
        else:
            joined = [torch.cat([x.detach() for x in pair], min(dim, pair[0].ndim - 1)) for pair in zip(*halves, strict=True)]
        for start, one, other in zip(starts, whole, joined, strict=True):
            update = float((one.detach() - start).abs().max())
            moved = max(moved, update)
            if float((one.detach() - other).abs().max()) > limit * update + 1e-14:
                return False
    if not moved:
        raise ValueError("its steps change nothing")
    return True


def _refuse_state(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not can_keep(value, parameter):
                what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"it keeps {key}, {what}, of a parameter {list(parameter.shape)}")


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
