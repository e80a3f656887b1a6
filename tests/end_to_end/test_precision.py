"""Every precision of Lightning's, against one process; and steps that are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.layout.param_layout import local_rows
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import Trace, norm_of
from tests.helpers import models
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.habit_runs import TOPOLOGIES
from tests.mutants import sees

PRECISIONS = ("64-true", "32-true", "bf16-mixed", "bf16-true", "16-true")


class Reordered(models.GPT):
    """The same function with the hidden features of its MLPs in another order: what the order of sums alone changes."""

    def __init__(self, seed: int) -> None:
        super().__init__(tied=False)
        self.order = [torch.randperm(64, generator=torch.Generator().manual_seed(seed)) for _ in self.model.blocks]
        with torch.no_grad():
            for block, order in zip(self.model.blocks, self.order, strict=True):
                up, down = block.mlp.up, block.mlp.down
                up.weight.copy_(up.weight[order])
                up.bias.copy_(up.bias[order])
                down.weight.copy_(down.weight[:, order])


models.Reordered = Reordered


def as_before(trace: Trace, orders: list[Tensor]) -> dict[str, Tensor | None]:
    """The gradients of a :class:`Reordered` model in the order of the model as it was."""
    grads = dict(trace.grads)
    for at, order in enumerate(orders):
        back = torch.argsort(order)
        for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
            key = f"model.blocks.{at}.mlp.{name}"
            grads[key] = grads[key].index_select(dim, back)  # type: ignore[union-attr]
    return grads


def error(grads: dict[str, Tensor | None], exact: dict[str, Tensor | None]) -> float:
    """The norm of the difference of two gradients, of the norm of the second."""
    apart = {name: grads[name].double() - value for name, value in exact.items() if value is not None}  # type: ignore[union-attr]
    return norm_of(apart) / norm_of(exact)


def fit_precisions(world: int, strategy: dict[str, Any]) -> dict[str, Trace]:
    args = {"tied": False}
    return {each: fit("GPT", args, world=world, strategy=strategy, steps=3, precision=each) for each in PRECISIONS}


@sees(
    "cp: the loss of autocast in 16 bits",
    "loss:cross_entropy",
    "dtype, summed = each.dtype, ",
    "dtype, summed = logits._local.dtype, ",
    case="cp2",
)
@pytest.mark.parametrize(
    "topology", [pytest.param(one, marks=[pytest.mark.matrix] * (one in ("dp2xtp2", "tp2xcp2", "cp2"))) for one in TOPOLOGIES]
)
def test_no_precision_drifts_further_than_the_order_of_sums_makes_it(topology):
    """The error of the first gradient against float64, beside that of one process, as it is and with sums in other orders."""
    found = run_distributed(fit_precisions, TOPOLOGIES[topology][0], *TOPOLOGIES[topology], timeout=300.0)[0]
    exact = fit("GPT", {"tied": False}, steps=3)
    for precision in PRECISIONS:
        alone = fit("GPT", {"tied": False}, steps=3, precision=precision)
        beside = [error(alone.grads, exact.grads)]
        for seed in range(3):
            trace = fit("Reordered", {"seed": seed}, steps=1, precision=precision)
            beside.append(error(as_before(trace, Reordered(seed).order), exact.grads))
        ours = error(found[precision].grads, exact.grads)
        assert ours <= 1.25 * max(beside) + 1e-12, (precision, ours, beside)
        apart = max(abs(a - b) for a, b in zip(found[precision].losses, exact.losses, strict=True))
        least = max(abs(a - b) for a, b in zip(alone.losses, exact.losses, strict=True))
        assert apart <= 2 * least + 1e-3 * (precision not in ("64-true", "32-true")) + 1e-6 * (precision == "32-true") + 1e-12


# ---- 16-mixed ----------------------------------------------------------------------------------------------------


class Overflows(models.GPT):
    """In the second batch one rank alone finds an infinity in the gradient of what it holds."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(tied=False)
        self.name, self.at, self.seen = name, rank, []

    def on_after_backward(self) -> None:
        self.begin = [local_rows(p).detach().clone() for p in self.parameters()]
        if self.trainer.global_rank == self.at and self.trainer.global_step == self.planted_at:
            local_rows(self.get_parameter(self.name).grad).add_(float("inf"))

    planted_at = 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        moved = any(not torch.equal(a, local_rows(b)) for a, b in zip(self.begin, self.parameters(), strict=True))
        self.seen.append((moved, self.trainer.precision_plugin.scaler.get_scale()))
        if len(self.seen) == 2:
            self.planted_at = -1  # global_step did not move


def overflow(
    axis: str, size: int, how: str, name: str, rank: int, scaler: Any = torch.amp.GradScaler
) -> list[tuple[bool, float]]:
    module = Overflows(name, rank)
    plugin = MixedPrecision("16-mixed", "cpu", scaler("cpu", init_scale=8.0, growth_interval=3))
    strategy = SeqParallelStrategy(data_parallel=how, regather=True, **{axis: size})
    world = torch.distributed.get_world_size()
    trainer = quiet_trainer(
        devices=world, strategy=strategy, max_epochs=1, plugins=[plugin], precision=None, limit_train_batches=5
    )
    trainer.fit(module, models.loader(2, count=64))
    assert plugin.scaler.get_scale() == 8.0  # the user's own is as it was
    return module.seen


@sees(
    "overflows of a rank not shared",
    "SeqParallelStrategy.setup",
    "            share_overflows(self.precision_plugin, env.world)\n",
    "            pass\n",
    case="2-tp-2-ddp-model.blocks.0.mlp.up.weight-1",
)
@sees(
    "overflows shared within a replica alone",
    "SeqParallelStrategy.setup",
    "share_overflows(self.precision_plugin, env.world)",
    'share_overflows(self.precision_plugin, self.groups["tp"])',
    case="4-tp-2-fsdp-model.blocks.1.attn.proj.weight-2",
)
@pytest.mark.parametrize(
    ("world", "axis", "size", "how", "name", "rank"),
    [
        (2, "tp", 2, "ddp", "model.blocks.0.mlp.up.weight", 1),
        (2, "cp", 2, "ddp", "model.blocks.0.mlp.up.weight", 1),
        (4, "tp", 2, "fsdp", "model.blocks.1.attn.proj.weight", 2),
        (4, "tp", 1, "fsdp", "model.tokens.weight", 3),
    ],
)
def test_all_ranks_skip_the_same_step(world, axis, size, how, name, rank):
    for seen in run_distributed(overflow, world, axis, size, how, name, rank):
        assert seen == [(True, 8.0), (False, 4.0), (True, 4.0), (True, 4.0), (True, 8.0)]


class Foreign(torch.amp.GradScaler):
    """A scaler of somebody's."""


def test_a_scaler_of_another_class_is_refused():
    with pytest.raises(RankFailedError, match=r"ValueError: a scaler of class Foreign: its ranks would disagree"):
        run_distributed(overflow, 2, "tp", 2, "ddp", "model.head.weight", 0, Foreign)
