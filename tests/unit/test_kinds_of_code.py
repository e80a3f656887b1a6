"""What inference writes for kinds of code that libraries have, and which modules count as linears. No process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar import ShardingPlan
from lightning_seqpar.inference.dataflow import CantInferError
from lightning_seqpar.inference.infer import infer_plan
from lightning_seqpar.inference.trace import REDUCTIONS
from lightning_seqpar.layout.attributes import read_attribute, write_attribute
from lightning_seqpar.layout.linear_kind import linear_kind, settings_of
from lightning_seqpar.plan.sharding_plan import linears_beside, resolve_plans
from lightning_seqpar.verify.training import KeepFloat64
from tests.helpers import models, third_party, zoo
from tests.helpers.third_party import KINDS
from tests.mutants import sees

IDS = torch.arange(40).view(4, 10) % 31
SAYS = {
    "conformer": ["{pattern: h.*, style: blocks, sp: false}", "{pattern: h.*.attn.wo, style: row, units: num_heads}"],
    "batch_normed": [
        "{pattern: h.*.attn, style: set, divide: [heads, value_dim]}",
        "{pattern: h.*.attn.qkv.bn.running_var, style: local_heads}",
        "{pattern: h.*.attn.bias, style: local_heads}",
        "{pattern: h.*.attn.proj.bn.weight, style: gradient, summed: false}",
        "{pattern: h.*.mlp.0.bn.running_mean, style: local_heads}",
        "{pattern: h.*.mlp.2.bn.bias, style: gradient, summed: false}",
    ],
    "listed": ["{pattern: h.*.mlp.2, style: row}"],
    "parametrized": ["{pattern: h.*.attn, style: whole}", "{pattern: h.*.mlp.fc2, style: row}"],
    "spatial_gate": [
        "{pattern: h.*.mlp.fc1, style: column, segments: 2}",
        "{pattern: h.*.mlp.norm, style: full_width}",
    ],
    "shared_scale": ["{pattern: h.*.temperature, style: gradient, summed: true}"],
    "einops_heads": [f"{{pattern: h.*.attn.split_{x}, style: set, divide: [_axes_lengths.h]}}" for x in "qkv"],
    "weight_of_qkv": [
        "{pattern: h.*.attn, style: gather, local_width: true}",
        "{pattern: h.*.attn.qkv.weight, style: local_heads, segments: 3, units: heads}",
        "{pattern: h.*.attn.v_bias, style: local_heads}",
    ],
    "low_rank_row": [
        "{pattern: h.*.attn.o.weight, style: row, units: heads}",
        "{pattern: h.*.attn.o.lora_a, style: row, units: heads}",
        "{pattern: h.*.attn.o, style: reduce}",
        "{pattern: h.*.mlp.fc2, style: reduce}",
    ],
    "biased_row": [
        "{pattern: h.*.fc2.up.bias, style: once}",
        "{pattern: h.*.fc2.scale_in, style: local_heads}",
        "{pattern: h.*.fc2, style: reduce}",
    ],
    "bent_row": ["{pattern: h.*.attn, style: whole}", "{pattern: h.*.mlp.fc2, style: row}"],
    "mix_ffn": [
        "{pattern: h.*.mlp.dw, style: set, divide: [groups]}",
    ],
    "reads_width": [
        "{pattern: blocks.*.attn, style: gather, local_width: true}",
        "{pattern: blocks.*.attn, style: copy, args: [1]}",
    ],
    "positioned": ["{pattern: blocks.*.attn, style: gather}", "{pattern: blocks.*.attn, style: copy, args: [1]}"],
    "positioned_memory": ["{pattern: blocks.*.attn, style: copy, args: [1, 2]}"],
    "shifted_inside": [
        "{pattern: stages.0.*.attn, style: gather}",
        "{pattern: stages.0.*.attn.qkv.weight, style: local_heads, segments: 3, units: heads}",
    ],
    "two_activations": [
        "{pattern: blocks.*, style: blocks, sp: false}",
        "{pattern: 'blocks.{0,1}.attn', style: gather, args: [0, text]}",
        "{pattern: blocks.*.attn.add_q, style: column, units: heads}",
        "{pattern: 'blocks.{0,1}.attn.add_o', style: row, units: heads}",
    ],
    "value_residual": [
        "{pattern: blocks.0.1, style: blocks, sp: false}",
        "{pattern: blocks.0.1.fc2, style: row}",
        "{pattern: blocks.1.0, style: local_heads, dim: 1, args: [1]}",
    ],
    "first_differs": [
        "{pattern: 'blocks.{1,2}', style: blocks, sp: false}",
        "{pattern: 'blocks.{1,2}.attn.wo', style: row, units: num_heads}",
    ],
    "one_way_out": ["{pattern: h.*.out, style: row, segments: [16, 32], units: [4, 32]}"],
    "twice_out": ["{pattern: h.*.attn.wo, style: row, units: num_heads}"],
    "shared_queries": ["{pattern: blocks.*.attn, style: copy, args: [1]}"],
}  # fmt: skip


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build(kind)


@sees(
    "the gradient of a norm behind the row is summed",
    "BlockPlanner._write_gradients",
    "elif inner and flow.behind_rows(parameter):",
    "elif False:",
    case="batch_normed",
)
@sees(
    "batch norms behind columns are not known to be cut with them",
    "edit_search:_batch_norms",
    'if block.flow.between(f"{name}.weight", [group.row])',
    "if False",
    case="batch_normed",
)
@sees(
    "a parametrized weight is not seen as one",
    "BlockReader._step",
    "any(around[-1:])",
    "not any(around[-1:])",
    case="parametrized",
)
@sees(
    "a linear over positions hides the columns in front of it",
    "group_layout",
    "if support.mixes(name) and",
    "if False and",
    case="spatial_gate",
)
@sees(
    "a list of modules taken for a module that is called", "part_around", "if flow.trace.calls_of(one)", "if one", case="listed"
)
@sees("a second activation taken for a memory", "find_streams", "found.append(key)", "pass", case="two_activations")
@sees(
    "rows that share columns are planned one by one",
    "BlockPlanner._rows_beside",
    "return found[1:]",
    "return []",
    case="two_activations",
)
@sees(
    "a column that nothing reads has its row refused",
    "_FeatureSupport.deal",
    "if not covered.any():",
    "if False:",
    case="two_activations",
)
@sees(
    "an input made inside a module is gathered nowhere",
    "GatherPoints.find",
    "if keys and self._can_gather(call, keys):",
    "if False:",
    case="shifted_inside",
)
@sees(
    "one kind of block that can't be planned ends the search",
    "StackPlanner.plan",
    "if not failing or not rest:",
    "if True:",
    case="value_residual",
)
@sees(
    "a pattern of some blocks of a list matches all of them",
    "block_planner:pattern_of",
    " and {*leaves} == {*model.get_submodule(parent)._modules}",
    "",
    case="two_activations",
)
@sees(
    "a product with a weight reads the stand-in",
    "stand_in:_PRODUCTS",
    "(F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)",
    "()",
    case="weight_of_qkv",
)
@sees(
    "a row's joined input taken for one part",
    "BlockReader._segments_of",
    "return sizes if sum(sizes) == self.value(number).shape[-1] else ()",
    "return ()",
    case="one_way_out",
)
@sees(
    "what a projection reads in its second call is not copied",
    "GatherPoints.settle",
    "(flow.linears[column].reads, *flow.linears[column].also_reads)",
    "(flow.linears[column].reads,)",
    case="shared_queries",
)
@sees(
    "the linear behind an attention's way out taken for the row",
    "_end_rows_at_attention",
    "if not upstream or ",
    "if True or ",
    case="twice_out",
)
@sees(
    "positions that a block is given taken for a weight",
    "BlockReader._step",
    " and not self.upstream_of.get(n)]",
    "]",
    case="shared_queries",
)
@sees(
    "a head count divided in one of two modules",
    "_needed",
    "if rehearse(block, groups, tp, [*edits, *fewer]) is None:",
    "if True:",
    case="einops_heads",
)
@sees(
    "a scale of a row's input is left whole",
    "summed_parts:_Candidate.try_all",
    '("once", "local", "whole") if len(vector) == self._features else ',
    "",
    case="biased_row",
)
@sees(
    "a depthwise convolution keeps the groups of all channels",
    "_depthwise",
    'for key in ("groups", "in_channels", "out_channels")',
    'for key in ("in_channels",)',
    case="mix_ffn",
)
@sees(
    "a batch norm sees a shard of the sequence",
    "Block.sequence_dim",
    "return None if all(mixed) else",
    "return 1 if all(mixed) else",
    case="conformer",
)
@sees(
    "a gradient that was copied inside is copied again around it",
    "GatherPoints.settle",
    "        if fed:\n",
    "        if False:\n",
    case="positioned_memory",
)
@sees(
    "what a column reads beside the activation is not copied",
    "GatherPoints.settle",
    'self._write(point, "copy", [key for key in sources if call.args[key] not in flow.made])',
    "pass",
    case="positioned",
)
@sees(
    "a stand-in for an argument that is copied",
    "BlockPlanner._write_gathers",
    'if style == "gather" and any(key in args for key in narrow):',
    "if narrow:",
    case="reads_width",
)
@sees(
    "a weight that is read past its linear dealt out by its in-features",
    "BlockReader._out_dim",
    "return turns % 2",
    "return 1 - turns % 2",
    case="weight_of_qkv",
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_rules_that_are_found(kind):
    plan = infer_plan(build(kind), IDS, 2).plan
    text = plan.to_yaml()
    for rule in SAYS.get(kind, ()):
        assert f"- {rule}\n" in text
    points = {rule.pattern for rule in plan.rules if rule.style in ("gather", "copy")}
    assert not [(a, b) for a in points for b in points if b.startswith(f"{a}.")]  # what is whole is not made whole again
    assert ("style: whole" in text) == (kind in ("re_attention", "bent_row", "parametrized"))


# ---- linears -----------------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class Casting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class NoisyInTraining(zoo.Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + torch.randn_like(out) if self.training else out


class Growing(nn.Linear):
    """Its noise is zero until a schedule raises it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.noise * torch.randn(())


class GrowingByClass(nn.Linear):
    noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.noise


SETTINGS = {"noise": 0.0}


class GrowingByGlobal(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SETTINGS["noise"]


@sees(
    "a scaled linear taken for a linear",
    "_makes",
    "torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)",
    "True",
    case="True-Scaled",
)
@sees(
    "a linear whose noise may grow taken for a linear",
    "linear_kind",
    "if settings_of(module) is None:",
    "if False:",
    case="True-Growing",
)
@sees(
    "a linear is probed as it stands, not in training",
    "linear_kind:_try",
    "for training in (True, False)",
    "for training in (module.training,)",
    case="False-NoisyInTraining",
)
@sees(
    "a linear that casts its weight taken for one that does not",
    "linear_kind:_try",
    "return None if _output(module, x.to(other), module.training) is not None else kind",
    "return kind",
    case="True-Casting",
)
@pytest.mark.parametrize("kind", [Scaled, Casting, NoisyInTraining, Growing, GrowingByClass, GrowingByGlobal])
@pytest.mark.parametrize("training", [True, False])
def test_what_computes_something_else_is_no_linear(kind, training):
    module = kind(8, 6).train(training)
    state = torch.get_rng_state()
    assert linear_kind(module) is None
    assert module.training == training
    assert torch.equal(torch.get_rng_state(), state)


@sees(
    "a setting that a linear reads may change unseen",
    "LinearSettings.check",
    "if now is not value and now != value:",
    "if False:",
)
def test_settings_that_are_off_are_watched():
    module = third_party.SettingLinear(8, 6)
    assert linear_kind(third_party.SettingLinear(8, 6, precision=torch.float32)) is None
    settings = settings_of(module)
    assert settings is not None
    assert settings.values == {"precision": None}
    settings.check(module, "blocks.0.attn.q")
    module.precision = torch.bfloat16
    with pytest.raises(RuntimeError, match=r"blocks.0.attn.q.precision: it was None .* is torch.bfloat16 now"):
        settings.check(module, "blocks.0.attn.q")


@sees(
    "verify: casts that are turned down make linears of one type unknown",
    "linear_kind:_try",
    "    with _disable_current_modes():\n",
    "    if True:\n",
    case="OwnLinear",
)
@pytest.mark.parametrize("kind", [nn.Linear, third_party.OwnLinear, third_party.SettingLinear, zoo.Conv1D])
def test_what_computes_a_product_is_a_linear(kind):
    module = kind(8, 6)
    calls: list[Any] = []
    module.register_forward_hook(lambda *args: calls.append(args))
    assert linear_kind(module) == ("in_out" if kind is zoo.Conv1D else "out_in")
    assert calls == []  # hooks are the user's
    with KeepFloat64():  # as verify trains models in float64: every cast to a narrower type is turned down
        assert linear_kind(module.double()) == ("in_out" if kind is zoo.Conv1D else "out_in")
        assert linear_kind(Casting(8, 6).double()) is None


# ---- rows of several products ------------------------------------------------------------------------------------


class Saturating(third_party.LowRankLinear):
    """Nearly linear in small numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + 300 * torch.tanh(self.lora_b(self.lora_a(x)) / 300)


class BentInTraining(third_party.BentLinear):
    """Linear in evaluation alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else third_party.LowRankLinear.forward(self, x)


class Normalised(third_party.LowRankLinear):
    """DoRA's: divided by a norm over all in-features of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias) + self.lora_b(self.lora_a(x))


class Unused(third_party.LowRankLinear):
    """A second adapter that this run does not use."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__(dim, out)
        self.other = nn.Linear(dim, 2)


class Watched(third_party.LowRankLinear):
    """What its first half makes is read by the block."""

    def forward(self, x: Tensor) -> Tensor:
        self.low = self.lora_a(x)
        return F.linear(x, self.weight, self.bias) + self.lora_b(self.low)


class Scaling(third_party.LowRankLinear):
    """Multiplied by what the block computed before."""

    scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Watching(zoo.PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.attn.o.scale = x.sigmoid()
        x = super().forward(x)
        low = getattr(self.attn.o, "low", None)
        return x if low is None else x + low.mean(-1, keepdim=True)


class DroppingOutputs(third_party.DroppingLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.dropout(x @ self.lora_A.T @ self.lora_B.T)


ROWS = [third_party.LowRankLinear, third_party.MatrixLinear, third_party.BiasedLinear, third_party.DroppingLinear]
NO_ROWS = [
    third_party.BentLinear, Saturating, BentInTraining, Normalised, Unused, Watched, Scaling, DroppingOutputs,
]  # fmt: skip


@sees(
    "a module with a nonlinearity is taken for a row",
    "summed_parts:_sums_up",
    "return is_equal(total, whole)",
    "return True",
    case="BentLinear",
)
@sees(
    "what saturates is tried in small numbers alone",
    "summed_parts:_Candidate._sums_up",
    "dtype=torch.float64) * scale)",
    "dtype=torch.float64) * 1e-3)",
    case="Saturating",
)
@sees(
    "a row that is linear in evaluation alone",
    "summed_parts:_Candidate._sums_up",
    "product((True, False), enumerate(_SCALES))",
    "product((False,), enumerate(_SCALES))",
    case="BentInTraining",
)
@sees(
    "a row is scaled by what another module computes",
    "summed_parts:_is_closed",
    "return all(",
    "return True or all(",
    case="Scaling",
)
@sees(
    "an adapter that drops out of its output is a row",
    "summed_parts:_Candidate._draws_for_features",
    "draw.shape != x.shape",
    "False",
    case="DroppingOutputs",
)
@pytest.mark.parametrize("linear", [*ROWS, *NO_ROWS])
def test_a_sum_of_products_is_a_row_if_it_is_linear_in_its_input(linear, monkeypatch):
    attention = lambda: third_party.LowRankProjections(linear, "o")  # noqa: E731
    monkeypatch.setitem(zoo.EXTRA, "tried", lambda: Watching(16, attention(), zoo.FeedForward(16, 32)))
    text = infer_plan(build("tried"), IDS, 2).plan.to_yaml()
    assert ("{pattern: h.*.attn.o, style: reduce}" in text) == (linear in ROWS)
    assert ("style: whole" in text) == (linear in NO_ROWS)


# ---- attributes --------------------------------------------------------------------------------------------------


def test_numbers_in_a_dict_or_in_pairs_are_read_and_replaced_by_name():
    class Holder:
        def __init__(self) -> None:
            self.sizes: Any = {"h": 4, "values": 2}
            self.pairs: Any = (("h", 4), ("w", 3))

    first, other = Holder(), Holder()
    for path in ("sizes.h", "sizes.values", "pairs.h"):
        write_attribute(first, path, read_attribute(first, path) // 2)
    assert (first.sizes, first.pairs) == ({"h": 2, "values": 1}, (("h", 2), ("w", 3)))
    assert (other.sizes, other.pairs) == ({"h": 4, "values": 2}, (("h", 4), ("w", 3)))


# ---- errors ------------------------------------------------------------------------------------------------------


class Breaks(zoo.Attention):
    """Raises an error of its own where it makes less than the whole width."""

    def forward(self, x: Tensor) -> Tensor:
        if self.wq(x).shape[-1] != 16:
            raise LookupError("no such width")
        return super().forward(x)


def test_an_error_of_the_models_own_code_is_told_as_a_reason(monkeypatch):
    monkeypatch.setitem(zoo.EXTRA, "breaks", lambda: zoo.PreNorm(16, Breaks(16, 4), zoo.FeedForward(16, 32)))
    found = infer_plan(build("breaks"), IDS, 2)
    assert "{pattern: h.*.attn, style: whole}" in found.plan.to_yaml()
    assert any("h.0.attn.wo" in reason and "LookupError: no such width" in reason for reason in found.reasons)


@sees(
    "what one stack's code raises ends inference for the others",
    "infer:_infer",
    'if "use_reentrant" in str(caught):',
    "if not isinstance(caught, CantInferError):",
)
def test_an_error_without_a_message_is_told_with_its_place_and_the_other_blocks_are_planned():
    class Silent(zoo.PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad and x.is_leaf:  # a block run by itself
                raise StopIteration
            return super().forward(x)

    model = zoo.Named()
    model.first, model.second = (
        models.Stack(nn.ModuleList(kind(16, zoo.Attention(16, 4), zoo.FeedForward(16, 32)) for _ in range(2)))
        for kind in (Silent, zoo.PreNorm)
    )
    found = infer_plan(model, IDS, 2)
    assert [rule.pattern for rule in found.plan.rules if rule.style == "blocks"] == ["second.blocks.*"]
    said = (
        r"first.blocks.0: planning it was tried, which raised StopIteration: (it has no message) (test_kinds_of_code.py, line"
    )
    assert said in found.reasons[0]


@sees("a model of convolutions is asked to name its blocks", "only_convolutions", "if not sizes:", "if True:", case="1")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_of_convolutions_is_told_that_nothing_can_be_split(depth):
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(F.gelu(self.fc1(x)))

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.Sequential(*(Pooled() for _ in range(depth)))
            self.head = nn.Linear(16, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stages(x).mean((2, 3)))

    with pytest.raises(CantInferError) as stopped:
        infer_plan(Images(), torch.randn(2, 16, 4, 4), 2)
    text = str(stopped.value)
    assert "its repeated modules (stages.*, of class Pooled) hold convolutions and no linears" in text
    assert text.endswith("train it with data parallelism alone (tp=1)")


def test_a_model_of_parametrized_linears_is_told_so():
    torch.manual_seed(0)
    model = zoo.Decoder("parametrized")
    for block in model.h:
        for linear in (block.mlp.fc1, block.mlp.fc2):
            nn.utils.parametrizations.spectral_norm(linear)
    with pytest.raises(CantInferError, match=r"(?s)h.0.mlp.fc2: its weight is parametrized.*nothing of the block is left"):
        infer_plan(model, IDS, 2)


def test_what_raises_while_it_is_recorded_is_told_with_the_line():
    class Raises(zoo.Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            raise ArithmeticError("never works")

    with pytest.raises(
        CantInferError, match=r"Raises: a copy of it was run .* ArithmeticError: never works \(test_kinds_of_code.py, line"
    ):
        infer_plan(Raises("einsum"), IDS, 2)


# ---- beside a shipped plan ---------------------------------------------------------------------------------------


@sees(
    "what a shipped plan covers is inferred again",
    "infer:_infer",
    "if not any(inside(name, call.name) or inside(call.name, name) for call in calls for name in planned if name)",
    "if True",
)
@sees(
    "behind a shipped plan nothing is inferred",
    "_resolve_base",
    "infer_rest(plans) if infer_rest and linears_beside(model, plans) else None",
    "None",
)
def test_the_rest_is_inferred_behind_a_shipped_plan():
    model = build("described")
    asked = []

    def infer(beside: Any) -> ShardingPlan:
        asked.append([plan.prefix for plan in beside])
        return infer_plan(model, IDS, 2, beside=beside).plan

    shipped, inferred = resolve_plans("auto", model, infer_rest=infer)
    assert asked == [["tower"]]
    assert (shipped.source, shipped.prefix) == ("family torch_encoder_batch_first", "tower")
    assert "blocks.*.attn.wo" in inferred.to_yaml()
    assert "tower" not in inferred.to_yaml()
    assert linears_beside(models.GPT(), resolve_plans("auto", models.GPT())) == []  # which covers all


@pytest.mark.skipif(not hasattr(torch.Tag, "reduction"), reason="this torch does not tag reductions")
def test_what_torch_tags_as_reductions_is_known():
    names = {each.split("::")[1].split(".")[0] for each in torch._C._dispatch_get_all_op_names() if each.startswith("aten::")}
    packets = {name: getattr(torch.ops.aten, name, None) for name in names}
    tagged = {
        name
        for name, packet in packets.items()
        if packet is not None and any(torch.Tag.reduction in getattr(packet, each).tags for each in packet.overloads())
    }
    assert tagged
    assert tagged <= REDUCTIONS
