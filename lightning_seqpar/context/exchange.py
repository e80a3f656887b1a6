"""How parts of a sequence become whole, and whole sequences parts.

Over ``cp`` the convention of gradients is that of data parallelism: each rank differentiates a loss of its own, collectives have
their true adjoints, and the gradient of a parameter is the *mean* over the ranks of the axis. That is right for any mixture of work
on parts and work that every rank does alike, and no parameter has to be told from another.

Over ``tp`` the loss is one. What is whole is the same on all ranks and has the same, whole gradient (arXiv 2205.05198): so a whole
tensor that work on parts reads has the *sum* of the ranks' gradients (:func:`share`), and of the gradient of what was gathered, or
summed, each rank takes its own positions.

In the equations ``x_r`` is what rank ``r`` holds and ``dx_r`` its gradient.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.context.chunks import Chunks
from lightning_seqpar.distributed.async_ops import all_gather, all_reduce, reduce_scatter
from lightning_seqpar.distributed.collectives import copy_to_tensor_parallel_region, passes_none
from lightning_seqpar.distributed.padding import pad, with_memory


class _Enter(torch.autograd.Function):
    """Forward ``y_r = x[positions of r]``; input-grad ``dx = gather_r(dy_r)``, over cp a part of it, as the mean is due."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, chunks: Chunks) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.chunks = dim, chunks
        return chunks.own(x, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = gather_for_parts(grad, ctx.dim, ctx.chunks)
        return whole / ctx.chunks.losses if ctx.chunks.losses > 1 else whole, None, None


class _GatherAlike(torch.autograd.Function):
    """Forward ``y = gather_r(x_r)``; input-grad ``dx_r = dy[positions of r]``, as ``dy`` is whole and the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, chunks: Chunks) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.chunks = dim, chunks
        return _gathered(x, dim, chunks)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return enter(grad, ctx.dim, ctx.chunks), None, None


class _Gather(torch.autograd.Function):
    """Forward ``y = gather_r(x_r)``; input-grad ``dx_r = (sum over q of dy_q)[positions of r]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, chunks: Chunks) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.chunks = dim, chunks
        return _gathered(x, dim, chunks)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Reduce.apply(grad, ctx.dim, ctx.chunks), None, None  # type: ignore[no-untyped-call]


class _Reduce(torch.autograd.Function):
    """Forward ``y_r = (sum over q of x_q)[positions of r]``; input-grad ``dx_r = gather_q(dy_q)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, chunks: Chunks) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.chunks = dim, chunks
        return _reduced(x, dim, chunks)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad, ctx.dim, ctx.chunks), None, None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """Forward ``y = sum over r of x_r``; input-grad ``dx_r = dy``, which is whole and the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.chunks = chunks
        total = all_reduce(x, chunks.group)
        return total.clone() if total._is_view() else total  # whoever gets it may change it in place

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return share(grad, ctx.chunks), None


def _gathered(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """All ranks' positions in the order of the whole: ``[b, s/cp, h]`` → ``[b, s, h]`` for ``dim=1``."""
    if chunks.is_even:
        return all_gather(x, dim, chunks.group)
    stacked = all_gather(pad(x, dim, max(chunks.counts)), dim, chunks.group)
    return stacked.index_select(dim, chunks.order(x.device, is_padded=True))


def _reduced(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """This rank's positions of the sum over ranks: ``[b, s, h]`` → ``[b, s/cp, h]`` for ``dim=1``."""
    if chunks.is_even:
        return reduce_scatter(x, dim, chunks.group)
    shape = list(x.shape)
    shape[dim] = max(chunks.counts) * chunks.size
    stacked = x.new_zeros(shape).index_copy_(dim, chunks.order(x.device, is_padded=True), x.detach())
    return reduce_scatter(stacked, dim, chunks.group).narrow(dim, 0, chunks.local_length).contiguous()


def enter(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """This rank's positions of an activation that all ranks have: ``[b, s, h]`` → ``[b, s/cp, h]`` for ``dim=1``.

    Forward: nothing is sent. Backward: all-gather (over cp divided by its size), so that what lies in front has the same gradient
    on all ranks.
    """
    out: Tensor = _Enter.apply(x, dim, chunks)  # type: ignore[no-untyped-call]
    return out


def gather_positions(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """The whole of what ranks have parts of, for work that all ranks do alike: ``[b, s/cp, h]`` → ``[b, s, h]`` for ``dim=1``.

    Forward: all-gather. Backward: over cp a reduce-scatter, since each rank may do something else with the whole; over tp a slice.
    """
    function = _Gather if chunks.axis == "cp" else _GatherAlike
    out: Tensor = function.apply(x, dim, chunks)  # type: ignore[no-untyped-call]
    return out


def gather_for_parts(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """The whole of what ranks have parts of, for work of each rank on its own part: ``[b, s/tp, h]`` → ``[b, s, h]`` for ``dim=1``.

    Forward: all-gather. Backward: reduce-scatter.
    """
    out: Tensor = _Gather.apply(x, dim, chunks)  # type: ignore[no-untyped-call]
    return out


def share(x: Tensor, chunks: Chunks) -> Tensor:
    """A whole tensor on its way into work on parts, in the same shape.

    Forward: nothing is sent. Backward: over tp an all-reduce, since each rank's gradient tells of its own positions; over cp none.
    """
    if chunks.axis == "cp":
        return x
    return copy_to_tensor_parallel_region(x, chunks.group)


def sum_over_ranks(x: Tensor, chunks: Chunks) -> Tensor:
    """The sum of what every rank has computed of its positions, in the same shape.

    Forward: all-reduce. Backward: over cp an all-reduce; over tp nothing is sent.
    """
    summed = x if chunks.axis == "tp" else copy_to_tensor_parallel_region(x, chunks.group)
    out: Tensor = _Sum.apply(summed, chunks)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """Forward: an all-to-all, positions to heads or heads to positions; backward: the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks, to_heads: bool, joined: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.chunks, ctx.to_heads = chunks, to_heads
        return _to_heads(x.detach(), chunks) if to_heads else _to_positions(x.detach(), chunks, joined)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = heads_to_positions if ctx.to_heads else positions_to_heads
        return back(grad, ctx.chunks), None, None, None


def _to_heads(x: Tensor, chunks: Chunks) -> Tensor:
    """``[..., heads, s/cp, d]`` → ``[..., heads/cp, s, d]``."""
    size, counts, lead = chunks.size, chunks.counts, x.shape[:-3]
    heads, width = x.shape[-3] // size, x.shape[-1]
    sent = x.unflatten(-3, (size, heads)).movedim(-4, 0).contiguous()
    each = prod(lead) * heads * width
    received = _all_to_all(sent.flatten(), [each * chunks.local_length] * size, [each * n for n in counts], chunks)
    pieces = [
        part.view(*lead, heads, count, width)
        for part, count in zip(received.split([each * n for n in counts]), counts, strict=True)
    ]
    return _in_order(torch.cat(pieces, -2), chunks)


def _to_positions(x: Tensor, chunks: Chunks, joined: bool) -> Tensor:
    """``[..., heads/cp, s, d]`` → ``[..., heads, s/cp, d]``."""
    size, counts, lead = chunks.size, chunks.counts, x.shape[:-3]
    heads, width, own = x.shape[-3], x.shape[-1], chunks.local_length
    each = prod(lead) * heads * width
    pieces = [_of_rank(x, rank, chunks).flatten() for rank in range(size)]
    received = _all_to_all(torch.cat(pieces), [each * n for n in counts], [each * own] * size, chunks)
    parts = received.view(size, *lead, heads, own, width).movedim(0, -4)
    if joined:
        return parts.movedim(-2, -4).flatten(-3, -2).transpose(-3, -2)
    return parts.flatten(-4, -3)


def _all_to_all(sent: Tensor, out_sizes: list[int], in_sizes: list[int], chunks: Chunks) -> Tensor:
    """Numbers in a row, of which each rank gets a stretch from each; ``out_sizes`` leave this rank and ``in_sizes`` arrive."""
    sent = with_memory(sent)
    received = sent.new_empty(sum(in_sizes))
    dist.all_to_all_single(received, sent.contiguous(), in_sizes, out_sizes, group=chunks.group)
    return received


def _of_rank(x: Tensor, rank: int, chunks: Chunks) -> Tensor:
    """The positions of a rank, along dim -2."""
    runs = [x.narrow(-2, start, stop - start) for start, stop in chunks.ranges[rank]]
    return runs[0] if len(runs) == 1 else torch.cat(runs, -2)


def _in_order(x: Tensor, chunks: Chunks) -> Tensor:
    """What the ranks hold, one behind the other along dim -2, in the order of the whole."""
    if all(len(runs) == 1 for runs in chunks.ranges):
        return x
    return x.index_select(-2, chunks.order(x.device))


def positions_to_heads(x: Tensor, chunks: Chunks) -> Tensor:
    """All positions of this rank's heads: ``[..., heads, s/cp, d]`` → ``[..., heads/cp, s, d]``.

    Forward: all-to-all. Backward: all-to-all (:func:`heads_to_positions`).
    """
    out: Tensor = _Exchange.apply(x, chunks, True, False)  # type: ignore[no-untyped-call]
    return out


def heads_to_positions(x: Tensor, chunks: Chunks, *, joined: bool = False) -> Tensor:
    """This rank's positions of all heads: ``[..., heads/cp, s, d]`` → ``[..., heads, s/cp, d]``.

    Forward: all-to-all. Backward: all-to-all (:func:`positions_to_heads`).

    Args:
        x: all positions of this rank's heads.
        chunks: how the positions are dealt out.
        joined: whether the heads of a position lie next to each other in memory, so that they can be joined by a view.
    """
    out: Tensor = _Exchange.apply(x, chunks, False, joined)  # type: ignore[no-untyped-call]
    return out


class PassedOn:
    """A row of numbers on its way to the next rank of a ring, and one from the rank before on its way here.

    All ranks of the group make these in the same order. What has no numbers is not sent.

    Args:
        x: this rank's numbers, ``[n]``; they must not change before :meth:`wait`.
        count: how many come.
        chunks: of the group.
    """

    def __init__(self, x: Tensor, count: int, chunks: Chunks) -> None:
        rank, size, group = chunks.rank, chunks.size, chunks.group
        self._sent, self._out = x, x.new_empty(count)
        self._works: list[Any] = []
        if size == 1:
            self._out = x
            return
        calls = []
        if x.numel():
            calls.append(dist.P2POp(dist.isend, x, dist.get_global_rank(group, (rank + 1) % size), group))
        if count:
            calls.append(dist.P2POp(dist.irecv, self._out, dist.get_global_rank(group, (rank - 1) % size), group))
        if calls:
            self._works = dist.batch_isend_irecv(calls)

    def wait(self) -> Tensor:
        """Wait for both; returns what came, ``[count]``."""
        for work in self._works:
            work.wait()
        return self._out
