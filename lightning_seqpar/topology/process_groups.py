"""The process groups that a rank belongs to, made once and looked up by the axes that they span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_seqpar.releases import make_fake_backend, new_group
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.user_input import nearest

Axes = str | tuple[str, ...]  # one axis, several axes, or one of :data:`NAMED`

NAMED = ("embedding", "position_embedding", "fp8_amax", "fsdp_shard", "fsdp_replicate")
"""Groups that have a name of their own: those of embeddings, and of replicas that share out parameters or hold the same part of
them, span no set of axes; ``fp8_amax`` is tp × dp."""


def _silent_group(rank: int, size: int) -> ProcessGroup:
    """A group on torch's fake backend, whose collectives return at once and send nothing, and which its registry does not know."""
    group = ProcessGroup(HashStore(), rank, size)
    backend = make_fake_backend(rank, size)
    for device in ("cpu", "meta", "cuda"):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
    return group


class ParallelGroups:
    """This rank's process groups, one for every set of axes; equal rank lists share a group.

    ``groups["tp"]``, ``groups["dp", "cp"]``, ``groups["embedding"]``, ``groups["position_embedding"]``,
    ``groups["fp8_amax"]``; the axes' order does not matter. Making them is collective: every rank of the topology
    constructs the object, at the same point of the program. Only the groups that a rank belongs to cost it anything.
    They live until the process ends, or until :meth:`destroy`; then they can be made anew.

    Args:
        topology: the grid.
        rank: this process's rank in the world.
        rank_mapping: world rank of each rank of the grid, if that covers a part of the world; others answer -1 to :meth:`rank`.
        backend: backend of the groups; none takes the default group's.
        timeout: how long a collective waits (a sub-group does not inherit the default group's timeout).
        split_rank: first pipeline stage of the decoder, in an encoder-decoder model; it holds embeddings too.
        shard_size: how many neighbours among the replicas (dp × cp) share out parameters; none for all.
        gloo_twins: make a gloo group beside each group of axes (:meth:`gloo`), for objects on the CPU and for threads.
        pp_channels: make so many more groups of the ranks of ``pp``, each for one kind of messages between neighbours.

    Raises:
        RuntimeError: if ``torch.distributed`` is not initialised.
        ValueError: if the grid does not fit the world, or ``split_rank`` the pipeline.
    """

    pp_channels: tuple[ProcessGroup, ...] = ()

    def __init__(
        self,
        topology: ProcessTopology,
        rank: int,
        rank_mapping: Sequence[int] | Mapping[int, int] | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        split_rank: int | None = None,
        shard_size: int | None = None,
        gloo_twins: bool = False,
        pp_channels: int = 0,
    ) -> None:
        self._place(topology, rank, rank_mapping, split_rank, shard_size)
        if not dist.is_initialized():
            raise RuntimeError(
                "ParallelGroups needs torch.distributed; call init_process_group first, "
                "or ParallelGroups.fake to ask about ranks and sizes alone"
            )
        world = dist.get_world_size()
        if rank != dist.get_rank():
            raise ValueError(f"rank={rank}, but this process is rank {dist.get_rank()} of the world; pass dist.get_rank()")
        if rank_mapping is None and topology.world_size != world:
            raise ValueError(
                f"the topology ({topology}) has {topology.world_size} ranks, the world {world}; "
                "make them equal, or pass rank_mapping for a grid over a part of the world"
            )
        if outside := [world_rank for world_rank in self._mapping if not 0 <= world_rank < world]:
            raise ValueError(f"rank_mapping names rank {outside[0]}, but the world has ranks 0 to {world - 1}")
        options = {"backend": backend, "timeout": timeout}
        self._make_axis_groups(self._groups, options)
        if gloo_twins:
            self._make_axis_groups(self._twins, {**options, "backend": "gloo"})
        self._make_named_groups(options)
        stages = self.ranks("pp") if pp_channels and self._grid_rank >= 0 else [self._world_rank]
        # NCCL orders all that two ranks of a group send each other: kinds that overtake each other need groups of their own.
        self.pp_channels = tuple(self._new(stages, options) for _ in range(pp_channels))

    def _place(
        self,
        topology: ProcessTopology,
        rank: int,
        rank_mapping: Any = None,
        split_rank: int | None = None,
        shard_size: int | None = None,
    ) -> None:
        """Find this rank's place in the grid, and check that the mapping and the split fit. Makes no groups."""
        self.topology, self._world_rank, self._split_rank, self._fake = topology, rank, split_rank, False
        self._shard_size = shard_size
        self._groups: dict[frozenset[str], ProcessGroup] = {}
        self._twins: dict[frozenset[str], ProcessGroup] = {}
        self._made: list[ProcessGroup] = []
        self._ranks_by_axes: dict[Axes, list[int]] = {}
        size = topology.world_size
        mapping: Sequence[int] = range(size)
        if isinstance(rank_mapping, Mapping):
            mapping = [rank_mapping[r] for r in range(size)] if set(rank_mapping) == set(range(size)) else ()
        elif rank_mapping is not None:
            mapping = tuple(rank_mapping)
        if len(mapping) != size or (rank_mapping is not None and len(set(mapping)) != size):
            raise ValueError(
                f"rank_mapping={rank_mapping}: give {size} different world ranks, one for each rank of the grid ({topology})"
            )
        self._mapping: Sequence[int] = mapping
        self._grid_rank: int = mapping.index(rank) if rank in mapping else -1
        if rank_mapping is None and self._grid_rank < 0:
            topology.get_coord(rank)  # raises, and says which ranks there are
        topology.embedding_ranks(0, split_rank)  # raises for a split outside the pipeline

    def _axis_sets(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Every set of axes, in one order on all ranks, with the first that has the same ranks: they differ in axes of size 1."""
        names, first = sorted(self.topology.axes), dict[tuple[str, ...], tuple[str, ...]]()
        return {
            axes: first.setdefault(tuple(axis for axis in axes if self.topology.get_dim(axis) > 1), axes)
            for count in range(1, len(names) + 1)
            for axes in combinations(names, count)
        }

    def _new(self, ranks: Sequence[int], options: Mapping[str, Any]) -> ProcessGroup:
        """Make a group of world ranks; only its members call this."""
        # The name that torch gives a group counts the groups that a rank made before, and the members must arrive at the same
        # name. So all ranks must make equally many groups: a rank that is in none at some point makes one of itself alone there.
        group = new_group(ranks, **options)
        self._made.append(group)
        return group

    def _make_axis_groups(self, into: dict[frozenset[str], ProcessGroup], options: Mapping[str, Any]) -> None:
        """Make a group for each set of axes, and put it into ``into``; sets that have the same ranks share one."""
        made: dict[tuple[str, ...], ProcessGroup] = {}
        # In the order of _axis_sets: ranks that share two groups must make them in the same order.
        for axes, first in self._axis_sets().items():
            ranks = tuple(self.ranks(axes)) if self._grid_rank >= 0 else (self._world_rank,)
            if axes == first:
                made[axes] = self._new(ranks, options)
            if self._grid_rank >= 0:
                into[frozenset(axes)] = made[first]

    def _make_named_groups(self, options: Mapping[str, Any]) -> None:
        """Make the groups that span no axes; one that has the ranks of a group of axes, or of another, shares that group."""
        known = {axes: self.topology.get_comm_list(0, *axes) for axes in self._axis_sets()}
        shares = ("fsdp_shard",) if self.mean_axes else ()
        for name in ("embedding", "position_embedding", *shares, *(("fsdp_replicate",) if self._shard_size else ())):
            # The ranks of grid rank 0's own group decide whether it is shared, so that all ranks decide alike.
            first = self._grid_ranks(frozenset((name,)), 0)
            shared = next((axes for axes, ranks in known.items() if ranks == first), None)
            known[name,] = first
            member = self._grid_rank >= 0 and self._world_rank in self.ranks(name)
            if shared is None:
                group = self._new(self.ranks(name) if member else [self._world_rank], options)
            if member:
                self._groups[frozenset((name,))] = group if shared is None else self._groups[frozenset(shared)]

    @classmethod
    def fake(cls, topology: ProcessTopology, rank: int, *, split_rank: int | None = None) -> ParallelGroups:
        """An object that answers ranks and sizes without ``torch.distributed``; asking it for a group raises."""
        groups = cls.__new__(cls)
        groups._place(topology, rank, split_rank=split_rank)
        groups._fake = True
        return groups

    @classmethod
    def silent(cls, topology: ProcessTopology, rank: int = 0) -> ParallelGroups:
        """Groups for one process that acts as a rank of the grid, without ``torch.distributed`` on any device: their
        collectives return at once and send nothing. Shapes, memory and traffic are the rank's; values are not.
        """
        groups = cls.fake(topology, rank)
        groups._fake = False
        for axes, first in groups._axis_sets().items():
            made = groups._groups.get(frozenset(first)) or _silent_group(groups.rank(axes), groups.size(axes))
            groups._groups[frozenset(axes)] = made
        return groups

    def __getitem__(self, axes: Axes) -> ProcessGroup:
        """The group along one axis (``groups["tp"]``), several (``groups["dp", "cp"]``), or of a name."""
        return self._find(self._groups, axes)

    def axes_of(self, group: ProcessGroup) -> str:
        """The axes along which a group's ranks lie, as text; empty for a group that is none of these."""
        found = (key for key, known in self._groups.items() if known is group)
        axes = min(found, key=lambda key: (len(key), sorted(key)), default=frozenset())
        return " × ".join(axis for axis in self.topology.axes if axis in axes)

    def gloo(self, axes: Axes) -> ProcessGroup:
        """The gloo group beside the group along ``axes``, if they were made with ``gloo_twins=True``; not of embeddings."""
        if not self._fake and not self._twins and self._groups:
            raise RuntimeError("no gloo twins were made; pass gloo_twins=True")
        if self._key(axes) & {*NAMED}:
            raise ValueError(f"groups.gloo({axes!r}): groups of axes have twins, named ones have none; use gloo('pp')")
        return self._find(self._twins, axes)

    def _find(self, among: Mapping[frozenset[str], ProcessGroup], axes: Axes) -> ProcessGroup:
        """The group along ``axes``; raises RuntimeError with the reason if there is none."""
        key = self._key(axes)
        if self._fake:
            raise RuntimeError(f"fake groups have no process group for {sorted(key)}; they answer ranks and sizes")
        if key not in among:
            why = "this rank is outside the grid"
            if not self._made:
                why = "the groups were destroyed; make them anew"
            elif self._grid_rank >= 0:
                why = f"this rank ({self._world_rank}) is not one of {self.ranks(axes)}"
            raise RuntimeError(f"no process group for {sorted(key)}: {why}")
        return among[key]

    def _key(self, axes: Axes) -> frozenset[str]:
        """What a group is looked up by; raises ValueError if ``axes`` names no axes of the topology and no named group."""
        names = (axes,) if isinstance(axes, str) else axes
        if names == ("fp8_amax",):
            names = tuple(axis for axis in ("dp", "tp") if axis in self.topology.axes)
            if not names:
                raise ValueError(f"groups['fp8_amax'] spans dp × tp, and the topology ({self.topology}) has neither")
        elif len(names) == 1 and names[0] in NAMED:
            return frozenset(names)
        if not names or len(set(names)) != len(names):
            raise ValueError(f"groups[{axes!r}]: name one axis or more, each once")
        for axis in names:
            if axis not in self.topology.axes:
                raise ValueError(f"unknown axis {axis!r}; did you mean {nearest(axis, (*self.topology.axes, *NAMED))}?")
        return frozenset(names)

    def _grid_ranks(self, key: frozenset[str], rank: int) -> list[int]:
        """Ranks in the grid of the group that ``rank`` is in; of embeddings, those of its pipeline."""
        if key == {"embedding"}:
            return self.topology.embedding_ranks(rank, self._split_rank)
        if key == {"position_embedding"}:
            return self.topology.position_embedding_ranks(rank, self._split_rank)
        if key <= {"fsdp_shard", "fsdp_replicate"}:
            replicas = self.topology.get_comm_list(rank, *self.mean_axes)
            size, place = self._shard_size or len(replicas), replicas.index(rank)
            first = place - place % size
            return replicas[first : first + size] if key == {"fsdp_shard"} else replicas[place % size :: size]
        return self.topology.get_comm_list(rank, *sorted(key))

    def ranks(self, axes: Axes) -> list[int]:
        """World ranks of the group along ``axes``, in its order; of embeddings, this pipeline's. ``[]`` outside the grid."""
        if axes not in self._ranks_by_axes:
            key, here = self._key(axes), self._grid_rank
            self._ranks_by_axes[axes] = [self._mapping[r] for r in self._grid_ranks(key, here)] if here >= 0 else []
        return list(self._ranks_by_axes[axes])

    def rank(self, axes: Axes) -> int:
        """This process's rank in the group along ``axes``; -1 outside the grid, or if it is not a member."""
        ranks = self.ranks(axes)
        return ranks.index(self._world_rank) if self._world_rank in ranks else -1

    def size(self, axes: Axes) -> int:
        """Ranks in the group along ``axes``; -1 outside the grid."""
        return len(self.ranks(axes)) if self._grid_rank >= 0 else -1

    def source(self, axes: Axes) -> int:
        """World rank of the group's first member, from which a broadcast starts; -1 outside the grid."""
        return self.ranks(axes)[0] if self._grid_rank >= 0 else -1

    @cached_property
    def mean_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are averaged, as their ranks hold the same parameters: ``dp`` and ``cp``."""
        return tuple(axis for axis in self.topology.axes if axis in ("dp", "cp"))

    @cached_property
    def holder_axes(self) -> tuple[str, ...]:
        """The axes of all ranks that hold a part of the same layers, which agree on what becomes of a gradient."""
        return tuple(axis for axis in self.topology.axes if axis in ("dp", "cp", "tp"))

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks work on the same samples: all but ``dp``. Empty where there is no other."""
        return tuple(axis for axis in self.topology.axes if axis != "dp")

    @cached_property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes along which ranks compute the same loss: ``tp`` and ``cp``. Empty where there are none."""
        return tuple(axis for axis in self.topology.axes if axis in ("tp", "cp"))

    @property
    def next_stage(self) -> int:
        """World rank that this rank sends activations to, the last stage's being the first; -1 outside the grid."""
        return self._mapping[self.topology.next_stage(self._grid_rank)] if self._grid_rank >= 0 else -1

    @property
    def prev_stage(self) -> int:
        """World rank that this rank receives activations from; -1 outside the grid."""
        return self._mapping[self.topology.prev_stage(self._grid_rank)] if self._grid_rank >= 0 else -1

    def p2p_pairs(self) -> list[list[int]]:
        """World ranks ``[sender, receiver]`` of every hop along every pipeline, the wrap-around included."""
        return [[self._mapping[sender], self._mapping[receiver]] for sender, receiver in self.topology.p2p_pairs()]

    def mesh(self, device_type: str) -> DeviceMesh:
        """A ``DeviceMesh`` over these very groups, its dims named by the axes, for torch's own tools."""
        groups = [self[axis] for axis in self.topology.axes]  # raises outside the grid, for fake or destroyed groups
        ranks = torch.tensor(self._mapping).view(self.topology.dims)
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=self.topology.axes)

    def over_gloo(self, timeout: timedelta | None = None) -> ParallelGroups:
        """The same groups once more, on the CPU; collective over the topology's ranks."""
        options: dict[str, Any] = {"split_rank": self._split_rank, "shard_size": self._shard_size}
        options["pp_channels"] = len(self.pp_channels)
        place = (self.topology, self._world_rank, tuple(self._mapping))
        return ParallelGroups(*place, backend="gloo", timeout=timeout, **options)

    def destroy(self) -> None:
        """Shut the groups down, on every rank that made them; a group that was taken from here can't be used any more.

        Their names stay registered in torch until the process ends. torch names a group by its ranks and by how many groups
        there are, and a new group of an old name would find the addresses of the old one, which are closed, in the store.
        """
        for group in self._made:
            group.shutdown()
        self._groups, self._twins, self._made, self.pp_channels = {}, {}, [], ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelGroups:
        return self  # a process group can't be copied; a copied model keeps talking over the same one

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled (a sampler's, for a worker or with a Trainer): it answers ranks and sizes, and has no groups."""
        return {**vars(self), "_fake": True, "_groups": {}, "_twins": {}, "_made": [], "pp_channels": ()}
