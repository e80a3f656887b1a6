"""Which indices of a dim each tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A dim dealt out over the tensor-parallel ranks.

    Attributes:
        dim: the tensor dim.
        length: its global length.
        ranges: for each rank, the ``(start, stop)`` ranges that it holds, in the order in which it holds them.
    """

    dim: int
    length: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def by_segments(cls, dim: int, segments: Sequence[int], units: Sequence[int], size: int, name: str) -> Shard:
        """Each segment of a fused dim in ``units`` equal parts, dealt out in order: ``[q|k|v]`` by heads.

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
            if count % size:
                works = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
                raise ValueError(
                    f"{name}: {count} units (heads or features) do not divide by tp={size}; use tp of {works}"
                )
            part = length // size
            for rank in range(size):
                ranges[rank].append((start + rank * part, start + (rank + 1) * part))
            start += length
        return cls(dim, start, tuple(tuple(held) for held in ranges))

    def local_length(self, rank: int) -> int:
        """Length of the dim on ``rank``."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """What ``rank`` holds of a whole tensor, in memory of its own."""
        if whole.shape[self.dim] != self.length:
            raise ValueError(f"expected {self.length} at dim {self.dim}, got a tensor of shape {list(whole.shape)}")
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return torch.cat(pieces, self.dim).clone(memory_format=torch.contiguous_format)

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
