"""Rank arithmetic against literal lists and a brute-force oracle."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_seqpar import ParallelConfig, ParallelGroups, ProcessTopology
from tests.mutants import sees


def test_filters_lists_and_labels():
    topology = ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("data", 0) == [0, 1, 4, 5]
    assert topology.get_axis_comm_lists("expert") == []
    small = ProcessTopology(["a", "b"], [2, 2])
    assert small.get_rank_repr(3, omit_axes=()) == "a_01-b_01"
    assert ProcessTopology(["tp"], [128]).get_rank_repr(7) == "tp_007"
    assert ProcessTopology(["dp", "tp"], [2, 2]).get_rank_repr(3) == "tp_01"


AXES = ("pp", "dp", "cp", "tp")


def brute_force(order: tuple[str, ...], sizes: dict[str, int]) -> dict[tuple[int, ...], int]:
    """Coordinates (in the order of ``AXES``) → rank, by counting through nested loops."""
    found = {}
    for rank, coord in enumerate(itertools.product(*(range(sizes[axis]) for axis in order))):
        named = dict(zip(order, coord, strict=True))
        found[tuple(named[axis] for axis in AXES)] = rank
    return found


@sees(
    "row-major strides in the wrong direction",
    "ProcessTopology._strides",
    "math.prod(self.dims[i + 1 :]) for i",
    "math.prod(self.dims[:i]) for i",
    case="pp-dp-cp-tp",
)
@sees(
    "order of the axes reversed",
    "ProcessTopology.from_config",
    'names = config.order.split("-")',
    'names = config.order.split("-")[::-1]',
    case="pp-dp-cp-tp",
)
@sees(
    "hop does not wrap around",
    "ProcessTopology.next_stage",
    "(self.get_stage(rank) + 1) % self.pipeline_size",
    "min(self.get_stage(rank) + 1, self.pipeline_size - 1)",
    case="pp-dp-cp-tp",
)
@sees(
    "embedding group without its split rank",
    "ProcessTopology._at_stages",
    "stages if split_rank is None else {*stages, split_rank}",
    "stages",
    case="pp-dp-cp-tp",
)
@sees(
    "interleaved layers in one piece",
    "ProcessTopology.stage_layers",
    "range((turn * stages + stage) * size, (turn * stages + stage + 1) * size)",
    "range((stage * rounds + turn) * size, (stage * rounds + turn + 1) * size)",
    case="pp-dp-cp-tp",
)
@pytest.mark.parametrize("order", list(itertools.permutations(AXES)), ids="-".join)
def test_every_order_of_the_axes_against_brute_force(order):
    """1,944 topologies: sizes 1 to 3 on four axes in all 24 orders; groups, pipelines, embeddings."""
    for dims in itertools.product((1, 2, 3), repeat=4):
        sizes = dict(zip(AXES, dims, strict=True))
        config = ParallelConfig(**{**sizes, "order": "-".join(order)})
        topology = ProcessTopology.from_config(config, math.prod(dims))
        ranks = brute_force(order, sizes)
        pp = sizes["pp"]
        for coord, rank in ranks.items():
            named = dict(zip(AXES, coord, strict=True))
            assert topology.get_coord(rank) == named
            assert topology.get_rank(**named) == rank
        for chosen in ({"tp"}, {"pp"}, {"dp"}, {"cp"}, {"tp", "pp"}, {"cp", "dp"}, {"tp", "dp"}, {"tp", "cp", "pp"}):
            lists: dict[tuple, list[int]] = {}
            for coord, rank in ranks.items():
                outside = tuple(c for axis, c in zip(AXES, coord, strict=True) if axis not in chosen)
                lists.setdefault(outside, []).append(rank)
            assert sorted(topology.get_axis_comm_lists(*chosen)) == sorted(sorted(group) for group in lists.values())
            for group in lists.values():
                assert topology.get_comm_list(group[-1], *chosen) == sorted(group)
        for (stage, *rest), rank in ranks.items():
            pipeline = [ranks[(s, *rest)] for s in range(pp)]
            assert topology.get_pipeline(rank) == pipeline
            assert topology.next_stage(rank) == pipeline[(stage + 1) % pp]
            assert topology.prev_stage(rank) == pipeline[stage - 1]
            assert topology.embedding_ranks(rank) == sorted({pipeline[0], pipeline[-1]}, key=pipeline.index)
            assert topology.position_embedding_ranks(rank) == pipeline[:1]
            for split in range(1, pp):
                wanted = [r for s, r in enumerate(pipeline) if s in (0, split, pp - 1)]
                assert topology.embedding_ranks(rank, split) == wanted
                assert topology.position_embedding_ranks(rank, split) == [pipeline[0], pipeline[split]]
            layers = [layer for part in topology.stage_layers(rank, 2 * 3 * pp, 3 if pp > 1 else 1) for layer in part]
            assert all((layer // 2) % pp == stage for layer in layers if pp > 1)
            assert len(layers) == 6


def test_the_pipelines_of_the_sixteen_rank_example():
    topology = ProcessTopology(["pp", "dp", "tp"], [4, 2, 2])
    assert topology.p2p_pairs()[12:] == [[12, 0], [13, 1], [14, 2], [15, 3]], "the last stage's hop leads to the first"
    assert topology.get_embedding_comm_lists() == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert topology.get_embedding_comm_lists(split_rank=2) == [[0, 8, 12], [1, 9, 13], [2, 10, 14], [3, 11, 15]]
    assert topology.get_embedding_comm_lists(split_rank=3) == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert topology.get_position_embedding_comm_lists() == [[0], [1], [2], [3]]
    assert topology.get_position_embedding_comm_lists(split_rank=2) == [[0, 8], [1, 9], [2, 10], [3, 11]]
    assert (topology.get_stage(9), topology.next_stage(13), topology.prev_stage(1)) == (2, 1, 13)
    assert (topology.stage_to_global(7, 3), topology.stage_to_global(7, 3, dp=0, tp=0)) == (15, 12)


def test_interleaved_layers():
    """16 layers on four stages, twice round: each stage holds two pairs."""
    topology = ProcessTopology(["pp"], [4])
    held = [[list(part) for part in topology.stage_layers(rank, 16, virtual_pp=2)] for rank in range(4)]
    assert held == [[[0, 1], [8, 9]], [[2, 3], [10, 11]], [[4, 5], [12, 13]], [[6, 7], [14, 15]]]
    first = [(rank, turn) for rank in range(4) for turn in range(2) if topology.is_first_stage(rank, turn)]
    last = [(rank, turn) for rank in range(4) for turn in range(2) if topology.is_last_stage(rank, turn, 2)]
    assert (first, last) == ([(0, 0)], [(3, 1)])
    alone = ProcessTopology(["dp", "tp"], [2, 2])
    assert alone.stage_layers(3, 5) == [range(5)]
    assert alone.is_first_stage(3)
    assert alone.is_last_stage(3)
    assert alone.embedding_ranks(3) == alone.position_embedding_ranks(3) == alone.get_pipeline(3) == [3]
    assert alone.next_stage(3) == 3


def test_a_trillion_ranks_answer_at_once():
    """What looped over ranks would never end here."""
    topology = ProcessTopology(["pp", "dp", "cp", "tp"], [16, 2**30, 8, 8])
    assert topology.world_size == 2**40
    last = 2**40 - 1
    assert topology.get_comm_list(last, "tp") == list(range(last - 7, last + 1))
    assert topology.get_rank(**topology.get_coord(last)) == last
    assert topology.next_stage(last) == 2**36 - 1
    assert topology.embedding_ranks(last, 4)[1] == 5 * 2**36 - 1
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert hash(topology) == hash(ProcessTopology(topology.axes, topology.dims))
    groups = ParallelGroups.fake(topology, last)
    assert (groups.rank("tp"), groups.size("cp"), groups.ranks("tp")[0]) == (7, 8, last - 7)


@pytest.mark.parametrize(
    ("axes", "dims", "says"),
    [
        ([], [], "one size for each axis"),
        (["a", "a"], [1, 2], "stands there twice"),
        (["a"], [0], "a size must be 1 or more"),
        (["a"], [2.0], "axis 'a' has size 2.0: a size is a whole number"),
        (["a"], [True], "axis 'a' has size True: a size is a whole number"),
    ],
)
def test_a_wrong_grid_is_refused(axes, dims, says):
    with pytest.raises(ValueError, match=says):
        ProcessTopology(axes, dims)


def test_wrong_questions_are_answered_with_the_right_name():
    topology = ProcessTopology(["dp", "tp"], [2, 2])
    with pytest.raises(ValueError, match="unknown axis 'tpp'; did you mean 'tp'"):
        topology.get_dim("tpp")
    with pytest.raises(ValueError, match="rank 4 lies outside"):
        topology.get_coord(4)
    with pytest.raises(ValueError, match="tp=2 lies outside the axis"):
        topology.filter_match(tp=2)
    with pytest.raises(ValueError, match="tp missing"):
        topology.get_rank(dp=0)
    with pytest.raises(AttributeError, match="no axis 'pp'"):
        _ = topology.get_coord(0).pp
    with pytest.raises(ValueError, match="an axis stands there twice"):
        topology.get_axis_comm_lists("tp", "tp")
    pipeline = ProcessTopology(["pp", "tp"], [4, 2])
    with pytest.raises(ValueError, match="pp_split_rank=4 lies outside a pipeline of 4 stages; use 1 to 3"):
        pipeline.embedding_ranks(0, 4)
    with pytest.raises(ValueError, match="it needs two stages or more; leave it out"):
        topology.position_embedding_ranks(0, 1)
    with pytest.raises(ValueError, match="stage 4 lies outside the pipeline: it has stages 0 to 3"):
        pipeline.stage_to_global(0, 4)
    with pytest.raises(ValueError, match=r"18 layers do not divide by pp 4 × virtual_pp 2 = 8; use 16 or 24 layers"):
        pipeline.stage_layers(0, 18, 2)
    with pytest.raises(ValueError, match="virtual_pp=2 with pp=1: there is nothing to interleave"):
        topology.stage_layers(0, 8, 2)
    with pytest.raises(ValueError, match="world size 0: a world has 1 rank or more; use 2 processes"):
        ProcessTopology.from_config(ParallelConfig(tp=2), 0)
    with pytest.raises(ValueError, match="virtual_pp=-1: a rank holds 1 virtual stage or more"):
        pipeline.stage_layers(0, 8, -1)


# ---- process groups without other processes ---------------------------------------------------------------------


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
