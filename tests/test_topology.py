"""Rank arithmetic against literal lists and a brute-force oracle."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seqpar import ParallelConfig, ParallelGroups, ProcessTopology


def test_the_sixteen_rank_example_of_the_field():
    topology = ProcessTopology(["pp", "dp", "tp"], [4, 2, 2])
    assert topology.get_axis_comm_lists("tp") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert topology.get_axis_comm_lists("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert topology.get_axis_comm_lists("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]


def test_filters_lists_and_labels():
    topology = ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data", "model") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.get_axis_list("data", 0) == [0, 1, 4, 5]
    assert topology.get_axis_comm_lists("expert") == []
    assert topology.get_coord(5).model == 1
    assert topology.get_coord(5).pipe == 1
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    small = ProcessTopology(["a", "b"], [2, 2])
    assert small.get_rank_repr(3, omit_axes=()) == "a_01-b_01"
    assert ProcessTopology(["tp"], [128]).get_rank_repr(7) == "tp_007"
    assert ProcessTopology(["dp", "tp"], [2, 2]).get_rank_repr(3) == "tp_01"


@given(dims=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_against_an_oracle_that_loops_over_everything(dims, data):
    axes = ["a", "b", "c", "d"][: len(dims)]
    topology = ProcessTopology(axes, dims)
    coords = list(itertools.product(*map(range, dims)))
    assert topology.world_size == len(coords)
    for rank, coord in enumerate(coords):
        named = dict(zip(axes, coord, strict=True))
        assert topology.get_coord(rank) == named
        assert topology.get_rank(**named) == rank
    chosen = data.draw(st.sets(st.sampled_from(axes), min_size=1))
    lists: dict[tuple, list[int]] = {}
    for rank, coord in enumerate(coords):
        lists.setdefault(tuple(c for a, c in zip(axes, coord, strict=True) if a not in chosen), []).append(rank)
    assert topology.get_axis_comm_lists(*chosen) == list(lists.values())
    for ranks in lists.values():
        assert topology.get_comm_list(ranks[-1], *chosen) == ranks


def test_a_hundred_thousand_ranks_answer_without_a_loop():
    topology = ProcessTopology(["pp", "dp", "cp", "tp"], [16, 1024, 1, 8])
    assert topology.world_size == 131_072
    assert topology.get_comm_list(131_071, "tp") == list(range(131_064, 131_072))
    assert topology.get_coord(131_071) == {"pp": 15, "dp": 1023, "cp": 0, "tp": 7}
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert hash(topology) == hash(ProcessTopology(topology.axes, topology.dims))


@pytest.mark.parametrize(
    ("axes", "dims", "says"),
    [
        ([], [], "one size for each axis"),
        (["a"], [1, 2], "one size for each axis"),
        (["a", "a"], [1, 2], "stands there twice"),
        (["a"], [0], "a size must be 1 or more"),
        (["a", "b"], [2, -1], "axis 'b' has size -1"),
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


def test_from_config_derives_dp():
    topology = ProcessTopology.from_config(ParallelConfig(tp=4), 8)
    assert dict(topology) == {"pp": 1, "dp": 2, "cp": 1, "tp": 4}
    swapped = ProcessTopology.from_config(ParallelConfig(tp=2, order="tp-dp-cp-pp"), 4)
    assert swapped.get_axis_comm_lists("tp") == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("config", "world", "says"),
    [
        ({"tp": 4}, 6, "world size 6 does not divide by tp 4 × cp 1 × pp 1 = 4; use 4 or 8 processes"),
        ({"tp": 4}, 2, "use 4 processes"),
        ({"tp": 2, "dp": 3}, 8, r"dp=3: dp 3 × tp 2 × cp 1 × pp 1 = 6 ranks, but the world has 8; use dp=4"),
    ],
)
def test_a_world_that_does_not_fit_names_one_that_does(config, world, says):
    with pytest.raises(ValueError, match=says):
        ProcessTopology.from_config(ParallelConfig(**config), world)


def test_fake_groups_answer_ranks_and_raise_on_a_group():
    groups = ParallelGroups.fake(ProcessTopology(["dp", "tp"], [2, 4]), rank=6)
    assert (groups.rank("tp"), groups.rank("dp"), groups.size("tp"), groups.size(("dp", "tp"))) == (2, 1, 4, 8)
    assert groups.ranks("tp") == [4, 5, 6, 7]
    with pytest.raises(RuntimeError, match="fake groups have no process group"):
        groups["tp"]
    with pytest.raises(ValueError, match="unknown axis 'pt'"):
        groups.rank("pt")


def test_groups_without_torch_distributed_say_what_to_call():
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        ParallelGroups(ProcessTopology(["tp"], [2]), 0)
