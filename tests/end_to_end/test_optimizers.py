"""Optimizers on shards: torch's fused and foreach kernels, and one that somebody vouches for."""

from __future__ import annotations

import pytest
import torch

from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import models
from tests.helpers.fit import fit
from tests.helpers.optimizers import Damped

KINDS = ("fused AdamW", "foreach AdamW", "fused SGD", "foreach SGD", "vouched for")


class Chosen(models.GPT):
    """The last kind is none of torch's, and of no class that knows about us."""

    def __init__(self, kind: str) -> None:
        super().__init__(tied=False)
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "vouched for":
            return Damped(self.parameters(), lr=0.2)
        how, name = self.kind.split()
        kind, more = getattr(torch.optim, name), {"weight_decay": 0.1} if name == "AdamW" else {"momentum": 0.9}
        return kind(self.parameters(), lr=0.05, **{how: True}, **more)


models.Chosen = Chosen


def fit_kinds(world: int, how: str) -> dict[str, Trace | str]:
    found: dict[str, Trace | str] = {}
    vouched = ["tests.helpers.optimizers.Damped"]
    for kind in KINDS:
        strategy = {"tp": 2, "data_parallel": how, "elementwise_optimizers": vouched}
        try:
            found[kind] = fit("Chosen", {"kind": kind}, world=world, strategy=strategy, steps=3)
        except NotImplementedError as error:  # torch has no such kernel for rows
            found[kind] = str(error)
    return found


@pytest.mark.parametrize(("world", "how"), [(2, "ddp"), (4, "fsdp")])
def test_optimizers_train_as_on_one_process(world, how):
    for found in run_distributed(fit_kinds, world, world, how):
        for kind, trace in found.items():
            if (how, kind) == ("fsdp", "fused SGD"):
                assert "_fused_sgd_" in trace
            else:
                compare(fit("Chosen", {"kind": kind}, steps=3), trace).raise_if_failed()
