"""Which positions of a sequence each rank of an axis holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.layout.shard import Shard

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
