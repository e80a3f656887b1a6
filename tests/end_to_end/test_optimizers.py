"""Which implementation of an optimizer runs, and on what: torch's fused and foreach kernels, on plain local tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import models
from tests.helpers.fit import fit
from tests.helpers.optimizers import Damped

KINDS = {
    "fused AdamW": "_fused_adamw_",
    "foreach AdamW": "_foreach_addcdiv_",
    "fused SGD": "_fused_sgd_",
    "foreach SGD": "_foreach_add_",
}


class Kernels(TorchDispatchMode):
    """The operations of a step, and the classes of the tensors that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[type]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {type(each) for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        self.seen.setdefault(func._schema.name.removeprefix("aten::"), set()).update(given)
        return func(*args, **(kwargs or {}))


class Steps(Callback):
    """Watches what every step of the optimizer runs."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        (optimizer,) = trainer.optimizers
        step, self.kernels = optimizer.step, Kernels()

        def watched(*args: Any, **kwargs: Any) -> Any:
            closure = args[0] if args else kwargs.pop("closure", None)
            loss = None if closure is None else closure()
            with self.kernels:
                step()
            return loss

        optimizer.step = watched


class Chosen(models.GPT):
    def __init__(self, kind: str) -> None:
        super().__init__(tied=False)
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        how, name = self.kind.split()
        kind, more = getattr(torch.optim, name), {"weight_decay": 0.1} if name == "AdamW" else {"momentum": 0.9}
        return kind(self.parameters(), lr=0.05, **{how: True}, **more)


models.Chosen = Chosen


def fit_kinds(world: int, tp: int, how: str) -> dict[str, tuple[Trace, dict[str, set[type]]] | str]:
    found: dict[str, tuple[Trace, dict[str, set[type]]] | str] = {}
    for kind in KINDS:
        steps = Steps()
        strategy = {"tp": tp, "data_parallel": how}
        try:
            trace = fit("Chosen", {"kind": kind}, world=world, strategy=strategy, steps=3, callbacks=[steps])
            found[kind] = trace, steps.kernels.seen
        except NotImplementedError as error:  # torch has no such kernel for rows
            found[kind] = str(error)
    return found


@pytest.mark.parametrize(("world", "tp", "how"), [(2, 2, "ddp"), (4, 2, "fsdp")])
@pytest.mark.more
def test_fused_and_foreach_kernels_run(world, tp, how):
    for found in run_distributed(fit_kinds, world, world, tp, how):
        for kind, kernel in KINDS.items():
            if how == "fsdp" and kind == "fused SGD":
                assert "_fused_sgd_" in found[kind]
                continue
            trace, seen = found[kind]
            compare(fit("Chosen", {"kind": kind}, steps=3), trace).raise_if_failed()
            assert kernel in seen, (kind, seen)
            assert any(name.startswith("_fused") for name in seen) == ("fused" in kind)
            # With fsdp the optimizer holds rows as DTensors, which torch unwraps once per kernel.
            expected = {DTensor} if how == "fsdp" else {torch.Tensor, torch.nn.Parameter}
            assert seen[kernel] & expected
            assert how == "fsdp" or DTensor not in seen[kernel]


class Vouched(models.GPT):
    """Its optimizer is none of torch's, and of no class that knows about us."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Damped(self.parameters(), lr=0.2)


VOUCHED = "end_to_end.test_optimizers:Vouched"


@pytest.mark.parametrize(("world", "how"), [(2, "ddp"), (4, "fsdp")])
def test_an_optimizer_that_is_vouched_for_trains_as_on_one_process(world, how):
    strategy = {"tp": 2, "data_parallel": how, "elementwise_optimizers": ["tests.helpers.optimizers.Damped"]}
    for trace in run_distributed(fit, world, VOUCHED, {}, world=world, strategy=strategy, steps=3):
        compare(fit(VOUCHED, {}, steps=3), trace).raise_if_failed()
