"""Steps that use their trainer, through ``Trainer.fit``: proved with it, trained with it, and as one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import compare
from tests.helpers import models, zoo
from tests.helpers.fit import fit, quiet_trainer
from tests.mutants import sees


@sees(
    "gathered entries have no gradient",
    "OnReplicas.all_gather",
    "with nullcontext() if sync_grads else torch.no_grad():",
    "with torch.no_grad():",
    case="4-2-sync",
)
@sees(
    "entries are gathered over the world",
    "OnReplicas.all_gather",
    'over = self.groups["dp"] if',
    "over = self.environment.world if",
    case="2-2-sync",
)
@pytest.mark.parametrize(
    ("world", "tp", "own"), [(2, 2, "sync"), (4, 2, "sync"), (4, 2, "slot"), (2, 1, "slot"), (4, 4, "sync")]
)
def test_a_contrastive_loss_over_all_replicas_trains_as_in_one_process(world, tp, own):
    expected = fit("Contrastive", {"own": own}, steps=4)
    strategy = {"tp": tp}
    for trace in run_distributed(fit, world, "Contrastive", {"own": own}, world=world, strategy=strategy, steps=4):
        if own == "slot":  # every replica returns dp times its loss
            trace.losses = expected.losses
        compare(expected, trace).raise_if_failed()


class Alone(zoo.Zoo):
    """Speaks to the other ranks past the trainer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(loss.detach())
        return loss


class RanksOwn(models.Contrastive):
    """Finds its own entry by the number of its process, as where every rank is a replica."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = self.features(batch[0])
        whole = self.all_gather(own).flatten(0, 1)
        first = self.global_rank * len(own)
        return torch.nn.functional.cross_entropy(own @ whole.T, torch.arange(first, first + len(own)) % len(whole))


def refused(kind: Any, *args: Any) -> None:
    trainer = quiet_trainer(devices=dist.get_world_size(), strategy=SeqParallelStrategy(tp=2), max_steps=1)
    trainer.fit(kind(*args), models.loader(4, count=16))


def test_a_collective_of_the_steps_own_is_named_rather_than_waited_for():
    said = r"the step calls torch\.distributed itself \(allreduce\).*\(test_trainer_in_steps\.py, line \d+: dist\.all_reduce"
    with pytest.raises(RankFailedError, match=said):
        run_distributed(refused, 2, Alone, "einsum")


def test_an_entry_by_the_number_of_the_process_is_refused():
    with pytest.raises(RankFailedError, match=r"the loss differs .*depend on the number of the process .*dp_rank"):
        run_distributed(refused, 4, RanksOwn)
