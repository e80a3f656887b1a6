"""Modules that have never heard of tensor parallelism: inferred, proved, trained, and equal to one process."""

from __future__ import annotations

import functools
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.layout.attributes import class_source
from lightning_seqpar.plan.sharding_plan import Family
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import third_party, zoo
from tests.helpers.fit import fit, fit_kinds, quiet_trainer
from tests.helpers.models import loader
from tests.helpers.third_party import BATCH_NORMS, SHARDED, LowRankFeedForward, LowRankProjections
from tests.mutants import sees

KEPT_WHOLE = ("hard_coded", "head_list")
KINDS = [kind for kind in (*zoo.BLOCKS, *zoo.MODELS) if kind not in {*KEPT_WHOLE, *third_party.KINDS}]
# On four ranks, one of each sort; the rest differ in what two ranks show as well.
FOUR = [
    "gqa", "gqa_shared", "mqa", "head_norm", "full_norm", "fused_per_head", "fused_gqa", "einsum",
    "alibi", "bias_table", "raw_attention", "routed_moe",
    "nano", "sequence_first", "flat", "vision", "encoder_decoder", "tied",
]  # fmt: skip
TOPOLOGIES = {"tp2": (2, 2, True), "tp4": (4, 4, True), "dp2-tp2": (4, 2, True), "tp2-no-sp": (2, 2, False)}
CHOSEN = {
    "tp2": [*KINDS, *third_party.KINDS[::2], "low_rank_row", "mix_ffn", "one_way_out", "shared_scale", "weight_of_qkv"],
    "tp4": [*FOUR[0::8], "weight_of_qkv", "grouped_adapters"],
    "dp2-tp2": [*FOUR[1::8], "low_rank_row", "windows"],
    "tp2-no-sp": FOUR[2::8],
}
"""What is no case of the matrix."""
ALL = {
    topology: [
        *(FOUR if world == 4 else KINDS),
        *(kind for kind in third_party.KINDS if world == tp or kind not in BATCH_NORMS),
    ]
    for topology, (world, tp, _) in TOPOLOGIES.items()
}


@functools.cache
def reference(kind: str) -> Trace:
    return fit("ThirdParty", {"kind": kind}, steps=3)


@functools.cache
def trained(topology: str, is_chosen: bool) -> dict[str, tuple[Trace, int] | str]:
    """One start of the ranks for all kinds of the matrix, or for all others."""
    world, tp, sp = TOPOLOGIES[topology]
    kinds = [kind for kind in ALL[topology] if (kind in CHOSEN[topology]) == is_chosen]
    return run_distributed(fit_kinds, world, "ThirdParty", kinds, world, tp, sp, timeout=600.0)[0]


CASES = [
    pytest.param(name, kind, marks=() if kind in CHOSEN[name] else pytest.mark.matrix, id=f"{name}-{kind}")
    for name, kinds in ALL.items()
    for kind in kinds
]


@sees(
    "shared kv gradients not summed",
    "GradSync._sum_bucket",
    "            part.take(summed, rows)\n",
    "            del summed\n",
    case="tp2-fused_mqa",
)
@sees(
    "encoder states gathered backwards alone",
    "DataPath.copy",
    "copied = columns.gather(self._whole, x, hooks, regather=not is_of_checkpoint(hooks))",
    "copied = x.view_as(x)",
    case="tp2-encoder_decoder",
)
@sees(
    "the gradient of a scale of all heads is not summed",
    "GradientRule.layout",
    "partial=self.summed",
    "partial=False",
    case="tp2-shared_scale",
)
@sees(
    "a fused parameter cut in one piece",
    "LocalHeadsRule.check",
    "Shard.by_segments(self.dim % tensor.ndim, segments, units, plan.size, name)",
    "Shard.by_segments(self.dim % tensor.ndim, [length], [length], plan.size, name)",
    case="tp2-weight_of_qkv",
)
@sees(
    "ranks that share a head of a parameter do not sum its gradient",
    "LocalHeadsRule.layout",
    "partial=shard.has_shared",
    "partial=False",
    case="tp4-grouped_adapters",
)
@sees(
    "a row's joined input dealt out as one part",
    "RowRule.check",
    "        plan.shards[name] = Shard.by_segments(dim, segments, units, plan.size, name)",
    "        plan.shards[name] = Shard.by_segments(dim, [sum(segments)], [sum(segments)], plan.size, name)",
    case="tp2-one_way_out",
)
@sees(
    "an adapter's second half keeps a part of its gradient",
    "ReduceRule.layout",
    "Reason.IN_SUM, partial=True",
    "Reason.IN_SUM, partial=False",
    case="tp2-low_rank_row",
)
@sees(
    "channels cut in another order than the features",
    "LocalHeadsRule.apply",
    "shrink(tensor, shard, application.rank)",
    "shrink(tensor, shard, -1 - application.rank)",
    case="tp2-mix_ffn",
)
@sees(
    "a column's output may not be changed in place",
    "_product",
    "if out._is_view() else out",
    "if False else out",
    case="tp2-in_place",
)
@pytest.mark.parametrize(("topology", "kind"), CASES)
@pytest.mark.more
def test_parity_with_one_process(topology, kind):
    is_chosen = kind in CHOSEN[topology]
    got = trained(topology, is_chosen)[kind]
    assert not isinstance(got, str), got
    trace, sharded = got
    compare(reference(kind), trace).raise_if_failed()
    # A part that stays whole is right too; here nothing may that need not.
    if kind in SHARDED and (topology == "tp2" or (topology == "tp4" and is_chosen)):
        assert sharded == SHARDED[kind]


@sees(
    "one rank rehearsed for all",
    "rehearse",
    "    for rank in range(tp):\n        try:\n",
    "    for rank in range(1):\n        try:\n",
)
@pytest.mark.parametrize(("kind", "tp"), [*product(KEPT_WHOLE, (2, 4)), ("conv", 2), ("shifted", 2)])
def test_what_cannot_be_dealt_out_is_computed_whole(kind, tp):
    """Or, where blocks mix positions, on whole sequences."""
    strategy = {"tp": tp}
    found = run_distributed(fit, tp, "ThirdParty", {"kind": kind}, world=tp, strategy=strategy, steps=3)
    compare(reference(kind), found[0]).raise_if_failed()


# ---- a shipped plan for a part -----------------------------------------------------------------------------------


class Widths(Callback):
    """In-features of the row of the blocks that no shipped plan covers, on this rank."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = {block.attn.wo.in_features for block in pl_module.net.blocks}


def fit_described(self_check: bool) -> tuple[Trace, set[int]]:
    widths = Widths()
    strategy = {"tp": 2, "self_check": self_check}
    trace = fit("ThirdParty", {"kind": "described"}, world=2, strategy=strategy, steps=3, callbacks=[widths])
    return trace, widths.seen


@sees(
    "behind a shipped plan something is sharded that nothing proves",
    "Prover._infer_rest",
    "        if not self._config.self_check:\n",
    "        if False:\n",
    case="False-16",
)
@pytest.mark.parametrize(("self_check", "width"), [(True, 8), (False, 16)])
def test_behind_a_shipped_plan_nothing_is_sharded_without_a_proof(self_check, width):
    for trace, seen in run_distributed(fit_described, 2, self_check):
        compare(reference("described"), trace).raise_if_failed()
        assert seen == {width}


# ---- adapters on rows --------------------------------------------------------------------------------------------


def dropped(sp: bool) -> dict[str, Tensor]:
    """What each dropout of an adapter on a row drops in the first step."""
    adapted = third_party.DroppingLinear
    zoo.EXTRA["dropping"] = lambda: zoo.PreNorm(16, LowRankProjections(adapted, "o"), LowRankFeedForward(adapted))
    model = third_party.ThirdParty(kind="dropping")
    masks: dict[str, Tensor] = {}

    def note(module: nn.Module, args: Any, out: Tensor, name: str = "") -> None:
        if module is model.get_submodule(name):  # not the self-check's copies
            masks.setdefault(name, out.detach() == 0)

    for name, module in model.named_modules():
        if name.endswith(("o.dropout", "fc2.dropout")):
            module.register_forward_hook(functools.partial(note, name=name))
    quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, sp=sp), max_steps=1).fit(model, loader(4, length=8, count=4))
    return masks


@sees(
    "an adapter on a row drops the same features on every rank",
    "SequenceRegion.leave_partial",
    "if not of_features:",
    "if True:",
    case="True",
)
@pytest.mark.parametrize("sp", [True, False])
def test_an_adapter_on_a_row_drops_each_ranks_own_features(sp):
    one, other = run_distributed(dropped, 2, sp)
    assert len(one) == len(other) == 4
    for name, mask in one.items():
        assert mask.shape == (4, 7, 16 if "fc2" in name else 8)  # these are the rank's own features
        assert 0.3 < float(mask.double().mean()) < 0.7
        assert not torch.equal(mask, other[name])


# ---- modules that are imported lazily ----------------------------------------------------------------------------

LAZY = """
import sys, types
import lightning.pytorch  # torch itself asks every module for its file while it is imported
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError(f"lazy import of {self.__name__} failed")
sys.modules["some_optional_thing"] = Lazy("some_optional_thing")
from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.layout.attributes import class_source
from lightning_seqpar.plan.sharding_plan import Family
SeqParallelStrategy(tp=2)
print(class_source(Family), end="")
"""


@pytest.mark.more
def test_a_module_that_raises_when_it_is_asked_for_its_file_does_no_harm():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert done.stdout == class_source(Family)
