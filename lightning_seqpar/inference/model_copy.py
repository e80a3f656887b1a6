"""Harmless runs of a model: a detached copy, an example of its input, and no luck involved."""

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
"""Parameters above which equal blocks of a copy share one block's weights."""


class Quiet(TorchDispatchMode):
    """Random draws become constants that keep everything: two runs of one model are alike, dropout or not.

    Args:
        draws: leave numbers that are not masks to chance: for a step that needs some (masked tokens).
    """

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[-1].split(".")[0]
        # Nothing is drawn for these, so that the streams stay alike where other things are drawn.
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
    """What makes two blocks of a stack alike: classes, shapes and plain settings, a block's own index aside."""

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
"""Names of a block's own place in its stack."""


def _share_equal_blocks(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let equal blocks of the copy be one: the depth stays, the memory is that of one block of each kind."""
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
    """A copy of ``model`` that no trainer knows, in ``dtype``, with weights at which no gradient hides.

    Weights are those of the model moved by seeded noise (zeros, ones and tiny scales hide wrong gradients), or all
    noise for a model on the meta device. Large models share the weights of equal blocks.
    """
    memo: dict[int, Any] = {}
    for attribute in ("_trainer", "_fabric"):
        for module in model.modules():
            held = module.__dict__.get(attribute)
            if held is not None:
                memo[id(held)] = None
    for module in model.modules():  # metrics hold the group that they sync over, which nobody can copy
        memo |= {id(held): held for held in module.__dict__.values() if isinstance(held, ProcessGroup)}
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
    """Blocks that are one would put their keys and values into one place of a cache, and read each other's."""
    for module in model.modules():
        settings = getattr(module, "config", None)
        if getattr(settings, "use_cache", None) is True:
            settings.use_cache = False  # type: ignore[union-attr]


def without_checkpoints(model: nn.Module) -> nn.Module:
    """``model`` with transformers' activation checkpointing off, in place: the reentrant form runs blocks without a graph."""
    for module in model.modules():
        if module.__dict__.get("gradient_checkpointing") is True:
            module.__dict__["gradient_checkpointing"] = False
    return model


def _without_meta(model: nn.Module, device: torch.device) -> None:
    """Zeros for what lies on the meta device, ones for the weights of norms; tied parameters stay tied."""
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
    generator = torch.Generator().manual_seed(20220505)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
            scale = 0.5 / math.sqrt(fan_in) if parameter.ndim > 1 else 0.2
            noise = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-2, 2, generator=generator).mul_(scale)
            if parameter.ndim == 1 and float(parameter.detach().abs().max()) < 0.05:
                noise += 0.5  # a layer scale that starts near zero hides its branch
            parameter.add_(noise.to(device=parameter.device, dtype=parameter.dtype))


@contextmanager
def repeats_skipped(model: nn.Module) -> Iterator[None]:
    """Blocks that stand for more than two are run twice; after that their last output is given again."""
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
    """A forward that stops to compute after two calls."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward, self._calls, self._last = forward, 0, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls <= 2:
            self._last = self._forward(*args, **kwargs)
        return self._last


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Let the tensors that a forward makes have ``dtype``."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- examples --------------------------------------------------------------------------------------------------
