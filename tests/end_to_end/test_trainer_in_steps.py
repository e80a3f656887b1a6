"""Steps that use their trainer, through ``Trainer.fit``: proved with it, trained with it, and as one process trains."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import compare
from tests.helpers import models, zoo
from tests.helpers.fit import fit, quiet_trainer
from tests.mutants import sees


@sees(
    "gathered entries have no gradient",
    "Environment.all_gather",
    "with nullcontext() if sync_grads else torch.no_grad():",
    "with torch.no_grad():",
    case="4-2-sync",
)
@sees(
    "entries are gathered over the world",
    "Environment.all_gather",
    'over = self.groups["dp"] if',
    "over = self.world if",
    case="2-2-sync",
)
@pytest.mark.parametrize(
    ("world", "tp", "own"),
    [(2, 2, "sync"), (4, 2, "sync"), (4, 2, "slot"), (2, 1, "slot"), (4, 4, "sync")],
)
def test_a_contrastive_loss_over_all_replicas_trains_as_in_one_process(world, tp, own):
    expected = fit("Contrastive", {"own": own}, steps=4)
    strategy = {"tp": tp}
    for trace in run_distributed(fit, world, "Contrastive", {"own": own}, world=world, strategy=strategy, steps=4):
        if own == "slot":  # every replica returns dp times its loss
            trace.losses = expected.losses
        compare(expected, trace).raise_if_failed()


class Counting(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []


class Data(L.LightningDataModule):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def ask(self, index: int) -> float:
        self.asked.append(index)
        return self.scale

    def train_dataloader(self) -> Any:
        return models.loader(4, count=32)


class Using(models.GPT):
    """Reads and writes all around itself at each step."""

    history: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.outputs, self.seen = MeanMetric(), [], {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer, strategy = self.trainer, self.trainer.strategy
        loss = super().training_step(batch, batch_idx) * trainer.datamodule.ask(batch_idx)
        trainer.callbacks[0].losses.append(float(loss.detach()))
        self.outputs.append(loss.detach())
        self.history.append(float(loss.detach()))
        self.metric.update(loss.detach())
        self.log("loss", loss, sync_dist=True)
        self.print("loss", self.current_epoch, self.global_step)
        strategy.barrier()
        whole = self.all_gather({"loss": loss.detach(), "batch": batch[0]})
        assert whole["batch"].shape == ((strategy.dp_size,) if strategy.dp_size > 1 else ()) + batch[0].shape
        mean = strategy.reduce(loss.detach().clone(), reduce_op="mean")
        assert strategy.broadcast(batch_idx, src=0) == batch_idx
        assert trainer.num_training_batches == 8 // strategy.dp_size
        assert self.lr_schedulers().get_last_lr() == [self.optimizers().param_groups[0]["lr"]]
        self.seen = {"mean": float(mean), "step": self.global_step}
        return loss / trainer.estimated_stepping_batches

    def configure_optimizers(self) -> Any:
        optimizer = models.optimizer_of("sgd", self)
        self.steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, self.steps)]


def fit_using(tp: int) -> Any:
    module, data, counting = Using(), Data(), Counting()
    Using.history.clear()
    trainer = quiet_trainer(
        devices=dist.get_world_size(), strategy=SeqParallelStrategy(tp=tp), max_epochs=1, callbacks=[counting]
    )
    trainer.fit(module, datamodule=data)
    assert counting.losses == Using.history == [float(loss) for loss in module.outputs]
    return data.asked, len(module.outputs), module.steps, module.seen["step"], float(module.metric.weight)


def test_a_step_uses_its_trainer_and_only_training_leaves_traces():
    assert run_distributed(fit_using, 2, 2) == [(list(range(8)), 8, 8, 7, 8.0)] * 2
    assert run_distributed(fit_using, 4, 2) == [(list(range(4)), 4, 4, 3, 4.0)] * 4


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
