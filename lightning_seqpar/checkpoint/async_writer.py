"""Writing a checkpoint in a thread of its own while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_seqpar.checkpoint.atomic_files import SaveError


class Background:
    """A thread that writes one checkpoint at a time, and then does what must wait until that is complete.

    Writing is collective, over a group that nothing else uses: every rank must make the same calls of it in the same order.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None
        self._waiting: list[Future[None]] = []

    def start(self, write: Callable[[], None]) -> None:
        """Begins to write a checkpoint in the thread; :meth:`wait` must have been called for the one before."""
        assert self._saving is None
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="lightning_seqpar-save")
        self._saving = self._thread.submit(_write_or_warn, write)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do something, such as removing an older checkpoint, once the one that is being written is complete, if it ever is."""
        saving = self._saving
        if saving is None or self._thread is None:
            work()
        else:
            self._waiting.append(self._thread.submit(lambda: None if saving.exception() else work()))

    def wait(self) -> None:
        """Waits until the checkpoint is written and all that came after it is done; raises SaveError on every rank if it failed."""
        under_way = [*filter(None, [self._saving]), *self._waiting]
        self._saving, self._waiting = None, []
        for future in under_way:
            future.result()

    def close(self) -> None:
        """End the thread as soon as it has finished what it began."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


def _write_or_warn(write: Callable[[], None]) -> None:
    """Write; if that fails, warn at once, and raise, for :meth:`Background.wait`."""
    try:
        write()
    except SaveError as error:
        rank_zero_warn(f"lightning_seqpar: {error}; the run ends where its next checkpoint would be written, or at its end")
        raise
