"""What a run does before its first step: a line for each phase that takes long, while it runs and when it is done."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from tqdm.auto import tqdm

PATIENCE = 3.0
"""Seconds that a phase may take in silence."""


class Phase:
    """A phase that is under way."""

    def __init__(self, name: str, total: int | None, bar: bool, write: Callable[[str], None]) -> None:
        self._name, self._total, self._draws, self._write = name, total, bar and total is not None, write
        self._lock = threading.Lock()  # the timer's thread announces while the phase advances
        self._done, self._announced, self._ended = 0, False, False
        self._bar: Any = None

    def advance(self, by: int = 1) -> None:
        """Count units that are done."""
        with self._lock:
            self._done += by
            if self._bar is not None:
                self._bar.update(by)

    def announce(self) -> None:
        """Say what is being done: it takes longer than a moment."""
        with self._lock:
            if self._ended:
                return
            self._announced = True
            if self._draws:
                self._bar = tqdm(
                    desc=f"lightning_seqpar: {self._name}", total=self._total, initial=self._done, unit_scale=True
                )
            else:
                self._write(f"lightning_seqpar: {self._name} ...")

    def end(self, seconds: float | None) -> None:
        """The phase is over: close what was drawn, and say how long it took if it was announced."""
        with self._lock:
            self._ended = True
            if self._bar is not None:
                self._bar.close()
            if self._announced and seconds is not None:
                self._write(f"lightning_seqpar: {self._name} took {seconds:.1f} s")


class Phases:
    """Reports the phases of a start that take longer than ``patience`` seconds, on a rank that ``shows`` them.

    Where the error stream is a terminal, ``bars`` may be drawn in the place of lines.
    """

    def __init__(
        self,
        *,
        shows: bool,
        bars: bool = False,
        patience: float = PATIENCE,
        write: Callable[[str], None] = rank_zero_info,
    ) -> None:
        self._shows, self._bars, self._patience, self._write = shows, bars, patience, write

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Wraps a phase. A thread waits beside it to announce it, and is gone when it ends, however it ends."""
        made = Phase(name, total, self._bars and sys.stderr.isatty(), self._write)
        if not self._shows:
            yield made
            return
        timer = threading.Timer(self._patience, made.announce)
        timer.daemon = True  # a rank that is killed half way does not wait for it
        began, took = time.monotonic(), None
        timer.start()
        try:
            yield made
            took = time.monotonic() - began
        finally:
            timer.cancel()
            timer.join()
            made.end(took)
