"""Inference: the same plans as the shipped ones; seconds for a large model; words where it stops."""

from __future__ import annotations

import ast
import copy
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import byte_gpt
import numpy as np
import peers
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_seqpar import ShardingPlan
from lightning_seqpar.inference.dataflow import CantInferError
from lightning_seqpar.inference.examples import Example, NoExampleError, peek_batch, small
from lightning_seqpar.inference.infer import infer_blocks, infer_plan, with_tried_rules
from lightning_seqpar.inference.model_copy import detached_copy
from lightning_seqpar.inference.reduction import Reduction
from lightning_seqpar.plan.sharding_plan import resolve_plans
from tests.helpers import models, zoo
from tests.mutants import sees

IDS = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(0))


def meaning(plan: ShardingPlan, model: nn.Module) -> set[tuple[Any, ...]]:
    """What a plan says of each module, in words that do not depend on how it says it."""
    out: set[tuple[Any, ...]] = set()
    for match in plan.match(model):
        told = match.rule.model_dump(exclude={"pattern", "style"})
        if isinstance(segments := told.get("segments"), tuple):
            told["segments"] = len(segments)
        if isinstance(units := told.get("units"), str):
            at = match.name
            while not isinstance(value := getattr(model.get_submodule(at), units, None), int):
                at = at.rpartition(".")[0]
            told["units"] = value
        out.add((match.name, match.rule.style, tuple(sorted((k, repr(v)) for k, v in told.items()))))
    return out


# ---- the shipped families --------------------------------------------------------------------------------------


@sees(
    "head counts never found",
    "find_edits",
    "            return [*norms, *heads, *_needed(",
    "            return []\n            return [*norms, *heads, *_needed(",
    case="True-2",
)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_the_example_gpt(tp, tied):
    model = byte_gpt.ByteGPT(dim=16, n_head=4, n_layer=2, context=16, tied=tied, vocab=31)
    (family,) = resolve_plans("auto", model)
    assert meaning(infer_plan(model, IDS, tp).plan, model) == meaning(family, model)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_encoders(batch_first, norm_first):
    model = models.Encoder(batch_first, norm_first)
    example = Example("a batch", "training_step", ((models.tokens(count=4).tensors[0],), 0), {})
    (family,) = resolve_plans("auto", model)
    assert meaning(infer_plan(model, example, 2).plan, model) == meaning(family, model)


# ---- large models ----------------------------------------------------------------------------------------------


def large(depth: int = 32, dim: int = 4096, hidden: int = 11008) -> nn.Module:
    """The shapes of a 7B model with grouped kv heads and a gated MLP."""
    model = zoo.Net(
        *(zoo.PreNorm(dim, zoo.Attention(dim, 32, 8, rope=True), zoo.SwiGLU(dim, hidden), zoo.RMSNorm) for _ in range(depth))
    )
    for index, layer in enumerate(model.blocks):
        layer.layer_idx = index
    model.embed, model.norm, model.out = nn.Embedding(1000, dim), zoo.RMSNorm(dim), nn.Linear(dim, 1000, bias=False)
    return model


@pytest.mark.more
def test_a_large_model_is_never_materialised():
    with torch.device("meta"):
        model = large()
    assert sum(p.numel() for p in model.parameters()) > 5e9
    copied = detached_copy(model, torch.device("cpu"), torch.float32, Reduction(skips_repeats=True))
    assert sum(p.numel() for p in copied.parameters()) < 0.3e9
    del copied
    started = time.monotonic()
    plan = infer_plan(model, IDS[:2, :6], 8).plan
    print(f"{time.monotonic() - started:.1f} s")
    assert plan.to_yaml() == LARGE_PLAN
    assert all(parameter.is_meta for parameter in model.parameters())


LARGE_PLAN = """\
rules:
- {pattern: blocks.*, style: blocks}
- {pattern: blocks.*.attn, style: gather}
- {pattern: blocks.*.mlp, style: gather}
- {pattern: blocks.*.attn.wq, style: column, units: num_heads}
- {pattern: blocks.*.attn.wk, style: column, units: num_kv_heads}
- {pattern: blocks.*.attn.wv, style: column, units: num_kv_heads}
- {pattern: blocks.*.attn.wo, style: row, units: num_heads}
- {pattern: blocks.*.mlp.w1, style: column}
- {pattern: blocks.*.mlp.w3, style: column}
- {pattern: blocks.*.mlp.w2, style: row}
- {pattern: blocks.*.attn, style: set, divide: [num_heads, num_kv_heads]}
- {pattern: norm, style: exit}
"""


# ---- what it says ----------------------------------------------------------------------------------------------


def test_reasons_name_what_they_are_about():
    reasons = infer_plan(zoo.Decoder("alibi"), IDS, 2).reasons
    assert reasons[0] == "h.*: 2 blocks, sequence at dim 1"
    assert any("its input falls apart into 4 units, made by the columns attn.qkv" in reason for reason in reasons)
    assert any(reason.startswith("h.0.attn.slopes: without it") for reason in reasons)


def test_where_it_stops_it_names_the_module_and_the_rule():
    with pytest.raises(CantInferError, match=r"its 16 in-features do not divide by tp=3") as caught:
        infer_plan(zoo.Decoder("einsum"), IDS, 3)
    assert "No rule was found that works. Tried:\n    - {pattern: h.*.attn, style: whole}\n" in str(caught.value)
    assert "with which inference stops at\n  h.0: no pair of linears is found" in str(caught.value)


class Pointwise(nn.Module):
    """An MLP of convolutions of kernel 1."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(16, 32, 1), nn.Conv1d(32, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x.transpose(1, 2)).relu()).transpose(1, 2)


def test_convolutions_of_kernel_1_are_told_to_be_linears():
    model = nn.Sequential(nn.Embedding(32, 16), Pointwise(), Pointwise())
    with pytest.raises(CantInferError, match=r"up is a convolution of kernel 1, and linears alone are sharded: write it as"):
        infer_plan(model, IDS, 2)


class Rounded(nn.Linear):
    """Stands for a quantised linear."""

    def forward(self, x):
        return super().forward(x).round(decimals=3)


def test_a_rule_that_it_proposes_was_tried_and_works():
    model = zoo.Decoder("alibi")
    for block in model.h:
        block.mlp.fc2.__class__ = Rounded
    with pytest.raises(CantInferError, match=r"h.0.mlp.fc2: a Rounded, which is not known to compute") as caught:
        infer_plan(model, IDS, 2)
    said, rules = str(caught.value).split("with it a plan is found for tp=2:\n")
    assert "layers" not in said, "the names are the model's own"
    assert rules == "    plan={'rules': [{'pattern': 'h.*.mlp', 'style': 'whole'}]}"
    own = ShardingPlan.from_rules(ast.literal_eval(rules.partition("=")[2])["rules"])
    assert "{pattern: h.*.attn.proj, style: row" in infer_plan(model, IDS, 2, own).plan.to_yaml()


@sees("a rule is proposed that was not tried", "with_tried_rules", "            attempt(rules)\n", "            pass\n")
@sees("rules that are proposed together were tried one by one", "with_tried_rules", "attempt(rules)", "attempt(stopped.rules)")
def test_rules_that_it_proposes_together_were_tried_together():
    def stop(name: str) -> CantInferError:
        error = CantInferError(f"h.0.{name}: it can't be split", f"h.0.{name}")
        error.rules = [{"pattern": f"h.*.{name}", "style": "whole"}]
        return error

    def attempt(rules):
        if len(rules) < 2:
            raise stop("mlp")

    told = str(with_tried_rules(stop("attn"), attempt, 2))
    assert told.startswith("h.0.attn: it can't be split\n  h.0.mlp: it can't be split\n")
    rules = [{"pattern": f"h.*.{name}", "style": "whole"} for name in ("attn", "mlp")]
    assert told.endswith(f"with it a plan is found for tp=2:\n    plan={{'rules': {rules}}}")
    own = ShardingPlan.from_rules([{"pattern": "h.*", "style": "blocks"}])
    told = str(with_tried_rules(stop("attn"), attempt, 2, own))
    assert told.endswith(f"plan={{'rules': {[{'pattern': 'h.*', 'style': 'blocks'}, *rules]}}}"), "with the user's own in front"


def test_what_cannot_be_split_is_computed_whole_and_the_reason_says_why():
    found = infer_plan(zoo.Decoder("hard_coded"), IDS, 2)
    assert "{pattern: h.*.attn, style: whole}" in found.plan.to_yaml()
    says = r"h\.\*\.attn: computed whole .* h\.0\.attn\.out: with its columns cut .* written into the forward as numbers"
    assert any(re.match(says, reason) for reason in found.reasons)


class Reentrant(peers.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = checkpoint(lambda x: nn.functional.silu(self.gate(x)) * self.up(x), x, use_reentrant=True)
        return self.down(made)


def test_reentrant_checkpointing_says_what_to_write(monkeypatch):
    monkeypatch.setattr(peers, "HEAD", 8)
    model = peers.Decoder(32, 2, 64)
    for layer in model.layers:
        layer.mlp = Reentrant(32, 1)
    with pytest.raises(CantInferError, match=r"Decoder: .* reentrant checkpointing.* use_reentrant=False\)"):
        infer_plan(model, IDS, 2)


class InLists(zoo.Net):
    """Attention and feed-forward modules each in a list of their own, with a norm, in one list."""

    def __init__(self) -> None:
        parts = [zoo.EinsumAttention(16, 4), zoo.FeedForward(16, 32)] * 2
        super().__init__(*(nn.ModuleList([nn.LayerNorm(16), copy.deepcopy(part)]) for part in parts))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in self.blocks:  # type: ignore[attr-defined]
            x = x + part(norm(x))
        return x


@sees(
    "feed-forward modules in lists of their own are no blocks",
    "stack_planner:_outer_list",
    "isinstance(model.get_submodule(_parent(name)), nn.ModuleList)",
    "False",
)
def test_feed_forward_modules_in_lists_of_their_own_are_blocks():
    model = InLists()
    rows = [match.name for match in infer_plan(model, IDS, 2).plan.match(model) if match.rule.style == "row"]
    assert rows == [f"blocks.{at}.1.{'fc2' if at % 2 else 'to_out'}" for at in range(4)]


class Uncopied(zoo.Decoder):
    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        return self


@sees("a copy that is the model itself is moved", "_refuse_shared", "        if id(parameter) in own:\n", "        if False:\n")
def test_a_model_that_is_its_own_copy_is_refused_before_its_weights_move():
    model = Uncopied("einsum")
    before = model.wte.weight.clone()
    with pytest.raises(RuntimeError, match=r"a copy of Uncopied has parameters of the model itself, such as wte\.weight"):
        infer_plan(model, IDS, 2)
    assert torch.equal(model.wte.weight, before)


# ---- sequence parallelism where it can't be ---------------------------------------------------------------------


@sees(
    "a latent projection that all heads share dealt out",
    "_FeatureSupport.is_shared",
    "self.mixes(column) if column in self._feeding else ",
    "",
)
def test_what_all_heads_share_stays_whole():
    told = infer_plan(zoo.Zoo("latent").net, IDS, 2).plan
    assert "kv_down" not in told.to_yaml()
    assert "{pattern: h.*.attn.kv_up, style: column, units: num_heads}" in told.to_yaml()


@sees(
    "owners of blocks taken for blocks",
    "find_stacks",
    "len(calls) > 1 and not any(_holds_a_chain(trace, call, listed.values()) for call in calls)",
    "len(calls) > 1",
)
def test_modules_of_one_class_that_own_a_chain_are_no_blocks():
    model = zoo.Named()
    model.first, model.second = (models.Stack(nn.ModuleList(zoo.EXTRA["shifted"]() for _ in range(2))) for _ in range(2))
    told = infer_plan(model, IDS, 2).plan.to_yaml()
    assert "{pattern: first.blocks.*, style: blocks" in told
    assert "{pattern: second.blocks.*, style: blocks" in told


@sees(
    "experts taken for a chain of blocks",
    "_holds_a_chain",
    "if before and trace.values[one.args[key]].root == trace.values[before.outputs[0]].root:",
    "if before:",
)
def test_two_blocks_outside_any_list_keep_their_experts():
    model = zoo.Named()
    model.first, model.second = (zoo.PreNorm(16, zoo.EinsumAttention(16, 4), zoo.ListMoE(16, 24)) for _ in range(2))
    assert "{pattern: '{first,second}', style: blocks" in infer_plan(model, IDS, 2).plan.to_yaml()


# ---- examples --------------------------------------------------------------------------------------------------


def test_a_batch_is_peeked_from_any_loader():
    data = torch.arange(24).view(12, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, num_workers=2, shuffle=True)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    (batch,) = peek_batch(lambda: loader, "training")
    assert batch.shape == (4, 2)
    assert torch.equal(torch.rand(1), expected)
    both = peek_batch(lambda: {"a": loader, "b": [loader]}, "training")
    assert set(both) == {"a", "b"}
    with pytest.raises(NoExampleError, match="the training loader is a stream that can be read once only"):
        peek_batch(lambda: iter([1, 2]), "training")


def test_a_batch_whose_tensors_have_other_numbers_of_samples_is_not_cut():
    assert small([torch.zeros(512, 64), torch.zeros(3)])[0].shape == (512, 64)


class Augmented(Dataset[torch.Tensor]):
    """Draws from generators in its transforms, and counts what it gave."""

    def __init__(self) -> None:
        self.transforms = [SimpleNamespace(rng=np.random.default_rng(0)), SimpleNamespace(rng=random.Random(0))]
        self.given = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> torch.Tensor:
        self.given += 1
        drawn = self.transforms[0].rng.integers(1000) + self.transforms[1].rng.random() + self.given
        return torch.tensor(drawn)


@sees(
    "a look at the data uses up its generators and counters",
    "_state_kept",
    "        for put_back in back:\n",
    "        for put_back in ():\n",
)
def test_a_look_at_the_data_leaves_its_generators_and_counters():
    loader = DataLoader(Augmented(), batch_size=4)
    looks = [peek_batch(lambda: loader, "training").tolist() for _ in range(2)]
    assert looks[0] == looks[1] == next(iter(loader)).tolist()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += self.down(self.up(x).relu())
        return x


class MixesTokens(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x + x.cumsum(0)).relu())


class KeepsNoGraph(InPlace):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


@sees(
    "blocks that show no sequence end the run",
    "infer:_sequence_dim",
    "    except Exception:  # of the block's own code\n",
    "    except ZeroDivisionError:\n",
    case="InPlace-1",
)
@pytest.mark.parametrize(
    ("kind", "dim"),
    [(MixesTokens, 0), (InPlace, 1), (KeepsNoGraph, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_blocks_alone_are_named_with_the_dim_of_their_sequence_where_it_shows(kind, dim):
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.blocks = nn.Linear(8, 8), nn.ModuleList(kind() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.enter(x)

    (rule,) = infer_blocks(Stacked(), torch.randn(5, 2, 8)).rules
    assert (rule.pattern, rule.dim) == ("blocks.*", dim)
