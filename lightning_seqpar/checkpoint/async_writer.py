"""Writing that goes on while training does: one thread of this rank, one piece of work after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_seqpar.checkpoint.atomic_files import SaveError


class Background:
    """One checkpoint at a time, and what waits for it.

    The same calls must come on every rank in the same order: the work is collective, over a group that nothing else uses.
    """

    def __init__(self) -> None:
        self.path: Path | None = None  # of what is being written
        self._thread: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None
        self._waiting: list[Future[None]] = []

    def start(self, path: Path, write: Callable[[], None]) -> None:
        """Write a checkpoint; the one before must have been awaited."""
        assert self._saving is None
        self.path = path
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="lightning_seqpar-save")
        self._saving = self._thread.submit(_warned, write)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do ``work`` (remove an older checkpoint) when the one under way is whole; never if it fails. At once if there is none."""
        saving = self._saving
        if saving is None or self._thread is None:
            work()
        else:
            self._waiting.append(self._thread.submit(lambda: None if saving.exception() else work()))

    def wait(self) -> None:
        """Wait for all of it.

        Raises:
            SaveError: on every rank, if the checkpoint could not be written.
        """
        under_way = [*([self._saving] if self._saving else []), *self._waiting]
        self.path, self._saving, self._waiting = None, None, []
        for future in under_way:
            future.result()

    def close(self) -> None:
        """Let the thread go; what it has begun it ends."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


def _warned(write: Callable[[], None]) -> None:
    try:
        write()
    except SaveError as error:
        rank_zero_warn(
            f"lightning_seqpar: {error}; the run ends where its next checkpoint would be written, or at its end"
        )
        raise
