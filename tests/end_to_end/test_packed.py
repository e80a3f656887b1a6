"""Packed documents and flash-attention, by a stand-in of its signatures, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.describe import describe
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import flash, models
from tests.helpers.fit import fit, metered, quiet_trainer
from tests.helpers.packed import VOCAB, Packed
from tests.helpers.slices import rest
from tests.mutants import sees

pytestmark = pytest.mark.skipif(
    flash.REAL, reason="flash-attn itself is installed, which runs on GPUs: make gpu has cases with it"
)
KINDS = ("documents", "one tensor", "mask", "batch")
MODEL = "helpers.packed:Packed"
FSDP = {"data_parallel": "fsdp"}
BLOCKS = {"base": "none", "rules": [{"pattern": "blocks.*", "style": "blocks", "dim": 0}]}


def fit_kinds(world: int, strategy: dict[str, Any], kinds: list[str]) -> list[Trace]:
    return [fit(MODEL, {"kind": kind}, world=world, strategy=strategy, steps=3) for kind in kinds]


@sees(
    "flash: keys that several ranks have count once",
    "_Heads.own_positions",
    "own.unflatten(-2, (-1, self._times)).sum(-2)",
    "own[..., :: self._times, :]",
    case="4-cp4",
)
@sees(
    "flash: what is made for q, k and v together keeps what it was",
    "flash:_backward",
    "            _put(own, target.zero_(), q.place)\n",
    "            target.zero_()\n",
    case="2-cp2",
)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (4, {"tp": 2}),
        (2, {"cp": 2}),
        *(pytest.param(4, one, marks=pytest.mark.more) for one in ({"tp": 4}, {"tp": 2, "cp": 2}, {"cp": 4})),
        *(rest(4, one) for one in ({"tp": 2, **FSDP}, {"cp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "recompute": "full"})),
        *(rest(2, {"tp": 2, **one}) for one in ({}, {"sp": False}, {"recompute": "activations"})),
        *(rest(2, {"cp": 2, **one}) for one in ({"cp_method": "ring"}, {"recompute": "selective"})),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(f"{key}{x}" for key, x in value.items()),
)
def test_packed_documents_train_as_on_one_process(world, strategy):
    for found in run_distributed(fit_kinds, world, world, strategy, [*KINDS]):
        for kind, trace in zip(KINDS, found, strict=True):
            report = compare(fit(MODEL, {"kind": kind}, steps=3), trace)
            assert report.ok, f"{kind}\n{report}"


def fit_dropping(strategy: dict[str, Any], kind: str) -> Trace:
    return fit(MODEL, {"kind": kind}, world=2, strategy=strategy, steps=2)


@sees(
    "flash: ranks that compute all heads drop out other weights each",
    "flash:_forward",
    " and heads.are_dealt_out else",
    " else",
)
def test_ranks_that_compute_all_heads_drop_out_alike():
    """Three heads do not divide by two ranks: both compute all, with the mask that one process has."""
    for trace in run_distributed(fit_dropping, 2, {"cp": 2}, "dropped"):
        compare(fit(MODEL, {"kind": "dropped"}, steps=2), trace).raise_if_failed()


@sees(
    "copies: dropout of extensions drops in one copy what it keeps in the other",
    "Quiet._run",
    '        args, kwargs = _with(func, args, kwargs, "dropout_p", 0.0)\n',
    "",
)
def test_dropout_in_flash_attention_is_no_fault_of_the_plan():
    for strategy in ({"tp": 2}, {"cp": 2}):
        trace = run_distributed(fit_dropping, 2, strategy, "drops")[0]
        assert len(trace.losses) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_is_sharded(kind):
    found = describe(Packed(kind), {"tp": 2}, batch=(torch.randint(0, VOCAB, (3, 11)),), world_size=2)
    assert found.coverage.sp
    assert "(100 % of their parameters)" in str(found.coverage)


def sent_by_cp(kind: str) -> dict[str, int]:
    loader = models.loader(2, count=2 * 18)
    plan = {"base": "none", "rules": [{"pattern": "blocks.*", "style": "blocks", "dim": 1 if kind == "batch" else 0}]}
    meter, _ = metered(Packed(kind), SeqParallelStrategy(cp=2, self_check=False, plan=plan), loader)
    return dict(meter.calls)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mask"])
def test_over_cp_heads_are_exchanged_and_no_sequence_is_gathered(kind):
    calls = run_distributed(sent_by_cp, 2, kind)[0]
    # Of two blocks: q, k, v and what is made of them; and in the backward these, and the gradients of all four.
    per_block = 4 + 5 + 3
    assert calls["alltoall"] == 2 * per_block, calls
    assert calls.get("all_gather", 0) <= 2, calls  # behind the blocks, and of its gradient in front of them


HF = "helpers.packed:Flash"


def fit_transformers(strategy: dict[str, Any]) -> list[Trace]:
    return [fit(HF, {"family": "llama", "packed": packed}, world=2, strategy=strategy, steps=2) for packed in (False, True)]


@pytest.mark.more
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_flash_attention_2_of_transformers(axis):
    pytest.importorskip("transformers", minversion="5", reason="where it looks for flash-attn is another place before")
    for found in run_distributed(fit_transformers, 2, {axis: 2}):
        for packed, trace in zip((False, True), found, strict=True):
            compare(fit(HF, {"family": "llama", "packed": packed}, steps=2), trace).raise_if_failed()


def train_in_16_bits(plan: Any, noise: float) -> str:
    """Where kernels take no float64, and sum in another order each time: the error of the self-check, if any."""
    flash.strict, flash.noise = True, noise
    torch.manual_seed(0)
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, plan=plan), max_steps=2, precision="bf16-mixed")
    try:
        trainer.fit(Packed("one tensor"), models.loader(8, count=16))
    except ValueError as error:
        return str(error)
    return ""


BY_HEADS = {"pattern": "blocks.*.attention.qkv", "style": "column", "segments": 3, "units": 4}
ROW = {"pattern": "blocks.*.attention.out", "style": "row", "units": 4}
GATHER = {"pattern": "blocks.*.attention", "style": "gather"}
RIGHT = {"base": "none", "rules": [*BLOCKS["rules"], GATHER, BY_HEADS, ROW]}
MIXED = {"base": "none", "rules": [*RIGHT["rules"], {**BY_HEADS, "segments": 1}]}  # a rank has rows of q and k, or of k and v


@sees(
    "kernels of 16 bits: nothing is proved where there are some",
    "Quiet._run",
    "                made = _in_16_bits(func, args, kwargs)\n",
    "                raise error\n",
    case="exact",
)
@sees(
    "kernels of 16 bits: their own error counts as the plan's",
    "ObservedRun.limits",
    "if own else limits",
    "if False else limits",
    case="in any order",
)
@sees(
    "kernels of 16 bits: their own error hides the plan's",
    "ObservedRun.limits",
    "min(8 * self.own_error, _MOST_OF_KERNELS)",
    "1e6",
    case="in any order",
)
@pytest.mark.parametrize("noise", [0.0, 2**-8], ids=["exact", "in any order"])
def test_kernels_of_16_bits_are_compared_by_their_own_error(noise):
    plans = [(RIGHT, ""), (MIXED, "self_check: with the plan")]
    for plan, wrong in plans if noise else [("auto", ""), *plans]:
        for found in run_distributed(train_in_16_bits, 2, plan, noise):
            assert found.startswith(wrong), found
            assert bool(found) is bool(wrong), found
