"""Which modules are linears, whatever their class is, and how they keep their weight."""

from __future__ import annotations

import copy
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

LinearKind = Literal["out_in", "in_out"]
"""How a linear keeps its weight: ``[out, in]`` as ``nn.Linear``, or ``[in, out]`` as Conv1D."""


def linear_kind(module: nn.Module) -> LinearKind | None:
    """How ``module`` keeps its weight if it computes ``x Wᵀ + b`` and nothing else; None for any other module.

    Subclasses of ``nn.Linear`` that are not torch's own count as none, since quantised linears are such. A module of another
    class with a matrix ``weight`` (Conv1D) is run on random numbers and compared with ``F.linear``.
    """
    if isinstance(module, nn.Linear):
        if not type(module).__module__.startswith("torch.nn.modules.linear"):
            return None
        return "out_in" if set(dict(module.named_parameters())) <= {"weight", "bias"} else None
    own = dict(module.named_parameters())
    weight, bias = own.get("weight"), own.get("bias")
    plain = set(own) <= {"weight", "bias"} and not any(True for _ in module.children())
    if not plain or any(True for _ in module.buffers()) or getattr(module, "parametrizations", None) is not None:
        return None
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or (bias is not None and bias.ndim != 1):
        return None
    if isinstance(module, nn.Embedding):
        return None
    if weight.is_meta or isinstance(weight, FakeTensor):  # it has no values, so a copy with random ones is tried
        with unset_fake_temporarily():
            numbers = {name: torch.randn(parameter.shape) for name, parameter in own.items()}
            module = copy.deepcopy(
                module, {id(parameter): nn.Parameter(numbers[name]) for name, parameter in own.items()}
            )
            return _try(module, numbers["weight"], numbers.get("bias"))
    return _try(module, weight, bias)


def _try(module: nn.Module, weight: Tensor, bias: Tensor | None) -> LinearKind | None:
    """Run a module on random numbers ``[2, 3, in]`` and compare it with ``F.linear`` for either form of its weight."""
    generator = torch.Generator().manual_seed(5)
    kinds: tuple[tuple[LinearKind, Tensor], ...] = (("in_out", weight.t()), ("out_in", weight))
    with torch.no_grad():
        for kind, matrix in kinds:
            x = torch.randn(2, 3, matrix.shape[1], generator=generator).to(weight)
            if bias is not None and bias.shape[0] != matrix.shape[0]:
                continue
            try:
                got = module(x)
            except (RuntimeError, TypeError, ValueError, IndexError):
                continue  # it does not take such an input, so it is no linear of this kind
            wanted = F.linear(x, matrix, bias)
            if (
                isinstance(got, Tensor)
                and got.shape == wanted.shape
                and torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
            ):
                return kind
    return None


def features(module: nn.Module, kind: LinearKind) -> tuple[int, int]:
    """Numbers of out- and in-features of a linear."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return (weight.shape[0], weight.shape[1]) if kind == "out_in" else (weight.shape[1], weight.shape[0])
