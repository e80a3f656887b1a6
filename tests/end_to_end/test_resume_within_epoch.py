"""A run that resumes in the middle of an epoch reads the batches that are left of it, in the order that it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.strategy import saving
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import FLOAT64_TOLERANCE, ParityRecorder
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees


class Own(Sampler[int]):
    """A sampler of the user's, that draws from Python's generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        import random

        return iter(random.sample(range(self.count), self.count))

    def __len__(self) -> int:
        return self.count


def make_loader(kind: str, each: int) -> DataLoader[Any]:
    data = models.tokens(count=24)
    if kind == "own generator":
        return DataLoader(data, each, shuffle=True, generator=torch.Generator().manual_seed(7))
    if kind == "workers":
        return DataLoader(data, each, shuffle=True, num_workers=1)
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), each, drop_last=False))
    if kind == "sampler of one's own":
        return DataLoader(data, each, sampler=Own(24))
    return DataLoader(data, each, shuffle=kind != "in order")


class Read(Callback):
    """What this rank read."""

    def __init__(self) -> None:
        self.batches: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(float(batch[0].double().mul(torch.arange(batch[0].numel()).view_as(batch[0])).sum()))


def fit(folder: str, kind: str, config: dict[str, Any], replicas: int, resume: int | None) -> Any:
    """Train 15 steps of six a epoch, with a checkpoint behind each; or go on behind step ``resume``."""
    torch.manual_seed(3 if resume is None else 4)
    module = models.GPT().double()
    recorder, read = ParityRecorder(), Read()
    torch.manual_seed(5 if resume is None else 6)
    trainer = quiet_trainer(
        devices=2 * replicas,
        strategy=SeqParallelStrategy(self_check=False, **config),
        max_steps=15,
        enable_checkpointing=True,
        callbacks=[recorder, read, ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
    )
    path = None if resume is None else str(Path(folder, f"step={resume}.ckpt"))
    trainer.fit(module, make_loader(kind, 4 // replicas), ckpt_path=path)
    return recorder.trace.weights, read.batches


def both(folder: str, kind: str, config: dict[str, Any], replicas: int) -> None:
    weights, batches = fit(folder, kind, config, replicas, None)
    for step in (8, 12):  # in the middle of the second epoch, and at its end
        again, rest_of_batches = fit(folder, kind, config, replicas, step)
        assert rest_of_batches == batches[step:], (kind, step)
        for name, weight in weights.items():
            assert float((again[name] - weight).abs().max()) <= FLOAT64_TOLERANCE, (kind, step, name)


@sees(
    "an epoch that goes on has another order",
    "ReplicaSampler.__iter__",
    '                    torch.set_rng_state(place["torch"])\n',
    "                    pass\n",
    case="shuffled-{'tp': 2}-1",
)
@sees(
    "an epoch that goes on begins with its first batch",
    "ReplicaSampler.__iter__",
    'for _ in islice(rest, place["items"]):',
    "for _ in islice(rest, 1):",
    case="shuffled-{'tp': 2}-1",
)
@sees(
    "stages agree on an order with themselves alone",
    "ReplicaSampler.set_epoch",
    "source = self.groups.source(self.groups.replica_axes)",
    "source = self.groups.source(self.groups.holder_axes)",
    case="shuffled-{'pp': 2}-1",
)
@pytest.mark.parametrize(
    ("kind", "config", "replicas"),
    [
        ("shuffled", {"tp": 2}, 1),
        ("shuffled", {"tp": 2}, 2),
        ("shuffled", {"pp": 2}, 1),
        ("own generator", {"tp": 2}, 1),
        rest("workers", {"tp": 2, "broadcast_batch": True}, 1),
        rest("sampler of one's own", {"tp": 2}, 1),
        rest("in order", {"tp": 2}, 1),
        rest("batch sampler", {"tp": 2}, 2),
        rest("own generator", {"tp": 2, "data_parallel": "fsdp", "checkpoint": {"format": "sharded"}}, 2),
    ],
    ids=str,
)
def test_a_run_that_resumes_in_the_middle_of_an_epoch_reads_the_rest_of_it(kind, config, replicas, tmp_path):
    run_distributed(both, 2 * replicas, str(tmp_path), kind, config, replicas)


def resume_without_places(folder: str) -> list[str]:
    fit(folder, "in order", {"tp": 2}, 1, None)
    path = Path(folder, "step=8.ckpt")
    if torch.distributed.get_rank() == 0:
        checkpoint = torch.load(path)
        del checkpoint[saving.OWN]  # as plain Lightning writes it
        torch.save(checkpoint, path)
    torch.distributed.barrier()
    with mock.patch.object(saving, "rank_zero_warn") as told:
        fit(folder, "in order", {"tp": 2}, 1, 8)
    return [one.args[0] for one in told.call_args_list]


def test_a_checkpoint_that_does_not_say_which_samples_were_read_is_told_of(tmp_path):
    for (told,) in run_distributed(resume_without_places, 2, str(tmp_path)):
        assert "the epoch's first batches are read again" in told
