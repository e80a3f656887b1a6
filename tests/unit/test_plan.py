"""Plans as data: patterns, rules, families, and messages."""

from __future__ import annotations

import byte_gpt
import pytest
import yaml
from torch import nn

from lightning_seqpar import ParallelConfig, ShardingPlan
from lightning_seqpar.layout.module_names import in_all_layers, match_pattern
from lightning_seqpar.plan.sharding_plan import EXAMPLE, load_families, resolve_plans, source_digest
from tests.helpers import models


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("blocks.*", "blocks.3", True),
        ("blocks.*", "blocks.3.attn", False),
        ("blocks.*.{attn,mlp}", "blocks.10.mlp", True),
        ("blocks.*.{attn.out,mlp.down}", "blocks.1.attn.out", True),
        ("*.*_proj", "attn.q_proj", True),
        ("norm", "norm1", False),
        ("a.b", "axb", False),
        ("", "", True),
    ],
)
def test_patterns(pattern, name, fits):
    assert match_pattern(pattern, name) is fits


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("h.0.attn", "h.*.attn"),
        ("0.attn", "*.attn"),
        ("stages.1.blocks.0.mlp.2", "stages.*.blocks.*.mlp.2"),
        ("h.12.norm1", "h.*.norm1"),
        ("norm", "norm"),
    ],
)
def test_a_pattern_for_all_layers(name, pattern):
    assert in_all_layers(name) == pattern
    assert match_pattern(pattern, name)


def test_auto_finds_the_families():
    assert resolve_plans("auto", models.GPT())[0].source == "family byte_gpt"
    assert resolve_plans("auto", models.Encoder())[0].source == "family torch_encoder_batch_first"
    assert resolve_plans("auto", models.Encoder(batch_first=False))[0].source == "family torch_encoder_sequence_first"
    two = nn.ModuleDict({"a": models.Encoder().encoder, "b": models.Encoder(batch_first=False).encoder})
    assert [(p.prefix, p.source) for p in resolve_plans("auto", two)] == [
        ("a", "family torch_encoder_batch_first"),
        ("b", "family torch_encoder_sequence_first"),
    ]


def odd_encoders() -> dict[str, nn.Module]:
    def encoder(**kwargs):
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **kwargs)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    odd, extra = encoder(), encoder()
    odd.layers[1].linear1 = nn.Conv1d(1, 1, 1)
    extra.layers[0].adapter = nn.Linear(2, 2)
    softmax = encoder(activation=lambda x: x.softmax(-1))
    return {"is a Conv1d": odd, "'layers.0.adapter'": extra, "activation_relu_or_gelu is 0": softmax}


@pytest.mark.parametrize("says", odd_encoders())
def test_a_model_that_only_looks_like_a_family_is_refused(says):
    with pytest.raises(ValueError, match=says):
        resolve_plans("auto", nn.ModuleDict({"e": odd_encoders()[says]}))


def test_changed_source_is_refused_unless_the_plan_is_named(monkeypatch):
    class MLP(byte_gpt.MLP):
        pass

    MLP.__name__ = "MLP"
    model = models.GPT()
    model.model.blocks[0].mlp.__class__ = MLP
    with pytest.raises(ValueError, match=r"the source of MLP differs .* name the plan yourself: plan='byte_gpt'"):
        resolve_plans("auto", model)
    assert resolve_plans("byte_gpt", model)


def test_the_families_digests_are_fresh():
    family = next(f for f in load_families() if f.family == "byte_gpt")
    assert family.source == {name: source_digest(getattr(byte_gpt, name)) for name in family.source}
    assert all(family.source.values())


def test_the_printed_example_is_a_plan(tmp_path):
    """Pasted into a plan's own file, and into a configuration."""
    data = yaml.safe_load(EXAMPLE)
    assert ShardingPlan.from_rules(ParallelConfig(plan={"base": "none", **data}).plan.rules).rules
    (tmp_path / "plan.yaml").write_text(EXAMPLE)
    assert len(ShardingPlan.from_yaml(tmp_path / "plan.yaml").rules) == len(data["rules"])
