"""Which samples a rank reads: the ranks of a replica the same ones, the replicas different ones, in the user's order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from lightning_seqpar.groups import ParallelGroups


class ReplicaSampler(Sampler[Any]):
    """Deals the order of another sampler out over the data-parallel replicas.

    Each epoch every rank runs the user's sampler, and the first rank's order counts for all: one permutation, seeded
    or not. Replica ``r`` reads samples ``r``, ``r + dp``, ...; the last round is filled up from the beginning, as
    torch's ``DistributedSampler`` does.

    Args:
        sampler: the order; any sized sampler.
        groups: the process groups; iterating is collective over dp × tp.
    """

    def __init__(self, sampler: Any, groups: ParallelGroups) -> None:
        self.sampler, self.groups = sampler, groups
        self.num_replicas, self.rank = groups.size("dp"), groups.rank("dp")

    def __iter__(self) -> Iterator[Any]:
        order = [list(self.sampler)]
        dist.broadcast_object_list(order, src=self.groups.ranks(("dp", "tp"))[0], group=self.groups["dp", "tp"])
        indices = order[0]
        if missing := -len(indices) % self.num_replicas:
            indices = indices + (indices * (missing // max(1, len(indices)) + 1))[:missing]
        return iter(indices[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the user's sampler."""
        if callable(getattr(self.sampler, "set_epoch", None)):
            self.sampler.set_epoch(epoch)


def inject_sampler(dataloader: DataLoader[Any], groups: ParallelGroups, stage: RunningStage | None) -> DataLoader[Any]:
    """The loader with its own order, dealt out over the replicas; the loader itself where nothing is to be dealt.

    Raises:
        ValueError: for a ``DistributedSampler`` of the user's that counts ranks instead of replicas, or a sampler
            without a length.
    """
    sampler = dataloader.sampler
    if isinstance(sampler, DistributedSampler):
        check_users_sampler(sampler, groups)
        return dataloader
    if isinstance(dataloader.dataset, IterableDataset) or (
        groups.size("dp") == 1 and (isinstance(sampler, SequentialSampler) or _has_custom_batches(dataloader))
    ):
        return dataloader
    if not isinstance(sampler, Sized):
        raise ValueError(
            f"the sampler {type(sampler).__name__} has no length, so it can't be dealt out over dp={groups.size('dp')} "
            "replicas; give it __len__, or set Trainer(use_distributed_sampler=False) and deal by strategy.dp_rank"
        )
    if stage == RunningStage.PREDICTING and groups.size("dp") > 1:
        # No sample twice: a prediction belongs to one replica.
        dealt: Any = UnrepeatedDistributedSamplerWrapper(
            sampler, num_replicas=groups.size("dp"), rank=groups.rank("dp"), shuffle=False
        )
    else:
        dealt = ReplicaSampler(sampler, groups)
    return _update_dataloader(dataloader, dealt, mode=stage)


def _has_custom_batches(dataloader: DataLoader[Any]) -> bool:
    return type(dataloader.batch_sampler) is not BatchSampler


def check_users_sampler(sampler: DistributedSampler[Any], groups: ParallelGroups) -> None:
    """A sampler that the user made must count data-parallel replicas, not ranks."""
    expected = (groups.size("dp"), groups.rank("dp"))
    if (sampler.num_replicas, sampler.rank) != expected:
        raise ValueError(
            f"your DistributedSampler has num_replicas={sampler.num_replicas}, rank={sampler.rank}, but the ranks of one "
            f"replica must read the same samples: here num_replicas={expected[0]}, rank={expected[1]}. Make it with "
            "num_replicas=trainer.strategy.dp_size, rank=trainer.strategy.dp_rank, or leave the sampler to the strategy"
        )


def replica_workers(dataloader: DataLoader[Any], dp_rank: int) -> None:
    """Seed workers by replica: Lightning would seed them by rank, and one replica would read different augmentations."""
    if dataloader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=dp_rank)
