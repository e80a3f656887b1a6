"""``benchmarks/host_time.py``, and what it counts of a block of ours: pinned, beside blocks that are cut by hand."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import host_time
import pytest
from counting import Counts
from host_time import DENSE, MINIMAL, ONE_FUNCTION, OURS

from lightning_seqpar import ParallelConfig
from lightning_seqpar.testing import run_distributed

PINS = {"ByteGPT": (291, 72, 162), "llama-like": (334, 78, 221)}
"""Python calls forward and backward, and operations."""


def measured() -> tuple[dict[str, dict[str, dict[str, Any]]], list[list[Counts]]]:
    """What the command prints, by model and way; and counts at two depths."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        host_time.main(["--json", "--rounds", "1", "--steps", "1"])
    size = host_time.Size(64, 16, 2)
    depths = [[host_time.count_block(kind, OURS, size, blocks) for blocks in (2, 3)] for kind in host_time.KINDS.values()]
    return json.loads(printed.getvalue())["models"], depths


@pytest.fixture(scope="module")
def both() -> Any:
    """In a process of its own: what other tests leave in this one may call Python functions, too."""
    return run_distributed(measured, 1, timeout=200.0)[0]


@pytest.fixture(scope="module")
def found(both) -> dict[str, dict[str, dict[str, Any]]]:
    return both[0]


def test_every_choice_of_what_is_kept_is_a_row(found):
    for rows in found.values():
        assert list(rows)[:4] == [DENSE, MINIMAL, ONE_FUNCTION, OURS]
        assert {f"{OURS}, recompute: selective", f"{OURS}, recompute: full"} <= rows.keys()
        for way, settings in host_time.ways().items():
            assert settings is None or ParallelConfig(tp=2, **settings)
            assert min(*rows[way]["us"], *rows[way]["of_minimal"]) > 0
        assert rows[MINIMAL]["of_minimal"] == [1, 1]


def test_a_block_is_counted_alike_at_any_depth(both):
    for less, more in both[1]:
        assert less == more


@pytest.mark.parametrize("name", host_time.KINDS)
def test_what_a_block_makes(found, name):
    rows = found[name]
    ours, minimal = rows[OURS], rows[MINIMAL]
    assert minimal["collectives"] == rows["ours, regather: false"]["collectives"] == 8
    assert ours["collectives"] == rows[ONE_FUNCTION]["collectives"] == 10  # they gather again
    assert rows[DENSE]["collectives"] == 0
    assert ours["kept"] <= minimal["kept"]
    assert all(ours[key] <= pin for key, pin in zip(("forward_calls", "backward_calls", "operations"), PINS[name], strict=True))
