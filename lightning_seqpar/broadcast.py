"""Batches that one rank of a replica reads for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_seqpar.random import get_streams, set_streams


class BroadcastLoader:
    """A loader that is read on the first rank of each replica, which sends every batch to the others.

    For iterable data sets that give each process other samples (streams, shards by rank, unseeded shuffles). The random
    streams of the reading process travel along, so that a draw while reading leaves the ranks in step. An exception of
    the reader ends all ranks of the replica, with its message.

    Args:
        loader: the user's loader, on every rank; the others never iterate it.
        group: the ranks of one replica.
        source: world rank of the one that reads.
    """

    def __init__(self, loader: Any, group: ProcessGroup, source: int) -> None:
        self.loader, self._group, self._source = loader, group, source

    def __iter__(self) -> Iterator[Any]:
        reads = dist.get_rank() == self._source
        batches = iter(self.loader) if reads else None
        cpu = torch.device("cpu")
        while True:
            box: list[Any] = [None]
            failed: Exception | None = None
            if batches is not None:
                try:
                    box = [("batch", next(batches), None)]
                except StopIteration:
                    box = [("end", None, None)]
                except Exception as error:  # told to the others first, then raised
                    failed = error
                    box = [("failed", f"{type(error).__name__}: {error}", None)]
                box = [(*box[0][:2], get_streams(cpu))]
            dist.broadcast_object_list(box, src=self._source, group=self._group)
            kind, value, streams = box[0]
            if failed is not None:
                raise failed
            if kind == "failed":
                raise RuntimeError(f"rank {self._source}, which reads the batches of this replica, raised {value}")
            if not reads:
                set_streams(streams, cpu)
            if kind == "end":
                return
            yield value

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Whatever else is asked (sampler, dataset, batch_size, ...) is the user's loader's.
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
