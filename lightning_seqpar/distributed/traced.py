"""The autograd pairs of :mod:`~lightning_seqpar.distributed.collectives` in a form that ``torch.compile`` traces.

While a graph is traced they are made of torch's functional collectives; anywhere else each is the eager pair of the same name.
Instead of the length ``s`` they take the ``padding``, by which the shards of all ranks are longer together: one graph can serve all
sequences with as much padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed import collectives as eager


def gather_from_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup, padding: int = 0) -> Tensor:
    """g, ``[b, s/tp, h]`` → ``[b, s, h]``. Forward: all-gather, trimmed. Backward: reduce-scatter. Dim: ``dim``."""
    if not torch.compiler.is_compiling():
        return eager.gather_from_sequence_parallel_region(x, dim, group, _whole_length(x, dim, group, padding))
    return _trim(functional.all_gather_single_autograd(x.contiguous(), dim, group), dim, padding)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup, padding: int = 0) -> Tensor:
    """ḡ, ``[b, s, h]`` → ``[b, s/tp, h]``. Forward: zero-padded, reduce-scatter. Backward: all-gather, trimmed. Dim: ``dim``."""
    if not torch.compiler.is_compiling():
        return eager.reduce_scatter_to_sequence_parallel_region(x, dim, group)
    padded = _pad(x, dim, padding).contiguous()
    return functional.reduce_scatter_single_autograd(padded, "sum", dim, group)  # type: ignore[no-any-return]


def copy_to_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """f, ``[b, s, h]`` → ``[b, s, h]``. Forward: identity. Backward: all-reduce. Dim: none."""
    if not torch.compiler.is_compiling():
        return eager.copy_to_tensor_parallel_region(x, group)
    return _Copy.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def reduce_from_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """f̄, ``[b, s, h]`` → ``[b, s, h]``. Forward: all-reduce. Backward: identity. Dim: none.

    torch's functional all-reduce would sum the gradients over the ranks once more.
    """
    if not torch.compiler.is_compiling():
        return eager.reduce_from_tensor_parallel_region(x, group)
    return _Reduce.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_replicated_from_sequence_parallel_region(
    x: Tensor, dim: int, group: ProcessGroup, padding: int = 0
) -> Tensor:
    """``[b, s/tp, h]`` → ``[b, s, h]``. Forward: all-gather, trimmed. Backward: slice, zero-padded. Dim: ``dim``."""
    if not torch.compiler.is_compiling():
        length = _whole_length(x, dim, group, padding)
        return eager.gather_replicated_from_sequence_parallel_region(x, dim, group, length)
    return _GatherReplicated.apply(x, dim, group, padding)  # type: ignore[no-untyped-call, no-any-return]


def scatter_to_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup, padding: int = 0) -> Tensor:
    """``[b, s, h]`` → ``[b, s/tp, h]``. Forward: slice; padding repeats the last position. Backward: all-gather. Dim: ``dim``."""
    if not torch.compiler.is_compiling():
        return eager.scatter_to_sequence_parallel_region(x, dim, group)
    return _Scatter.apply(x, dim, group, padding)  # type: ignore[no-untyped-call, no-any-return]


# ---- what they are made of -----------------------------------------------------------------------------------------


def _whole_length(shard: Tensor, dim: int, group: ProcessGroup, padding: int) -> int:
    return shard.shape[dim] * group.size() - padding


def _trim(x: Tensor, dim: int, padding: int) -> Tensor:
    """``x`` without the padding behind it."""
    return x.narrow(dim, 0, x.shape[dim] - padding)


def _pad(x: Tensor, dim: int, padding: int) -> Tensor:
    """``x`` with ``padding`` zeros behind it."""
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, padding])


def _own(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard of ``x``, which divides along ``dim``."""
    chunk = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * chunk, chunk).clone(memory_format=torch.contiguous_format)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))  # type: ignore[no-any-return]


def _gather(x: Tensor, dim: int, group: ProcessGroup, padding: int) -> Tensor:
    return _trim(functional.wait_tensor(functional.all_gather_single(x.contiguous(), dim, group)), dim, padding)


class _Copy(torch.autograd.Function):
    """f: forward identity, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    """f̄: forward all-reduce, backward identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherReplicated(torch.autograd.Function):
    """Forward all-gather, backward slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, padding: int) -> Tensor:
        ctx.dim, ctx.group, ctx.padding = dim, group, padding
        return _gather(x, dim, group, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(_pad(grad, ctx.dim, ctx.padding), ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    """Forward slice, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, padding: int) -> Tensor:
        ctx.dim, ctx.group, ctx.padding = dim, group, padding
        # A row of zeros might become NaN in a norm, and NaN times a zero gradient is NaN.
        last = x.narrow(dim, x.shape[dim] - 1, 1).expand(*x.shape[:dim], padding, *x.shape[dim + 1 :])
        return _own(torch.cat([x, last], dim), dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grad, ctx.dim, ctx.group, ctx.padding), None, None, None
