"""Collectives that a caller may start, compute under, and wait for; and the same as plain functions.

None of them is differentiable: :mod:`~lightning_seqpar.distributed.collectives` makes the autograd pairs of them. Each
``Pending`` class starts its collective in ``__init__`` and returns the result, a new tensor, from ``wait``. Where a backend
is faster with something else than its own collective, a module about that backend
(:mod:`~lightning_seqpar.distributed.gloo`) holds it, and the class calls that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from lightning_seqpar.distributed.gloo import Exchange, end_sum, start_sum, uses_exchanges
from lightning_seqpar.distributed.padding import pad, shard_length, with_memory


def _options(kind: type[Any]) -> tuple[Any, Any]:
    """The options of a collective: waited for, and under way. They are made once, since making them takes a microsecond."""
    waited_for, under_way = kind(), kind()
    waited_for.asyncOp, under_way.asyncOp = False, True
    return waited_for, under_way


_ALL_GATHER = _options(AllgatherOptions)
_ALL_REDUCE = _options(dist.AllreduceOptions)
_REDUCE_SCATTER = _options(dist.ReduceScatterOptions)


def _started(work: Work | None, async_op: bool) -> Work | None:
    """What to wait for later; where nothing runs under the collective, it is waited for here."""
    if not async_op and work is not None:
        work.wait()
    return work if async_op else None


def _sent(x: Tensor) -> Tensor:
    """``x`` as a backend takes it: complex numbers as pairs."""
    return torch.view_as_real(x) if x.is_complex() else x


class PendingAllReduce:
    """A sum of tensors of any shape over the group under way; :meth:`wait` returns it, in a new tensor."""

    def __init__(self, x: Tensor, group: ProcessGroup, async_op: bool) -> None:
        x = with_memory(x)
        self._shape, self._group = x.shape, group
        self._exchange = start_sum(x, group, async_op) if uses_exchanges(x, group) else None
        if self._exchange is None:
            self._out = x.clone(memory_format=torch.contiguous_format)
            self._work = _started(group.allreduce([_sent(self._out)], _ALL_REDUCE[async_op]), async_op)

    def wait(self) -> Tensor:
        """Wait for the sum and return it."""
        if self._exchange is not None:
            return end_sum(self._exchange, self._shape, self._group)
        if self._work is not None:
            self._work.wait()
        return self._out


class PendingGather:
    """An all-gather along ``dim`` under way; :meth:`wait` returns the gathered tensor.

    Args:
        x: this rank's shard, ``[b, ceil(s/tp), h]`` for ``dim=1``; all ranks' have one shape.
        dim: the dim along which shards follow each other, 0 or more.
        length: the true length ``s`` of ``dim``, to which the result is trimmed; None for all that was gathered.
        flat: whether the first two dims of the result are flattened into one.
    """

    def __init__(
        self, x: Tensor, dim: int, group: ProcessGroup, length: int | None, async_op: bool, flat: bool = False
    ) -> None:
        self._dim, self._length, self._flat = dim, length, flat
        if x._is_zerotensor():
            x = x.clone()  # the gradient of a step function is a tensor of zeros that has no memory to send
        size, shape = group.size(), x.shape
        self._exchange: Exchange | None = None
        if x.is_cpu and uses_exchanges(x, group):
            self._exchange = Exchange([x] * size, group, async_op, ("all_gather", x.nbytes))
            return
        # Kept until the collective is done: the backend reads it meanwhile.
        self._input = x.contiguous()
        # The collective stacks ranks along dim 0. Where nothing lies in front of the sequence (a batch of one), that is its order.
        self._stacked = None if shape[:dim].numel() == 1 else (size, *shape)
        if self._stacked is None:
            self._out = x.new_empty(*shape[:dim], size * shape[dim], *shape[dim + 1 :])
            into = self._out.view(size * shape[0], *shape[1:]) if dim else self._out
        else:
            self._out = into = x.new_empty(size * shape[0], *shape[1:])
        # The group's own call, here and below: torch.distributed's wrapper of it costs host time.
        work = group.all_gather_single(_sent(into), _sent(self._input), _ALL_GATHER[async_op])
        self._work = _started(work, async_op)

    def wait(self) -> Tensor:
        """Wait for the shards and return them as one tensor, trimmed to the true length: ``[b, s, h]``."""
        dim = self._dim
        if self._exchange is not None:
            out = torch.cat(self._exchange.wait(), dim)
        else:
            if self._work is not None:
                self._work.wait()
            out = self._out
            if self._stacked is not None:
                out = out.view(self._stacked).movedim(0, dim).flatten(dim, dim + 1).contiguous()
        if self._length is not None and self._length != out.shape[dim]:
            out = out.narrow(dim, 0, self._length).contiguous()
        return out.flatten(0, 1) if self._flat else out


class PendingReduceScatter:
    """A reduce-scatter along ``dim`` under way; :meth:`wait` returns this rank's shard of the sum.

    Args:
        x: this rank's addend, ``[b, s, h]`` for ``dim=1``; zeros are added behind ``s`` until it divides by the group.
        dim: the dim along which the sum is divided, 0 or more.
        flat: whether the first two dims of the result are flattened into one.
    """

    def __init__(self, x: Tensor, dim: int, group: ProcessGroup, async_op: bool, flat: bool = False) -> None:
        size, shape, self._flat = group.size(), x.shape, flat
        chunk = -(-shape[dim] // size)
        if chunk * size != shape[dim]:
            x = pad(x, dim, chunk * size)
        if x._is_zerotensor():
            x = x.clone()
        self._exchange: Exchange | None = None
        if x.is_cpu and uses_exchanges(x, group):
            self._exchange = Exchange(x.chunk(size, dim), group, async_op, ("reduce_scatter", x.nbytes))
            return
        self._out = out = x.new_empty(*shape[:dim], chunk, *shape[dim + 1 :])
        if dim == 0:
            self._input = x.contiguous()
        elif shape[:dim].numel() == 1:  # the sequence is the first dim but for ones
            self._input, out = x.contiguous().flatten(0, dim), out.flatten(0, dim)
        else:
            stacked = x.reshape(*shape[:dim], size, chunk, *shape[dim + 1 :]).movedim(dim, 0).contiguous()
            self._input = stacked.flatten(0, 1)
        work = group.reduce_scatter_single(_sent(out), _sent(self._input), _REDUCE_SCATTER[async_op])
        self._work = _started(work, async_op)

    def wait(self) -> Tensor:
        """Wait for the sum and return this rank's shard of it, ``[b, ceil(s/tp), h]``."""
        if self._exchange is not None:
            out = self._exchange.sum()
        else:
            if self._work is not None:
                self._work.wait()
            out = self._out
        return out.flatten(0, 1) if self._flat else out


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``x`` over the group, in a new tensor of the same shape. Not differentiable.

    Where it is made of exchanges, all ranks add the same tensors in the same order, so their results are equal to the last
    bit.
    """
    if group.size() == 1:
        return _own(x)
    return PendingAllReduce(x.detach(), group, async_op=False).wait()


def all_gather(x: Tensor, dim: int, group: ProcessGroup, length: int | None = None) -> Tensor:
    """All shards along ``dim``, trimmed to ``length``, in a new tensor. Not differentiable.

    ``[b, ceil(s/tp), h]`` → ``[b, s, h]`` for ``dim=1`` and ``length=s``.
    """
    if group.size() == 1:
        return _own(x if length is None else x.narrow(dim, 0, length))
    return PendingGather(x.detach(), dim % x.ndim, group, length, async_op=False).wait()


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard along ``dim`` of the sum over the group, zero-padded. Not differentiable.

    ``[b, s, h]`` → ``[b, ceil(s/tp), h]`` for ``dim=1``.
    """
    if group.size() == 1:
        return _own(x)
    return PendingReduceScatter(x.detach(), dim % x.ndim, group, async_op=False).wait()


def _own(x: Tensor) -> Tensor:
    """What a rank that is alone in its group gets of its own tensor: a new one, for which nothing is sent."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def split(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard of a whole tensor along ``dim``, zero-padded. Nothing is sent. Not differentiable.

    ``[b, s, h]`` → ``[b, ceil(s/tp), h]`` for ``dim=1``.
    """
    size = group.size()
    chunk = shard_length(x.shape[dim], size)
    start = min(group.rank() * chunk, x.shape[dim])
    stop = min(start + chunk, x.shape[dim])
    piece = x.detach().narrow(dim, start, stop - start)
    return pad(piece, dim, chunk).clone(memory_format=torch.contiguous_format)
