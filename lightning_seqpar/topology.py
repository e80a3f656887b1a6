"""Rank arithmetic: which process sits where in the grid of parallel axes.

Everything here is pure arithmetic on sizes. No loop over all ranks is needed to answer for one rank, so a
topology of 131,072 ranks costs as much as one of 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_seqpar.config import ParallelConfig, nearest


class Coord(dict[str, int]):
    """Coordinates of a rank, one attribute per axis: ``coord.tp``."""

    def __getattr__(self, axis: str) -> int:
        try:
            return self[axis]
        except KeyError:
            raise AttributeError(f"the topology has no axis {axis!r}; it has {', '.join(self)}") from None


@dataclass(frozen=True, init=False)
class ProcessTopology:
    """A grid of ranks with named axes, row-major: ranks along the **last** axis are adjacent.

    Args:
        axes: names of the axes, outermost first.
        dims: how many ranks lie along each axis.

    Raises:
        ValueError: for no axes, a repeated name, a size below 1, or as many names as there are not sizes.

    Example::

        >>> topology = ProcessTopology(axes=["dp", "tp"], dims=[2, 2])
        >>> topology.get_axis_comm_lists("tp")
        [[0, 1], [2, 3]]
        >>> topology.get_coord(2).dp
        1
    """

    axes: tuple[str, ...]
    dims: tuple[int, ...]

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        names, sizes = tuple(axes), tuple(dims)
        if not names or len(names) != len(sizes):
            raise ValueError(f"axes={list(names)} and dims={list(sizes)}: give one size for each axis")
        if len(set(names)) != len(names):
            raise ValueError(f"axes={list(names)}: an axis stands there twice; name each axis once")
        for name, size in zip(names, sizes, strict=True):
            if size < 1:
                raise ValueError(f"axis {name!r} has size {size}: a size must be 1 or more")
        object.__setattr__(self, "axes", names)
        object.__setattr__(self, "dims", sizes)

    @classmethod
    def from_config(cls, config: ParallelConfig, world_size: int) -> ProcessTopology:
        """The topology of ``config`` on ``world_size`` ranks; ``dp`` is derived, or checked if it is a number.

        Raises:
            ValueError: if the sizes do not multiply to the world; the message names the worlds that would do.
        """
        model = config.tp * config.cp * config.pp
        product = f"tp {config.tp} × cp {config.cp} × pp {config.pp}"
        if world_size % model:
            below = world_size // model * model
            fits = f"{below} or {below + model}" if below else f"{model}"
            raise ValueError(
                f"world size {world_size} does not divide by {product} = {model}; use {fits} processes "
                f"(devices × num_nodes), or a tp that divides {world_size}"
            )
        derived = world_size // model
        if config.dp != "auto" and config.dp != derived:
            raise ValueError(
                f"dp={config.dp}: dp {config.dp} × {product} = {config.dp * model} ranks, but the world has "
                f"{world_size}; use dp={derived} (or 'auto'), or start {config.dp * model} processes"
            )
        sizes = {"tp": config.tp, "cp": config.cp, "pp": config.pp, "dp": derived}
        names = config.order.split("-")
        return cls(names, [sizes[name] for name in names])

    @property
    def world_size(self) -> int:
        """How many ranks the grid holds."""
        return math.prod(self.dims)

    @property
    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.dims[i + 1 :]) for i in range(len(self.dims)))

    def _require(self, axis: str) -> int:
        if axis not in self.axes:
            raise ValueError(f"unknown axis {axis!r}; did you mean {nearest(axis, self.axes)}?")
        return self.axes.index(axis)

    def get_dim(self, axis: str) -> int:
        """Ranks along ``axis``."""
        return self.dims[self._require(axis)]

    def get_rank(self, **coord: int) -> int:
        """The rank at a full set of coordinates, one per axis."""
        missing = [axis for axis in self.axes if axis not in coord]
        if missing:
            raise ValueError(f"get_rank needs every axis; {', '.join(missing)} missing (filter_match takes some)")
        return sum(self._offset(axis, index) for axis, index in coord.items())

    def _offset(self, axis: str, index: int) -> int:
        at = self._require(axis)
        if not 0 <= index < self.dims[at]:
            raise ValueError(f"{axis}={index} lies outside the axis: it has indices 0 to {self.dims[at] - 1}")
        return index * self._strides[at]

    def get_coord(self, rank: int) -> Coord:
        """The coordinates of ``rank``, one attribute per axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} lies outside the topology: it has ranks 0 to {self.world_size - 1}")
        return Coord(
            {
                axis: rank // stride % size
                for axis, size, stride in zip(self.axes, self.dims, self._strides, strict=True)
            }
        )

    def _spread(self, axes: Sequence[str]) -> list[int]:
        """Offsets of all positions along ``axes`` from their common origin, in rank order."""
        offsets = [0]
        for axis, size, stride in zip(self.axes, self.dims, self._strides, strict=True):
            if axis in axes:
                offsets = [offset + index * stride for offset in offsets for index in range(size)]
        return offsets

    def get_axis_comm_lists(self, *axes: str) -> list[list[int]]:
        """All rank lists that differ along ``axes`` alone; ``[]`` if the topology lacks one of the axes.

        Example: in ``ProcessTopology(["pp", "dp", "tp"], [2, 2, 2])`` the lists of ``pp`` are
        ``[[0, 4], [1, 5], [2, 6], [3, 7]]``.
        """
        if not axes or any(axis not in self.axes for axis in axes):
            return []
        inside = self._spread(axes)
        origins = self._spread([axis for axis in self.axes if axis not in axes])
        return [[origin + offset for offset in inside] for origin in origins]

    def get_comm_list(self, rank: int, *axes: str) -> list[int]:
        """The one list of :meth:`get_axis_comm_lists` that holds ``rank``; costs its length alone."""
        coord = self.get_coord(rank)
        for axis in axes:
            self._require(axis)
        origin = sum(self._offset(axis, index) for axis, index in coord.items() if axis not in axes)
        return [origin + offset for offset in self._spread(axes)]

    def filter_match(self, **coord: int) -> list[int]:
        """All ranks whose coordinates match, in order: ``filter_match(pp=0, dp=1)``."""
        origin = sum(self._offset(axis, index) for axis, index in coord.items())
        return [origin + offset for offset in self._spread([axis for axis in self.axes if axis not in coord])]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks whose coordinate along ``axis`` is ``idx``."""
        return self.filter_match(**{axis: idx})

    def get_rank_repr(self, rank: int, omit_axes: Sequence[str] = ("dp", "pp")) -> str:
        """A label such as ``tp_01``: two digits, more when needed."""
        coord = self.get_coord(rank)
        width = {axis: max(2, len(str(size - 1))) for axis, size in zip(self.axes, self.dims, strict=True)}
        return "-".join(f"{axis}_{coord[axis]:0{width[axis]}d}" for axis in self.axes if axis not in omit_axes)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(zip(self.axes, self.dims, strict=True))

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self)
