"""The autograd pairs of tensor and sequence parallelism, after arXiv 2205.05198.

Conjugates stand next to each other. A different backward is a different function, never a flag. The process
group is always a required argument, and inputs are never modified in place. Each backward is itself made of
these functions, so that gradients of gradients are right too.

A sequence dim that does not divide by the group is padded where it is scattered and trimmed where it is
gathered: a shard holds ``ceil(s / tp)`` positions on every rank.

Over gloo an exchange of parts (all-to-all) takes a half to a third of the time of its gather, reduce-scatter and
all-reduce, at every size, so there they are made of it; a sum is then made by each rank, in the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.counters import ExchangeRole, announce_exchange


def shard_length(length: int, size: int) -> int:
    """Positions in one shard of a sequence of ``length`` positions over ``size`` ranks, padding included."""
    return -(-length // size)


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    """``x`` with zeros behind it along ``dim``, up to ``length``."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


_AT_ONCE = 2**18
"""Bytes up to which every rank gets every other's whole tensor to sum it, in one exchange instead of two."""


def _exchanges(x: Tensor, group: ProcessGroup) -> bool:
    """Whether collectives of this tensor are made of exchanges."""
    return x.is_cpu and not x.is_complex() and group._get_backend(x.device).name() == "gloo"


class _Exchange:
    """A tensor for each rank of the group under way, and one from each; all of one shape, and of no graph."""

    def __init__(self, given: Sequence[Tensor], group: ProcessGroup, async_op: bool, role: ExchangeRole) -> None:
        self._rank = group.rank()
        self._own, *others = given[self._rank], *given[: self._rank], *given[self._rank + 1 :]
        if async_op and self._own.nbytes < self._own.untyped_storage().nbytes():
            self._own = self._own.clone()  # what it is a part of may go meanwhile
        count, self._count = self._own.numel(), len(others)
        splits = [count] * len(given)
        splits[self._rank] = 0  # its own stays where it is
        sent = others[0].reshape(-1) if len(others) == 1 else torch.cat([one.reshape(-1) for one in others])
        self._sent = sent.contiguous()  # kept until it has gone
        self._out = self._own.new_empty(len(others) * count)
        announce_exchange(role)
        # The group's own call: torch.distributed's wrapper of it costs host time.
        self._work = group.alltoall_base(self._out, self._sent, splits, splits, dist.AllToAllOptions())

    def wait(self) -> list[Tensor]:
        """What came, by rank."""
        self._work.wait()
        del self._sent
        shape = self._own.shape
        parts = [self._out.view(shape)] if self._count == 1 else [*self._out.view(self._count, *shape)]
        parts.insert(self._rank, self._own)
        return parts

    def sum(self) -> Tensor:
        """The sum of what came and its own, the same bits on all ranks; more than two 16-bit parts are added in float32."""
        first, second, *others = self.wait()
        if not others:
            return (first if self._rank else second).add_(self._own)  # what came
        kind = torch.promote_types(first.dtype, torch.float32) if first.is_floating_point() else first.dtype
        total = first.to(kind) + second
        for part in others:
            total += part
        return total.to(first.dtype).contiguous()


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``x`` over the group, in a new tensor. Not differentiable.

    Where it is made of exchanges, ranks sum the same parts in the same order: their results are equal to the last bit.
    """
    return PendingAllReduce(x, group, async_op=False).wait()


class PendingAllReduce:
    """A sum over the group under way; :meth:`wait` returns it, in a new tensor."""

    def __init__(self, x: Tensor, group: ProcessGroup, async_op: bool) -> None:
        self._group, self._shape, size = group, x.shape, group.size()
        self._in_parts, self._at_once = _exchanges(x, group), size == 2 or x.nbytes <= _AT_ONCE
        if not self._in_parts:
            self._out = x.detach().clone(memory_format=torch.contiguous_format)
            self._work = dist.all_reduce(self._out, group=group, async_op=async_op)
            return
        if self._at_once:
            self._exchange = _Exchange([x.detach()] * size, group, async_op, ExchangeRole.ALL_REDUCE)
        else:
            flat = x.detach().reshape(-1)
            chunks = _pad(flat, 0, shard_length(len(flat), size) * size).chunk(size)
            self._exchange = _Exchange(chunks, group, async_op, ExchangeRole.ALL_REDUCE_SCATTER)

    def wait(self) -> Tensor:
        """The sum."""
        if not self._in_parts:
            if self._work is not None:
                self._work.wait()
            return self._out
        summed = self._exchange.sum()
        if self._at_once:
            return summed
        copies = [summed] * self._group.size()
        whole = torch.cat(_Exchange(copies, self._group, async_op=False, role=ExchangeRole.ALL_REDUCE_GATHER).wait())
        return whole[: self._shape.numel()].view(self._shape)


class PendingGather:
    """An all-gather along ``dim`` under way; :meth:`wait` returns the whole tensor."""

    def __init__(self, x: Tensor, dim: int, group: ProcessGroup, length: int | None, async_op: bool) -> None:
        self._size, self._shape = group.size(), x.shape
        self._dim, self._length = dim % x.ndim, length
        self._in_parts = _exchanges(x, group)
        if self._in_parts:
            self._exchange = _Exchange([x.detach()] * self._size, group, async_op, ExchangeRole.ALL_GATHER)
            return
        self._out = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        # Kept until the collective is done: the backend reads it meanwhile.
        self._input = x.detach().contiguous()
        self._work = dist.all_gather_single(self._out, self._input, group=group, async_op=async_op)

    def wait(self) -> Tensor:
        """The gathered tensor, trimmed to the true length."""
        dim = self._dim
        if self._in_parts:
            out = torch.cat(self._exchange.wait(), dim)
            if self._length == out.shape[dim]:
                return out
        else:
            if self._work is not None:
                self._work.wait()
            out = self._out
            if dim:
                # The collective stacks ranks along dim 0; the sequence may lie elsewhere.
                out = out.view(self._size, *self._shape).movedim(0, dim).flatten(dim, dim + 1)
        if self._length is not None and self._length != out.shape[dim]:
            out = out.narrow(dim, 0, self._length)
        return out.contiguous()


class PendingReduceScatter:
    """A reduce-scatter along ``dim`` under way; :meth:`wait` returns this rank's shard of the sum."""

    def __init__(self, x: Tensor, dim: int, group: ProcessGroup, async_op: bool) -> None:
        size, dim = group.size(), dim % x.ndim
        chunk = shard_length(x.shape[dim], size)
        x = _pad(x.detach(), dim, chunk * size)
        self._in_parts = _exchanges(x, group)
        if self._in_parts:
            self._exchange = _Exchange(x.chunk(size, dim), group, async_op, ExchangeRole.REDUCE_SCATTER)
            return
        stacked = x.unflatten(dim, (size, chunk)).movedim(dim, 0).contiguous()
        self._shape = stacked.shape[1:]
        self._input = stacked.flatten(0, 1)
        self._out = x.new_empty(self._input.shape[0] // size, *self._input.shape[1:])
        self._work = dist.reduce_scatter_single(self._out, self._input, group=group, async_op=async_op)

    def wait(self) -> Tensor:
        """This rank's shard."""
        if self._in_parts:
            return self._exchange.sum()
        if self._work is not None:
            self._work.wait()
        return self._out.view(self._shape)


def all_gather(x: Tensor, dim: int, group: ProcessGroup, length: int | None = None) -> Tensor:
    """All shards along ``dim``, trimmed to ``length``, in a new tensor. Not differentiable."""
    return PendingGather(x, dim, group, length, async_op=False).wait()


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard along ``dim`` of the sum over the group, zero-padded. Not differentiable."""
    return PendingReduceScatter(x, dim, group, async_op=False).wait()


def split(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard of a whole tensor along ``dim``, zero-padded. Not differentiable."""
    size = group.size()
    chunk = shard_length(x.shape[dim], size)
    start = min(group.rank() * chunk, x.shape[dim])
    stop = min(start + chunk, x.shape[dim])
    piece = x.detach().narrow(dim, start, stop - start)
    return _pad(piece, dim, chunk).clone(memory_format=torch.contiguous_format)


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
