"""Which samples a rank reads: the ranks of a replica the same ones, the replicas different ones, in the user's order."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
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

from lightning_seqpar.distributed.rng import SavedStreams, kept_streams, share_streams
from lightning_seqpar.releases import IndexBatchSamplerWrapper, fabric
from lightning_seqpar.topology.process_groups import ParallelGroups

_DRAWN_FROM_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, BatchSampler)
"""Samplers whose order follows from the states of torch's generators alone."""


PLACE = "lightning_seqpar"  # key of what a loader's state says of the place in its epoch


class OrderSeed:
    """The number from which the order of samples follows in each epoch: ``seed_everything``'s, or one that checkpoints keep."""

    def __init__(self) -> None:
        self.value: int | None = None

    def of_epoch(self, epoch: int, place: int = 0) -> int:
        """Returns the seed of one epoch's order, another one for each of several loaders."""
        if self.value is None:
            seed = os.environ.get("PL_GLOBAL_SEED")
            self.value = int(torch.empty((), dtype=torch.int64).random_(2**31)) if seed is None else int(seed)
        return (self.value + epoch + 1_000_003 * place) % 2**32


class ReplicaSampler(Sampler[Any]):
    """Divides the order of another sampler, of samples or of batches, among the data-parallel replicas.

    Replica ``r`` reads positions ``r``, ``r + dp``, ... of one order, on which all ranks agree in :meth:`set_epoch`. Iterating is
    not collective. With one replica and one of torch's samplers, the ranks share the states of their generators and draw the order
    that one process would. In all other cases the order of the first rank is sent to all.
    With ``repeat`` it takes samples from the beginning again until all replicas read equally many, as torch's
    ``DistributedSampler`` does; without it no sample comes twice. ``place`` counts loaders (0-based).
    """

    def __init__(self, order: Any, groups: ParallelGroups, seed: OrderSeed, *, repeat: bool = True, place: int = 0) -> None:
        self.order, self.groups, self.seed, self.repeat, self.place = order, groups, seed, repeat, place
        self.num_replicas, self.rank = groups.size("dp"), groups.rank("dp")
        self.sampler = self  # of a batch sampler, Lightning calls set_epoch on this attribute
        self._agreed: list[Any] | None = None
        self._began: dict[str, Any] = {}  # from which states the order of this epoch was drawn
        self._resumed: Mapping[str, Any] | None = None
        self._epoch: int | None = None

    def place_in_epoch(self, items: int) -> dict[str, Any]:
        """Returns where the epoch is, after this replica has trained on ``items`` samples or batches; 0 between two epochs."""
        if items:
            return {"items": items, **self._began}
        generator = self._generator()  # the next epoch's order is drawn from it
        return {} if generator is None else {"items": 0, "own": generator.get_state()}

    def resume(self, place: Mapping[str, Any]) -> None:
        """Begin the next iteration where :meth:`place_in_epoch` was asked, in the order that the epoch had. Collective."""
        if (generator := self._generator()) is not None and "own" in place:
            generator.set_state(place["own"])
        again = place.get("epoch", self._epoch)
        if again is not None:  # the order was drawn from another state of that generator when this object was made
            self._epoch = None
            self.set_epoch(again)
        self._resumed = place if place["items"] else None

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch: call the user's sampler's ``set_epoch``, and agree on the order. Collective over all ranks."""
        for part in (self.order, getattr(self.order, "sampler", None)):
            forward = getattr(part, "set_epoch", None)
            if callable(forward):
                forward(epoch)
        # One replica, whose order follows from states of torch's generators that its ranks share.
        if self.num_replicas == 1 and (type(self.order) in _DRAWN_FROM_TORCH or not isinstance(self.order, Sized)):
            source = self.groups.source(self.groups.replica_axes)
            share_streams(self.groups[self.groups.replica_axes], source)
            if (generator := self._generator()) is not None:
                box: list[Any] = [generator.get_state()]
                dist.broadcast_object_list(box, src=source, group=self.groups[self.groups.replica_axes])
                generator.set_state(box[0])
            return
        if epoch == self._epoch:  # Lightning says so once more behind the start of an iteration
            return
        self._epoch, self._began = epoch, {"epoch": epoch}
        if (generator := self._generator()) is not None:
            self._began["own"] = generator.get_state()
        number = self.seed.of_epoch(epoch, self.place)
        with kept_streams():
            random.seed(number)
            np.random.seed(number)
            torch.default_generator.manual_seed(number)
            box = [list(self.order)]
        everybody = tuple(self.groups.topology.axes)
        dist.broadcast_object_list(box, src=self.groups.source(everybody), group=self.groups[everybody])
        self._agreed = box[0]

    def _generator(self) -> torch.Generator | None:
        """A generator on the CPU that the user's sampler has of its own."""
        for part in (self.order, getattr(self.order, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
                return generator
        return None

    def __iter__(self) -> Iterator[Any]:
        place, self._resumed = self._resumed or {}, None
        rest = self._iterate(place)
        if place:
            with kept_streams():
                if "torch" in place:
                    torch.set_rng_state(place["torch"])
                for _ in islice(rest, place["items"]):  # torch's samplers draw all that they draw for the first one
                    pass
        return rest

    def _iterate(self, place: Mapping[str, Any]) -> Iterator[Any]:
        """Iterates this replica's items from the first one of the epoch on; ``place`` is where a resumed epoch was."""
        if self.num_replicas == 1 and self._agreed is None:
            self._began = {"torch": place.get("torch", torch.get_rng_state())}
            if (generator := self._generator()) is not None:
                if "own" in place:  # the loader may have drawn its seed from it since
                    generator.set_state(place["own"])
                self._began["own"] = generator.get_state()
            return iter(self.order)
        items = list(self.order) if self._agreed is None else self._agreed
        if self.repeat and (missing := -len(items) % self.num_replicas):
            items = items + (items * (missing // max(1, len(items)) + 1))[:missing]
        return iter(items[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        count = len(self.order)
        return -(-count // self.num_replicas) if self.repeat else len(range(self.rank, count, self.num_replicas))

    def __getattr__(self, name: str) -> Any:
        # All other attributes (batch_size, drop_last, state_dict, ...) are those of the user's sampler.
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
    batches_done: Callable[[], int] | None = None,
) -> DataLoader[Any]:
    """Copies a loader so that its samples are divided among the replicas, as :class:`ReplicaSampler` does, where they must be.

    With ``batches_done``, how many batches of the epoch are done, it is resumable. In ``predicting`` no sample may come twice.
    Raises ValueError for a ``DistributedSampler`` of the user's that counts ranks instead of replicas, or one without a length.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return dataloader
    batches: Any = dataloader.batch_sampler
    indexed = isinstance(batches, IndexBatchSamplerWrapper)
    if indexed:
        batches = batches._batch_sampler
    of_samples = batches is None or type(batches) is BatchSampler
    order: Any = dataloader.sampler if batches is None else batches.sampler if of_samples else batches
    if isinstance(order, DistributedSampler):
        check_users_sampler(order, groups)
        return dataloader
    if isinstance(order, ReplicaSampler):
        order = order.order
    elif groups.size("dp") == 1 and isinstance(order, SequentialSampler) and batches_done is None:
        return dataloader
    if groups.size("dp") > 1 and not isinstance(order, Sized):
        raise ValueError(
            f"the sampler {type(order).__name__} has no length, so it can't be dealt out over dp={groups.size('dp')} "
            "replicas; give it __len__, or leave it to you (use_distributed_sampler=False) and deal by strategy.dp_rank"
        )
    replicas = ReplicaSampler(order, groups, seed, repeat=not predicting, place=place)
    sampler: Any = replicas
    if groups.size("dp") > 1:  # at once: Lightning begins to iterate, and workers to read, before it calls set_epoch
        sampler.set_epoch(epoch)
    divided = copy.copy(dataloader)
    # A DataLoader refuses to set these attributes once it was iterated, which the copy was not.
    if batches is None or of_samples:
        vars(divided)["sampler"] = sampler
    if batches is not None:
        if of_samples:
            batch_sampler = copy.copy(batches)
            batch_sampler.sampler = sampler
            sampler = batch_sampler
        vars(divided)["batch_sampler"] = IndexBatchSamplerWrapper(sampler) if indexed else sampler
    if batches_done is not None:
        each = batches.batch_size if batches is not None and of_samples else 1
        at = _Place(replicas, lambda: batches_done() * each)
        vars(divided).update(state_dict=at.state_dict, load_state_dict=at.load_state_dict)
    return divided


class _Place:
    """The two methods by which Lightning asks a loader where it is; what is pickled of it, with a Trainer, knows no place."""

    def __init__(self, sampler: ReplicaSampler | None, items_done: Callable[[], int] | None) -> None:
        self._sampler, self._items_done = sampler, items_done

    def __getstate__(self) -> dict[str, Any]:
        return {"_sampler": None, "_items_done": None}

    def state_dict(self) -> dict[str, Any]:
        if self._sampler is None or self._items_done is None:
            return {PLACE: {}}
        return {PLACE: self._sampler.place_in_epoch(self._items_done())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._sampler is not None and state[PLACE]:
            self._sampler.resume(state[PLACE])


def check_users_sampler(sampler: DistributedSampler[Any], groups: ParallelGroups) -> None:
    """Raises ValueError if a sampler that the user made counts ranks rather than data-parallel replicas."""
    expected = (groups.size("dp"), groups.rank("dp"))
    if (sampler.num_replicas, sampler.rank) != expected:
        raise ValueError(
            f"your DistributedSampler has num_replicas={sampler.num_replicas}, rank={sampler.rank}, but the ranks of one "
            f"replica must read the same samples: here num_replicas={expected[0]}, rank={expected[1]}. Make it with "
            "num_replicas=strategy.dp_size, rank=strategy.dp_rank, or leave the sampler to the strategy"
        )


def replica_workers(dataloader: DataLoader[Any], dp_rank: int) -> None:
    """Seeds worker processes by replica where Lightning would by rank, by which ranks of one replica augmented differently."""
    if dataloader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
        dataloader.worker_init_fn = partial(fabric.utilities.seed.pl_worker_init_function, rank=dp_rank)


class BroadcastLoader:
    """A loader that is read on the first rank of each replica (``source``), which sends every batch to the others.

    For iterable data sets that give each process other samples. One that gives each process a share must share by replica
    (``strategy.dp_rank``, ``dp_size``). The states of the reader's random generators are sent with each batch, an exception of it
    ends all ranks of the replica, and its length is theirs. Making it is collective.
    """

    def __init__(self, loader: Any, group: ProcessGroup, source: int) -> None:
        self.loader, self._group, self._source = loader, group, source
        box = [fabric.utilities.data.sized_len(loader)]
        dist.broadcast_object_list(box, src=source, group=group)
        self._length = box[0]
        self._resumes = False
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):  # by which Lightning resumes a loader
            self.state_dict, self.load_state_dict = loader.state_dict, self._resume

    def __iter__(self) -> Iterator[Any]:
        reads = dist.get_rank() == self._source
        reader, end = self._read() if reads else None, object()
        while True:
            message: list[Any] = [None]
            failed: Exception | None = None
            if reader is not None:
                try:
                    batch = next(reader, end)
                    message = [("end" if batch is end else "batch", pickle.dumps(batch), SavedStreams())]
                except Exception as error:  # sent to the other ranks first, and raised here afterwards
                    failed = error
                    message = [("failed", f"{type(error).__name__}: {error}", SavedStreams())]
            dist.broadcast_object_list(message, src=self._source, group=self._group)
            event, value, streams = message[0]
            if failed is not None:
                raise failed
            if not reads:
                streams.restore()
            if event == "failed":
                raise RuntimeError(f"rank {self._source}, which reads the batches of this replica, raised {value}")
            if event == "end":
                return
            yield batch if reads else pickle.loads(value)

    def _read(self) -> Iterator[Any]:
        """Iterate the user's loader: a generator, so that an error on making its iterator comes with the first batch."""
        with kept_streams() if self._resumes else contextlib.nullcontext():
            iterator = iter(self.loader)  # of an epoch that goes on it drew its seed before the checkpoint
        self._resumes = False
        yield from iterator

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._resumes = bool(state[PLACE].get("items"))
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length on rank {self._source}, which reads it")
        return int(self._length)

    def __getattr__(self, name: str) -> Any:
        # All other attributes (sampler, dataset, batch_size, ...) are those of the user's loader.
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
