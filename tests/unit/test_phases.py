"""Phases of a start: what is said while a long one runs, nothing of a short one, and nothing is left behind."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from lightning_seqpar.distributed.phases import Phases
from tests.mutants import sees


class Lines(list):
    """What was written, and an event that is set when something is."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def __call__(self, line: str) -> None:
        self.append(line)
        self.came.set()


class Terminal(io.StringIO):
    """An error stream that is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "filling" in text:
            self.came.set()
        return super().write(text)


@sees("a thread stays behind a phase", "Phases.phase", "            timer.cancel()\n            timer.join()\n", "")
def test_a_short_phase_is_silent():
    lines = Lines()
    before = threading.active_count()
    with Phases(shows=True, patience=3600, write=lines).phase("cutting the model"):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert not lines


def test_a_long_phase_is_told_while_it_runs_and_when_it_is_done():
    lines = Lines()
    with Phases(shows=True, patience=0, write=lines).phase("cutting the model", 3) as phase:
        assert lines.came.wait(60)
        assert lines == ["lightning_seqpar: cutting the model ..."]
        phase.advance()
    assert len(lines) == 2
    assert lines[1].startswith("lightning_seqpar: cutting the model took ")


@sees("a phase is told on every rank", "Phases.phase", "if not self._shows:", "if False:", case="{'shows': False}")
@pytest.mark.parametrize("options", [{"shows": False}, {"shows": False, "bars": True}], ids=str)
def test_other_ranks_say_nothing_and_start_no_thread(options):
    lines = Lines()
    before = threading.active_count()
    with Phases(patience=0, write=lines, **options).phase("cutting the model") as phase:
        assert threading.active_count() == before
        phase.advance()
    assert not lines


@pytest.mark.parametrize(("bars", "stream"), [(True, Terminal), (False, Terminal), (True, io.StringIO)])
def test_progress_is_drawn_on_a_terminal_alone(bars, stream, monkeypatch):
    lines, error = Lines(), stream()
    draws = bars and stream is Terminal
    monkeypatch.setattr(sys, "stderr", error)
    with Phases(shows=True, bars=bars, patience=0, write=lines).phase("filling the weights", 4) as phase:
        assert (error if draws else lines).came.wait(60)
        for _ in range(4):
            phase.advance()
    assert ("4.00/4.00" in error.getvalue()) is draws
    assert len(lines) == (1 if draws else 2)


@pytest.mark.parametrize("patience", [0, 3600])
def test_an_error_ends_the_thread_and_passes(patience):
    lines = Lines()
    before = threading.active_count()
    with pytest.raises(ArithmeticError), Phases(shows=True, patience=patience, write=lines).phase("proving the plan"):
        if patience == 0:
            assert lines.came.wait(60)
        raise ArithmeticError
    assert threading.active_count() == before
    assert not any("took" in line for line in lines)
