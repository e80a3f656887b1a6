"""Modules that multiply parameters themselves, and experts that share the tokens: by hand, inferred, refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import zoo
from fit import fit, quiet_trainer
from models import loader
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.infer import infer_plan
from lightning_seqpar.parallelize import record_of
from lightning_seqpar.parity import Trace, compare
from lightning_seqpar.probe import Example
from lightning_seqpar.testing import RankFailedError, run_distributed

IDS = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(0))
STEP = Example("a batch", "training_step", ((IDS,), 0), {})
BLOCKS = {"pattern": "net.h.*", "style": "blocks"}
EXIT = {"pattern": "net.ln_f", "style": "exit"}
WHOLE = {"pattern": "net.h.*.attn", "style": "whole"}


def rule(pattern: str, style: str, **options: Any) -> dict[str, Any]:
    return {"pattern": f"net.h.*.{pattern}", "style": style, **options}


HAND: dict[str, list[dict[str, Any]]] = {
    "raw_attention": [
        BLOCKS, EXIT,
        rule("attn", "gather"),
        rule("attn.{w_q,w_k,w_v}", "column", dim=0),
        rule("attn.{b_q,b_v}", "local_heads"),
        rule("attn.w_o", "row", dim=0),
        rule("attn.b_o", "once"),
    ],
    "routed_moe": [
        BLOCKS, EXIT, WHOLE,
        rule("mlp.experts", "gather", args=[0, 1, 2]),
        rule("mlp.experts.gate_up", "column", segments=2),
        rule("mlp.experts.down", "row"),
        rule("mlp.shared", "gather"),
        rule("mlp.shared.{w1,w3}", "column"),
        rule("mlp.shared.w2", "row"),
    ],
    "list_moe": [
        BLOCKS, EXIT, WHOLE,
        rule("mlp", "gather"),
        rule("mlp", "reduce"),
        rule("mlp.experts.*.fc1", "column"),
        rule("mlp.experts.*.fc2", "row"),
    ],
    "dense_moe": [
        BLOCKS, EXIT, WHOLE,
        rule("mlp", "gather"),
        rule("mlp.w1", "column", dim=2),
        rule("mlp.b1", "column", dim=1),
        rule("mlp.w2", "row", dim=1),
        rule("mlp.b2", "once"),
    ],
}  # fmt: skip


def plan_of(kind: str, *more: dict[str, Any]) -> dict[str, Any]:
    return {"base": "none", "rules": [*HAND[kind], *more]}


# ---- parity ----------------------------------------------------------------------------------------------------


def fit_all(world: int, tp: int, sp: bool) -> dict[str, Trace]:
    return {
        kind: fit("Zoo", {"kind": kind}, world=world, strategy={"tp": tp, "sp": sp, "plan": plan_of(kind)}, steps=3)
        for kind in HAND
    }


@pytest.mark.parametrize(("world", "tp", "sp"), [(2, 2, True), (2, 2, False), (4, 4, True), (4, 2, True)])
def test_by_hand(world, tp, sp):
    got = run_distributed(fit_all, world, world, tp, sp, timeout=300.0)[0]
    for kind in HAND:
        compare(fit("Zoo", {"kind": kind}, steps=3), got[kind]).raise_if_failed()


class RecomputedDecoder(zoo.Decoder):
    """Blocks are computed again in the backward."""

    mode = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=self.mode)
        return self.lm_head(self.ln_f(x))


class RecomputedZoo(zoo.Zoo):
    """A model of the zoo whose blocks are computed again in the backward."""

    def __init__(self, kind: str, reentrant: bool) -> None:
        super().__init__(kind)
        self.net.__class__ = RecomputedDecoder
        self.net.mode = reentrant


zoo.RecomputedZoo = RecomputedZoo
RECOMPUTED = [(kind, mode) for kind in ("routed_moe", "raw_attention", "list_moe") for mode in (True, False)]


def fit_recomputed() -> list[Trace]:
    return [
        fit("RecomputedZoo", {"kind": kind, "reentrant": mode}, world=2, strategy={"tp": 2}, steps=2, length=8)
        for kind, mode in RECOMPUTED
    ]


def test_recomputed_in_the_backward():
    for (kind, _), got in zip(RECOMPUTED, run_distributed(fit_recomputed, 2)[0], strict=True):
        compare(fit("Zoo", {"kind": kind}, steps=2, length=8), got).raise_if_failed()


# ---- inference -------------------------------------------------------------------------------------------------


INFERRED = {
    "raw_attention": [
        "{pattern: net.h.*.attn, style: gather}",
        "{pattern: net.h.*.attn.w_o, style: row, dim: 0}",
        "{pattern: net.h.*.attn.w_q, style: column, dim: 0}",
        "{pattern: net.h.*.attn.b_q, style: column, dim: 0}",
        "{pattern: net.h.*.attn.b_o, style: once}",
    ],
    "routed_moe": [
        "{pattern: net.h.*.mlp.experts, style: gather, args: [0, 1, 2]}",
        "{pattern: net.h.*.mlp.experts.gate_up, style: column, dim: 1, segments: 2}",
        "{pattern: net.h.*.mlp.experts.down, style: row, dim: 2}",
        "{pattern: net.h.*.mlp.shared, style: gather}",
    ],
    "list_moe": [
        "{pattern: net.h.*.mlp, style: reduce}",
        "{pattern: net.h.*.mlp.experts.0.fc1, style: column}",
        "{pattern: net.h.*.mlp.experts.3.fc2, style: row}",
    ],
    "dense_moe": [
        "{pattern: net.h.*.mlp.w1, style: column, dim: 2}",
        "{pattern: net.h.*.mlp.b1, style: column, dim: 1}",
        "{pattern: net.h.*.mlp.b2, style: once}",
    ],
}


@pytest.mark.parametrize("kind", INFERRED)
def test_inferred(kind):
    told = infer_plan(zoo.Zoo(kind), STEP, 2).plan.to_yaml()
    for line in INFERRED[kind]:
        assert f"- {line}\n" in told, told


def test_an_expert_without_tokens_is_dealt_out_like_the_others():
    model = zoo.Zoo("list_moe")
    with torch.no_grad():
        for block in model.net.h:
            block.mlp.gate.weight[3] = 0
            block.mlp.gate.weight[:3] *= 1e-3
            block.mlp.gate.register_forward_hook(lambda module, args, out: out - torch.tensor([0, 0, 0, 1e3]))
    told = infer_plan(model, STEP, 2).plan.to_yaml()
    assert "{pattern: net.h.*.mlp.experts.3.fc1, style: column}" in told, told
    assert "{pattern: net.h.*.mlp.experts.3.fc2, style: row}" in told, told


class Balanced(zoo.Zoo):
    """Adds what the routers left behind to the loss: a gradient that no sum over ranks may count twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(block.mlp.balance for block in self.net.h)


def shards_kept(model: type[zoo.Zoo]) -> list[bool]:
    """Whether the blocks of a trained model see shards."""
    module = model("list_moe").double()
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1)
    seen: list[bool] = []
    module.on_train_batch_end = lambda *_: seen.append(all(region.sp for region in record_of(module).regions))
    trainer.fit(module, loader(4))
    return seen


def test_experts_in_a_list_see_shards_unless_a_loss_reads_the_router():
    assert run_distributed(shards_kept, 2, zoo.Zoo)[0] == [True]
    assert run_distributed(shards_kept, 2, Balanced)[0] == [False]


# ---- refusals --------------------------------------------------------------------------------------------------


WRONG: list[tuple[str, list[dict[str, Any]], str]] = [
    ("dense_moe", [rule("mlp.w1", "column", dim=3)], r"it has shape \[3, 16, 24\] and no dim 3"),
    ("dense_moe", [rule("ln2.weight", "row", dim=0)], "multiplies this row itself, where nothing was gathered for it"),
    ("dense_moe", [rule("attn", "reduce")], "must be entered with whole activations"),
    ("dense_moe", [rule("mlp.gate.bias", "once")], "self_check"),
    ("raw_attention", [rule("mlp.fc1.bias", "once")], "around this one none are left"),
    ("raw_attention", [rule("mlp", "gather"), rule("mlp", "reduce")], "takes a module with rows inside"),
    ("list_moe", [rule("mlp.gate.weight", "column")], "it is the parameter of a linear; name the linear itself"),
]
SPOILED: list[tuple[str, list[dict[str, Any]]]] = [
    ("dense_moe", [rule("mlp.w1", "column", dim=1)]),
    ("routed_moe", [rule("mlp.experts.gate_up", "column")]),
    ("routed_moe", [rule("mlp.experts", "gather", args=[0])]),
    ("routed_moe", [rule("mlp.experts", "gather", args=[0, 1])]),
    ("raw_attention", [rule("attn.w_o", "row", dim=1)]),
]


def refuse_each() -> list[str]:
    told = []
    for kind, more in [(kind, more) for kind, more, _ in WRONG] + SPOILED:
        strategy = SeqParallelStrategy(tp=2, plan=plan_of(kind, *more))
        try:
            quiet_trainer(devices=2, strategy=strategy, max_steps=1).fit(zoo.Zoo(kind), loader(4))
            told.append("trained")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return told


def test_what_can_not_be_right_is_refused():
    told = run_distributed(refuse_each, 2)[0]
    for said, wanted in zip(told, [says for *_, says in WRONG] + ["self_check"] * len(SPOILED), strict=True):
        assert re.search(wanted, said), said


def fit_partly() -> None:
    rules = [{**r, "pattern": r["pattern"].replace("experts.*", "experts.{0,1,2}")} for r in HAND["list_moe"]]
    strategy = SeqParallelStrategy(tp=2, plan={"base": "none", "rules": rules})
    quiet_trainer(devices=2, strategy=strategy, max_steps=1).fit(zoo.Zoo("list_moe"), loader(4))


def test_one_whole_expert_among_shards_is_refused():
    with pytest.raises(RankFailedError, match=r"no rule names it, but .* beside it is a column"):
        run_distributed(fit_partly, 2)


class Dropping(zoo.RawAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.1, self.training))


zoo.EXTRA["dropping"] = lambda: zoo.PreNorm(16, Dropping(16, 4), zoo.FeedForward(16, 32))


def fit_dropping() -> None:
    quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1).fit(zoo.Zoo("dropping"), loader(4))


def test_draws_beside_raw_parameters_are_refused():
    with pytest.raises(RankFailedError, match="multiplies sharded parameters itself draws random numbers"):
        run_distributed(fit_dropping, 2)
