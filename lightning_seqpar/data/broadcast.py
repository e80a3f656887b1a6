"""Batches that one rank of a replica reads for all of them."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch.distributed import ProcessGroup

from lightning_seqpar.data.sampler import PLACE
from lightning_seqpar.distributed.rng import SavedStreams, kept_streams


class BroadcastLoader:
    """A loader that is read on the first rank of each replica (``source``), which sends every batch to the others.

    For iterable data sets that give each process other samples. One that gives each process a share must share by replica
    (``strategy.dp_rank``, ``dp_size``). The states of the reader's random generators are sent with each batch, an exception of it
    ends all ranks of the replica, and its length is theirs. Making it is collective.
    """

    def __init__(self, loader: Any, group: ProcessGroup, source: int) -> None:
        self.loader, self._group, self._source = loader, group, source
        box = [sized_len(loader)]
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
        """Pass on to the loader where the epoch goes on."""
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
