"""Which indices of a dim each tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A dim dealt out over the tensor-parallel ranks.

    Attributes:
        dim: the tensor dim.
        length: its global length.
        ranges: for each rank, the ``(start, stop)`` ranges that it holds, in the order in which it holds them.
        padded: length on every rank, with zeros behind what it holds; none for no padding.
    """

    dim: int
    length: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    padded: int | None = None

    @classmethod
    def by_vocabulary(cls, length: int, size: int) -> Shard:
        """Dim 0 in equal parts, padded where it does not divide."""
        part = -(-length // size)
        ranges = tuple(((min(rank * part, length), min((rank + 1) * part, length)),) for rank in range(size))
        return cls(0, length, ranges, part)

    @classmethod
    def by_segments(cls, dim: int, segments: Sequence[int], units: Sequence[int], size: int, name: str) -> Shard:
        """Each segment of a fused dim in ``units`` equal parts, dealt out in order: ``[q|k|v]`` by heads.

        Fewer units than ranks are shared: each of ``size / units`` ranks side by side holds the same one, as the query
        heads of a group use one kv head.

        Raises:
            ValueError: if units do not divide by ``size``, or a segment not by its units; the message names the
                module and the tp values that work.
        """
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        start = 0
        for length, count in zip(segments, units, strict=True):
            if length % count:
                raise ValueError(
                    f"{name}: a segment of {length} features can't be made of {count} units; {count} must divide it"
                )
            if count % size and size % count:
                works = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
                raise ValueError(
                    f"{name}: {count} units (heads or features) do not divide by tp={size}; use tp of {works}"
                )
            parts = min(count, size)
            part = length // parts
            for rank in range(size):
                at = start + rank * parts // size * part
                ranges[rank].append((at, at + part))
            start += length
        if all(held == ranges[0] for held in ranges):
            raise ValueError(
                f"{name}: with {max(units)} unit(s) every one of tp={size} ranks would hold all of it; leave it whole"
            )
        return cls(dim, start, tuple(tuple(held) for held in ranges))

    @cached_property
    def holders(self) -> Tensor:
        """How many ranks hold each index: ``[length]``."""
        count = torch.zeros(self.length, dtype=torch.int64)
        for held in self.ranges:
            for start, stop in held:
                count[start:stop] += 1
        return count

    @property
    def has_shared(self) -> bool:
        """Whether some indices are held by several ranks."""
        return sum(stop - start for held in self.ranges for start, stop in held) > self.length

    @staticmethod
    def _indices(held: Sequence[tuple[int, int]]) -> Tensor:
        return torch.cat([torch.arange(start, stop) for start, stop in held])

    def indices(self, rank: int) -> Tensor:
        """The global indices that ``rank`` holds, in its order."""
        return self._indices(self.ranges[rank])

    def is_first_holder(self, rank: int) -> Tensor:
        """For each index that ``rank`` holds, whether no rank before it does: bool ``[local length]``."""
        mine = self.indices(rank)
        before = torch.zeros(self.length, dtype=torch.bool)
        for other in range(rank):
            before[self.indices(other)] = True
        return ~before[mine]

    def local_length(self, rank: int) -> int:
        """Length of the dim on ``rank``."""
        if self.padded is not None:
            return self.padded
        return sum(stop - start for start, stop in self.ranges[rank])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """What ``rank`` holds of a whole tensor, in memory of its own."""
        if whole.shape[self.dim] != self.length:
            raise ValueError(f"expected {self.length} at dim {self.dim}, got a tensor of shape {list(whole.shape)}")
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return self.join(pieces).clone(memory_format=torch.contiguous_format)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """What a rank holds, from its ranges in order; padded with zeros where every rank's length is the same."""
        missing = 0 if self.padded is None else self.padded - sum(piece.shape[self.dim] for piece in pieces)
        shape = list(pieces[0].shape)
        shape[self.dim] = missing
        return torch.cat([*pieces, pieces[0].new_zeros(shape)] if missing else list(pieces), self.dim)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from every rank's part."""
        shape = list(parts[0].shape)
        shape[self.dim] = self.length
        whole = parts[0].new_empty(shape)
        for part, held in zip(parts, self.ranges, strict=True):
            at = 0
            for start, stop in held:
                whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
                at += stop - start
        return whole
