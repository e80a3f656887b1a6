"""Which samples a rank reads: the ranks of a replica the same ones, the replicas different ones, in the user's order."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sized
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from lightning_seqpar.groups import ParallelGroups
from lightning_seqpar.random import share_streams


class ReplicaSampler(Sampler[Any]):
    """Deals the order of another sampler out over the data-parallel replicas.

    With one replica, its ranks share their random state at the start of each epoch and then draw what one process
    would. With several, every rank runs the user's sampler and the first rank's order counts for all: one permutation,
    seeded or not. Replica ``r`` reads samples ``r``, ``r + dp``, ...

    Args:
        sampler: the order: any sampler, of samples or of batches.
        groups: the process groups; iterating is collective over dp × tp.
        repeat: fill the last round up from the beginning, as torch's ``DistributedSampler`` does, so that all replicas
            read equally many; without it no sample comes twice.
    """

    def __init__(self, sampler: Any, groups: ParallelGroups, *, repeat: bool = True) -> None:
        self.sampler, self.groups, self.repeat = sampler, groups, repeat
        self.num_replicas, self.rank = groups.size("dp"), groups.rank("dp")

    def __iter__(self) -> Iterator[Any]:
        source = self.groups.ranks(("dp", "tp"))[0]
        if self.num_replicas == 1:
            share_streams(self.groups["tp"], source, torch.device("cpu"))
            self._share_generator(source)
            yield from self.sampler
            return
        order = [list(self.sampler)]
        dist.broadcast_object_list(order, src=source, group=self.groups["dp", "tp"])
        items = order[0]
        if self.repeat and (missing := -len(items) % self.num_replicas):
            items = items + (items * (missing // max(1, len(items)) + 1))[:missing]
        yield from items[self.rank :: self.num_replicas]

    def _share_generator(self, source: int) -> None:
        """A sampler may draw from a generator of its own."""
        generator = getattr(self.sampler, "generator", None)
        if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
            state = generator.get_state()
            dist.broadcast(state, src=source, group=self.groups["tp"])
            generator.set_state(state)

    def __len__(self) -> int:
        count = len(self.sampler)
        return -(-count // self.num_replicas) if self.repeat else len(range(self.rank, count, self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the user's sampler."""
        if callable(getattr(self.sampler, "set_epoch", None)):
            self.sampler.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        # Whatever else is asked (batch_size, drop_last, state_dict, ...) is the user's sampler's.
        if name.startswith("__") or name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)


def inject_sampler(dataloader: DataLoader[Any], groups: ParallelGroups, *, predicting: bool = False) -> DataLoader[Any]:
    """A copy of the loader whose order is dealt out over the replicas; the loader itself where nothing is to be dealt.

    Raises:
        ValueError: for a ``DistributedSampler`` of the user's that counts ranks instead of replicas, or a sampler
            without a length that would have to be dealt out.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return dataloader
    batches: Any = dataloader.batch_sampler
    indexed = isinstance(batches, _IndexBatchSamplerWrapper)
    if indexed:
        batches = batches._batch_sampler
    deals_samples = batches is None or type(batches) is BatchSampler
    order: Any = dataloader.sampler if batches is None else batches.sampler if deals_samples else batches
    if isinstance(order, DistributedSampler):
        check_users_sampler(order, groups)
        return dataloader
    if isinstance(order, ReplicaSampler):
        order = order.sampler
    elif groups.size("dp") == 1 and isinstance(order, SequentialSampler):
        return dataloader
    if groups.size("dp") > 1 and not isinstance(order, Sized):
        raise ValueError(
            f"the sampler {type(order).__name__} has no length, so it can't be dealt out over dp={groups.size('dp')} "
            "replicas; give it __len__, or set Trainer(use_distributed_sampler=False) and deal by strategy.dp_rank"
        )
    dealt: Any = ReplicaSampler(order, groups, repeat=not predicting)
    made = copy.copy(dataloader)
    # A DataLoader guards these attributes, but a fresh copy has not been iterated.
    if batches is None or deals_samples:
        vars(made)["sampler"] = dealt
    if batches is not None:
        if deals_samples:
            inner = copy.copy(batches)
            inner.sampler = dealt
            dealt = inner
        vars(made)["batch_sampler"] = _IndexBatchSamplerWrapper(dealt) if indexed else dealt
    return made


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
