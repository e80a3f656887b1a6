"""The autograd pairs of :mod:`~lightning_seqpar.distributed.collectives` in a form that ``torch.compile`` traces.

While a graph is traced they are made of torch's functional collectives, which become operations of the graph; anywhere else each
of them is the eager pair of the same name, so that a lowered module can also run eagerly. The process group is always a required
argument. Sequences that do not divide by the group are padded and trimmed as there: a shard holds ``ceil(s / tp)`` positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed import collectives as eager


def gather_from_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup, length: int) -> Tensor:
    """g: shards enter a *tensor-parallel* consumer: ``[b, s/tp, h]`` → ``[b, s, h]`` for ``dim=1``.

    Forward: all-gather, trimmed to ``length``. Backward: reduce-scatter, which is the functional collective's own. Dim: ``dim``.
    """
    if not torch.compiler.is_compiling():
        return eager.gather_from_sequence_parallel_region(x, dim, group, length)
    return functional.all_gather_single_autograd(x.contiguous(), dim, group).narrow(dim, 0, length)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """ḡ: partial sums enter the sequence region: ``[b, s, h]`` → ``[b, s/tp, h]`` for ``dim=1``.

    Forward: zero-padded, reduce-scatter. Backward: all-gather, trimmed to ``s``. Dim: ``dim``.
    """
    if not torch.compiler.is_compiling():
        return eager.reduce_scatter_to_sequence_parallel_region(x, dim, group)
    return functional.reduce_scatter_single_autograd(_pad(x, dim, group).contiguous(), "sum", dim, group)


def copy_to_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """f: a replicated activation enters the tensor-parallel region, ``[b, s, h]`` → ``[b, s, h]``.

    Forward: identity. Backward: all-reduce. Dim: none.
    """
    if not torch.compiler.is_compiling():
        return eager.copy_to_tensor_parallel_region(x, group)
    return _Copy.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def reduce_from_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """f̄: partial sums leave the tensor-parallel region, ``[b, s, h]`` → ``[b, s, h]``.

    Forward: all-reduce. Backward: identity (torch's functional all-reduce would sum the gradients over the ranks once more).
    Dim: none.
    """
    if not torch.compiler.is_compiling():
        return eager.reduce_from_tensor_parallel_region(x, group)
    return _Reduce.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_replicated_from_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup, length: int) -> Tensor:
    """Shards leave for a *replicated* consumer, ``[b, s/tp, h]`` → ``[b, s, h]`` for ``dim=1``.

    Forward: all-gather, trimmed to ``length``. Backward: slice, zero-padded. Dim: ``dim``.
    """
    if not torch.compiler.is_compiling():
        return eager.gather_replicated_from_sequence_parallel_region(x, dim, group, length)
    return _GatherReplicated.apply(x, dim, group, length)  # type: ignore[no-untyped-call, no-any-return]


def scatter_to_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """A replicated activation, of which each rank takes its part: ``[b, s, h]`` → ``[b, s/tp, h]`` for ``dim=1``.

    Forward: slice; padding repeats the last position. Backward: all-gather, trimmed to ``s``. Dim: ``dim``.
    """
    if not torch.compiler.is_compiling():
        return eager.scatter_to_sequence_parallel_region(x, dim, group)
    return _Scatter.apply(x, dim, group)  # type: ignore[no-untyped-call, no-any-return]


# ---- what they are made of -----------------------------------------------------------------------------------------


def _missing(length: int, size: int) -> int:
    """How many positions are missing until ``length`` divides by ``size``."""
    return -length % size


def _pad(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """``x`` with zeros behind it along ``dim``, until that divides by the group."""
    missing = _missing(x.shape[dim], group.size())
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])


def _own(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard of ``x``, which divides along ``dim``."""
    chunk = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * chunk, chunk).clone(memory_format=torch.contiguous_format)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))  # type: ignore[no-any-return]


def _gather(x: Tensor, dim: int, group: ProcessGroup, length: int) -> Tensor:
    whole = functional.wait_tensor(functional.all_gather_single(x.contiguous(), dim, group))
    return whole.narrow(dim, 0, length)  # type: ignore[no-any-return]


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
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, length: int) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(_pad(grad, ctx.dim, ctx.group), ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    """Forward slice, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]
        missing = _missing(x.shape[dim], group.size())
        last = x.narrow(dim, x.shape[dim] - 1, 1)
        # A row of zeros might become NaN in a norm, and NaN times a zero gradient is NaN.
        return _own(torch.cat([x] + [last] * missing, dim), dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.dim, ctx.group, ctx.length), None, None
