"""Errors that every rank raises alike: rank 0 tells them once, and the other ranks end without a word."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_seqpar.strategy.child_watch import say

PATIENCE = timedelta(seconds=5)
"""How long a rank waits for what the others raise, and for rank 0 to tell it."""
_PACKAGE = Path(__file__).parent.parent


class Refusals:
    """Finds out whether all ranks of the world raise one error, and has rank 0 tell it for all of them.

    The ranks compare in the store of the world's process group: one that raised nothing takes part in no collective. The error
    stays an ordinary exception on every rank, so that each of them may catch it. Only where nobody does, ``sys.excepthook``
    prints it on rank 0 alone; the other ranks wait until it is printed (torchrun would end rank 0 with the first that goes),
    and print it themselves if it is not.

    Args:
        world: the process group of all ranks.
        patience: how long a rank waits for the others.
    """

    def __init__(self, world: dist.ProcessGroup, patience: timedelta = PATIENCE) -> None:
        self._patience = patience
        self._store = dist.distributed_c10d._world.pg_map[world][1]
        self._rank, self._size = world.rank(), world.size()
        self._name = ""

    def is_shared(self, error: BaseException) -> bool:
        """Whether every rank raises this error now, with the same text. Returns once that is known, or out of patience."""
        said = hashlib.sha256(f"{type(error).__name__}: {error}".encode()).hexdigest()
        self._name = f"error {self._store.add(f'errors of rank {self._rank}', 1)}"
        keys = self._keys("raised by")
        self._store.set(keys[self._rank], said)
        return self._have_come(keys) and all(self._store.get(key).decode() == said for key in keys)

    def tell_once(self, error: BaseException, *, opens_log: bool) -> None:
        """Have rank 0 alone print an error that every rank raised, if nothing catches it.

        Args:
            error: the error.
            opens_log: whether this rank is the first one of its node, of which it prints one line if it is not rank 0.
        """
        usual = sys.excepthook

        def print_once(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
            if value is not error or (self._rank and not self._have_come([f"{self._name} is told"])):
                return usual(kind, value, trace)
            if self._rank == 0:
                usual(kind, value, trace)
                sys.stderr.flush()
                self._store.set(f"{self._name} is told", "")
                # The store may be this process's: it stays until the others have read it.
                return self._have_come(self._keys("heard by")[1:])
            if opens_log:
                say(f"rank {self._rank} raised {kind.__name__}, as every rank did: rank 0 says why")
            return self._store.set(self._keys("heard by")[self._rank], "")

        sys.excepthook = print_once

    def _keys(self, what: str) -> list[str]:
        """The store's key of each rank, for one fact about the current error."""
        return [f"{self._name} {what} rank {rank}" for rank in range(self._size)]

    def _have_come(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are in the store, or get there in time; not if the store is gone."""
        try:
            self._store.wait(list(keys), self._patience)
        except RuntimeError:
            return False
        return True


def without_inner_frames(error: BaseException) -> None:
    """Shorten the traceback of a refusal of this package: it ends where Lightning calls the package.

    What lies inside says nothing of the user's model. ``python -X dev`` keeps it; so does an error that the user's code or a
    library raised, and any other than a ``ValueError``.
    """
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    ours = [Path(one.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE) for one in frames]
    if not isinstance(error, ValueError) or sys.flags.dev_mode or not ours or not ours[-1]:
        return
    inner = len(ours) - ours[::-1].index(False) if False in ours else 0
    frames[inner].tb_next = None
