"""Rank arithmetic: which process sits where in the grid of parallel axes.

No loop over all ranks is needed to answer for one rank: a topology of 131,072 ranks costs as much as one of 8.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.user_input import nearest, sizes_that_divide

PIPELINE = "pp"  # the axis of pipeline stages; a topology without it is a pipeline of one stage


def nearest_multiples(number: int, unit: int) -> str:
    """The multiples of ``unit`` around ``number``, as text for a message: ``4 or 8``."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below > 0 else str(unit)


def _whole(name: str, value: Any, rule: str = "it must be a whole number") -> int:
    """A whole number of any library as a plain int; raises ValueError, which calls it ``name``, for anything else."""
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None:
        raise ValueError(f"{name} {value!r}: {rule}")
    return whole


def _nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of ``number`` just below and just above ``wanted``, as text for a message: ``2 or 4``."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    nearest_two = [d for d in divisors if d < wanted][-1:] + [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, nearest_two))


class Coord(dict[str, int]):
    """Coordinates of a rank by axis, as items (``coord["tp"]``) and as attributes (``coord.tp``)."""

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
        ValueError: for no axes, one that stands there twice, not one size for each, or a size below 1.

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
        if isinstance(axes, str | Set | Mapping):  # whose parts are letters, or in no order
            raise ValueError(f"axes={axes!r}: write a list of names, such as ['dp', 'tp']")
        names, sizes = tuple(axes), tuple(dims)
        if not names or len(names) != len(sizes):
            raise ValueError(f"axes={[*names]} and dims={[*sizes]}: give one size for each axis")
        if len(set(names)) != len(names):
            raise ValueError(f"axes={[*names]}: an axis stands there twice; name each axis once")
        rule = "a size is a whole number of ranks"
        sizes = tuple(_whole(f"axis {name!r} has size", size, rule) for name, size in zip(names, sizes, strict=True))
        for name, size in zip(names, sizes, strict=True):
            if size < 1:
                raise ValueError(f"axis {name!r} has size {size}: a size must be 1 or more; leave the axis out for 1")
        object.__setattr__(self, "axes", names)
        object.__setattr__(self, "dims", sizes)

    @classmethod
    def from_config(cls, config: ParallelConfig, world_size: int) -> ProcessTopology:
        """The topology of ``config`` on ``world_size`` ranks, which its sizes must make; ``dp`` is derived, or checked."""
        world_size = _whole("world size", world_size)
        model = config.tp * config.cp * config.pp
        product = f"tp {config.tp} × cp {config.cp} × pp {config.pp}"
        if world_size < 1:
            raise ValueError(f"world size {world_size}: a world has 1 rank or more; use {model} processes for {product}")
        if world_size % model:
            per_tp, rest = divmod(world_size, config.cp * config.pp)
            other_tp = "" if rest else f", or tp={_nearest_divisors(per_tp, config.tp)}"
            raise ValueError(
                f"world size {world_size} does not divide by {product} = {model}; use "
                f"{nearest_multiples(world_size, model)} processes (devices × num_nodes){other_tp}"
            )
        derived = world_size // model
        if config.dp != "auto" and config.dp != derived:
            raise ValueError(
                f"dp={config.dp}: dp {config.dp} × {product} = {config.dp * model} ranks, but the world has "
                f"{world_size}; use dp={derived} (or 'auto'), or start {config.dp * model} processes"
            )
        if (replicas := derived * config.cp) % (shares := config.shares(replicas)):
            raise ValueError(
                f"fsdp={{shard_size: {shares}}}: {replicas} replicas (dp {derived} × cp {config.cp}) do not divide by it; "
                f"{sizes_that_divide('shard_size', replicas) if replicas > 1 else 'leave hsdp out'}, or start "
                f"{nearest_multiples(world_size, config.smallest_world)} processes"
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
        """The place of an axis among all; raises ValueError with the nearest name if there is none of that name."""
        if axis not in self.axes:
            raise ValueError(f"unknown axis {axis!r}; did you mean {nearest(str(axis), self.axes)}?")
        return self.axes.index(axis)

    def get_dim(self, axis: str) -> int:
        """Ranks along ``axis``."""
        return self.dims[self._require(axis)]

    def get_rank(self, /, **coord: int) -> int:
        """The rank at a full set of coordinates, one per axis."""
        if missing := [axis for axis in self.axes if axis not in coord]:
            raise ValueError(f"get_rank needs every axis; {', '.join(missing)} missing (filter_match takes some)")
        return sum(self._offset(axis, index) for axis, index in coord.items())

    def _offset(self, axis: str, index: int) -> int:
        """What the coordinate ``index`` along an axis adds to a rank; raises ValueError outside the axis."""
        position = self._require(axis)
        index = _whole(f"index of {axis!r}:", index)
        if not 0 <= index < self.dims[position]:
            raise ValueError(f"{axis}={index} lies outside the axis: it has indices 0 to {self.dims[position] - 1}")
        return index * self._strides[position]

    def get_coord(self, rank: int) -> Coord:
        """The coordinates of ``rank``, one attribute per axis."""
        rank = _whole("rank", rank)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} lies outside the topology: it has ranks 0 to {self.world_size - 1}")
        places = zip(self.axes, self.dims, self._strides, strict=True)
        return Coord({axis: rank // stride % size for axis, size, stride in places})

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
        if len(set(axes)) != len(axes):
            raise ValueError(f"axes {', '.join(axes)}: an axis stands there twice; name each axis once")
        offsets = self._spread(axes)
        origins = self._spread([axis for axis in self.axes if axis not in axes])
        return [[origin + offset for offset in offsets] for origin in origins]

    def get_comm_list(self, rank: int, *axes: str) -> list[int]:
        """The one list of :meth:`get_axis_comm_lists` that holds ``rank``; costs its length alone."""
        coord = self.get_coord(rank)
        for axis in axes:
            self._require(axis)
        origin = sum(self._offset(axis, index) for axis, index in coord.items() if axis not in axes)
        return [origin + offset for offset in self._spread(axes)]

    def filter_match(self, /, **coord: int) -> list[int]:
        """All ranks whose coordinates match, in order: ``filter_match(pp=0, dp=1)``."""
        origin = sum(self._offset(axis, index) for axis, index in coord.items())
        return [origin + offset for offset in self._spread([axis for axis in self.axes if axis not in coord])]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks whose coordinate along ``axis`` is ``idx``."""
        self._require(axis)
        return self.filter_match(**{axis: idx})

    def get_rank_repr(self, rank: int, omit_axes: Sequence[str] = ("dp", "pp")) -> str:
        """A label such as ``tp_01``: two digits, more when needed."""
        coord = self.get_coord(rank)
        width = {axis: max(2, len(str(size - 1))) for axis, size in zip(self.axes, self.dims, strict=True)}
        return "-".join(f"{axis}_{coord[axis]:0{width[axis]}d}" for axis in self.axes if axis not in omit_axes)

    # ---- pipelines ---------------------------------------------------------------------------------------------

    @property
    def pipeline_size(self) -> int:
        """Stages of a pipeline; 1 in a topology without the axis ``pp``."""
        return self.get_dim(PIPELINE) if PIPELINE in self.axes else 1

    def get_stage(self, rank: int) -> int:
        """Which stage of its pipeline ``rank`` holds."""
        return self.get_coord(rank).get(PIPELINE, 0)

    def get_pipeline(self, rank: int) -> list[int]:
        """The ranks of ``rank``'s pipeline, first stage first."""
        return self.get_comm_list(rank, *({PIPELINE} & {*self.axes}))

    def stage_to_global(self, /, rank: int, stage: int, **coord: int) -> int:
        """The rank that holds ``stage`` in ``rank``'s pipeline; further coordinates may be replaced: ``dp=1``."""
        if not 0 <= stage < self.pipeline_size:
            raise ValueError(f"stage {stage} lies outside the pipeline: it has stages 0 to {self.pipeline_size - 1}")
        if PIPELINE in coord:
            raise ValueError(f"stage_to_global(..., pp={coord[PIPELINE]}): the stage is its second argument; leave pp out")
        at = {PIPELINE: stage} if PIPELINE in self.axes else {}
        return self.get_rank(**{**self.get_coord(rank), **coord, **at})

    def next_stage(self, rank: int) -> int:
        """The rank that ``rank`` sends activations to; the last stage's is the first (interleaving wraps around)."""
        return self.stage_to_global(rank, (self.get_stage(rank) + 1) % self.pipeline_size)

    def prev_stage(self, rank: int) -> int:
        """The rank that ``rank`` receives activations from; the first stage's is the last."""
        return self.stage_to_global(rank, (self.get_stage(rank) - 1) % self.pipeline_size)

    def p2p_pairs(self) -> list[list[int]]:
        """``[rank, next_stage(rank)]`` for every rank, in rank order, the wrap-around included."""
        return [[rank, self.next_stage(rank)] for rank in range(self.world_size)]

    def _at_stages(self, rank: int, stages: set[int], split_rank: int | None) -> list[int]:
        """The ranks of a pipeline at some stages, and at ``split_rank``, which raises ValueError for a stage that can't be one."""
        if split_rank is not None and not 0 < split_rank < self.pipeline_size:
            size = self.pipeline_size
            fix = f"use 1 to {size - 1}" if size > 1 else "it needs two stages or more; leave it out"
            raise ValueError(f"pp_split_rank={split_rank} lies outside a pipeline of {size} stages; {fix}")
        pipeline = self.get_pipeline(rank)
        return [pipeline[stage] for stage in sorted(stages if split_rank is None else {*stages, split_rank})]

    def embedding_ranks(self, rank: int, split_rank: int | None = None) -> list[int]:
        """The ranks of ``rank``'s pipeline with the token embedding: its first stage, its last (a tied head), ``split_rank``."""
        return self._at_stages(rank, {0, self.pipeline_size - 1}, split_rank)

    def position_embedding_ranks(self, rank: int, split_rank: int | None = None) -> list[int]:
        """The ranks of ``rank``'s pipeline that hold the position embedding: the first stage, and the decoder's first."""
        return self._at_stages(rank, {0}, split_rank)

    def get_embedding_comm_lists(self, split_rank: int | None = None) -> list[list[int]]:
        """The embedding ranks of every pipeline: with ``pp`` 4 outermost on 16 ranks ``[[0, 12], [1, 13], [2, 14], [3, 15]]``,
        and ``[[0, 8, 12], ...]`` with ``split_rank`` 2.
        """
        return [self.embedding_ranks(rank, split_rank) for rank in range(self.world_size) if not self.get_stage(rank)]

    def get_position_embedding_comm_lists(self, split_rank: int | None = None) -> list[list[int]]:
        """The position-embedding ranks of every pipeline: ``[[0], [1], ...]``, or ``[[0, 8], ...]`` with a split."""
        return [self.position_embedding_ranks(rank, split_rank) for rank in range(self.world_size) if not self.get_stage(rank)]

    def is_first_stage(self, rank: int, virtual_stage: int = 0) -> bool:
        """Whether ``rank`` holds the model's very first layers, in its ``virtual_stage``-th chunk."""
        return self.get_stage(rank) == 0 and virtual_stage == 0

    def is_last_stage(self, rank: int, virtual_stage: int = 0, virtual_pp: int | None = None) -> bool:
        """Whether ``rank`` holds the model's very last layers, in its ``virtual_stage``-th chunk of ``virtual_pp``."""
        return self.get_stage(rank) == self.pipeline_size - 1 and virtual_stage == (virtual_pp or 1) - 1

    def stage_layers(self, rank: int, num_layers: int, virtual_pp: int | None = None) -> list[range]:
        """The layers that ``rank`` holds, one range for each of its virtual stages.

        Layers go round the pipeline ``virtual_pp`` times: 16 layers over ``pp`` 4 with ``virtual_pp`` 2 put 0-1 and 8-9
        on the first stage, 2-3 and 10-11 on the second (interleaving, arXiv 2104.04473). They must divide by both.
        """
        rounds, stages = virtual_pp or 1, self.pipeline_size
        if rounds < 1:
            raise ValueError(f"virtual_pp={rounds}: a rank holds 1 virtual stage or more; leave it out for 1")
        if rounds > 1 and stages == 1:
            raise ValueError(f"virtual_pp={rounds} with pp=1: there is nothing to interleave; set pp to 2 or more")
        chunks = stages * rounds
        if num_layers < 1 or num_layers % chunks:
            raise ValueError(
                f"{num_layers} layers do not divide by pp {stages} × virtual_pp {rounds} = {chunks}; "
                f"use {nearest_multiples(num_layers, chunks)} layers"
            )
        size, stage = num_layers // chunks, self.get_stage(rank)
        return [range((turn * stages + stage) * size, (turn * stages + stage + 1) * size) for turn in range(rounds)]

    @property
    def larger_axes(self) -> list[tuple[str, int]]:
        """The axes along which there is more than one rank, each with its size, for texts that leave the others out."""
        return [(axis, size) for axis, size in self if size > 1]

    def get_crossing_lists(self, axis: str, ranks_per_node: int) -> list[list[int]]:
        """Those lists of ``axis`` whose ranks do not all sit on one node of ``ranks_per_node`` adjacent ranks."""
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node {ranks_per_node}: a node has 1 rank or more; write how many")
        lists = self.get_axis_comm_lists(axis)
        return [ranks for ranks in lists if len({rank // ranks_per_node for rank in ranks}) > 1]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(zip(self.axes, self.dims, strict=True))

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self)
