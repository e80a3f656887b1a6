"""Stages of a pipeline trained by a Trainer: what the strategy runs of it so far, which is not offered yet (``pp`` is refused)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parallel.apply import whole_tensor
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.guards import config
from tests.helpers import models
from tests.helpers.fit import class_named, quiet_trainer

Found = tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]


class Kept(Callback):
    """The norm and the gradients in front of the first update, of what this stage holds."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not hasattr(self, "grads"):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if isinstance(trainer.strategy, SeqParallelStrategy):
                self.norm = float(trainer.strategy.global_norm(parameters))
            else:
                self.norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
            self.grads = whole(pl_module, lambda p: p.grad)


def whole(module: Any, take: Any) -> dict[str, torch.Tensor]:
    record = record_of(module)
    found = {}
    for name, parameter in module.named_parameters():
        if record is None or record.stage is None or record.stage.holds(name):
            x = take(parameter)
            if x is not None:
                found[name] = (
                    x.detach().clone() if record is None else whole_tensor(x, record.layout[name], record.groups)
                )
    return found


def fit(model: str, args: dict[str, Any], sizes: dict[str, Any] | None) -> Found:
    torch.manual_seed(0)
    module, kept, strategy = class_named(model)(**args), Kept(), "auto"
    if sizes is not None:
        later = config.LATER.copy()
        config.LATER.pop("pp")
        try:
            strategy = SeqParallelStrategy(**sizes)
        finally:
            config.LATER |= later
    trainer = quiet_trainer(
        devices=1 if sizes is None else dist.get_world_size(),
        strategy=strategy,
        max_steps=3,
        accumulate_grad_batches=3,
        gradient_clip_val=0.05,
        callbacks=[kept],
    )
    trainer.fit(module, models.loader(4, length=9, count=40))  # the last window has one batch
    return kept.norm, kept.grads, whole(module, lambda p: p.data)


CASES = [("GPT", {"tied": True}), ("GPT", {"tied": False}), ("Encoder", {"batch_first": False})]


def fit_all(sizes: dict[str, Any]) -> list[Found]:
    return [fit(*case, sizes) for case in CASES]


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(2, {"pp": 2}), (4, {"pp": 2, "tp": 2}), (4, {"pp": 2, "tp": 2, "sp": False})],
    ids=["pp2", "pp2-tp2", "pp2-tp2-no-sp"],
)
def test_a_trainer_runs_stages_as_one_process(world, sizes):
    everywhere = run_distributed(fit_all, world, sizes)
    for at, case in enumerate(CASES):
        norm, grads, weights = fit(*case, None)
        for what, expected, limit in ((1, grads, 1e-9 * norm), (2, weights, 1e-9)):
            assert {n for rank in everywhere for n in rank[at][what]} == set(expected), case
            for rank in everywhere:
                assert rank[at][0] == pytest.approx(norm, rel=1e-9)
                for n, x in rank[at][what].items():
                    assert (x - expected[n]).abs().max() <= limit, (case, n)
