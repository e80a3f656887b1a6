"""Process groups of a grid of any size, without other processes."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_seqpar import ParallelGroups, ProcessTopology


def made_on_the_fake_backend(axes: list[str], dims: list[int], split: int | None = None) -> int:
    world = math.prod(dims)
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    try:
        groups = ParallelGroups(ProcessTopology(axes, dims), world - 1, split_rank=split)
        assert groups.rank("tp") == dims[axes.index("tp")] - 1
        return len(_world.pg_names)
    finally:
        dist.destroy_process_group()


def test_set_up_does_not_grow_with_the_groups_of_others():
    """A rank of 4,096 makes as many groups as a rank of 16: those that it is in."""
    axes = ["pp", "dp", "cp", "tp"]
    small = made_on_the_fake_backend(axes, [4, 2, 2, 2], 2)
    assert small == made_on_the_fake_backend(axes, [8, 32, 2, 8], 2) == 15 + 2 + 1
    assert (
        made_on_the_fake_backend(["dp", "tp"], [512, 8]) == 1 + 3 + 1
    )  # no axis of size 1 whose group a lone first stage could share


def test_fake_groups_answer_ranks_and_raise_on_a_group():
    groups = ParallelGroups.fake(ProcessTopology(["dp", "tp"], [2, 4]), rank=6)
    assert (groups.rank("tp"), groups.rank("dp"), groups.size("tp"), groups.size(("dp", "tp"))) == (2, 1, 4, 8)
    assert groups.ranks("tp") == [4, 5, 6, 7]
    with pytest.raises(RuntimeError, match="fake groups have no process group"):
        groups["tp"]
    with pytest.raises(ValueError, match="unknown axis 'pt'; did you mean 'tp'"):
        groups.rank("pt")
    with pytest.raises(ValueError, match="unknown axis 'embeding'; did you mean 'embedding'"):
        groups["embeding"]
    with pytest.raises(ValueError, match=r"groups\[\('tp', 'tp'\)\]: name one axis or more, each once"):
        groups["tp", "tp"]
    assert groups.rank("embedding") == 0  # a pipeline of one stage
    assert groups.replica_axes == ("tp",)
    with pytest.raises(ValueError, match="rank 8 lies outside the topology: it has ranks 0 to 7"):
        ParallelGroups.fake(groups.topology, 8)
    with pytest.raises(ValueError, match=r"'fp8_amax'.* has neither"):
        ParallelGroups.fake(ProcessTopology(["pp"], [2]), 0).size("fp8_amax")


def test_groups_without_torch_distributed_say_what_to_call():
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        ParallelGroups(ProcessTopology(["tp"], [2]), 0)
