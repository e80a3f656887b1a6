"""Harmless runs of a model: a copy that no trainer knows, weights that hide no gradient, random draws made constant."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 30_000_000
"""Number of parameters above which equal blocks of a copy share one block's weights."""


class Quiet(TorchDispatchMode):
    """A mode in which random draws give constants, so that two runs of a model are alike; dropout drops nothing.

    Args:
        draws: whether draws that make no dropout mask stay random, for a step that needs them (to choose masked tokens).
    """

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[-1].split(".")[0]
        # These draw nothing at all: whole and sharded copies would advance the random streams by different amounts.
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "bernoulli_":
            return args[0].fill_(1)
        out = func(*args, **(kwargs or {}))
        if name == "bernoulli":
            return out.fill_(1)
        if self._draws:
            return out
        if name in ("rand", "rand_like"):
            return out.fill_(0.75)  # layerdrop compares with small numbers, from either side
        if name == "uniform_":
            low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
            return out.fill_(low + 0.75 * (high - low))
        if name in ("randn", "randn_like"):
            return out.zero_()
        if name == "normal_":
            return out.fill_(args[1] if len(args) > 1 else 0.0)
        if name == "randperm":
            return out.copy_(torch.arange(out.numel(), device=out.device))
        return out


# ---- copies ----------------------------------------------------------------------------------------------------


def kind_of(module: nn.Module) -> Any:
    """A key that is equal for blocks of a stack that are alike: classes, shapes and settings, but not a block's own index."""

    def settings(part: nn.Module) -> tuple[Any, ...]:
        return tuple(
            (key, value)
            for key, value in sorted(vars(part).items())
            if isinstance(value, bool | int | float | str) and not _INDEX.search(key)
        )

    return tuple(
        (name, type(part), settings(part), tuple((n, tuple(p.shape)) for n, p in part.named_parameters(recurse=False)))
        for name, part in module.named_modules()
    )


_INDEX = re.compile(r"(idx|index|layer_id|layer_number|depth)$", re.IGNORECASE)
"""Names of attributes that hold a block's own index in its stack."""


def _share_equal_blocks(model: nn.Module, memo: dict[int, Any]) -> None:
    """Write into ``memo`` that equal blocks of a stack are copied as one module, so that they need the memory of one.

    Args:
        model: the model that will be copied.
        memo: for ``copy.deepcopy``.
    """
    for stack in model.modules():
        if not isinstance(stack, nn.ModuleList | nn.Sequential) or len(stack) < 3:
            continue
        first: dict[Any, Any] = {}
        for block in stack:
            if id(block) in memo or not any(True for _ in block.children()):
                continue
            kind = kind_of(block)
            if kind not in first:
                first[kind] = copy.deepcopy(block, memo)
            memo[id(block)] = first[kind]


def is_large(model: nn.Module) -> bool:
    """Whether a copy of the model shares its equal blocks' weights."""
    return sum(parameter.numel() for parameter in model.parameters()) > LARGE


def detached_copy(model: nn.Module, device: torch.device, dtype: torch.dtype | None = torch.float64) -> nn.Module:
    """A copy of ``model`` that no trainer knows, with weights at which no wrong gradient stays hidden.

    Weights are those of the model with seeded noise added (zeros, ones and tiny scales would hide wrong gradients), or
    noise alone for a model on the meta device. Equal blocks of a large model share their weights.

    Args:
        model: the model, on any device.
        device: of the copy.
        dtype: of the copy; None keeps the model's own types.
    """
    memo: dict[int, Any] = {}
    for attribute in ("_trainer", "_fabric"):
        for module in model.modules():
            trainer = module.__dict__.get(attribute)
            if trainer is not None:
                memo[id(trainer)] = None
    for module in model.modules():  # metrics hold the process group that they sync over, which can't be copied
        memo |= {id(value): value for value in module.__dict__.values() if isinstance(value, ProcessGroup)}
    if is_large(model):
        _share_equal_blocks(model, memo)
    copied = copy.deepcopy(model, memo)
    if is_large(model):
        _without_caches(copied)
    _without_meta(copied, device)
    copied = copied.to(device)
    if dtype is not None:
        copied = copied.double() if dtype is torch.float64 else copied.float()  # complex tables stay complex
    _move_weights(copied)
    copied.train()
    for name, module in model.named_modules():
        if not module.training and name:
            copied.get_submodule(name).train(False)  # a frozen tower in evaluation mode stays so
    return copied


def _without_caches(model: nn.Module) -> None:
    """Switch caches of keys and values off, in place: blocks that share one module would read each other's entries."""
    for module in model.modules():
        settings = getattr(module, "config", None)
        if getattr(settings, "use_cache", None) is True:
            settings.use_cache = False  # type: ignore[union-attr]


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


def _move_weights(model: nn.Module) -> None:
    """Add seeded noise to every floating-point parameter, in place."""
    generator = torch.Generator().manual_seed(20220505)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
            scale = 0.5 / math.sqrt(fan_in) if parameter.ndim > 1 else 0.2
            noise = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-2, 2, generator=generator).mul_(scale)
            if parameter.ndim == 1 and float(parameter.detach().abs().max()) < 0.05:
                noise += 0.5  # a layer scale near zero would hide its branch
            parameter.add_(noise.to(device=parameter.device, dtype=parameter.dtype))


@contextmanager
def repeats_skipped(model: nn.Module) -> Iterator[None]:
    """While open, a module of a large model's copy that stands for more than two blocks is computed at its first two calls.

    Later calls return the second output again, which is all that a record of the data flow needs.
    """
    names: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        names[id(module)] = names.get(id(module), 0) + 1
    patched = []
    for module in model.modules():
        if names[id(module)] > 2 and any(True for _ in module.children()):
            module.forward = _Repeat(module.forward)
            patched.append(module)
    try:
        yield
    finally:
        for module in patched:
            del module.forward


class _Repeat:
    """A forward that is computed at its first two calls, and returns the second output at later ones."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward, self._calls, self._last = forward, 0, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls <= 2:
            self._last = self._forward(*args, **kwargs)
        return self._last


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """While open, new tensors have ``dtype`` by default; None changes nothing."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
