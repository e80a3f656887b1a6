"""Batches that one rank of a replica reads for all of them."""

from __future__ import annotations

import random
import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, compare
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees


class Stream(IterableDataset):
    """Rows that no two processes share, drawn while reading."""

    def __init__(self, count: int, fail_at: int = -1) -> None:
        self.count, self.fail_at = count, fail_at

    def __iter__(self):
        own = random.SystemRandom()
        for at in range(self.count):
            if at == self.fail_at:
                raise OSError("the shard is gone")
            torch.rand(own.randint(1, 5))  # puts this process's streams out of step
            random.random()
            np.random.rand()
            yield (torch.tensor([own.randint(1, 30) for _ in range(10)]),)


class Seen(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []
        self.validated: list[Tensor] = []
        self.draws: list[tuple[float, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[0])
        self.draws.append((float(torch.rand(())), random.random(), float(np.random.rand())))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch[0])


def reference(batches: list[Tensor]):
    """One process on the same batches."""
    torch.manual_seed(0)
    recorder = ParityRecorder()
    trainer = quiet_trainer(max_steps=len(batches), callbacks=[recorder])
    trainer.fit(models.GPT(), DataLoader([(batch,) for batch in batches], batch_size=None))
    return recorder.trace


def worker_stream(broadcast: bool, workers: int = 0, world: int = 2, twins: bool = False):
    torch.manual_seed(0)
    strategy = SeqParallelStrategy(tp=2, broadcast_batch=broadcast, gloo_twins=twins, timeout=60)
    recorder, model = ParityRecorder(), Seen()
    trainer = quiet_trainer(
        devices=world, strategy=strategy, max_steps=6, callbacks=[recorder], limit_val_batches=2, num_sanity_val_steps=1
    )
    loader = DataLoader(Stream(16), batch_size=4, num_workers=workers)
    trainer.fit(model, loader, DataLoader(Stream(12), batch_size=4))
    return model.batches, model.draws, recorder.trace, model.validated


@sees(
    "a broadcast batch without the reader's random streams",
    "BroadcastLoader.__iter__",
    "                streams.restore()\n",
    "                pass\n",
    case="1-True",
)
@pytest.mark.parametrize(("workers", "twins"), [rest(0, False), (1, True)])
def test_a_replica_reads_one_stream_and_trains_as_one_process(workers, twins):
    told = run_distributed(worker_stream, 2, True, workers, 2, twins)
    (batches, draws, trace, validated), (others, other_draws, _, other_validated) = told
    assert len(batches) == 6
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(batches, others, strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(validated, other_validated, strict=True))
    assert len(validated) >= 3
    assert draws == other_draws, "a draw while reading must leave the ranks in step"
    assert compare(reference(batches), trace).ok


def test_two_replicas_read_streams_of_their_own():
    told = run_distributed(worker_stream, 4, True, 0, 4)
    seen = [torch.cat(batches) for batches, *_ in told]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])
    joined = [torch.cat(pair) for pair in zip(told[0][0], told[2][0], strict=True)]
    assert compare(reference(joined), told[0][2]).ok


def test_without_it_different_streams_are_refused():
    with pytest.raises(RankFailedError, match=r"read different validation batches .* set broadcast_batch"):
        run_distributed(worker_stream, 2, False)


class Lists(L.LightningDataModule):
    def train_dataloader(self):
        return {"a": models.loader(4, count=16, shuffle=True), "b": models.loader(2, count=8)}


class Two(models.GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)


class Validates(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1


class Sized:
    """As long as its rank says; only the reader's length counts."""

    def __len__(self) -> int:
        return 3 + dist.get_rank()

    def __iter__(self):
        return iter(models.loader(4, count=4 * len(self)))


def worker_lists() -> tuple[int, int]:
    """How many steps several loaders make in two epochs; and how many batches are read of kept loaders, or of unequal lengths."""
    torch.manual_seed(dist.get_rank())
    recorder = ParityRecorder()
    strategy = SeqParallelStrategy(tp=2, broadcast_batch=True, timeout=60)
    quiet_trainer(devices=2, strategy=strategy, max_epochs=2, callbacks=[recorder]).fit(Two(), Lists())
    strategy = SeqParallelStrategy(tp=2, broadcast_batch=True, timeout=60)
    trainer, model = quiet_trainer(devices=2, strategy=strategy), Validates()
    kept = CombinedLoader([models.loader(4, count=8)], "sequential")
    trainer.validate(model, kept)
    trainer.validate(model, kept)
    trainer.validate(model, Sized())
    return len(recorder.trace.losses), model.seen


def test_several_loaders_kept_ones_and_lengths_that_differ():
    assert run_distributed(worker_lists, 2) == [(8, 2 + 2 + 3)] * 2


class Unpicklable(IterableDataset):
    def __iter__(self):
        for _ in range(2):
            yield lambda: None


class Unstartable(IterableDataset):
    def __iter__(self):
        raise OSError("no such shard")


def worker_bad_reader(dataset, batch_size):
    strategy = SeqParallelStrategy(tp=2, broadcast_batch=True, timeout=30)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=6)
    trainer.fit(models.GPT(), DataLoader(dataset, batch_size))


@sees(
    "a reader's failure kept to itself",
    "BroadcastLoader.__iter__",
    '                    message = [("failed", f"{type(error).__name__}: {error}", SavedStreams())]\n',
    '                    told = [("end", None, SavedStreams())]\n',
    case="fails",
)
@pytest.mark.parametrize(
    ("dataset", "batch_size", "says"),
    [
        (Stream(16, fail_at=9), 4, "OSError: the shard is gone"),
        (Unpicklable(), None, "pickle"),
        (Unstartable(), None, "OSError: no such shard"),
    ],
    ids=["fails", "unpicklable", "unstartable"],
)
def test_whatever_ends_the_reader_is_told(dataset, batch_size, says):
    with pytest.raises(RankFailedError, match=f"rank 1: RuntimeError: rank 0, which reads .* raised .*{says}"):
        run_distributed(worker_bad_reader, 2, dataset, batch_size)


class OneStream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(8):
            yield (torch.randint(1, 30, (10,), generator=generator),)


def worker_alike():
    strategy = SeqParallelStrategy(tp=2, broadcast_batch=True, timeout=60)
    trainer = quiet_trainer(devices=4, strategy=strategy, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(models.GPT(), DataLoader(OneStream(), batch_size=4))
    return [str(one.message) for one in caught if "same first training batch" in str(one.message)]


def test_replicas_that_all_read_one_stream_are_warned_of():
    told = run_distributed(worker_alike, 4)
    assert len(told[0]) == 1
    assert "all 2 replicas read the same first training batch; deal an iterable data set out" in told[0][0]
    assert told[1:] == [[]] * 3
