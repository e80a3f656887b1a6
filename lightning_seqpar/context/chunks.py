"""Which positions of a sequence each rank of an axis holds, and how parts become whole, and whole sequences parts.

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
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.async_ops import all_gather, all_reduce, pad, reduce_scatter, with_memory
from lightning_seqpar.distributed.collectives import copy_to_tensor_parallel_region, passes_none
from lightning_seqpar.layout.param_layout import Shard

Ranges = tuple[tuple[int, int], ...]
"""Positions that one rank holds, as (start, stop) of each run, in the order in which it holds them."""


def contiguous(length: int, size: int) -> tuple[Ranges, ...]:
    """Runs of positions in the ranks' order, whose lengths differ by at most one.

    >>> contiguous(7, 2)
    (((0, 4),), ((4, 7),))
    """
    edges = [rank * (length // size) + min(rank, length % size) for rank in range(size + 1)]
    return tuple(((edges[rank], edges[rank + 1]),) for rank in range(size))


def zigzag(length: int, size: int) -> tuple[Ranges, ...]:
    """Two runs for each rank, one from either end, so that causal attention takes every rank equally long (arXiv 2411.01783).

    >>> zigzag(8, 2)
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """
    halves = [runs[0] for runs in contiguous(length, 2 * size)]
    return tuple((halves[rank], halves[2 * size - 1 - rank]) for rank in range(size))


def padded(length: int, size: int) -> tuple[Ranges, ...]:
    """Runs of ``ceil(length / size)`` positions in the ranks' order, of which the last ranks hold what is left, or nothing.

    >>> padded(7, 2)
    (((0, 4),), ((4, 7),))
    >>> padded(3, 4)
    (((0, 1),), ((1, 2),), ((2, 3),), ((3, 3),))
    """
    return Shard.by_vocabulary(length, size).ranges


@dataclass(frozen=True, eq=False)
class Chunks:
    """How a sequence of ``length`` positions is dealt out over the ranks of an axis.

    Every rank holds its positions in their order in ``ranges``. Ranks may hold different numbers of them, and none at all.
    """

    group: ProcessGroup
    length: int
    ranges: tuple[Ranges, ...]  # of each rank
    method: str = "auto"  # how attention between the ranks is computed (the field cp_method)
    # Over cp every rank differentiates a loss of its own, and the mean of all ranks' gradients is due; over tp the loss is one,
    # and what is whole has the same gradient on all ranks.
    axis: Literal["cp", "tp"] = "cp"
    _indices: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def rank(self) -> int:
        """This rank in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranges)

    @property
    def losses(self) -> int:
        """Of how many ranks' losses the gradient of a part is the sum."""
        return self.size if self.axis == "cp" else 1

    @property
    def shown(self) -> str:
        """How messages call the ranks."""
        return f"{self.axis}={self.size}"

    @property
    def off(self) -> str:
        """The setting by which no rank holds a part."""
        return "cp=1" if self.axis == "cp" else "sp=False"

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.ranges)

    @property
    def local_length(self) -> int:
        """How many positions this rank holds."""
        return self.counts[self.rank]

    @cached_property
    def is_even(self) -> bool:
        """Whether all ranks hold equally many positions, one run each, in the ranks' order: then no index is needed."""
        if len(set(self.counts)) > 1 or any(len(runs) != 1 for runs in self.ranges):
            return False
        return all(runs[0][0] == rank * self.counts[0] for rank, runs in enumerate(self.ranges))

    def same(self, other: Chunks) -> bool:
        """Whether both deal out the same positions alike."""
        return self is other or (self.ranges == other.ranges and self.group is other.group)

    def positions(self, device: torch.device) -> Tensor:
        """The positions that this rank holds, ``[s/cp]``, as int64."""
        return self._cached("positions", device, lambda: self._held[self.rank])

    def order(self, device: torch.device, *, is_padded: bool = False) -> Tensor:
        """Where each position of the whole lies among what all ranks hold, ``[s]``, of which each may be padded to the longest."""

        def places() -> list[int]:
            found, longest, before = [0] * self.length, max(self.counts), 0
            for rank, held in enumerate(self._held):
                for number, at in enumerate(held):
                    found[at] = (rank * longest if is_padded else before) + number
                before += len(held)
            return found

        return self._cached(f"order {is_padded}", device, places)

    @property
    def _held(self) -> list[list[int]]:
        """Each rank's positions, in the order in which it holds them."""
        return [[at for run in runs for at in range(*run)] for runs in self.ranges]

    def _cached(self, what: str, device: torch.device, make: Callable[[], list[int]]) -> Tensor:
        key = what, device
        if key not in self._indices:
            self._indices[key] = torch.tensor(make(), dtype=torch.int64).to(device, non_blocking=True)
        return self._indices[key]

    def own(self, x: Tensor, dim: int, before: int = 1, behind: int = 1, *, rank: int | None = None) -> Tensor:
        """A rank's positions (this one's for None) of a whole tensor: ``[b, s, h]`` → ``[b, s/cp, h]`` for ``dim=1``.

        ``before`` and ``behind`` are the sizes of what was flattened into ``dim`` in front of the sequence and behind it.
        """
        runs = self.ranges[self.rank if rank is None else rank]
        if before > 1 or behind > 1:
            split = x.unflatten(dim, (before, self.length, behind))
            return self.own(split, dim + 1, rank=rank).flatten(dim, dim + 2)
        if len(runs) == 1:
            return x.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)

    def sliced(self, start: int, stop: int) -> Chunks:
        """The chunks of ``whole[start:stop]``, of which each rank keeps what it holds of the whole: none of it is an empty run."""

        def kept(runs: Ranges) -> Ranges:
            inside = [(max(first, start), min(last, stop)) for first, last in runs if first < stop and last > start]
            return tuple((first - start, last - start) for first, last in inside) or ((0, 0),)

        return Chunks(self.group, stop - start, tuple(map(kept, self.ranges)), self.method, self.axis)

    def held_between(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Of this rank's positions those in ``start`` to ``stop`` of the whole, as runs of local indices."""
        found, at = [], 0
        for first, last in self.ranges[self.rank]:
            low, high = max(first, start), min(last, stop)
            if low < high:
                found.append((at + low - first, at + high - first))
            at += last - first
        return found


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
