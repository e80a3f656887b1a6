"""The autograd pairs of tensor and sequence parallelism, after arXiv 2205.05198.

Conjugates, of which each is the backward of the other, stand next to each other. A different backward is a different function,
never a flag. The process group is always a required argument, inputs are never modified in place, and none keeps a tensor for its
backward, which is made of these functions too: gradients of gradients are right.

In the equations ``x_r`` and ``y_r`` are the input and the output of rank ``r`` of the group, ``dx_r`` and ``dy_r`` their
gradients. ``shard_r(x)`` is what rank ``r`` holds of a tensor that is divided along ``dim``, and ``gather_r(x_r)`` puts the
shards of all ranks together again.

A sequence dim that does not divide by the group is padded where it is scattered and trimmed where it is gathered: a shard holds
``ceil(s / tp)`` positions on every rank, which the shapes below write as ``s/tp``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.async_ops import all_gather, all_reduce, reduce_scatter, split


def _fill_padding(shard: Tensor, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Replace the zero padding of a shard, in place, by copies of the last real position; returns the shard.

    Padding passes through norms; a row of zeros may become NaN there, and NaN times a zero gradient is NaN.
    """
    chunk = shard.shape[dim]
    real = max(0, min(chunk, x.shape[dim] - group.rank() * chunk))
    if real == chunk or x.shape[dim] == 0:
        return shard
    last = x.detach().narrow(dim, x.shape[dim] - 1, 1)
    shard.narrow(dim, real, chunk - real).copy_(last.expand_as(shard.narrow(dim, real, chunk - real)))
    return shard


def _scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard of ``x``, whose padding repeats the last position. Not differentiable."""
    return _fill_padding(split(x, dim, group), x, dim, group)


def passes_none(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward so that it returns None for every input where the output has no gradient, as torch's own do.

    To an optimizer a gradient that is None is not the same as zero: it skips the parameter. The decorated function must have
    one output and call ``ctx.set_materialize_grads(False)``. No collective runs in that case, and none is missed: what has
    no gradient on one rank has none on the others.
    """

    @wraps(backward)
    def passing(ctx: Any, grad: Tensor | None) -> Any:
        return (None,) * len(ctx.needs_input_grad) if grad is None else backward(ctx, grad)

    return passing


class _Pair(torch.autograd.Function):
    """Forward the first of a pair; backward the second, its conjugate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]) -> Tensor:
        ctx.set_materialize_grads(False)
        run, ctx.back = pair
        return run(x)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.back(grad), None


class _Reduction(_Pair):
    """A pair behind whose forward every rank has the whole, or its shard, of a sum over ranks."""


REDUCTIONS = (_Reduction,)


def _applied(function: type[_Pair], x: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a pair, or only its forward where gradients are off, as they are in most backwards."""
    result: Tensor = function.apply(x, (run, back)) if torch.is_grad_enabled() else run(x)  # type: ignore[no-untyped-call]
    return result


def _cut_by(cut: Callable[..., Tensor], x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard by ``cut``."""
    back = partial(gather_replicated_from_sequence_parallel_region, dim=dim, group=group, length=x.shape[dim])
    return _applied(_Pair, x, partial(cut, dim=dim, group=group), back)


def copy_to_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """f: a replicated activation enters the tensor-parallel region, ``[b, s, h]`` → ``[b, s, h]``.

    Each rank multiplies it by columns of its own, so each has one addend of the gradient.

    Forward: identity, ``y_r = x``. Backward: all-reduce, ``dx = sum over r of dy_r``. Dim: none.
    """
    return _applied(_Pair, x, lambda x: x.view_as(x), partial(reduce_from_tensor_parallel_region, group=group))


def reduce_from_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """f̄: partial sums leave the tensor-parallel region; conjugate of :func:`copy_to_tensor_parallel_region`.

    Each rank gives a partial sum ``[b, s, h]``, and all get the same sum ``[b, s, h]``.

    Forward: all-reduce, ``y = sum over r of x_r``. Backward: identity, ``dx_r = dy``. Dim: none.
    """
    back = partial(copy_to_tensor_parallel_region, group=group)
    return _applied(_Reduction, x, partial(all_reduce, group=group), back)


def scatter_to_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """A replicated activation enters the sequence region: ``[b, s, h]`` → ``[b, s/tp, h]`` for ``dim=1``.

    Forward: slice, ``y_r = shard_r(x)``; padding repeats the last position. Backward: all-gather, trimmed to ``s``,
    ``dx = gather_r(dy_r)``. Dim: ``dim``.
    """
    return _cut_by(_scatter, x, dim, group)


def gather_replicated_from_sequence_parallel_region(
    x: Tensor, dim: int, group: ProcessGroup, length: int | None = None
) -> Tensor:
    """Shards leave for a *replicated* consumer; conjugate of :func:`scatter_to_sequence_parallel_region`.

    ``[b, s/tp, h]`` → ``[b, s, h]`` for ``dim=1``. Every rank computes the same with the result and so has the same, whole
    gradient: it is sliced, not summed.

    Forward: all-gather, trimmed to ``length``, ``y = gather_r(x_r)``. Backward: slice, ``dx_r = shard_r(dy)``, whose padding
    is zero. Dim: ``dim``.
    """
    back = partial(_cut_by, split, dim=dim, group=group)
    return _applied(_Pair, x, partial(all_gather, dim=dim, group=group, length=length), back)


def gather_from_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup, length: int | None = None) -> Tensor:
    """g: shards enter a *tensor-parallel* consumer: ``[b, s/tp, h]`` → ``[b, s, h]`` for ``dim=1``.

    Each rank multiplies the result by columns of its own, so each has one addend of its gradient, and they are summed.

    Forward: all-gather, trimmed to ``length``, ``y = gather_r(x_r)``. Backward: reduce-scatter,
    ``dx_r = shard_r(sum over q of dy_q)``. Dim: ``dim``.
    """
    back = partial(reduce_scatter_to_sequence_parallel_region, dim=dim, group=group)
    return _applied(_Pair, x, partial(all_gather, dim=dim, group=group, length=length), back)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """ḡ: partial sums enter the sequence region; conjugate of :func:`gather_from_sequence_parallel_region`.

    Each rank gives a partial sum ``[b, s, h]`` and gets its shard ``[b, s/tp, h]`` of the sum, for ``dim=1``.

    Forward: reduce-scatter, zero-padded, ``y_r = shard_r(sum over q of x_q)``. Backward: all-gather, trimmed to ``s``,
    ``dx_r = gather_q(dy_q)``. Dim: ``dim``.
    """
    back = partial(gather_from_sequence_parallel_region, dim=dim, group=group, length=x.shape[dim])
    return _applied(_Reduction, x, partial(reduce_scatter, dim=dim, group=group), back)
