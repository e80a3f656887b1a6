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

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.context.chunks import Chunks
from lightning_seqpar.distributed.async_ops import all_gather, all_reduce, reduce_scatter
from lightning_seqpar.distributed.collectives import copy_to_tensor_parallel_region, passes_none
from lightning_seqpar.distributed.padding import pad, with_memory

_Way = Callable[[Tensor, int, Chunks], Tensor]


class _Between(torch.autograd.Function):
    """Forward ``run(x, dim, chunks)``; backward ``back(dy, dim, chunks)``, which is made of these functions as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, chunks: Chunks, run: _Way, back: _Way) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.chunks, ctx.back = dim, chunks, back
        return run(x, dim, chunks)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.dim, ctx.chunks), None, None, None, None


def _between(x: Tensor, dim: int, chunks: Chunks, run: _Way, back: _Way) -> Tensor:
    out: Tensor = _Between.apply(x, dim, chunks, run, back)  # type: ignore[no-untyped-call]
    return out


# ---- what is sent, without gradients ---------------------------------------------------------------------------


def _own(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    return chunks.own(x, dim).clone(memory_format=torch.contiguous_format)


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


def _summed(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    total = all_reduce(x, chunks.group)
    return total.clone() if total._is_view() else total  # whoever gets it may change it in place


# ---- pairs -----------------------------------------------------------------------------------------------------


def enter(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """This rank's positions of an activation that all ranks have: ``[b, s, h]`` → ``[b, s/cp, h]`` for ``dim=1``.

    Forward ``y_r = x[positions of r]``: nothing is sent. Backward ``dx = gather_r(dy_r)``, over cp divided by its size, as the mean
    is due: what lies in front has the same gradient on all ranks.
    """
    return _between(x, dim, chunks, _own, _leave)


def _leave(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """The gradient of what was whole in front of :func:`enter`."""
    whole = gather_for_parts(x, dim, chunks)
    return whole / chunks.losses if chunks.losses > 1 else whole


def gather_positions(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """The whole of what ranks have parts of, for work that all ranks do alike: ``[b, s/cp, h]`` → ``[b, s, h]`` for ``dim=1``.

    Forward ``y = gather_r(x_r)``. Backward: over cp a reduce-scatter, since each rank may do something else with the whole; over tp
    ``dx_r = dy[positions of r]``, as ``dy`` is the same on all ranks.
    """
    return _between(x, dim, chunks, _gathered, _reduce if chunks.axis == "cp" else enter)


def gather_for_parts(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """The whole of what ranks have parts of, for work of each rank on its own part: ``[b, s/tp, h]`` → ``[b, s, h]`` for ``dim=1``.

    Forward ``y = gather_r(x_r)``. Backward ``dx_r = (sum over q of dy_q)[positions of r]``.
    """
    return _between(x, dim, chunks, _gathered, _reduce)


def _reduce(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """Forward ``y_r = (sum over q of x_q)[positions of r]``. Backward ``dx_r = gather_q(dy_q)``."""
    return _between(x, dim, chunks, _reduced, gather_for_parts)


def share(x: Tensor, chunks: Chunks) -> Tensor:
    """A whole tensor on its way into work on parts, in the same shape.

    Forward: nothing is sent. Backward: over tp an all-reduce, since each rank's gradient tells of its own positions; over cp none.
    """
    return x if chunks.axis == "cp" else copy_to_tensor_parallel_region(x, chunks.group)


def sum_over_ranks(x: Tensor, chunks: Chunks) -> Tensor:
    """The sum of what every rank has computed of its positions. Forward: all-reduce. Backward: over cp too; over tp nothing."""
    summed = x if chunks.axis == "tp" else copy_to_tensor_parallel_region(x, chunks.group)
    return _between(summed, 0, chunks, _summed, lambda grad, dim, chunks: share(grad, chunks))


# ---- heads and positions ---------------------------------------------------------------------------------------


def _to_heads(x: Tensor, dim: int, chunks: Chunks) -> Tensor:
    """``[..., heads, s/cp, d]`` → ``[..., heads/cp, s, d]``."""
    size, counts, lead = chunks.size, chunks.counts, x.shape[:-3]
    heads, width = x.shape[-3] // size, x.shape[-1]
    sent = x.detach().unflatten(-3, (size, heads)).movedim(-4, 0).contiguous()
    each = prod(lead) * heads * width
    received = _all_to_all(sent.flatten(), [each * chunks.local_length] * size, [each * n for n in counts], chunks)
    pieces = [
        part.view(*lead, heads, count, width)
        for part, count in zip(received.split([each * n for n in counts]), counts, strict=True)
    ]
    return _in_order(torch.cat(pieces, -2), chunks)


def _to_positions(x: Tensor, dim: int, chunks: Chunks, *, joined: bool = False) -> Tensor:
    """``[..., heads/cp, s, d]`` → ``[..., heads, s/cp, d]``."""
    size, counts, lead = chunks.size, chunks.counts, x.shape[:-3]
    heads, width, own = x.shape[-3], x.shape[-1], chunks.local_length
    each = prod(lead) * heads * width
    pieces = [chunks.own(x.detach(), -2, rank=rank).flatten() for rank in range(size)]
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


def _in_order(x: Tensor, chunks: Chunks) -> Tensor:
    """What the ranks hold, one behind the other along dim -2, in the order of the whole."""
    if all(len(runs) == 1 for runs in chunks.ranges):
        return x
    return x.index_select(-2, chunks.order(x.device))


def positions_to_heads(x: Tensor, chunks: Chunks) -> Tensor:
    """All positions of this rank's heads: ``[..., heads, s/cp, d]`` → ``[..., heads/cp, s, d]``.

    Forward: all-to-all. Backward: all-to-all (:func:`heads_to_positions`).
    """
    return _between(x, -2, chunks, _to_heads, lambda grad, dim, chunks: heads_to_positions(grad, chunks))


def heads_to_positions(x: Tensor, chunks: Chunks, *, joined: bool = False) -> Tensor:
    """This rank's positions of all heads: ``[..., heads/cp, s, d]`` → ``[..., heads, s/cp, d]``.

    Forward: all-to-all. Backward: all-to-all (:func:`positions_to_heads`). With ``joined`` the heads of a position lie next to each
    other in memory, so that they can be joined by a view.
    """
    run = functools.partial(_to_positions, joined=joined)
    return _between(x, -2, chunks, run, lambda grad, dim, chunks: positions_to_heads(grad, chunks))


def pass_on(x: Tensor, count: int, chunks: Chunks) -> Callable[[], Tensor]:
    """Begin to send a row of numbers to the next rank of a ring, and to receive one of ``count`` numbers from the rank before.

    All ranks of the group do so in the same order. What has no numbers is not sent. Returns what waits for both, and then gives
    what came, ``[count]``; until then ``x`` must not change.
    """
    rank, size, group = chunks.rank, chunks.size, chunks.group
    received, calls = x.new_empty(count), []
    if size > 1 and x.numel():
        calls.append(dist.P2POp(dist.isend, x, dist.get_global_rank(group, (rank + 1) % size), group))
    if size > 1 and count:
        calls.append(dist.P2POp(dist.irecv, received, dist.get_global_rank(group, (rank - 1) % size), group))
    works = dist.batch_isend_irecv(calls) if calls else []

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received if size > 1 else x

    return wait
