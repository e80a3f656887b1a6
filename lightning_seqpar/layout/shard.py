"""Shards: which indices of one dim of a tensor each tensor-parallel rank has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_seqpar.user_input import sizes_that_divide


@dataclass(frozen=True)
class Shard:
    """How one dim of a tensor is split over the tensor-parallel ranks.

    A rank may have several ranges (its heads of ``[q|k|v]``), and several ranks may have the same indices (a kv head that
    their query heads share).
    """

    dim: int
    length: int  # of the whole
    ranges: tuple[tuple[tuple[int, int], ...], ...]  # of each rank, (start, stop) in the order in which it stores them
    padded: int | None = None  # the length on every rank, where shorter parts end in zeros; None for no padding

    @classmethod
    def by_vocabulary(cls, length: int, size: int) -> Shard:
        """Split dim 0 into ``size`` parts of ``ceil(length / size)`` rows; the last ones are padded if it does not divide."""
        part = -(-length // size)
        ranges = tuple(((min(rank * part, length), min((rank + 1) * part, length)),) for rank in range(size))
        return cls(0, length, ranges, part)

    @classmethod
    def by_segments(cls, dim: int, segments: Sequence[int], units: Sequence[int], size: int, name: str) -> Shard:
        """Splits every segment of a fused dim by its units, in order; for example ``[q|k|v]`` by heads.

        Of fewer units than ranks, ``size / units`` neighbouring ranks have the same one, as the query heads of a group use
        one kv head. With 4 query heads, 2 kv heads, 2 features a head and ``size=4``, segments ``[8, 4, 4]`` and units
        ``[4, 2, 2]`` give rank 1 the ranges ``(2, 4)``, ``(8, 10)`` and ``(12, 14)``, of which rank 0 has the last two too.

        What does not divide is a ValueError, which names the module ``name`` and the sizes that work.
        """
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        start = 0
        for length, count in zip(segments, units, strict=True):
            if length % count:
                raise ValueError(
                    f"{name}: a segment of {length} features can't be made of {count} units; {count} must divide it"
                )
            if count % size and size % count:
                works = sizes_that_divide("tp", count)
                raise ValueError(f"{name}: {count} units (heads or features) do not divide by tp={size}; {works}")
            parts = min(count, size)
            part = length // parts
            for rank in range(size):
                at = start + rank * parts // size * part
                ranges[rank].append((at, at + part))
            start += length
        if all(own == ranges[0] for own in ranges):
            raise ValueError(
                f"{name}: with {max(units)} unit(s) every one of tp={size} ranks would hold all of it; leave it whole"
            )
        return cls(dim, start, tuple(tuple(own) for own in ranges))

    @cached_property
    def holders(self) -> Tensor:
        """How many ranks have each index: int64 ``[length]``."""
        count = torch.zeros(self.length, dtype=torch.int64)
        for own in self.ranges:
            for start, stop in own:
                count[start:stop] += 1
        return count

    @property
    def shared_length(self) -> int:
        """How many indices several ranks have; no tensor is made, so that it can be asked where tensors have no numbers."""
        held = Counter(pair for own in self.ranges for pair in own)  # of two ranks the same, or without a common index
        return sum(stop - start for (start, stop), count in held.items() if count > 1)

    @property
    def has_shared(self) -> bool:
        """Whether several ranks have the same indices."""
        return sum(stop - start for own in self.ranges for start, stop in own) > self.length

    def indices(self, rank: int) -> Tensor:
        """The global indices that ``rank`` has, in the order in which it stores them: ``[local length]``, without padding."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges[rank]])

    def is_first_holder(self, rank: int) -> Tensor:
        """For each index that ``rank`` has, whether no rank before it has it too: bool ``[local length]``, without padding."""
        mine = self.indices(rank)
        before = torch.zeros(self.length, dtype=torch.bool)
        for other in range(rank):
            before[self.indices(other)] = True
        return ~before[mine]

    def local_length(self, rank: int) -> int:
        """Length of the dim on ``rank``, with padding."""
        if self.padded is not None:
            return self.padded
        return sum(stop - start for start, stop in self.ranges[rank])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Takes the part of a whole tensor that ``rank`` has, padded, in memory of its own."""
        if whole.shape[self.dim] != self.length:
            raise ValueError(f"expected {self.length} at dim {self.dim}, got a tensor of shape {list(whole.shape)}")
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return self.join(pieces).clone(memory_format=torch.contiguous_format)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """A rank's part from the pieces of its ranges, in order; padded with zeros to :attr:`padded`, if that is set."""
        missing = 0 if self.padded is None else self.padded - sum(piece.shape[self.dim] for piece in pieces)
        shape = list(pieces[0].shape)
        shape[self.dim] = missing
        return torch.cat([*pieces, pieces[0].new_zeros(shape)] if missing else list(pieces), self.dim)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks, in order; padding is left out."""
        shape = list(parts[0].shape)
        shape[self.dim] = self.length
        whole = parts[0].new_empty(shape)
        for part, own in zip(parts, self.ranges, strict=True):
            at = 0
            for start, stop in own:
                whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
                at += stop - start
        return whole
