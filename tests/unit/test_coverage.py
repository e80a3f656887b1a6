"""How much of a model is sharded of what could be, and the reasons that are given for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_seqpar import ParallelConfig, describe
from lightning_seqpar.cli.plan import render
from lightning_seqpar.verify.coverage import Coverage
from tests.helpers import third_party, zoo
from tests.helpers.adapted import Adapted
from tests.helpers.families import build
from tests.helpers.models import GPT
from tests.mutants import sees

IDS = torch.arange(18).reshape(2, 9)


def coverage(model: nn.Module, plan: Any = "auto", example: Any = IDS, **fields: Any) -> Coverage:
    found = describe(model, ParallelConfig(tp=2, plan=plan, **fields), example=example).coverage
    assert found is not None
    return found


# ---- what is counted -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """An MLP, and beside it one tensor of each kind that is no matrix of a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.router = nn.Linear(8, 4)
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.ones(1, 1, 8))
        self.conv, self.lookup, self.rnn = nn.Conv1d(8, 8, 1), nn.Embedding(4, 8), nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.up(y)) * self.router(y).amax() + (x @ self.mix) * self.scale


class Model(nn.Module):
    """Two blocks of which a plan speaks, two of which none does, and a linear outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.merge, self.head = nn.Embedding(31, 8), nn.Linear(8, 8), nn.Linear(8, 31)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.others = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.merge(self.embed(ids))
        for block in (*self.blocks, *self.others):
            x = block(x)
        return self.head(x)


RULES = [
    {"pattern": "blocks.*", "style": "blocks", "sp": False},
    {"pattern": "blocks.*.up", "style": "gather"},
    {"pattern": "blocks.*.up", "style": "column"},
    {"pattern": "blocks.*.down", "style": "row"},
]


@sees(
    "coverage: norms and embeddings could be sharded",
    "_Look.could_be",
    " or isinstance(self._modules[holder], _NO_LINEARS)",
    "",
)
@sees("coverage: a stack without a plan could not be sharded", "_Look.could_be", "if not linear and not any(", "if not any(")
@sees("coverage: a whole vocabulary is not counted", "_Look.could_be", "if self._vocabulary(name) is not None:", "if False:")
@sees("coverage: a part of a block that is whole passes for the block", "_Look.patterns", " if around not in taken]", "]")
def test_what_could_be_sharded_is_counted_by_what_a_tensor_is():
    found = coverage(Model(), {"base": "none", "rules": RULES})
    # up's weight and bias and down's weight, in two blocks.
    assert (found.sharded, found.sharded_numel) == (6, 2 * (16 * 8 + 16 + 8 * 16))
    # Beside them: router and mix in two blocks, two linears in each of the others, embedding, head and the linear outside.
    assert found.could_be == 6 + 4 + 4 + 3
    assert found.could_be_numel == found.sharded_numel + 2 * (4 * 8 + 8 * 8) + 4 * 8 * 8 + 2 * 31 * 8 + 8 * 8
    assert str(found) == "6 of 17 tensors that could be are sharded (35 % of their parameters)"
    (whole,) = found.whole
    assert set(whole.names) == {"blocks.*.router", "blocks.*.mix", "others", "embed", "head", "merge"}
    assert whole.why == "your plan leaves it whole"


@sees(
    "coverage: the user is warned of what he asked for",
    "Coverage.warnings",
    "missed = [one for one in self.whole if not one.as_asked]",
    "missed = [*self.whole]",
)
def test_what_the_user_wrote_himself_is_no_warning():
    assert coverage(Model(), {"base": "none", "rules": RULES}).warnings == []
    own = coverage(GPT().model, {"rules": [{"pattern": "blocks.*", "style": "blocks", "sp": False}]})
    assert (own.warnings, own.sp, own.sp_off) == ([], False, "blocks.*: your rule says sp: false")


def test_a_shipped_plan_that_shards_all():
    found = coverage(GPT())
    assert str(found) == "13 of 13 tensors that could be are sharded (100 % of their parameters)"
    assert (found.reasons, found.warnings, found.sp, found.sp_off) == ([], [], True, "")


@sees(
    "coverage: both halves of an adapter could be sharded",
    "_Look.could_be",
    "not any(is_adapted",
    "not any(False and is_adapted",
)
def test_the_half_of_an_adapter_that_meets_whole_features_could_not_be_sharded():
    model = Adapted("llama", ["q_proj", "o_proj"])
    layers = len(model.model.base_model.model.model.layers)
    plain, found = coverage(build("llama"), example=None), coverage(model, example=None)
    assert found.reasons == plain.reasons == []
    # Of a column's adapter the second half, of a row's the first.
    assert found.could_be == plain.could_be + 2 * layers


# ---- why -------------------------------------------------------------------------------------------------------


def test_a_part_that_can_not_be_split_is_named_with_the_reason():
    found = coverage(zoo.Decoder("hard_coded"))
    assert str(found) == "8 of 12 tensors that could be are sharded (60 % of their parameters)"
    (line,) = found.reasons
    assert line.startswith("whole: h.*.attn (4 tensors, 2,048 parameters): h.0.attn.out: with its columns cut for one rank")
    assert len(line) < 300
    assert line.endswith(" ...")
    assert found.warnings == []


class TwoStacks(zoo.Net):
    """A stack that can be sharded, before one that is larger and can't."""

    def __init__(self) -> None:
        super().__init__(zoo.usual(), zoo.usual())
        self.fixed = nn.ModuleList(zoo.BLOCKS["hard_coded"]() for _ in range(6))
        for block in self.fixed:
            block.mlp = nn.Identity()

    def run(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.fixed):
            x = block(x)
        return x


@sees(
    "coverage: no warning of little that is sharded",
    "Coverage.warnings",
    "if sum(one.numel for one in missed) >",
    "if False and sum(one.numel for one in missed) >",
)
def test_a_stack_without_a_plan_is_named_once_and_little_is_warned_of():
    found = coverage(TwoStacks())
    (line,) = found.reasons
    assert line.startswith("whole: fixed (12 tensors, 6,144 parameters): ")
    assert "with its columns cut for one rank" in line
    (warning,) = found.warnings
    assert warning.startswith(f"lightning_seqpar: {found}. {line}. Every rank holds and computes the whole of these.")
    assert "plan={'rules': [...]}" in warning


def test_rules_of_the_users_are_told_as_his():
    whole = [{"pattern": "h.*.attn", "style": "whole"}, {"pattern": "lm_head", "style": "whole"}]
    found = coverage(zoo.Decoder("hard_coded"), {"rules": whole})
    assert {(names, one.why) for one in found.whole for names in one.names} == {
        ("h.*.attn", "your rule"), ("lm_head", "your rule")
    }  # fmt: skip
    assert all(one.as_asked for one in found.whole)


def test_the_vocabulary():
    off = coverage(GPT(), vocab=False)
    assert off.reasons == ["whole: model.tokens (1 tensor, 496 parameters): vocab=False says so"]
    model = GPT(tied=False)
    model.model.tokens.max_norm = 1.0
    (line,) = coverage(model).reasons
    assert line.startswith("whole: model.tokens (1 tensor, 496 parameters): vocab: an nn.Embedding with max_norm")


def test_what_a_shipped_plan_leaves_whole():
    moe = {"num_local_experts": 2, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "experts_implementation": "eager"}
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**moe, **heads))
    (line,) = coverage(mixtral, example=None).reasons
    assert line == "whole: model.layers.*.mlp.gate (1 tensor, 32 parameters): the shipped plan leaves it whole"


# ---- sequence parallelism --------------------------------------------------------------------------------------


class OwnAttention(nn.Module):
    """ALBERT, vit-pytorch: the block is its own attention, and reads the length of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm = 4, nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, -1)
        q, k, v = (linear(x).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:-1], -1)
        return self.norm(x + self.o(out))


def own_attention() -> nn.Module:
    return zoo.Net(OwnAttention(), OwnAttention())


@sees(
    "coverage: no warning of sequence parallelism that is off",
    "Coverage.warnings",
    "if off := [one for one in self.no_sp if not one.as_asked]:",
    "if off := [one for one in self.no_sp if False]:",
)
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            own_attention,
            "blocks.*: the attention of o stands in the block's own forward, which would read the length of its shard",
        ),
        (
            lambda: third_party.Image(lambda at: third_party.ShiftedWindows(at % 2)),
            "stages.*.*: its activation [2, 4, 4, 16] has positions in 2 dims",
        ),
    ],
)
def test_sequence_parallelism_that_is_off_in_every_block_is_told_with_the_reason(model, why):
    found = coverage(model())
    assert (found.sp, found.sp_off) == (False, why)
    (warning,) = found.warnings
    assert warning.startswith(f"lightning_seqpar: sequence parallelism is off in every block: {why}. ")
    assert coverage(model(), sp=False).warnings == []
    assert coverage(model(), sp=False).sp_off == ""


# ---- where it is told ------------------------------------------------------------------------------------------


def test_a_description_has_the_same_lines():
    said = describe(zoo.Decoder("hard_coded"), ParallelConfig(tp=2), example=IDS)
    assert said.coverage is not None
    text = " ".join(render(said, 400).split())
    assert f"{said.coverage} {said.coverage.reasons[0]} per rank" in text
    assert said.to_dict()["coverage"]["sharded"] == 8
    off = describe(own_attention(), ParallelConfig(tp=2), example=IDS)
    assert not off.sp
    assert f"2 ranks: tp 2, not sequence parallel ({off.coverage.sp_off if off.coverage else ''}); " in render(off, 400)
    assert describe(GPT(), ParallelConfig(tp=1)).coverage is None
