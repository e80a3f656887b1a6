"""The process groups that this rank is in: made once, found by axis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_seqpar.topology import ProcessTopology

Axes = str | tuple[str, ...]


class ParallelGroups:
    """This rank's process groups, one for every set of axes; equal rank lists share a group.

    Making them is collective: every rank of the topology constructs the object, at the same point of the program.
    Only the groups that a rank belongs to cost it anything. They live until the process ends, or until
    :meth:`destroy`.

    Args:
        topology: the grid.
        rank: this process's rank in the world.
        rank_mapping: world rank of each rank of the grid, if the grid covers a part of the world; a process
            outside it answers -1 to :meth:`rank`.
        backend: backend of the groups; none takes the default group's.
        timeout: how long a collective waits (a sub-group does not inherit the default group's timeout).

    Raises:
        RuntimeError: if ``torch.distributed`` is not initialised.
        ValueError: if the grid does not fit the world.
    """

    def __init__(
        self,
        topology: ProcessTopology,
        rank: int,
        rank_mapping: Sequence[int] | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._place(topology, rank, rank_mapping)
        if not dist.is_initialized():
            raise RuntimeError(
                "ParallelGroups needs torch.distributed; call init_process_group first, "
                "or ParallelGroups.fake to ask about ranks and sizes alone"
            )
        if rank_mapping is None and topology.world_size != dist.get_world_size():
            raise ValueError(
                f"the topology ({topology}) has {topology.world_size} ranks, the world {dist.get_world_size()}; "
                "make them equal, or pass rank_mapping for a grid over a part of the world"
            )
        self._groups: dict[frozenset[str], ProcessGroup] = {}
        if self._grid_rank < 0:
            return
        by_ranks: dict[tuple[int, ...], ProcessGroup] = {}
        # Sorted axis sets: ranks that share two groups must make them in the same order.
        for axes in self._axis_sets():
            ranks = tuple(self._mapping[r] for r in topology.get_comm_list(self._grid_rank, *axes))
            if ranks not in by_ranks:
                by_ranks[ranks] = dist.new_group(
                    list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True
                )
            self._groups[frozenset(axes)] = by_ranks[ranks]

    def _place(self, topology: ProcessTopology, rank: int, rank_mapping: Sequence[int] | None) -> None:
        self.topology = topology
        self._fake = False
        self._mapping: Sequence[int] = range(topology.world_size) if rank_mapping is None else tuple(rank_mapping)
        if len(self._mapping) != topology.world_size or len(set(self._mapping)) != len(self._mapping):
            raise ValueError(
                f"rank_mapping={list(self._mapping)}: give {topology.world_size} different world ranks, "
                f"one for each rank of the grid ({topology})"
            )
        self._grid_rank = self._mapping.index(rank) if rank in self._mapping else -1

    def _axis_sets(self) -> list[tuple[str, ...]]:
        names = sorted(self.topology.axes)
        return [axes for count in range(1, len(names) + 1) for axes in combinations(names, count)]

    @classmethod
    def fake(cls, topology: ProcessTopology, rank: int) -> ParallelGroups:
        """Answers ranks and sizes without ``torch.distributed``; asking for a group raises."""
        groups = cls.__new__(cls)
        groups._place(topology, rank, None)
        groups._fake = True
        groups._groups = {}
        return groups

    def __getitem__(self, axes: Axes) -> ProcessGroup:
        """The group along one axis (``groups["tp"]``) or several (``groups["dp", "cp"]``)."""
        key = self._key(axes)
        if self._fake:
            raise RuntimeError(f"fake groups have no process group for {sorted(key)}; they answer ranks and sizes")
        if key not in self._groups:
            raise RuntimeError(f"no process group for {sorted(key)}: this rank is outside the grid, or it is destroyed")
        return self._groups[key]

    def _key(self, axes: Axes) -> frozenset[str]:
        names = (axes,) if isinstance(axes, str) else axes
        for axis in names:
            self.topology.get_dim(axis)
        return frozenset(names)

    def ranks(self, axes: Axes) -> list[int]:
        """World ranks of the group along ``axes``, in the group's order; ``[]`` outside the grid."""
        if self._grid_rank < 0:
            return []
        return [self._mapping[r] for r in self.topology.get_comm_list(self._grid_rank, *sorted(self._key(axes)))]

    def rank(self, axes: Axes) -> int:
        """This process's rank in the group along ``axes``; -1 outside the grid."""
        if self._grid_rank < 0:
            return -1
        return self.ranks(axes).index(self._mapping[self._grid_rank])

    def size(self, axes: Axes) -> int:
        """Ranks in the group along ``axes``; -1 outside the grid."""
        return len(self.ranks(axes)) if self._grid_rank >= 0 else -1

    def destroy(self) -> None:
        """Destroy the groups; collective over their members."""
        for group in dict.fromkeys(self._groups.values()):
            dist.destroy_process_group(group)
        self._groups = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelGroups:
        return self  # a process group can't be copied; a copied model keeps talking over the same one
