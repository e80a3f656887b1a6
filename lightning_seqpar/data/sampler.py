"""Which samples a rank reads: the ranks of a replica the same ones, the replicas different ones, in the user's order."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_seqpar.distributed.rng import kept_streams, share_streams
from lightning_seqpar.topology.process_groups import ParallelGroups

_DRAWN_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, BatchSampler)


class OrderSeed:
    """What the orders of a run's epochs follow from: the number of ``seed_everything``, else one that is drawn once.

    A run that goes on from a checkpoint has the orders that it would have had.

    Attributes:
        value: the number; none until it is needed.
    """

    def __init__(self) -> None:
        self.value: int | None = None

    def of_epoch(self, epoch: int, place: int = 0) -> int:
        """The number of one epoch; of several loaders each has its own."""
        if self.value is None:
            told = os.environ.get("PL_GLOBAL_SEED")
            drawn = int(torch.empty((), dtype=torch.int64).random_(2**31)) if told is None else int(told)
            self.value = drawn
        return (self.value + epoch + 1_000_003 * place) % 2**32


class ReplicaSampler(Sampler[Any]):
    """Deals the order of another sampler out over the data-parallel replicas.

    The ranks agree at the start of each epoch, in :meth:`set_epoch`, which Lightning calls on all of them; iterating
    speaks to nobody, so that one rank may peek. With one replica and a sampler of torch's they share their random state,
    and draw what one process would. Otherwise every rank runs the user's sampler, from a seed of the epoch's own, and the
    first rank's order counts for all: one permutation, seeded or not. Replica ``r`` reads samples ``r``, ``r + dp``, ...

    Args:
        order: any sampler, of samples or of batches.
        groups: the process groups.
        seed: of the order with several replicas.
        repeat: fill the last round up from the beginning, as torch's ``DistributedSampler`` does, so that all replicas
            read equally many; without it no sample comes twice.
        place: the loader's place among several.
    """

    def __init__(
        self,
        order: Any,
        groups: ParallelGroups,
        seed: OrderSeed,
        *,
        repeat: bool = True,
        place: int = 0,
    ) -> None:
        self.order, self.groups, self.seed, self.repeat, self.place = order, groups, seed, repeat, place
        self.num_replicas, self.rank = groups.size("dp"), groups.rank("dp")
        self._agreed: list[Any] | None = None

    @property
    def sampler(self) -> ReplicaSampler:
        """Itself: Lightning looks for ``set_epoch`` on a batch sampler's ``sampler``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """A new epoch: pass it on to the user's sampler and agree on the order; collective over dp × tp."""
        for part in (self.order, getattr(self.order, "sampler", None)):
            forward = getattr(part, "set_epoch", None)
            if callable(forward):
                forward(epoch)
        source = self.groups.ranks(("dp", "tp"))[0]
        if self.num_replicas == 1 and (type(self.order) in _DRAWN_FROM_TORCH or not isinstance(self.order, Sized)):
            share_streams(self.groups["tp"], source, torch.device("cpu"))
            self._share_generator(source)
            return
        number = self.seed.of_epoch(epoch, self.place)
        with kept_streams(torch.device("cpu")):
            random.seed(number)
            np.random.seed(number)
            torch.default_generator.manual_seed(number)
            box = [list(self.order)]
        dist.broadcast_object_list(box, src=source, group=self.groups["dp", "tp"])
        self._agreed = box[0]

    def _share_generator(self, source: int) -> None:
        """A sampler may draw from a generator of its own."""
        for part in (self.order, getattr(self.order, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
                box = [generator.get_state()]
                dist.broadcast_object_list(box, src=source, group=self.groups["tp"])
                generator.set_state(box[0])

    def __iter__(self) -> Iterator[Any]:
        if self.num_replicas == 1 and self._agreed is None:
            return iter(self.order)
        items = list(self.order) if self._agreed is None else self._agreed
        if self.repeat and (missing := -len(items) % self.num_replicas):
            items = items + (items * (missing // max(1, len(items)) + 1))[:missing]
        return iter(items[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        count = len(self.order)
        return -(-count // self.num_replicas) if self.repeat else len(range(self.rank, count, self.num_replicas))

    def __getattr__(self, name: str) -> Any:
        # Whatever else is asked (batch_size, drop_last, state_dict, ...) is the user's sampler's.
        if name.startswith("__") or name == "order":
            raise AttributeError(name)
        return getattr(self.order, name)


def inject_sampler(
    dataloader: DataLoader[Any],
    groups: ParallelGroups,
    seed: OrderSeed,
    *,
    predicting: bool = False,
    place: int = 0,
    epoch: int = 0,
) -> DataLoader[Any]:
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
        order = order.order
    elif groups.size("dp") == 1 and isinstance(order, SequentialSampler):
        return dataloader
    if groups.size("dp") > 1 and not isinstance(order, Sized):
        raise ValueError(
            f"the sampler {type(order).__name__} has no length, so it can't be dealt out over dp={groups.size('dp')} "
            "replicas; give it __len__, or set Trainer(use_distributed_sampler=False) and deal by strategy.dp_rank"
        )
    dealt: Any = ReplicaSampler(order, groups, seed, repeat=not predicting, place=place)
    if groups.size("dp") > 1:  # now: Lightning begins to iterate before the epoch is told, and workers read at once
        dealt.set_epoch(epoch)
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
