"""Ranks that were told different things are stopped before they train, with who says what."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.distributed.rendezvous import check_agreement
from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees


def worker_agree(values):
    check_agreement(values[dist.get_rank()], dist.group.WORLD, torch.device("cpu"))
    return True


@sees(
    "ranks that disagree go on",
    "check_agreement",
    "    if int(extremes[0]) == -int(extremes[1]):\n",
    "    if int(extremes[0]) >= -int(extremes[1]):\n",
)
def test_who_says_what():
    told = [{"tp": 2, "sp": True}, {"tp": 2, "sp": True}, {"tp": 4, "sp": True}, {"tp": 2}]
    with pytest.raises(RankFailedError) as failed:
        run_distributed(worker_agree, 4, told)
    text = str(failed.value)
    assert "4 of 4 ranks failed" in text
    assert text.count(
        "ValueError: the ranks were not told the same: tp is 2 on ranks 0, 1, 3 and 4 on rank 2; "
        "sp is true on ranks 0, 1, 2 and missing on rank 3. Start every rank with the same code, files and arguments\nTrace"
    ) == 4  # fmt: skip


def fit_differing(what):
    rank = dist.get_rank()
    mine = {k: v[rank] for k, v in what.items()}
    strategy = SeqParallelStrategy(**{"tp": 2, "timeout": 60, **mine.get("strategy", {})})
    trainer = quiet_trainer(devices=2, strategy=strategy, **{"max_steps": 2, **mine.get("trainer", {})})
    model = models.GPT(**mine.get("model", {}))
    model.model.norm.eps = mine.get("eps", 1e-5)
    if "lr" in mine:
        model.configure_optimizers = lambda: torch.optim.AdamW(
            [{"params": [model.model.norm.weight], "lr": mine["lr"]}, {"params": [model.model.norm.bias]}], lr=1e-3
        )
    for name in mine.get("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    trainer.fit(model, models.loader(4, count=mine.get("count", 16)))


def said_of(run, cases):
    """What this rank raises in each case, one after the other."""
    said = []
    for case in cases:
        try:
            run(case)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


DIFFER = [
    ({"strategy": [{"sp": True}, {"sp": False}]}, "sp is true on rank 0 and false on rank 1"),
    ({"strategy": [{"check_every": 0}, {"check_every": 5}]}, "check_every is 0 on rank 0 and 5 on rank 1"),
    ({"strategy": [{}, {"order": "tp-dp-cp-pp"}]}, "order is pp-dp-cp-tp on rank 0 and tp-dp-cp-pp on rank 1"),
    ({"strategy": [{}, {"dp": 1}]}, 'dp is auto on rank 0 and 1 on rank 1'),
    ({"strategy": [{}, {"timeout": 50}]}, "timeout is 60.0 s on rank 0 and 50.0 s on rank 1"),
    ({"model": [{}, {"dim": 32}]}, r"parameter model.tokens.weight is \[31, 16\] .* rank 0 and \[31, 32\] .*; and \d+ more"),
    ({"model": [{"n_head": 4}, {"n_head": 2}]}, "module model.blocks.0.attn is .*n_head=4 on rank 0 and .*n_head=2 on rank 1"),
    ({"eps": [1e-5, 1e-3]}, "module model.norm is .*eps=1e-05.* on rank 0 and .*eps=0.001"),
    ({"model": [{}, {"optimizer": "sgd"}]}, r'optimizer 0 is \["AdamW".* on rank 0 and \["SGD"'),
    ({"lr": [1e-3, 2e-3]}, "optimizer 0 is "),
    ({"frozen": [(), ("model.norm.weight",)]}, r"model.norm.weight is \[16\] .* rank 0 and \[16\] .* frozen on rank 1"),
    ({"trainer": [{}, {"max_steps": 3}]}, "max_steps is 2 on rank 0 and 3 on rank 1"),
    ({"trainer": [{}, {"accumulate_grad_batches": 2}]}, "accumulate_grad_batches is 1 on rank 0 and 2 on rank 1"),
    ({"trainer": [{}, {"gradient_clip_val": 1.0}]}, "gradient_clip_val is null on rank 0 and 1.0 on rank 1"),
    ({"count": [16, 32]}, "training batches in an epoch is 4 on rank 0 and 8 on rank 1"),
]  # fmt: skip


@sees(
    "plans and models not compared",
    "ModelSetup.shard",
    "            check_agreement(facts, self._env.world, self._env.device)\n",
    "",
)
@sees(
    "optimizers not compared",
    "Loops._describe_training",
    "describe_optimizer(plain_optimizer(optimizer))",
    "type(plain_optimizer(optimizer)).__name__",
)
@pytest.mark.core
def test_a_training_that_ranks_disagree_about_never_starts():
    for found in run_distributed(said_of, 2, fit_differing, [what for what, _ in DIFFER]):
        for (_, says), said in zip(DIFFER, found, strict=True):
            assert said.startswith("the ranks were not told the same"), (says, said)
            assert re.search(says, said), said


class Validated(models.GPT):
    def validation_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)

    test_step = predict_step = validation_step

    def train_dataloader(self):
        epoch = self.trainer.current_epoch
        return models.loader(4, count=16 + 4 * epoch * dist.get_rank())


def loop_unevenly(loop):
    strategy = SeqParallelStrategy(tp=2, timeout=60)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    if loop == "fit":
        trainer.fit(Validated())
    else:
        getattr(trainer, loop)(Validated(), models.loader(4, count=8 + 4 * dist.get_rank()))


UNEVEN = {
    "fit": "training batches in an epoch is 4 on rank 0 and 5 on rank 1",
    "validate": "validation batches is [2] on rank 0 and [3] on rank 1",
    "test": "test batches is [2] on rank 0 and [3] on rank 1",
    "predict": "predict batches is [2] on rank 0 and [3] on rank 1",
}


@pytest.mark.core
def test_ranks_of_a_replica_loop_equally_often():
    for found in run_distributed(said_of, 2, loop_unevenly, [*UNEVEN]):
        for says, said in zip(UNEVEN.values(), found, strict=True):
            assert says in said


def worker_group_of_its_own():
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, timeout=60), max_steps=1)
    trainer.fit(models.GPT(), models.loader(4, count=8))


def test_a_group_that_one_rank_made_alone_is_named():
    with pytest.raises(RankFailedError, match="process groups made before is 2 on rank 0 and 1 on rank 1"):
        run_distributed(worker_group_of_its_own, 2)
