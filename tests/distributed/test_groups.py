"""Process groups: real ones on eight gloo ranks, fake ones at any size, and who shares what."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar.testing import run_distributed

NAMES = ("embedding", "position_embedding", "fp8_amax")


def total(group: dist.ProcessGroup) -> int:
    told = torch.tensor(dist.get_rank())
    dist.all_reduce(told, group=group)
    return int(told)


def ask_everything(groups: ParallelGroups) -> None:
    """Every group that this rank is in holds the ranks that the topology says: their sum arrives."""
    axes = groups.topology.axes
    sets = [chosen for count in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, count)]
    for chosen in (*sets, *NAMES):
        ranks = groups.ranks(chosen)
        assert groups.size(chosen) == len(ranks)
        assert groups.source(chosen) == ranks[0]
        if groups.rank(chosen) < 0:
            with pytest.raises(RuntimeError, match=r"this rank \(\d\) is not one of"):
                groups[chosen]
            continue
        group = groups[chosen]
        assert dist.get_process_group_ranks(group) == ranks
        assert dist.get_rank(group) == groups.rank(chosen)
        assert total(group) == sum(ranks)


def worker_every_group(cases):
    rank = dist.get_rank()
    made = []
    for axes, dims, split in cases:
        topology = ProcessTopology(axes, dims)
        groups = ParallelGroups(topology, rank, split_rank=split)
        ask_everything(groups)
        groups.destroy()
        with pytest.raises(RuntimeError, match="the groups were destroyed; make them anew"):
            groups[axes[0]]
        # Made anew, over the same ranks, and beside groups of somebody else.
        again = ParallelGroups(topology, rank, split_rank=split)
        other = dist.new_group(list(range(8)), use_local_synchronization=True)
        assert total(other) == 28
        ask_everything(again)
        made.append({name: again.ranks(name) for name in NAMES})
        if topology.get_dim("pp") > 1:
            hop(again)
    return made


def hop(groups: ParallelGroups) -> None:
    """One activation goes round the pipeline."""
    told, heard = torch.tensor([dist.get_rank()]), torch.tensor([-1])
    sends = [
        dist.P2POp(dist.isend, told, groups.next_stage, group=groups["pp"]),
        dist.P2POp(dist.irecv, heard, groups.prev_stage, group=groups["pp"]),
    ]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    assert int(heard) == groups.prev_stage
    assert [int(heard), int(told)] in groups.p2p_pairs()


def test_an_all_reduce_of_ranks_over_every_group_of_eight():
    cases = [
        (["pp", "dp", "cp", "tp"], [2, 2, 1, 2], 1),
        (["dp", "pp", "tp", "cp"], [1, 4, 1, 2], 2),
        (["tp", "cp", "dp", "pp"], [2, 2, 1, 2], None),
        (["pp", "dp", "tp"], [4, 1, 2], None),
        (["cp", "pp", "tp"], [2, 4, 1], 1),
    ]
    first = run_distributed(worker_every_group, 8, cases)
    assert first[0][0]["embedding"] == [0, 4]
    assert first[3][1] == {"embedding": [1, 5, 7], "position_embedding": [1, 5], "fp8_amax": [3]}
    assert first[6][3] == {"embedding": [0, 6], "position_embedding": [0], "fp8_amax": [6, 7]}


def worker_parts():
    rank = dist.get_rank()
    # Two grids over parts of the world; the second is turned round, so that its order is its own.
    lower = ParallelGroups(ProcessTopology(["dp", "tp"], [2, 2]), rank, rank_mapping=[0, 1, 2, 3])
    upper = ParallelGroups(ProcessTopology(["dp", "tp"], [2, 2]), rank, rank_mapping={0: 7, 1: 6, 2: 5, 3: 4})
    mine, other = (lower, upper) if rank < 4 else (upper, lower)
    assert (other.rank("tp"), other.size("tp"), other.ranks("dp"), other.source("tp")) == (-1, -1, [], -1)
    assert (other.next_stage, other.prev_stage) == (-1, -1)
    with pytest.raises(RuntimeError, match="outside the grid"):
        other["tp"]
    ask_everything(mine)
    whole = ParallelGroups(ProcessTopology(["tp"], [8]), rank)
    assert total(whole["tp"]) == 28
    return mine.rank("tp"), mine.ranks("tp"), mine.ranks("dp")


def test_grids_over_parts_of_the_world():
    told = run_distributed(worker_parts, 8)
    assert told[1] == (1, [0, 1], [1, 3])
    assert told[6] == (1, [7, 6], [6, 4])
    assert told[7] == (0, [7, 6], [7, 5])


def worker_twins_and_mesh():
    rank = dist.get_rank()
    topology = ProcessTopology(["pp", "dp", "tp"], [2, 1, 2])
    groups = ParallelGroups(topology, rank, gloo_twins=True)
    assert groups.gloo("tp") is not groups["tp"]
    assert total(groups.gloo("tp")) == total(groups["tp"]) == sum(groups.ranks("tp"))
    assert groups.gloo(("dp", "tp")) is groups.gloo("tp")
    with pytest.raises(RuntimeError, match="no gloo twins were made; pass gloo_twins=True"):
        ParallelGroups(topology, rank).gloo("tp")
    # Equal rank lists share.
    assert groups["dp", "tp"] is groups["tp"]
    assert groups["fp8_amax"] is groups["tp"]
    assert groups["embedding"] is groups["pp"]
    assert (groups.rank("position_embedding") == 0) == (rank < 2)
    if rank < 2:
        assert groups["position_embedding"] is groups["dp"]
    mesh = groups.mesh("cpu")
    assert mesh.mesh_dim_names == ("pp", "dp", "tp")
    assert mesh["tp"].get_group() is groups["tp"]
    assert mesh["pp"].get_local_rank() == groups.rank("pp")
    whole = torch.arange(8.0)
    part = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    assert part.to_local().tolist() == whole.chunk(2)[groups.rank("tp")].tolist()
    assert part.full_tensor().tolist() == whole.tolist()
    return True


def test_twins_sharing_and_the_mesh():
    assert run_distributed(worker_twins_and_mesh, 4) == [True] * 4


def worker_wrong():
    rank = dist.get_rank()
    grid = ProcessTopology(["dp", "tp"], [1, 2])
    for wrong, says in (
        (
            {"topology": ProcessTopology(["tp"], [4])},
            r"\(tp 4\) has 4 ranks, the world 2; make them equal, or pass rank_mapping",
        ),
        ({"rank": 1 - rank}, f"rank={1 - rank}, but this process is rank {rank} of the world; pass dist.get_rank"),
        ({"rank_mapping": [0, 0]}, r"rank_mapping=\[0, 0\]: give 2 different world ranks"),
        ({"rank_mapping": [0]}, r"rank_mapping=\[0\]: give 2 different world ranks"),
        ({"rank_mapping": {0: 0, 2: 1}}, "give 2 different world ranks"),
        ({"rank_mapping": [0, 7]}, "rank_mapping names rank 7, but the world has ranks 0 to 1"),
        ({"split_rank": 1}, "pp_split_rank=1 lies outside a pipeline of 1 stages; it needs two stages or more"),
    ):
        with pytest.raises(ValueError, match=says):
            ParallelGroups(**{"topology": grid, "rank": rank, **wrong})
    return len(_world.pg_names)


def test_wrong_grids_are_refused_before_any_group_is_made():
    assert run_distributed(worker_wrong, 2) == [1, 1]


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
