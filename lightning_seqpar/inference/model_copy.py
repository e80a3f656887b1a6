"""Harmless runs of a model: a copy that no trainer knows, weights that hide no gradient, random draws made constant."""

from __future__ import annotations

import collections
import copy
import functools
import math
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.distributed.autograd import Watch, in_plain_operations, is_higher_order, run_backward
from lightning_seqpar.inference.block_kinds import share_equal_blocks
from lightning_seqpar.inference.lazy_copy import deep_copy
from lightning_seqpar.inference.reduction import WHOLE, Reduction, cut_vocabularies, tell_vocabularies


def _with(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any) -> tuple[Any, Any]:
    """The arguments of an operator with another value for one of them, if it has that."""
    names = [one.name for one in func._schema.arguments]
    if name not in names:
        return args, kwargs
    at = names.index(name)
    return ((*args[:at], value, *args[at + 1 :]), kwargs) if at < len(args) else (args, {**kwargs, name: value})


def _in_16_bits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on bfloat16 in the place of float64; what it makes, and what it was given to write to, is float64 again.

    One that can sum in the same order each time is told to, by its argument ``deterministic``.
    """
    args, kwargs = _with(func, args, kwargs, "deterministic", True)

    def narrow(x: Any) -> Any:
        return x.bfloat16() if isinstance(x, Tensor) and x.dtype is torch.float64 else x

    given, named = list(map(narrow, args)), {key: narrow(value) for key, value in kwargs.items()}
    made = func(*given, **named)
    with torch.no_grad():
        for at, one in enumerate(func._schema.arguments):
            if one.alias_info is not None and one.alias_info.is_write:
                own, other = (given, args) if at < len(args) else (named, kwargs)
                place = at if at < len(args) else one.name
                if own[place] is not other[place]:  # type: ignore[index]
                    other[place].copy_(own[place])  # type: ignore[index]
    return tree_map_only(Tensor, lambda x: x.double() if x.dtype is torch.bfloat16 else x, made)


def is_grouped_in_float64(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation is torch's grouped product of experts on float64, which its kernels do not take."""
    return func is torch.ops.aten._grouped_mm.default and args[0].dtype is torch.float64


def grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: Any = None) -> Tensor:
    """``torch._grouped_mm`` in plain operations: groups, which end at ``offs``, are rows of ``a``, or columns of ``b``, or both."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, at] @ b[at] for at in groups])
    if a.ndim == 2:
        made, dim, length = [a[at] @ b[number] for number, at in enumerate(groups)], 0, a.shape[0]
    else:
        made, dim, length = [a[number] @ b[:, at] for number, at in enumerate(groups)], 1, b.shape[1]
    shape = list(made[0].shape)
    shape[dim] = length - ends[-1]  # what is in no group
    return torch.cat([*made, made[0].new_zeros(shape)], dim)


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class _PlainFlex(TorchFunctionMode):
    """Lets FlexAttention run in plain operations, which compute in float64 on any device and have a backward for all they read."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == _REQUIRES_GRAD and sys._getframe(1).f_code.co_name == "_validate_device":
            return False  # it refuses gradients on CPUs, for the want of a compiled kernel alone
        if func is Tensor.backward:  # in which blocks may run again
            with self:
                return run_backward(*args, **(kwargs or {}))
        run = in_plain_operations(func) if is_higher_order(func) and func.name() == "flex_attention" else func
        return run(*args, **(kwargs or {}))


class Quiet(Watch):
    """A mode in which random draws give constants, so that two runs of a model are alike; dropout drops nothing.

    With ``draws`` those that make no dropout mask stay random, for a step that needs them (to choose masked tokens). Operators of
    extensions that take no float64 (flash-attn's) run in 16 bits, and the rest in float64; ``kernels`` has their names.
    """

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self.kernels: set[str] = set()

    def __enter__(self) -> Any:
        # What is compiled by itself (FlexAttention, at the level of a module) runs as it is written.
        self._stance: Any = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        self._plain = _PlainFlex()
        self._plain.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._plain.__exit__(*raised)  # type: ignore[no-untyped-call]
        self._stance.__exit__(*raised)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_grouped_in_float64(func, args):
            return grouped_product(*args, **kwargs)
        if func.namespace in _OF_TORCH:
            return func(*args, **kwargs)
        args, kwargs = _with(func, args, kwargs, "dropout_p", 0.0)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
            if not any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in (*args, *kwargs.values())):
                raise
            try:
                made = _in_16_bits(func, args, kwargs)
            except Exception:
                raise error from None
        self.kernels.add(func.name())
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if is_higher_order(func):
            return in_plain_operations(func)(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        # These draw nothing at all: whole and sharded copies would advance the random streams by different amounts.
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "bernoulli_":
            return args[0].fill_(1)
        out = self._run(func, args, kwargs or {})
        if name == "bernoulli":
            return out.fill_(1)
        if self._draws:
            return out
        if name in ("rand", "rand_like", "uniform_"):  # layerdrop compares with small numbers, from either side
            low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2] if name == "uniform_" else (0.0, 1.0)
            return out.fill_(low + 0.75 * (high - low))
        if name in ("randn", "randn_like", "normal_"):
            return out.fill_(args[1] if name == "normal_" and len(args) > 1 else 0.0)
        if name == "randperm":
            return out.copy_(torch.arange(out.numel(), device=out.device))
        return out


_OF_TORCH = frozenset(["aten", "prim", "prims", "c10d", "_c10d_functional", "higher_order"])
"""Namespaces of operators that take float64."""


def detached_copy(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None = torch.float64,
    reduction: Reduction = WHOLE,
    rules: Mapping[str, str] | None = None,
    *,
    frozen: bool = False,
) -> nn.Module:
    """A copy of ``model`` that no trainer knows, with weights at which no wrong gradient stays hidden.

    Weights are those of the model with seeded noise added (zeros, ones and tiny scales would hide wrong gradients), or
    noise alone for a model on the meta device. ``dtype`` None keeps the model's own types. ``rules`` is what a plan says of modules
    and parameters, by name: only blocks of which it says the same share one module. Frozen parameters ask for gradients too unless
    ``frozen`` is set: those of the model may thaw while it trains, and would be unproved then.
    """
    memo = left_out_of_copies(model)

    def shorten(memo: dict[int, Any]) -> None:
        if reduction.vocabularies:
            cut_vocabularies(model, reduction.vocabularies, memo)
        if reduction.skips_repeats:
            share_equal_blocks(model, rules or {}, memo)

    copied = deep_copy(model, memo, shorten)
    _refuse_shared(model, copied)
    point_to_copy(copied, memo)
    if reduction.vocabularies:
        tell_vocabularies(copied, model, reduction)
    for module in copied.modules() if reduction.skips_repeats else ():
        settings: Any = getattr(module, "config", None)
        if getattr(settings, "use_cache", None) is True:
            settings.use_cache = False  # blocks that share one module would read each other's keys and values
    _without_meta(copied, device)
    copied = copied.to(device)
    if dtype is not None:
        copied = copied.double() if dtype is torch.float64 else copied.float()  # complex tables stay complex
    move_weights(copied)
    if not frozen:
        for parameter in copied.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
    copied.train()
    for name, module in model.named_modules():
        if not module.training and name:
            copied.get_submodule(name).train(False)  # a frozen tower in evaluation mode stays so
    return copied


def change_attribute_tensors(model: nn.Module, which: Callable[[Tensor], bool], change: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors that a copy's modules have as plain attributes, in lists and dicts too, in place."""
    for module in model.modules():
        for key, value in vars(module).items():
            if key not in _REGISTERED and any(map(which, tensors_in(value))):
                module.__dict__[key] = map_tensors(lambda x: change(x) if which(x) else x, value)


_REGISTERED = ("_parameters", "_buffers", "_modules")  # where a module keeps its tensors and modules


def left_out_of_copies(model: nn.Module) -> dict[int, Any]:
    """A memo for ``copy.deepcopy`` by which copies of modules have no trainer, and no graph of a forward that ran before."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute in ("_trainer", "_fabric"):
            if (trainer := module.__dict__.get(attribute)) is not None:
                memo[id(trainer)] = None
        # Metrics hold the process group that they sync over, which can't be copied, and so can't what a forward made.
        memo |= {id(value): value for value in module.__dict__.values() if isinstance(value, ProcessGroup)}
    for key, tensor in kept_tensors(model).items():
        if tensor.grad_fn is not None:
            memo[key] = tensor.detach().clone()
    return memo


def kept_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Tensors among the attributes of modules that are neither parameters nor buffers, or in containers there, by id."""
    level = [value for m in model.modules() for key, value in vars(m).items() if key not in _REGISTERED]
    found: dict[int, Tensor] = {}
    for _ in range(_LEVELS):
        found |= {id(value): value for value in level if isinstance(value, Tensor)}
        holders = [v for v in level if isinstance(v, dict | list | tuple | collections.deque) and len(v) <= _MANY]
        level = [item for v in holders for item in (v.values() if isinstance(v, dict) else v)]
    return found


_LEVELS = 4  # how deep in containers kept tensors are sought
_MANY = 1024  # the most items of a container that are looked at: one of more is data


def point_to_copy(copied: nn.Module, memo: dict[int, Any]) -> None:
    """Let what a copy's attributes and hooks hold lead to the copy, in place: ``deepcopy`` leaves functions and weak references.

    They would run the model itself, or write to it, and a proof on copies would prove nothing. ``memo`` is the ``deepcopy``'s.
    """
    leads = _Leads(memo)
    for module in copied.modules():
        for key, value in list(vars(module).items()):
            if key not in _REGISTERED:
                module.__dict__[key] = leads.of(value)


class _Leads:
    """Functions, and what holds them, that lead to copies in place of what was copied."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def of(self, value: Any) -> Any:
        """What stands for ``value``; containers that are copies are changed in place."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if type(value) not in weakref.ProxyTypes and isinstance(value, Tensor | nn.Module | str | int | float | None):
            return value
        if id(value) not in self._made:
            self._kept.append(value)
            self._made[id(value)] = value  # it may hold itself
            self._made[id(value)] = self._lead(value)
        return self._made[id(value)]

    def _lead(self, value: Any) -> Any:
        if isinstance(value, weakref.ReferenceType):
            target = self._memo.get(id(value()))
            return value if target is None else weakref.ref(target)
        if type(value) in weakref.ProxyTypes:
            target = self._memo.get(id(value.__repr__.__self__))
            return value if target is None else weakref.proxy(target)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if type(value) is functools.partial:
            return functools.partial(self.of(value.func), *self.of(value.args), **self.of(value.keywords))
        if type(value) is tuple:
            return self._items(value, self.of)
        # By the base class: a class of the user's may refuse changes (frozen settings), or count them.
        if isinstance(value, dict):
            for key, item in list(value.items()):
                if (led := self.of(item)) is not item:
                    dict.__setitem__(value, key, led)
        elif isinstance(value, list):
            list.__setitem__(value, slice(None), [self.of(item) for item in value])
        return value

    @staticmethod
    def _items(value: tuple[Any, ...], lead: Callable[[Any], Any]) -> tuple[Any, ...]:
        items = tuple(map(lead, value))
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """A function that holds copies where ``value`` holds parts of the model; itself if it holds none."""
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        self._made[id(value)] = made  # before its cells, which may hold it
        try:
            held = [*(cell.cell_contents for cell in value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
        except ValueError:  # a name that has no value yet
            return value
        *contents, made.__defaults__, made.__kwdefaults__ = led = [self._held(one) for one in held]
        for cell, content in zip(cells, contents, strict=True):
            cell.cell_contents = content
        made.__dict__.update(value.__dict__)
        return value if all(new is old for new, old in zip(led, held, strict=True)) else made

    def _held(self, content: Any) -> Any:
        """What stands for something that a function holds, which ``deepcopy`` has not seen."""
        if type(content) is tuple:
            return self._items(content, self._held)
        if type(content) in (dict, list, set, collections.deque, functools.partial) and id(content) not in self._memo:
            try:
                copied = copy.deepcopy(content, self._memo)
            except Exception:  # what can't be copied is shared
                return content
            self._kept.append(copied)
            return self._lead(copied)  # its own id may be that of something else that was copied, and is gone
        return self.of(content)


def _refuse_shared(model: nn.Module, copied: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for name, parameter in copied.named_parameters():
        if id(parameter) in own:
            raise RuntimeError(
                f"a copy of {type(model).__name__} has parameters of the model itself, such as {name} (does a __deepcopy__ return "
                "what it should copy?), so nothing can be tried on it"
            )


def release(copied: nn.Module) -> None:
    """Free the memory of a copy's parameters and gradients now; the modules are in cycles, which are collected later."""
    for parameter in copied.parameters():
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def without_checkpoints(model: nn.Module) -> nn.Module:
    """Switch transformers' activation checkpointing off, in place: its reentrant form runs blocks without a graph."""
    for module in model.modules():
        if module.__dict__.get("gradient_checkpointing") is True:
            module.__dict__["gradient_checkpointing"] = False
    return model


def _without_meta(model: nn.Module, device: torch.device) -> None:
    """Give tensors on the meta device memory: ones for the weights of norms, else zeros; tied parameters stay tied."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            fill = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            numbers = torch.full_like(parameter, fill, device=device)
            torch.utils.swap_tensors(parameter, nn.Parameter(numbers, parameter.requires_grad))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    change_attribute_tensors(model, lambda x: x.is_meta, lambda x: torch.zeros_like(x, device=device))


_PERIOD = 1_048_573  # numbers of noise before they come again: a prime, so that no two rows of a matrix have the same ones


def move_weights(model: nn.Module) -> None:
    """Add seeded noise to every floating-point parameter, in place.

    Drawing numbers for a large model would take longer than to run it: all are of one sequence, from another place each.
    """
    drawn = torch.empty(_PERIOD).uniform_(-2, 2, generator=torch.Generator().manual_seed(20220505))
    begin = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
            scale = 0.5 / math.sqrt(fan_in) if parameter.ndim > 1 else 0.2
            begin = (begin + 7919) % _PERIOD
            end = begin + parameter.numel()
            numbers = drawn if end <= _PERIOD else drawn.repeat(-(-end // _PERIOD))
            noise = numbers[begin:end].view(parameter.shape)
            if parameter.ndim == 1 and float(parameter.detach().abs().max()) < 0.05:
                parameter.add_(0.5)  # a layer scale near zero would hide its branch
            parameter.add_(noise.to(device=parameter.device), alpha=scale)


def nudge_weights(model: nn.Module) -> None:
    """Move every floating-point parameter by about as much as rounding does, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.arange(parameter.numel(), device=parameter.device).remainder(3).sub(1)
                parameter.mul_(1 + 64 * torch.finfo(parameter.dtype).eps * signs.view(parameter.shape))


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """While open, new tensors have ``dtype`` by default; None changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
