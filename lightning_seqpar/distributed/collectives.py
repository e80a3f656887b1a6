"""The autograd pairs of tensor and sequence parallelism, after arXiv 2205.05198.

Conjugates stand next to each other. A different backward is a different function, never a flag. The process
group is always a required argument, and inputs are never modified in place. Each backward is itself made of
these functions, so that gradients of gradients are right too.

A sequence dim that does not divide by the group is padded where it is scattered and trimmed where it is
gathered: a shard holds ``ceil(s / tp)`` positions on every rank.

The collectives that the pairs are made of are those of :mod:`~lightning_seqpar.distributed.async_ops`; they can be
imported from here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.async_ops import all_gather, all_reduce, reduce_scatter, split
from lightning_seqpar.distributed.padding import shard_length

__all__ = [
    "all_gather",
    "all_reduce",
    "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_replicated_from_sequence_parallel_region",
    "passes_none",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "shard_length",
    "split",
]


def _fill_padding(piece: Tensor, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Replace the zero padding of a shard by copies of the last real position.

    Padding passes through norms; a row of zeros may become NaN there, and NaN times a zero gradient is NaN.
    """
    chunk = piece.shape[dim]
    real = max(0, min(chunk, x.shape[dim] - group.rank() * chunk))
    if real == chunk or x.shape[dim] == 0:
        return piece
    last = x.detach().narrow(dim, x.shape[dim] - 1, 1)
    piece.narrow(dim, real, chunk - real).copy_(last.expand_as(piece.narrow(dim, real, chunk - real)))
    return piece


def _scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return _fill_padding(split(x, dim, group), x, dim, group)


def passes_none(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that returns no gradients where it gets none, as torch's own do: none is not zero to an optimizer.

    For functions of one output that call ``ctx.set_materialize_grads(False)``. Nothing is sent for it: what has no gradient
    on one rank has none on the others.
    """

    @functools.wraps(backward)
    def passing(ctx: Any, grad: Tensor | None) -> Any:
        return (None,) * len(ctx.needs_input_grad) if grad is None else backward(ctx, grad)

    return passing


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from_tensor_parallel_region(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_to_tensor_parallel_region(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]
        return _scatter(x, dim, group)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (
            gather_replicated_from_sequence_parallel_region(grad, ctx.dim, ctx.group, ctx.length),
            None,
            None,
        )


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, length: int | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group, length)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _applied(_SplitGrad, split, grad, ctx.dim, ctx.group), None, None, None


class _SplitGrad(torch.autograd.Function):
    """A split whose padding is zero, as a gradient's must be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]
        return split(x, dim, group)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (
            gather_replicated_from_sequence_parallel_region(grad, ctx.dim, ctx.group, ctx.length),
            None,
            None,
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, length: int | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group, length)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter_to_sequence_parallel_region(grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]
        return reduce_scatter(x, dim, group)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_from_sequence_parallel_region(grad, ctx.dim, ctx.group, ctx.length), None, None


REDUCTIONS = (_Reduce, _ReduceScatter)
"""Functions behind which every rank has the whole, or its shard, of a sum over ranks."""


def _applied(function: Any, plain: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function``'s forward, ``plain``; a node of a graph only where there is one: in most backwards there is none."""
    made: Tensor = function.apply(*args) if torch.is_grad_enabled() else plain(*args)
    return made


def copy_to_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """f: a replicated activation enters the tensor-parallel region.

    Forward: identity. Backward: all-reduce. Dim: none.
    """
    return _applied(_Copy, lambda x, group: x.view_as(x), x, group)


def reduce_from_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """f̄: partial sums leave the tensor-parallel region; conjugate of :func:`copy_to_tensor_parallel_region`.

    Forward: all-reduce. Backward: identity. Dim: none.
    """
    return _applied(_Reduce, all_reduce, x, group)


def scatter_to_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """A replicated activation enters the sequence region: ``[b, s, h]`` → ``[b, ceil(s/tp), h]`` for ``dim=1``.

    Forward: slice; padding repeats the last position. Backward: all-gather, trimmed. Dim: ``dim``.
    """
    return _applied(_Scatter, _scatter, x, dim, group)


def gather_replicated_from_sequence_parallel_region(
    x: Tensor, dim: int, group: ProcessGroup, length: int | None = None
) -> Tensor:
    """Shards leave for a *replicated* consumer; conjugate of :func:`scatter_to_sequence_parallel_region`.

    Every rank computes the same with the result and so has the same, whole gradient: it is sliced, not summed.

    Forward: all-gather, trimmed to ``length``. Backward: slice. Dim: ``dim``.
    """
    return _applied(_GatherReplicated, all_gather, x, dim, group, length)


def gather_from_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup, length: int | None = None) -> Tensor:
    """g: shards enter a *tensor-parallel* consumer: ``[b, s/tp, h]`` → ``[b, s, h]`` for ``dim=1``.

    Every rank holds a part of the gradient of the result: the parts are summed.

    Forward: all-gather, trimmed to ``length``. Backward: reduce-scatter. Dim: ``dim``.
    """
    return _applied(_Gather, all_gather, x, dim, group, length)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """ḡ: partial sums enter the sequence region; conjugate of :func:`gather_from_sequence_parallel_region`.

    Forward: reduce-scatter, zero-padded. Backward: all-gather, trimmed. Dim: ``dim``.
    """
    return _applied(_ReduceScatter, reduce_scatter, x, dim, group)
