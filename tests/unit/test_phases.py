"""Phases of a start: what is said while a long one runs, nothing of a short one, and nothing is left behind."""

from __future__ import annotations

import threading

import pytest

from lightning_seqpar.distributed.rendezvous import Phases
from tests.mutants import sees


class Lines(list):
    """What was written, and an event that is set when something is."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def __call__(self, line: str) -> None:
        self.append(line)
        self.came.set()


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
    with Phases(shows=True, patience=0, write=lines).phase("cutting the model"):
        assert lines.came.wait(60)
        assert lines == ["lightning_seqpar: cutting the model ..."]
    assert len(lines) == 2
    assert lines[1].startswith("lightning_seqpar: cutting the model took ")


@sees("a phase is told on every rank", "Phases.phase", "if not self._shows:", "if False:")
def test_other_ranks_say_nothing_and_start_no_thread():
    lines = Lines()
    before = threading.active_count()
    with Phases(shows=False, patience=0, write=lines).phase("cutting the model"):
        assert threading.active_count() == before
    assert not lines


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
