"""Collectives that a caller may start, compute under, and wait for; and the same as plain functions.

None of them is differentiable: :mod:`~lightning_seqpar.distributed.collectives` makes the autograd pairs of them. Each
``Pending`` class starts its collective in ``__init__`` and returns the result, a new tensor, from ``wait``.

Over gloo an exchange (all-to-all), which gives each rank of a group a tensor and receives one from each, takes a half to a third
of the time of gloo's own gather, reduce-scatter and all-reduce, at every size. So there an all-gather is an exchange in which
every rank gives its shard to all, a reduce-scatter one in which it gives each rank that rank's chunk, and an all-reduce the one
after the other. A sum is then made by each rank itself, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from lightning_seqpar.releases import ALL_GATHER, FAKE_HAS_NAME, REDUCE_SCATTER


def shard_length(length: int, size: int) -> int:
    """Positions in one shard of a sequence of ``length`` positions over ``size`` ranks, padding included."""
    return -(-length // size)


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """Append zeros to ``x`` along ``dim`` until it has ``length`` there; returns ``x`` itself if it has."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def with_memory(x: Tensor) -> Tensor:
    """``x``, in memory where it has none: the gradient of a step function is a tensor of zeros that nothing can send."""
    return x.clone() if x._is_zerotensor() else x


_AT_ONCE = 2**18
"""Bytes up to which every rank gets every other's full tensor to sum it, in one exchange instead of two."""


def uses_exchanges(x: Tensor, group: ProcessGroup) -> bool:
    """Whether collectives of this tensor over this group are made of exchanges."""
    try:
        return x.is_cpu and not x.is_complex() and group._get_backend(x.device).name() == "gloo"
    except RuntimeError:
        if FAKE_HAS_NAME:
            raise
        return False


class Exchange:
    """An exchange under way: a tensor for each rank of the group, and one from each, all of one shape.

    A ``Traffic`` counts it as ``counts_as``: the name of the collective that it makes and the bytes that are given to that.
    """

    def __init__(self, given: Sequence[Tensor], group: ProcessGroup, async_op: bool, counts_as: tuple[str, int]) -> None:
        self._rank = group.rank()
        self._own, *others = given[self._rank], *given[: self._rank], *given[self._rank + 1 :]
        if async_op and self._own.nbytes < self._own.untyped_storage().nbytes():
            self._own = self._own.clone()  # the caller may free the tensor that this is a view of
        count, self._count = self._own.numel(), len(others)
        splits = [count] * len(given)
        splits[self._rank] = 0  # this rank's own tensor is not sent
        sent = others[0].reshape(-1) if len(others) == 1 else torch.cat([other.reshape(-1) for other in others])
        self._sent = sent.contiguous()  # kept until the backend has sent it
        self._sent.counts_as = counts_as  # type: ignore[attr-defined]
        self._out = self._own.new_empty(len(others) * count)
        # The group's own call: torch.distributed's wrapper of it costs host time.
        self._work = group.alltoall_base(self._out, self._sent, splits, splits, dist.AllToAllOptions())

    def wait(self) -> list[Tensor]:
        """Wait for the exchange; returns the tensor from each rank, by rank, this rank's own among them."""
        self._work.wait()
        del self._sent
        shape = self._own.shape
        parts = [self._out.view(shape)] if self._count == 1 else [*self._out.view(self._count, *shape)]
        parts.insert(self._rank, self._own)
        return parts

    def sum(self) -> Tensor:
        """Wait for the exchange; returns the sum of the tensors of all ranks, added in the order of the ranks.

        It has the same bits on every rank that sums the same tensors. More than two 16-bit tensors are added in float32.
        """
        first, second, *others = self.wait()
        if not others:
            received = first if self._rank else second
            return received.add_(self._own)
        dtype = torch.promote_types(first.dtype, torch.float32) if first.is_floating_point() else first.dtype
        total = first.to(dtype) + second
        for part in others:
            total += part
        return total.to(first.dtype).contiguous()


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
        x, size = with_memory(x), group.size()
        self._shape, self._group = x.shape, group
        self._exchange: Exchange | None = None
        if not uses_exchanges(x, group):
            self._out = x.clone(memory_format=torch.contiguous_format)
            self._work = _started(group.allreduce([_sent(self._out)], _ALL_REDUCE[async_op]), async_op)
        elif size == 2 or x.nbytes <= _AT_ONCE:
            self._exchange = Exchange([x] * size, group, async_op, ("all_reduce", x.nbytes))
        else:  # which leaves each rank a chunk of the sum
            flat = pad(x.reshape(-1), 0, shard_length(x.numel(), size) * size)
            self._exchange = Exchange(flat.chunk(size), group, async_op, ("all_reduce", flat.nbytes))

    def wait(self) -> Tensor:
        """Wait for the sum and return it; the second exchange of two is made here."""
        if self._exchange is not None:
            summed = self._exchange.sum()
            if summed.shape == self._shape:
                return summed
            gathering = Exchange([summed] * self._group.size(), self._group, async_op=False, counts_as=("", 0))
            return torch.cat(gathering.wait())[: self._shape.numel()].view(self._shape)
        if self._work is not None:
            self._work.wait()
        return self._out


class PendingGather:
    """An all-gather along ``dim``, 0 or more, under way; :meth:`wait` returns the gathered tensor.

    ``x`` is this rank's shard, ``[b, ceil(s/tp), h]`` for ``dim=1``, of one shape on all ranks. The result is trimmed to the true
    ``length`` (None for all), and its first two dims become one if it is to be ``flat``.
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
        work = getattr(group, ALL_GATHER)(_sent(into), _sent(self._input), _ALL_GATHER[async_op])
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
    """A reduce-scatter along ``dim``, 0 or more, under way; :meth:`wait` returns this rank's shard of the sum, as above.

    ``x`` is this rank's addend, ``[b, s, h]`` for ``dim=1``; zeros are added behind ``s`` until it divides by the group.
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
        work = getattr(group, REDUCE_SCATTER)(_sent(out), _sent(self._input), _REDUCE_SCATTER[async_op])
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


def all_reduce_max(x: Tensor, group: ProcessGroup) -> Tensor:
    """The largest of each of some sizes (0 or more) over the group; NaN where one is NaN, or infinite. Not differentiable."""
    out = x.nan_to_num(torch.inf, torch.inf)  # which of two numbers is larger where one is NaN, backends do not say
    dist.all_reduce(out, dist.ReduceOp.MAX, group)
    return torch.where(out < torch.inf, out, torch.nan)


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
