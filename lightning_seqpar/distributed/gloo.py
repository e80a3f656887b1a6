"""What is special to the gloo backend: collectives that are made of exchanges.

An exchange (all-to-all) gives each rank of a group a tensor and receives one from each. Over gloo it takes a half to a
third of the time of gloo's own gather, reduce-scatter and all-reduce, at every size. So there an all-gather is an
exchange in which every rank gives its shard to all, a reduce-scatter one in which it gives each rank that rank's chunk,
and an all-reduce the one after the other. A sum is then made by each rank itself, in the order of the ranks.

:mod:`~lightning_seqpar.distributed.async_ops` asks :func:`uses_exchanges`; nothing else knows of exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.padding import pad, shard_length

_AT_ONCE = 2**18
"""Bytes up to which every rank gets every other's full tensor to sum it, in one exchange instead of two."""


def uses_exchanges(x: Tensor, group: ProcessGroup) -> bool:
    """Whether collectives of this tensor over this group are made of exchanges."""
    return x.is_cpu and not x.is_complex() and group._get_backend(x.device).name() == "gloo"


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


def start_sum(x: Tensor, group: ProcessGroup, async_op: bool) -> Exchange:
    """Start a sum of full tensors, or for large ones the exchange that leaves each rank a chunk of the sum."""
    size = group.size()
    if size == 2 or x.nbytes <= _AT_ONCE:
        return Exchange([x] * size, group, async_op, ("all_reduce", x.nbytes))
    flat = pad(x.reshape(-1), 0, shard_length(x.numel(), size) * size)
    return Exchange(flat.chunk(size), group, async_op, ("all_reduce", flat.nbytes))


def end_sum(exchange: Exchange, shape: torch.Size, group: ProcessGroup) -> Tensor:
    """Wait for what :func:`start_sum` started and return the sum; the second exchange of two is made here."""
    summed = exchange.sum()
    if summed.shape == shape:
        return summed
    gathering = Exchange([summed] * group.size(), group, async_op=False, counts_as=("", 0))
    return torch.cat(gathering.wait())[: shape.numel()].view(shape)
