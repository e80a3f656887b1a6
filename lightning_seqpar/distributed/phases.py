"""What a run does before its first step: a line for each phase that takes long, while it runs and when it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_info

PATIENCE = 3.0
"""Seconds that a phase may take in silence."""


class Phases:
    """Reports the phases of a start that take longer than ``patience`` seconds, on a rank that ``shows`` them."""

    def __init__(self, *, shows: bool, patience: float = PATIENCE, write: Callable[[str], None] = rank_zero_info) -> None:
        self._shows, self._patience, self._write = shows, patience, write

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Wraps a phase. A thread waits beside it to announce it, and is gone when it ends, however it ends."""
        if not self._shows:
            yield
            return
        announced: list[bool] = []

        def announce() -> None:
            announced.append(True)
            self._write(f"lightning_seqpar: {name} ...")

        timer = threading.Timer(self._patience, announce)
        timer.daemon = True  # a rank that is killed half way does not wait for it
        began, took = time.monotonic(), None
        timer.start()
        try:
            yield
            took = time.monotonic() - began
        finally:
            timer.cancel()
            timer.join()
            if announced and took is not None:
                self._write(f"lightning_seqpar: {name} took {took:.1f} s")
