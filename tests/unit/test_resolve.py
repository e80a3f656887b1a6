"""A plan read on a model: which rule holds where, what styles imply, and that nothing is changed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from lightning_seqpar import ParallelConfig, ParallelGroups, ProcessTopology, ShardingPlan
from lightning_seqpar.layout.param_layout import Reason
from lightning_seqpar.parallel.apply import parallelize
from lightning_seqpar.parallel.resolve import ResolvedPlan
from lightning_seqpar.plan.sharding_plan import STYLES, resolve_plans
from lightning_seqpar.styles import style
from tests.helpers import models
from tests.mutants import sees

ROOT = Path(inspect.getfile(ShardingPlan)).resolve().parents[2]


def resolved(model: nn.Module, *rules: dict[str, Any], size: int = 2, base: bool = True) -> ResolvedPlan:
    plans = resolve_plans("auto", model) if base else []
    return ResolvedPlan(model, [*plans, ShardingPlan.from_rules(rules)], size, True)


def silent(tp: int) -> ParallelGroups:
    return ParallelGroups.silent(ProcessTopology.from_config(ParallelConfig(tp=tp), tp))


def held(plan: ResolvedPlan, name: str, *styles: str) -> list[style.Rule]:
    return [match.rule for match in plan.decided if match.name == name and match.rule.style in styles]


@sees(
    "an earlier rule wins over a later one",
    "PlannedModel._decide",
    "                last[match.slot, match.name, at if match.rule.accumulates else -1] = match\n",
    "                last.setdefault((match.slot, match.name, at if match.rule.accumulates else -1), match)\n",
)
def test_of_the_rules_for_a_linear_the_last_holds():
    plan = resolved(models.GPT(), {"pattern": "model.blocks.0.mlp.up", "style": "column", "units": 8})
    assert [rule.units for rule in held(plan, "model.blocks.0.mlp.up", "column")] == [8]
    assert (plan.units["model.blocks.0.mlp.up"], plan.units["model.blocks.1.mlp.up"]) == (8, 64)
    plan = resolved(models.GPT(), {"pattern": "model.blocks.0.mlp.up", "style": "row"})
    assert [rule.style for rule in held(plan, "model.blocks.0.mlp.up", "column", "row")] == ["row"]


def refusal(model: nn.Module, *rules: dict[str, Any], base: bool = True) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is what matters
        resolved(model, *rules, base=base)
    return str(caught.value)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True, norm_first=True)
    return nn.ModuleDict({"net": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)})


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: models.GPT(n_head=3, dim=24), {"pattern": "model.blocks.*.attn", "style": "whole"}),
        (encoder, {"pattern": "net.layers.*.self_attn", "style": "whole", "args": [0, 1, 2]}),
    ],
)
def test_heads_that_do_not_divide_are_refused_unless_a_rule_leaves_them_whole(make, rule):
    said = refusal(make())
    assert "3 units (heads or features) do not divide by tp=2; use tp=3. To have every rank compute" in said
    assert said.endswith(f"plan={ {'rules': [rule]} }")
    resolved(make(), rule)


def test_refusals_name_the_modules_of_the_model():
    row = {"pattern": "model.blocks.*.mlp.down", "style": "row"}
    assert refusal(models.GPT(), row, base=False).endswith("for example {pattern: model.blocks.*, style: blocks}")
    units = {"pattern": "model.blocks.*.attn.qkv", "style": "column", "segments": 3, "units": "n_heads"}
    assert "did you mean 'n_head'" in refusal(models.GPT(), units)
    near = refusal(models.GPT(), {"pattern": "model.blocks.0.mlp.ups", "style": "column"})
    assert "near names: 'model.blocks.*.mlp.up'" in near
    assert "near names: 'model.blocks.*'" in refusal(models.GPT(), {"pattern": "model.block.*", "style": "blocks"})
    exits = [{"pattern": "first.*", "style": "blocks"}, {"pattern": "second.*", "style": "blocks"}]
    said = refusal(TwoStacks(), *exits, {"pattern": "third", "style": "exit"}, base=False)
    assert said.endswith("{pattern: third, style: exit, blocks: first.*} or {pattern: third, style: exit, blocks: second.*}")
    with pytest.raises(ValueError, match=r"if they are tied\): \{pattern: model.head, style: vocab\}"):
        ResolvedPlan(models.GPT(), resolve_plans("auto", models.GPT()), 2, True, loss_chunk=4)


BAD_RULES = [
    ("{pattern: model.head, style: column}", "'model.head' is planned but lies outside the blocks"),
    (
        "{pattern: model.blocks.*.attn, style: set, divide: [heads]}",
        "'set' names 'heads', which CausalSelfAttention does not have",
    ),
    ("{pattern: model.blocks.*.attn, style: set, divide: [training]}", "can't be divided by tp=2"),
    ("{pattern: model.blocks.*.attn.qkv, style: column, segments: 5}", "48 out-features do not divide into 5 equal segments"),
    ("{pattern: model.blocks.*.attn.qkv, style: column, segments: [16, 16]}", "segments .16, 16. sum to 32, the linear has 48"),
    (
        "{pattern: model.blocks.*.attn.qkv, style: column, segments: 3, units: -1}",
        "units=.-1, -1, -1.: give 1 or more for each segment, such as the number of heads",
    ),
    ("{pattern: model.blocks.*.mlp.up, style: replace}", "'replace' knows nn.MultiheadAttention, and this is a Linear"),
    (
        "{pattern: model.blocks.*.norm1, style: row}",
        "style 'row' takes an nn.Linear, and this is a torch.nn.modules.normalization.LayerNorm",
    ),
    ("{pattern: model.norm, style: scatter}", "'scatter' names a block, and this is none"),
    ("{pattern: model.blocks.*.mlp.up, style: vocab}", "an embedding or a head outside the blocks"),
    ("{pattern: model.blocks.*, style: whole}", "names a module inside a block, and this is a block"),
    ("{pattern: model.blocks.*.mlp.up, style: full_width}", "takes a norm"),
    ("{pattern: model.blocks.*.norm1.weight, style: local_heads, dim: 2}", r"it has shape \[16\] and no dim 2"),
    ("{pattern: model.blocks.*.mlp.up.bias, style: local_heads}", "it belongs to a linear that is a column already"),
    (
        "{pattern: model.blocks.*.norm1.wight, style: local_heads}",
        r"matches no parameter or buffer; near names: .*'model.blocks.\*.norm1.weight'",
    ),
    (
        "{pattern: model.blocks.*.attn.qkv, style: column, segments: 3, units: [4, 4]}",
        "2 units for 3 segments; give one for all, or one for each",
    ),
    (
        "{pattern: model.norm, style: exit, blocks: model.layers.*}",
        "names blocks='model.layers.*', which no 'blocks' rule does",
    ),
]
"""Rules behind right ones, and what is said of them."""


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([{"pattern": "model.norm", "style": "exit"}], "has no 'blocks' rule"),
        (models.rules()[:1], "the plan shards nothing"),
        *(([*models.rules(), yaml.safe_load(rule)], says) for rule, says in BAD_RULES),
    ],
)
def test_a_plan_that_can_not_be_carried_out_leaves_the_model_untouched(rules, says):
    model = models.GPT()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    text = str(model)
    with pytest.raises(ValueError, match=says):
        parallelize(model, [ShardingPlan.from_rules(rules)], silent(2))
    assert str(model) == text
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    model.state_dict()


class TwoStacks(nn.Module):
    """One module that runs two stacks of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2))
        self.second = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2))
        self.third = nn.LayerNorm(4)


TWO_STACKS: list[dict[str, Any]] = [
    {"pattern": "{first,second}.*", "style": "blocks"},
    {"pattern": "{first,second}.*.up", "style": "column"},
    {"pattern": "{first,second}.*.down", "style": "row"},
]


@sees(
    "of several rules that set attributes the last alone holds",
    "PlannedModel._decide",
    "at if match.rule.accumulates else -1",
    "-1",
)
def test_one_module_may_end_several_stacks():
    exits = [{"pattern": "", "style": "exit", "blocks": f"{name}.*"} for name in ("first", "second")]
    plan = resolved(TwoStacks(), *TWO_STACKS, *exits, base=False)
    assert [(stack.blocks[0], stack.exits) for stack in plan.stacks] == [("first.0", [""]), ("second.0", [""])]


@sees(
    "a column with one unit gets the style of an earlier rule",
    "PlannedModel.drop",
    "        self._dropped.add((rule.slot or rule.style, name))\n",
    "",
)
def test_a_column_with_one_unit_stays_whole_whatever_an_earlier_rule_said():
    model = TwoStacks()
    model.n_kv = 1
    plan = resolved(model, *TWO_STACKS, {"pattern": "first.0.down", "style": "column", "units": "n_kv"}, base=False)
    assert "first.0.down" not in plan.linears
    assert plan.layout_of("first.0.down.weight").shard is None


def test_whole_undoes_what_earlier_rules_said_of_the_inside_and_later_rules_are_refused_there():
    whole = {"pattern": "model.blocks.0.mlp", "style": "whole"}
    plan = resolved(models.GPT(), whole)
    assert [m.rule.style for m in plan.matches if m.name.startswith("model.blocks.0.mlp")] == ["whole"]
    assert plan.layout_of("model.blocks.0.mlp.up.weight").reason is Reason.COMPUTED_WHOLE
    assert plan.layout_of("model.blocks.1.mlp.up.weight").reason is Reason.COLUMN
    with pytest.raises(ValueError, match=r"is computed whole on every rank, but model.blocks.0.mlp.up inside it is planned"):
        resolved(models.GPT(), whole, {"pattern": "model.blocks.0.mlp.up", "style": "column"})


class Experts(nn.Module):
    """Two matrices that it multiplies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 8, 6)), nn.Parameter(torch.randn(4, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("efh,bsh->bsef", self.w1, x).einsum("bsef,ehf->bsh", self.w2)  # type: ignore[attr-defined]


def experts() -> nn.Module:
    return models.Stack(nn.ModuleList([Experts(), Experts()]))


EXPERTS: list[dict[str, Any]] = [
    {"pattern": "blocks.*", "style": "blocks"},
    {"pattern": "blocks.*", "style": "gather"},
    {"pattern": "blocks.*.w1", "style": "column"},
    {"pattern": "blocks.*.w2", "style": "row"},
]


@sees(
    "a row that its module multiplies itself is never reduced",
    "RowRule.place",
    "        if name not in plan.modules:\n",
    "        if False:\n",
)
def test_a_row_that_a_module_multiplies_itself_implies_that_its_output_is_reduced():
    plan = resolved(experts(), *EXPERTS, base=False)
    assert list(plan.named("reduce")) == ["blocks.0", "blocks.1"]
    assert "reduce" not in {match.rule.style for match in plan.matches}
    layout = plan.layout_of("blocks.0.w2")
    assert (layout.reason, layout.shard.dim, layout.free) == (Reason.ROW, 2, True)
    plan = resolved(experts(), *EXPERTS, {"pattern": "blocks.*", "style": "reduce"}, base=False)
    assert [rule.style for rule in held(plan, "blocks.0", "reduce")] == ["reduce"]
    with pytest.raises(ValueError, match="multiplies this column itself, and no row leads out of it"):
        resolved(experts(), *EXPERTS[:3], base=False)


def test_what_is_replaced_with_a_module_can_not_be_whole():
    model = models.Encoder()
    with pytest.raises(ValueError, match=r"encoder.layers.0.self_attn around it is replaced with all that is in it"):
        resolved(model, {"pattern": "encoder.layers.0.self_attn.out_proj", "style": "whole"})


class CountsItsTensors(nn.Module):
    """An attention that reads its numbers of heads off parameters with a head dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.slopes, self.kv_slopes, self.groups = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2)), 4

    @property
    def n_head(self) -> int:
        return self.slopes.shape[0]

    @property
    def n_kv(self) -> int:
        return self.kv_slopes.shape[0]


@sees(
    "counts of heads read off tensors that are cut already",
    "_Swap.apply",
    "sorted(plan.decided, key=lambda match: match.of_tensor)",
    "sorted(plan.decided, key=lambda match: not match.of_tensor)",
)
def test_counts_that_are_read_off_tensors_are_those_of_the_whole_model():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"attn": CountsItsTensors()}) for _ in range(2))})
    rules = [
        {"pattern": "layers.*", "style": "blocks"},
        {"pattern": "layers.*.attn", "style": "gather"},
        {"pattern": "layers.*.attn.up", "style": "column"},
        {"pattern": "layers.*.attn.down", "style": "row"},
        {"pattern": "layers.*.attn.{slopes,kv_slopes}", "style": "local_heads"},
        {"pattern": "layers.*.attn", "style": "set", "ratio": {"groups": ["n_head", "n_kv"]}},
    ]
    with pytest.raises(ValueError, match=r"layers.0.attn.kv_slopes: 2 heads or features at dim 0 do not divide by tp=4"):
        parallelize(model, [ShardingPlan.from_rules(rules)], silent(4))
    parallelize(model, [ShardingPlan.from_rules(rules)], silent(2))
    attn = model["layers"][1]["attn"]
    assert (attn.n_head, attn.n_kv, attn.groups) == (4, 1, 4)


def test_every_style_is_one_class_with_a_line_in_the_docs():
    table = (ROOT / "docs" / "your_model.md").read_text().partition("## All styles")[2].partition("\n## ")[0]
    documented = {name for row in re.findall(r"^\| (.+?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(STYLES)
    for name, kind in STYLES.items():
        assert kind.model_fields["style"].default == name
