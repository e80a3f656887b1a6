"""Killed while a checkpoint is written: a slice of ``tests/crash.py``, each kind of thing once."""

from __future__ import annotations

import pytest

from lightning_seqpar.checkpoint.atomic_files import MARKER
from tests import crash
from tests.helpers.slices import rest
from tests.mutants import sees


# Written in the background it is the same folder in the same order; make crash tries all of it.
@sees(
    "the marker written first",
    "begin_folder",
    "    unfinished.mkdir(parents=True)\n",
    '    unfinished.mkdir(parents=True)\n    (unfinished / MARKER).write_text(json.dumps({"format": FORMAT}))\n',
    case="sharded",
)
@pytest.mark.parametrize("form", [rest("single"), "sharded", pytest.param("async", marks=pytest.mark.matrix)])
@pytest.mark.more
def test_whatever_is_killed_leaves_the_one_before(form):
    events, expected = crash.uninterrupted(form)
    started = next(at for at, event in enumerate(events[0]) if event.startswith("open step=2"))  # the first is whole
    kinds = {event.split()[0]: at for at, event in reversed([*enumerate(events[0])][started:])}
    assert {"open", "fsync", "rename"} <= kinds.keys()
    for kind, at in kinds.items():
        for everybody in (False, True):
            found = crash.trial(form, 0, at, everybody, expected)
            assert not found.wrong, (kind, found.wrong)
            assert found.whole, kind
    if form != "single":
        order = [event for event in events[0] if "step=2.ckpt.unfinished" in event]
        marker = next(at for at, event in enumerate(order) if MARKER in event)
        assert all(".distcp" not in event and ".metadata" not in event for event in order[marker:])
