"""The start-up summary, as a user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_seqpar import ParallelConfig, ProcessTopology, ShardingPlan
from lightning_seqpar.releases import VERSION
from lightning_seqpar.strategy.model_setup import LINES, groups_of, summarize
from lightning_seqpar.verify.coverage import Coverage, Whole
from lightning_seqpar.verify.prover import write_plan
from tests.mutants import sees


def summary(world: int, per_node: int, coverage: Coverage | None = None, **fields) -> str:
    config = ParallelConfig(**fields)
    return summarize(ProcessTopology.from_config(config, world), config, per_node, ["the plan"], coverage)


def test_two_replicas_on_two_nodes():
    assert summary(8, 4, tp=4) == (
        f"lightning_seqpar {VERSION}: 8 ranks on 2 nodes, dp 2 × tp 4\n"
        "  groups  dp  [0 4] [1 5] [2 6] [3 7]\n"
        "          tp  [0 1 2 3] [4 5 6 7]\n"
        "  plan    the plan\n"
        "  memory  regather true: what columns read is gathered again in the backward\n"
        "  on      tp (linears split), sp (sequence parallelism), ddp (over the replicas)"
    )


def test_one_process():
    assert summary(1, 1) == (
        f"lightning_seqpar {VERSION}: 1 rank on 1 node\n"
        "  plan    the plan\n"
        "  on      nothing\n"
        "  off     tp, sp, ddp (one replica)"
    )


def test_what_is_recomputed_is_said_with_and_without_tensor_parallelism():
    assert "  memory  recompute full: each block runs again in the backward, and only its input is kept" in summary(
        1, 1, recompute="full"
    )
    told = summary(2, 2, tp=2, regather=True, recompute="selective", loss_chunk=64)
    assert "gathered again in the backward; recompute selective: norms, what follows the columns of MLPs, and" in told
    assert "the attention run again in the backward; loss_chunk:" in told


@sees(
    "coverage: whole sequences everywhere are listed as sequence parallelism",
    "switches",
    " and (coverage is None or coverage.sp)",
    "",
)
def test_sequence_parallelism_that_is_off_in_every_block_is_off():
    windows = Whole(("stages.*.*",), "its activation [b, h, w, c] has positions in 2 dims", False)
    told = summary(2, 2, Coverage(4, 4, 8, 8, no_sp=(windows,), sp=False), tp=2).splitlines()
    assert told[-2] == "  on      tp (linears split)"
    assert told[-1] == ("  off     sp (stages.*.*: its activation [b, h, w, c] has positions in 2 dims), ddp (one replica)")


@sees(
    "coverage: blocks without sequence parallelism are not named beside those with it",
    "switches",
    "f\"sequence parallelism{f'; not in {sp_off}' if sp_off else ''}\"",
    '"sequence parallelism"',
)
def test_sequence_parallelism_that_is_on_in_some_blocks_says_where_not():
    decoder = Whole(("decoder.*",), "mixing counts tokens (cumsum)", False)
    told = summary(2, 2, Coverage(4, 4, 8, 8, no_sp=(decoder,), sp=True), tp=2).splitlines()
    assert told[-2] == (
        "  on      tp (linears split), sp (sequence parallelism; not in decoder.*: mixing counts tokens (cumsum))"
    )
    assert told[-1] == "  off     ddp (one replica)"
    everywhere = summary(2, 2, Coverage(4, 4, 8, 8, sp=True), tp=2).splitlines()
    assert everywhere[-2] == "  on      tp (linears split), sp (sequence parallelism)"


PLAN = ["inferred", "why: a reason", "rule: {pattern: h.*}", "vocabulary: sharded: wte", "whole: h.0", "whole: h.1"]


@pytest.mark.parametrize(
    ("world", "fields"), [(1, {}), (2, {"tp": 2}), (8, {"tp": 2, "pp": 2}), (64, {"tp": 4, "cp": 2, "pp": 2})]
)
@pytest.mark.parametrize("plan", [PLAN, [*PLAN, "stages: 2", "self-check: passed"], ["none"]])
def test_the_text_at_the_start_has_few_lines(world, fields, plan):
    config = ParallelConfig(**fields)
    topology = ProcessTopology.from_config(config, world)
    lines = summarize(topology, config, 8, plan, None, "/cache/plan.yaml").splitlines()
    assert len(lines) <= LINES
    assert not any("why: " in line or "rule: " in line or "gloo_twins" in line for line in lines)
    assert any("self-check: passed" in line for line in lines) == ("self-check: passed" in plan)
    assert "/cache/plan.yaml" in lines[-1]
    assert all(line[2:10].strip() in ("groups", "plan", "", "memory", "on", "rules") for line in lines[1:])


def test_the_file_of_a_plan_is_a_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rules = [{"pattern": "h.*", "style": "blocks"}, {"pattern": "h.*.up", "style": "column", "segments": 2}]
    plans = [ShardingPlan.from_rules(rules[:1]), ShardingPlan.from_rules(rules[1:])]
    place = write_plan(plans, "a headline\n  and more")
    assert [rule.dump() for rule in ShardingPlan.from_yaml(place).rules] == rules
    assert Path(place).read_text().startswith("# a headline\n#   and more\nrules:\n")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert write_plan(plans, "") == "", "its folder can't be made"


@pytest.mark.parametrize("sizes", [[16, 1024, 1, 8], [1, 2, 1, 64], [8, 8, 8, 8]])
def test_large_worlds_stay_small(sizes):
    lines = groups_of(ProcessTopology(["pp", "dp", "cp", "tp"], sizes))
    assert len(lines) <= 4
    assert max(map(len, lines)) <= 120
