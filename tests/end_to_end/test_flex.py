"""FlexAttention over heads and over parts of sequences: one process's numbers, where score and mask functions read heads too."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lightning_seqpar.context.flex import FlexCall, Heads, calls_flex, rebound
from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers.fit import fit, fit_or_tell, named_in_tests
from tests.helpers.slices import rest
from tests.mutants import sees

FLEXED = "helpers.flex:Flexed"
KINDS: tuple[str, ...] = (
    "plain", "grouped", "attribute", "alibi", "slopes", "table", "mask of heads", "own mask", "inside", "statistics",
)  # fmt: skip


class Sharded(Callback):
    """Whether the projections of the attention are divided."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        record = record_of(pl_module)
        self.attention = record is not None and record.layout["blocks.0.attention.q.weight"].is_sharded
        self.rules = 0 if record is None else sum(match.rule.style == "flex" for match in record.matches)


def kinds(strategy: dict[str, Any]) -> list[str]:
    """Those that can be trained on CPUs: torch's plain form has no gradient of what functions capture under its checkpoint."""
    return [kind for kind in KINDS if kind != "table" or strategy.get("recompute", "none") in ("none", "activations")]


def fit_kinds(world: int, strategy: dict[str, Any]) -> list[tuple[Trace, bool, int]]:
    out = []
    for kind in kinds(strategy):
        seen = Sharded()
        trace = fit(FLEXED, {"kind": kind}, world=world, strategy=strategy, steps=2, length=11, accumulate=2, callbacks=[seen])
        out.append((trace, seen.attention, seen.rules))
    return out


@sees(
    "flex: a rank's heads begin at 0 for functions that read them",
    "flex:_shifted",
    "mod(score, b, h + first, q, k)",
    "mod(score, b, h, q, k)",
    case="2-tp2",
)
@sees(
    "flex: over cp all ranks compute the same heads",
    "FlexCall.__call__",
    "chunks.rank, chunks.size)\n",
    "0, chunks.size)\n",
    case="4-tp2-cp2",
)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {"tp": 2}), (4, {"tp": 2, "cp": 2}),
        *(pytest.param(world, one, marks=pytest.mark.more) for world, one in (
            (4, {"tp": 4}), (4, {"tp": 2}), (2, {"cp": 2}), (4, {"cp": 4}), (2, {"tp": 2, "recompute": "full"}),
        )),
        *(rest(2, {"tp": 2, **one}) for one in ({"sp": False}, {"recompute": "selective"}, {"recompute": "activations"})),
        *(rest(2, one) for one in ({"pp": 2}, {"data_parallel": "fsdp"}, {"cp": 2, "cp_method": "ring"})),
        rest(4, {"tp": 4, "cp": 1, "data_parallel": "fsdp"}), rest(8, {"cp": 8}),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(f"{key}{x}" for key, x in value.items()),
)  # fmt: skip
def test_flex_attention_trains_as_on_one_process(world, strategy):
    for found in run_distributed(fit_kinds, world, world, strategy):
        for kind, (trace, is_sharded, rules) in zip(kinds(strategy), found, strict=True):
            report = compare(fit(FLEXED, {"kind": kind}, steps=2, length=11, accumulate=2), trace)
            assert report.ok, f"{kind}\n{report}"
            assert is_sharded == (strategy.get("tp", 1) > 1), kind
            assert rules == 2 * is_sharded, kind  # whether functions read heads, a batch need not show


def given_to_kernels(heads: Heads, mask: BlockMask, count: int) -> BlockMask:
    """The mask that a rank of those heads, of which it has ``count``, hands on: kernels read its blocks."""
    call = FlexCall(lambda **given: given["block_mask"], {}, heads)
    q = torch.zeros(1, count, 12, 8)
    found = call(q, q, q, block_mask=mask)
    assert call(q, q, q, block_mask=mask) is found
    return found


@sees("flex: of a mask of all heads each rank takes the first", "FlexCall._own", "start : start + count", ":count")
@sees(
    "flex: a mask that is made of a rank's heads is that of the first",
    "FlexCall._own",
    "moved = _shifted(mask.mask_mod, first - behind, 0)",
    "moved = mask.mask_mod",
)
def test_blocks_of_a_mask_are_those_of_the_ranks_heads():
    flex = importlib.import_module("tests.helpers.flex")
    of = functools.partial(create_block_mask, flex.windows, None, Q_LEN=12, KV_LEN=12, device="cpu", BLOCK_SIZE=2)
    whole = of(H=4)
    assert not torch.equal(whole.to_dense()[:, :2], whole.to_dense()[:, 2:])
    for mask in (whole, of(H=2)):  # the second is made where it is used, for as many heads as a rank has
        found = given_to_kernels(Heads(1, 2), mask, 2)
        assert torch.equal(found.to_dense(), whole.to_dense()[:, 2:])
        position = torch.arange(12)
        for head in range(2):
            right = flex.windows(None, torch.tensor(2 + head), position[:, None], position)
            assert torch.equal(found.mask_mod(None, torch.tensor(head), position[:, None], position), right)
    assert given_to_kernels(Heads(), whole, 4) is whole


SCALE = 1.0


class Scaled(nn.Module):
    def attend(self, x: torch.Tensor) -> Any:
        return flex_attention, x * SCALE

    def forward(self, x: torch.Tensor) -> Any:
        return self.attend(x)


class Overrides(Scaled):
    def attend(self, x: torch.Tensor) -> Any:
        return x


@sees("flex: what a class has in the place of its base's method is lost", "flex:rebound", "            seen.add(name)\n", "")
def test_only_the_names_that_lead_to_it_change(monkeypatch):
    one = torch.ones(1)
    attend = rebound(Scaled(), Heads(1, 2))["attend"]
    assert isinstance(attend(one)[0], FlexCall)
    monkeypatch.setitem(globals(), "SCALE", 3.0)  # what else it reads in its file is as it is now
    assert attend(one)[1] == 3
    assert Scaled().attend(one)[0] is flex_attention
    assert not rebound(Overrides(), Heads(1, 2))


@sees(
    "flex: a copy on a CPU is refused as a training there is",
    "_PlainFlex.__torch_function__",
    "            return False",
    "            return func(*args, **(kwargs or {}))",
)
@sees(
    "flex: a backward of a copy is that of its kernel",
    "_PlainFlex.__torch_function__",
    '        run = in_plain_operations(func) if is_higher_order(func) and func.name() == "flex_attention" else func\n',
    "        run = func\n",
)
def test_copies_run_on_cpus_and_have_gradients_of_what_functions_read(monkeypatch):
    helper = importlib.import_module("tests.helpers.flex")
    monkeypatch.setattr(helper.flex, "_validate_device", helper.CHECK)
    q, table = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 4, 12, 8), (4,)))
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q, q, q)
    for attend in (flex_attention, helper.compiled_flex):
        with Quiet():
            attend(q, q, q, score_mod=lambda score, b, h, i, j: score + table[h] * j).sum().backward()
        assert table.grad is not None
        assert table.grad.norm() > 0
        table.grad = None


def test_a_module_keeps_its_class_and_loses_nothing():
    module = named_in_tests("helpers.flex:Attention")("alibi")
    assert calls_flex(module)
    assert not calls_flex(module.q)
    assert "forward" not in vars(module)


def test_a_rule_for_a_module_that_does_not_call_it_is_refused():
    plan = {"rules": [{"pattern": "blocks.*", "style": "blocks"}, {"pattern": "blocks.*.attention.out", "style": "flex"}]}
    for said in run_distributed(fit_or_tell, 2, FLEXED, {}, world=2, strategy={"tp": 2, "plan": plan}):
        assert "blocks.0.attention.out: style 'flex', but Linear does not call flex_attention by a name" in said
