"""The swap: what it makes of each parameter, and that a refused plan leaves the model as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from byte_gpt import Block, ByteGPT
from torch import Tensor, nn

from lightning_seqpar import ParallelGroups, ProcessTopology, ShardingPlan, unshard
from lightning_seqpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from lightning_seqpar.parallel.apply import parallelize
from lightning_seqpar.parallel.sharded_model import ModuleSnapshot, changes_since
from lightning_seqpar.plan.sharding_plan import resolve_plans
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.mutants import sees


def groups(tp: int = 2) -> ParallelGroups:
    return ParallelGroups(ProcessTopology(["dp", "tp"], [dist.get_world_size() // tp, tp]), dist.get_rank())


def silent() -> ParallelGroups:
    return ParallelGroups.silent(ProcessTopology(["dp", "tp"], [1, 2]))


def test_modules_and_parameters_stay_the_same_objects():
    model = models.GPT()
    qkv, weight = model.model.blocks[0].attn.qkv, model.model.blocks[0].attn.qkv.weight
    calls = []
    qkv.register_forward_hook(lambda *a: calls.append(1))
    record = parallelize(model, resolve_plans("auto", model), silent())
    # The user's references stay good: same module, same parameter, same hooks, still an nn.Linear.
    assert model.model.blocks[0].attn.qkv is qkv
    assert qkv.weight is weight
    assert isinstance(qkv, ColumnParallelLinear | nn.Linear)
    assert type(qkv) is ColumnParallelLinear
    assert type(model.model.blocks[0].attn.proj) is RowParallelLinear
    assert (qkv.out_features, model.model.blocks[0].attn.n_head) == (24, 2)
    assert "rank" in repr(qkv)
    model.model(torch.ones(1, 4, dtype=torch.long))
    assert calls == [1]
    assert record.layout.local_numel() < record.layout.global_numel()
    assert ("model.blocks.0.attn.qkv", "column", "family byte_gpt") in record.choices
    with pytest.raises(ValueError, match="parallelised already"):
        parallelize(model, [], silent())
    copied = copy.deepcopy(model)  # an EMA's copy
    assert copied.model.blocks[0].attn.qkv.weight.shape == weight.shape


def check_shards(model: nn.Module, rules: list[dict[str, Any]], x: Tensor, limit: float, *, sp: bool = True) -> None:
    """A model computes the same sharded, and its input has the same gradient; unsharded it is what it was."""
    expected = model(x)
    expected.pow(2).sum().backward()
    grad, x.grad = x.grad.clone(), None
    parallelize(model, [ShardingPlan.from_rules(rules)], groups(), sp=sp)
    out = model(x)
    out.pow(2).sum().backward()
    torch.testing.assert_close(out, expected, rtol=limit, atol=limit)
    torch.testing.assert_close(x.grad, grad, rtol=limit, atol=limit)
    unshard(model)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def keyword_blocks() -> None:
    """A block called by keyword, with the activation named by 'scatter', and an attention with a keyword gather."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(16, 4)

        def forward(self, position, *, hidden):
            return self.inner(hidden) + 0 * position, position

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Named() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(torch.zeros(1), hidden=x)
            return x

    torch.manual_seed(0)
    model = Stack().double()
    rules = [
        {"pattern": "layers.*", "style": "blocks"},
        {"pattern": "layers.*", "style": "scatter", "arg": "hidden"},
        {"pattern": "layers.*.inner.{attn,mlp}", "style": "gather"},
        {"pattern": "layers.*.inner.attn.qkv", "style": "column", "segments": 3, "units": "n_head"},
        {"pattern": "layers.*.inner.attn.proj", "style": "row"},
        {"pattern": "layers.*.inner.attn", "style": "set", "divide": ["n_head"]},
        {"pattern": "layers.*.inner.mlp.up", "style": "column"},
        {"pattern": "layers.*.inner.mlp.down", "style": "row"},
    ]
    check_shards(model, rules, torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True), 1e-9)


@sees("attributes that a plan changed not taken back", "ModuleChange.undo", "        own.update(self.replaced)\n", "")
def test_arguments_by_keyword_and_tuple_outputs():
    run_distributed(keyword_blocks, 2)


class Scored(nn.Module):
    """An MLP that reads scores of a wider type than its activations, as experts read a router's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, scores):
        assert (x.dtype, scores.dtype) == (torch.float32, torch.float64)
        return self.down(self.up(x).relu() * scores.to(x.dtype))


class ScoredBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.mlp = nn.LayerNorm(16), nn.Linear(16, 1), Scored()

    def forward(self, x):
        h = self.norm(x)
        return x + self.mlp(h, self.gate(h).double().sigmoid())


def arguments_of_two_types(sp: bool) -> None:
    torch.manual_seed(0)
    rules = [
        {"pattern": "blocks.*", "style": "blocks"},
        {"pattern": "blocks.*.mlp", "style": "gather", "args": [0, 1]},
        {"pattern": "blocks.*.mlp.up", "style": "column"},
        {"pattern": "blocks.*.mlp.down", "style": "row"},
    ]
    model = models.Stack(nn.ModuleList([ScoredBlock(), ScoredBlock()]))
    check_shards(model, rules, torch.randn(2, 7, 16, requires_grad=True), 1e-5, sp=sp)


@sees(
    "gathered arguments widened to the widest",
    "hooks:gather_arguments.hook",
    "                    whole = whole.to(x.dtype)",
    "                    pass",
    case="True",
)
@pytest.mark.parametrize("sp", [True, False])
def test_gathered_arguments_keep_their_types(sp):
    run_distributed(arguments_of_two_types, 2, sp)


def change_twice() -> None:
    model = ByteGPT(dim=16, n_head=4, n_layer=1, context=16, tied=False, vocab=31)
    record = parallelize(model, resolve_plans("byte_gpt", model), groups())
    linear = model.blocks[0].mlp.up
    between, before = type(linear), ModuleSnapshot(linear)
    assert between is not nn.Linear
    linear.__class__ = type("Changed", (between,), {})
    record.changes += changes_since([before])
    unshard(model)
    assert type(linear) is nn.Linear


@sees(
    "a module's first change is taken back first",
    "unshard",
    "for change in reversed(record.changes):",
    "for change in record.changes:",
)
def test_what_was_changed_last_is_taken_back_first():
    run_distributed(change_twice, 2)
