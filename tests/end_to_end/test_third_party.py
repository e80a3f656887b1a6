"""Kinds of code that libraries of models have: inferred, proved, trained, and equal to one process."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.layout.class_source import class_source
from lightning_seqpar.plan.sharding_plan import Family
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import third_party, zoo
from tests.helpers.fit import fit, fit_kinds, quiet_trainer
from tests.helpers.models import loader
from tests.helpers.third_party import BATCH_NORMS, KINDS, LowRankFeedForward, LowRankProjections
from tests.mutants import sees

TOPOLOGIES = {"tp2": (2, 2, True), "tp4": (4, 4, True), "dp2-tp2": (4, 2, True), "tp2-no-sp": (2, 2, False)}
# On four ranks one of each sort; `make parity` runs them all.
ALWAYS = {
    "tp2": [*[*KINDS][::2], "in_place", "low_rank_row", "mix_ffn", "one_way_out", "shared_scale", "weight_of_qkv"],
    "tp4": ["weight_of_qkv", "grouped_adapters"],
    "dp2-tp2": ["low_rank_row", "windows"],
    "tp2-no-sp": [],
}
SHARDED = {
    "in_place": 22, "conformer": 22, "einops_heads": 22, "own_linears": 22, "weight_of_qkv": 16,
    "low_rank_linear": 26, "matrix_linear": 26, "low_rank_row": 30, "matrix_row": 30, "biased_row": 30, "bent_row": 8,
    "two_counts": 22, "mix_ffn": 26, "re_attention": 8, "parallel_scaling": 42, "reads_width": 23, "positioned": 23,
    "positioned_memory": 23, "windows": 43, "channels_first": 15, "described": 35, "shifted_inside": 27,
    "two_activations": 59, "value_residual": 11, "one_way_out": 20, "twice_out": 22, "shared_queries": 23,
    "batch_normed": 20, "shared_scale": 16, "listed": 22, "spatial_gate": 8, "parametrized": 8,
    "grouped_adapters": 26, "first_differs": 23,
}  # fmt: skip
"""How many tensors of each kind are sharded: in a value residual the first attention is whole, in re-attention and
of parametrized weights each one."""
CASES = [
    pytest.param(name, kind, marks=() if kind in ALWAYS[name] else pytest.mark.matrix, id=f"{name}-{kind}")
    for name in TOPOLOGIES
    for kind in KINDS
    if not (name.startswith("dp") and kind in BATCH_NORMS)
]


@functools.cache
def reference(kind: str) -> Trace:
    return fit("ThirdParty", {"kind": kind}, steps=3)


@functools.cache
def trained(topology: str, always: bool) -> dict[str, tuple[Trace, int] | str]:
    """One start of the ranks for all kinds that always run, or for all others."""
    world, tp, sp = TOPOLOGIES[topology]
    kinds = [kind for kind in KINDS if (kind in ALWAYS[topology]) == always]
    kinds = [kind for kind in kinds if not (topology.startswith("dp") and kind in BATCH_NORMS)]
    return run_distributed(fit_kinds, world, "ThirdParty", kinds, world, tp, sp, timeout=400.0)[0]


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
    got = trained(topology, kind in ALWAYS[topology])[kind]
    assert not isinstance(got, str), got
    trace, sharded = got
    compare(reference(kind), trace).raise_if_failed()
    if topology == "tp2" or (
        topology == "tp4" and kind in ALWAYS["tp4"]
    ):  # a part that stays whole is right too; here nothing may that need not
        assert sharded == SHARDED[kind]


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
    quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, sp=sp), max_steps=1).fit(
        model, loader(4, length=8, count=4)
    )
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
from lightning_seqpar.layout.class_source import class_source
from lightning_seqpar.plan.sharding_plan import Family
SeqParallelStrategy(tp=2)
print(class_source(Family), end="")
"""


@pytest.mark.more
def test_a_module_that_raises_when_it_is_asked_for_its_file_does_no_harm():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert done.stdout == class_source(Family)
