"""Optimizers on shards: torch's fused and foreach kernels, those of other packages, and those that need whole matrices."""

from __future__ import annotations

from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import schedulefree
import torch

from lightning_seqpar.releases import MUON
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import models
from tests.helpers.fit import fit
from tests.helpers.optimizers import Damped, Trusting, Whitening
from tests.helpers.slices import rest
from tests.mutants import sees

TORCHS = ("fused AdamW", "foreach AdamW", "fused SGD", "foreach SGD")
ELEMENTWISE: dict[str, Any] = {
    "vouched for": lambda params: Damped(params, lr=0.2),
    "Lion": lambda params: lion_pytorch.Lion(params, lr=0.01, weight_decay=0.1),
    "another Lion": lambda params: pytorch_optimizer.Lion(params, lr=0.01),
    "AdEMAMix": lambda params: pytorch_optimizer.AdEMAMix(params, lr=0.02),
    "ScheduleFree AdamW": lambda params: schedulefree.AdamWScheduleFree(params, lr=0.02, warmup_steps=2),
    "ScheduleFree SGD": lambda params: schedulefree.SGDScheduleFree(params, lr=0.05),
    "another ScheduleFree": lambda params: pytorch_optimizer.ScheduleFreeAdamW(params, lr=0.02),
}
WHOLE: dict[str, Any] = {
    "Muon": lambda params: MUON[0]([p for p in params if p.ndim == 2], lr=0.05, adjust_lr_fn="match_rms_adamw"),
    "Whitening": lambda params: Whitening(params, lr=0.05),
    "Trusting": lambda params: Trusting(params, lr=0.05),
    "Lamb": lambda params: pytorch_optimizer.Lamb(params, lr=0.05),
    "another Muon": lambda params: pytorch_optimizer.Muon(
        [{"params": [p for p in params if (p.ndim == 2) is flat], "use_muon": flat} for flat in (True, False)], lr=0.02
    ),
}


def clamped(params: list[Any]) -> torch.optim.Optimizer:
    """A hook behind its steps changes what it has updated."""
    optimizer = WHOLE["Muon"](params)
    optimizer.register_step_post_hook(lambda *args: torch._foreach_clamp_min_([p.data for p in params], -0.1))
    return optimizer


WHOLE["clamped behind a step"] = clamped
if not MUON:  # torch 2.8 lacks it
    del WHOLE["Muon"], WHOLE["clamped behind a step"]


class Chosen(models.GPT):
    """Fused ``[q|k|v]``, and a table whose vocabulary does not divide."""

    def __init__(self, kind: str) -> None:
        super().__init__(tied=True)
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind not in TORCHS:
            # The gradient of a key's bias is zero but for rounding, of which Lion takes the sign.
            given = [p for name, p in self.named_parameters() if "qkv.bias" not in name]
            optimizer = {**ELEMENTWISE, **WHOLE}[self.kind](given)
            getattr(optimizer, "train", lambda: None)()
            return optimizer
        how, name = self.kind.split()
        kind, more = getattr(torch.optim, name), {"weight_decay": 0.1} if name == "AdamW" else {"momentum": 0.9}
        return kind(self.parameters(), lr=0.05, **{how: True}, **more)


models.Chosen = Chosen
VOUCHED = {
    "elementwise_optimizers": ["tests.helpers.optimizers.Damped"],
    "whole_matrix_optimizers": ["tests.helpers.optimizers.Trusting"],
    "self_check": False,
}


def fit_kinds(world: int, kinds: list[str], topology: dict[str, Any]) -> dict[str, Trace | str]:
    found: dict[str, Trace | str] = {}
    for kind in kinds:
        try:
            found[kind] = fit("Chosen", {"kind": kind}, world=world, strategy={**topology, **VOUCHED}, steps=3)
        except NotImplementedError as error:  # torch has no such kernel for rows
            found[kind] = str(error)
    return found


@pytest.mark.parametrize(("world", "how"), [(2, "ddp"), (4, "fsdp")])
def test_optimizers_train_as_on_one_process(world, how):
    kinds = [*TORCHS, *(ELEMENTWISE if how == "ddp" else ("Lion", "ScheduleFree AdamW"))]
    for found in run_distributed(fit_kinds, world, world, kinds, {"tp": 2, "data_parallel": how}):
        for kind, trace in found.items():
            if (how, kind) == ("fsdp", "fused SGD"):
                assert "_fused_sgd_" in trace
            else:
                compare(fit("Chosen", {"kind": kind}, steps=3), trace).raise_if_failed()


FSDP: dict[str, Any] = {"data_parallel": "fsdp"}
HSDP: dict[str, Any] = {"data_parallel": "hsdp", "fsdp": {"shard_size": 2}}


@sees(
    "whole matrices: a fused projection in the order of the ranks",
    "_TensorParallel.join",
    "return one.layout.shard.assemble(parts)",
    "return torch.cat([*parts], one.layout.shard.dim)",
    case="2-tp2",
)
@sees(
    "whole matrices: a hook behind a step comes before the parts do",
    "WholeMatrices.around",
    "            hooks.move_to_end(behind.id, last=False)\n",
    "",
    case="2-tp2",
)
@sees(
    "whole matrices: each rank updates its own part",
    "Steps.check_optimizers",
    "                self._whole.around(optimizer)\n",
    "                pass\n",
    case="2-tp2",
)
@sees(
    "whole matrices: what is kept of one stays as it was",
    "_Step._take_over",
    "                local_rows(state[key]).copy_(next(kept))\n",
    "                next(kept)\n",
    case="4-tp4",
)
@sees(
    "whole matrices: numbers of another rank's are not told",
    "_Step.__init__",
    "any(not isinstance(x, Tensor) or not x.ndim for state in states for x in state.values())",
    "False",
    case="2-tp2",
)
@sees(
    "whole matrices: what has no parts over tp is left with one rank of it",
    "_Step._dealt",
    "if one.owner[axis.name] == rank]",
    "if one.owner[axis.name] == rank and (axis.cuts(one) or rank == own)]",
    case="4-tp2-data_parallelfsdp",
)
@pytest.mark.parametrize(
    ("world", "topology"),
    [(2, {"tp": 2}), (4, {"tp": 2, **FSDP}), (4, {"tp": 2, "pp": 2}),
     *(pytest.param(4, one, marks=pytest.mark.more) for one in ({"tp": 4}, HSDP, {"tp": 2, "cp": 2})),
     *(rest(world, one) for world, one in ((2, FSDP), (4, {"tp": 2}), (4, {"pp": 2, **FSDP}), (4, {"tp": 2, "cp": 2, **FSDP})))],
    ids=lambda value: value if isinstance(value, int) else "-".join(f"{key}{x}" for key, x in value.items() if key != "fsdp"),
)  # fmt: skip
def test_matrices_are_updated_whole(world, topology):
    kinds = [
        kind for kind in WHOLE if "pp" not in topology or kind != "clamped behind a step"
    ]  # what others hold can't be written
    for found in run_distributed(fit_kinds, world, world, kinds, topology):
        for kind, trace in found.items():
            compare(fit("Chosen", {"kind": kind}, steps=3), trace).raise_if_failed()
