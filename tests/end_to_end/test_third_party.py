"""Kinds of code that libraries of models have, beside their parity (``test_zoo.py``)."""

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
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.models import loader
from tests.helpers.third_party import LowRankFeedForward, LowRankProjections
from tests.mutants import sees


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
    alone = fit("ThirdParty", {"kind": "described"}, steps=3)
    for trace, seen in run_distributed(fit_described, 2, self_check):
        compare(alone, trace).raise_if_failed()
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
