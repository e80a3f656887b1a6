"""Process groups: real ones on eight gloo ranks, fake ones at any size, and who shares what."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar.testing import run_distributed
from tests.mutants import sees

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


@sees(
    "groups made from the first list",
    "ParallelGroups._make_axis_groups",
    "            ranks = tuple(self.ranks(axes)) if self._grid_rank >= 0 else (self._world_rank,)\n",
    "            ranks = tuple(self.topology.get_axis_comm_lists(*axes)[0])\n",
)
@sees(
    "only members count their embedding group",
    "ParallelGroups._make_named_groups",
    "            if shared is None:\n",
    "            if shared is None and member:\n",
)
@sees(
    "groups made anew under a dead one's name",
    "ParallelGroups.destroy",
    "            group.shutdown()\n",
    "            dist.destroy_process_group(group)\n",
)
def test_an_all_reduce_of_ranks_over_every_group_of_eight():
    cases = [
        (["pp", "dp", "cp", "tp"], [2, 2, 1, 2], 1),
        (["dp", "pp", "tp", "cp"], [1, 4, 1, 2], 2),
        (["tp", "cp", "dp", "pp"], [2, 2, 1, 2], None),
        (["pp", "dp", "tp"], [4, 1, 2], None),
    ]
    first = run_distributed(worker_every_group, 8, cases)
    assert first[0][0]["embedding"] == [0, 4]
    assert first[3][1] == {"embedding": [1, 5, 7], "position_embedding": [1, 5], "fp8_amax": [3]}
    assert first[6][3] == {"embedding": [0, 6], "position_embedding": [0], "fp8_amax": [6, 7]}


def worker_shares():
    topology = ProcessTopology(["dp", "cp", "tp"], [2, 2, 2])
    groups = ParallelGroups(topology, dist.get_rank(), shard_size=2)
    whole = ParallelGroups(topology, dist.get_rank())
    told = [groups.ranks(name) for name in ("fsdp_shard", "fsdp_replicate")]
    assert [total(groups[name]) for name in ("fsdp_shard", "fsdp_replicate")] == [sum(ranks) for ranks in told]
    assert whole["fsdp_shard"] is whole["dp", "cp"]
    assert whole.ranks("fsdp_replicate") == [dist.get_rank()]
    return told


def test_replicas_that_share_out_parameters_are_neighbours():
    found = run_distributed(worker_shares, 8)
    assert found[0] == [[0, 2], [0, 4]]
    assert found[7] == [[5, 7], [3, 7]]


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


@sees("a mapped grid's ranks sorted", "releases:new_group", 'options["sort_ranks"] = False', 'options["sort_ranks"] = True')
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
        ({"rank_mapping": {0: 0, 2: 1}}, "give 2 different world ranks"),
        ({"rank_mapping": [0, 7]}, "rank_mapping names rank 7, but the world has ranks 0 to 1"),
        ({"split_rank": 1}, "pp_split_rank=1 lies outside a pipeline of 1 stages; it needs two stages or more"),
    ):
        with pytest.raises(ValueError, match=says):
            ParallelGroups(**{"topology": grid, "rank": rank, **wrong})
    return len(_world.pg_names)


def test_wrong_grids_are_refused_before_any_group_is_made():
    assert run_distributed(worker_wrong, 2) == [1, 1]
