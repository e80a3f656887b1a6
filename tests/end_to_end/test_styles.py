"""Every style of the vocabulary, written by hand: read, printed back, checked, and right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_seqpar import ParallelConfig, SeqParallelStrategy, ShardingPlan
from lightning_seqpar.layout.attributes import AttributeOverride
from lightning_seqpar.layout.linear_kind import linear_kind
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from lightning_seqpar.nn.vocab_loss import VocabPart
from lightning_seqpar.plan.sharding_plan import STYLES
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import compare
from tests.helpers import models, zoo
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees

ALL_STYLES = """\
rules:
- {pattern: h.*, style: blocks, dim: 0, sp: false}
- {pattern: h.*, style: scatter, arg: hidden}
- {pattern: h.*.attn, style: gather, args: [0, context]}
- {pattern: h.*.cross, style: copy, args: [1]}
- {pattern: h.*.conv, style: whole}
- {pattern: h.*.attn.qkv, style: column, segments: [q, k, v], units: [n_head, n_kv, n_kv]}
- {pattern: h.*.attn.out, style: row, units: n_head}
- {pattern: h.*.experts.w1, style: column, dim: 2}
- {pattern: h.*.experts.w2, style: row, dim: 1}
- {pattern: h.*.experts.b2, style: once}
- {pattern: h.*.moe, style: reduce}
- {pattern: h.*.attn.slopes, style: local_heads}
- {pattern: h.*.attn, style: local_heads, dim: 1, args: [bias]}
- {pattern: h.*.attn.q_norm, style: full_width}
- {pattern: h.*.attn.temperature, style: gradient, summed: true}
- {pattern: h.*.attn, style: set, divide: [n_head, config.n_head], values: {n_kv: 1}}
- {pattern: h.*.attn, style: flex}
- {pattern: h.*.mha, style: replace}
- {pattern: '{wte,head}', style: vocab}
- {pattern: norm, style: exit, blocks: h.*}
"""


def test_every_style_is_read_and_printed_back(tmp_path: Path):
    file = tmp_path / "plan.yaml"
    file.write_text(ALL_STYLES)
    plan = ShardingPlan.from_yaml(file)
    assert plan.to_yaml() == ALL_STYLES
    assert {rule.style for rule in plan.rules} == set(STYLES)
    config = ParallelConfig(tp=2, plan={"base": "none", "rules": [rule.dump() for rule in plan.rules]})
    assert ShardingPlan.from_rules(config.plan.rules).to_yaml() == ALL_STYLES  # type: ignore[union-attr]


# ---- vocabulary ------------------------------------------------------------------------------------------------


def embedded(ids: list[int]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31)
    part = VocabPart(Shard.by_vocabulary(31, 2), dist.group.WORLD, dist.get_rank())
    VocabParallelEmbedding.adopt(embedding, part, cut=True)
    VocabParallelHead.adopt(head, part, cut=True)
    logits = head(embedding(torch.tensor([ids])))
    return logits.view(-1, head.out_features).shape, embedding.num_embeddings, repr(embedding), repr(head)


def test_a_sharded_vocabulary_is_as_large_as_it_was():
    shape, rows, *shown = run_distributed(embedded, 2, [0, 15, 16, 30])[1]
    assert (shape, rows) == ((4, 31), 31)
    assert shown == [
        "VocabParallelEmbedding(31, 8, rank 1 of tp=2)",
        "VocabParallelHead(in_features=8, out_features=31, bias=True, rank 1 of tp=2)",
    ]


@sees(
    "a token outside the vocabulary is embedded as zeros",
    "require_inside",
    "elif not bool(inside.all()):",
    "elif False:",
    case="31",
)
@pytest.mark.parametrize("wrong", [31, rest(-1)])
def test_a_token_outside_the_vocabulary_is_refused(wrong):
    with pytest.raises(
        RankFailedError, match=rf"2 of 2 ranks failed\n.*token id {wrong} is out of range: the embedding has 31 rows"
    ):
        run_distributed(embedded, 2, [0, wrong])


# ---- what several ranks hold -----------------------------------------------------------------------------------


def test_shards_by_units_and_by_vocabulary():
    shard = Shard.by_segments(0, [16, 4, 4], [8, 2, 2], 4, "qkv")
    assert shard.ranges[1] == ((4, 8), (16, 18), (20, 22))
    assert shard.ranges[3] == ((12, 16), (18, 20), (22, 24))
    assert shard.holders.tolist() == [1] * 16 + [2] * 8
    assert shard.is_first_holder(1).tolist() == [True] * 4 + [False] * 4
    for cut, length in ((shard, 24), (Shard.by_vocabulary(31, 4), 31)):  # the latter with padding
        whole = torch.randn(length, 2)
        assert torch.equal(cut.assemble([cut.take(whole, rank) for rank in range(4)]), whole)
    assert Shard.by_vocabulary(5, 4).local_length(3) == 2  # a rank that holds padding alone
    with pytest.raises(ValueError, match="expected 24 at dim 0"):
        shard.take(torch.ones(3), 0)
    with pytest.raises(ValueError, match=r"qkv: 6 units \(heads or features\) do not divide by tp=4; use tp=2, 3 or 6"):
        Shard.by_segments(0, [12], [6], 4, "qkv")
    with pytest.raises(ValueError, match="a segment of 10 features can't be made of 4 units"):
        Shard.by_segments(0, [10], [4], 2, "qkv")
    with pytest.raises(ValueError, match=r"every one of tp=4 ranks would hold all of it; leave it whole"):
        Shard.by_segments(0, [4], [1], 4, "k")


@sees(
    "a shared kv head counts twice in the norm",
    "global_grad_norm",
    "            grad = grad.index_select(shard.dim, layout.first_held",
    "            _ = (shard.dim, layout.first_held",
    case="4-4-gqa_shared",
)
@pytest.mark.parametrize(("world", "tp", "kind"), [(4, 4, "gqa_shared"), rest(8, 4, "gqa_shared"), rest(4, 4, "fused_mqa")])
def test_shared_parts_are_summed_once_and_count_once(world, tp, kind):
    """Accumulation, clipping by a norm that must count a shared kv head once, several steps."""
    kwargs: dict[str, Any] = {"steps": 3, "clip": 0.05, "accumulate": 2}
    reference = fit("Zoo", {"kind": kind, "optimizer": "sgd"}, **kwargs)
    got = run_distributed(fit, world, "Zoo", {"kind": kind, "optimizer": "sgd"}, world=world, strategy={"tp": tp}, **kwargs)
    compare(reference, got[0]).raise_if_failed()


# ---- linears and views -----------------------------------------------------------------------------------------


class Noisy(zoo.Conv1D):
    def forward(self, x):
        return super().forward(x) + 1e-2 * x.sum()


class Sub(nn.Linear):
    def forward(self, x):
        return F.linear(x, (self.weight * 64).round() / 64, self.bias)


def test_which_modules_are_linears():
    assert linear_kind(nn.Linear(3, 5)) == "out_in"
    assert linear_kind(nn.MultiheadAttention(4, 2).out_proj) == "out_in"
    assert linear_kind(zoo.Conv1D(3, 5)) == "in_out"
    assert linear_kind(zoo.Conv1D(4, 4)) == "in_out"
    weight_normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))
    for module in (Noisy(3, 5), Sub(3, 5), nn.Embedding(3, 5), nn.LayerNorm(4), nn.Bilinear(2, 3, 4), weight_normed):
        assert linear_kind(module) is None, module


def test_a_view_answers_for_a_config_that_stays():
    config = zoo.Settings(16, 4)
    view = AttributeOverride(config, {"n_head": 2})
    assert (view.n_head, view.dim, config.n_head) == (2, 16, 4)
    config.dim = 32  # a library writes to the config after the model is made
    assert view.dim == 32
    view.late = 1
    assert config.late == 1  # type: ignore[attr-defined]


class ReadsItsInput(zoo.NanoAttention):
    """Takes the head size from its input's width, and also computes with the input."""

    def forward(self, x):
        return super().forward(x) + 0 * x.sum()


zoo.EXTRA["reads_its_input"] = lambda: zoo.PreNorm(16, ReadsItsInput(16, 4), zoo.FeedForward(16, 32))


def fit_stand_in() -> None:
    rules = [
        {"pattern": "net.h.*", "style": "blocks"},
        {"pattern": "net.h.*.attn", "style": "gather", "local_width": True},
        {"pattern": "net.h.*.attn.c_attn", "style": "column", "segments": 3, "units": "n_head"},
        {"pattern": "net.h.*.attn.c_proj", "style": "row", "units": "n_head"},
        {"pattern": "net.h.*.attn", "style": "set", "divide": ["n_head", "n_embd"]},
    ]
    strategy = SeqParallelStrategy(tp=2, sp=False, plan={"base": "none", "rules": rules})
    quiet_trainer(devices=2, strategy=strategy, max_steps=1).fit(zoo.Zoo("reads_its_input"), models.loader(4))


@sees("a stand-in that is zero", "stand_in:stand_in", 'new_full((), float("nan"))', "new_full((), 0.0)")
def test_who_computes_with_a_stand_in_is_found_out():
    with pytest.raises(RankFailedError, match=r"the loss differs: nan instead of|nan"):
        run_distributed(fit_stand_in, 2)
