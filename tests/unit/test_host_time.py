"""``benchmarks/host_time.py``, and what it counts of a block of ours: pinned, beside blocks that are cut by hand."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import host_time
import pytest
from host_time import DENSE, MINIMAL, ONE_FUNCTION, OURS

from lightning_seqpar import ParallelConfig

PINS = {"ByteGPT": (291, 72, 162), "llama-like": (334, 78, 221)}
"""Python calls forward and backward, and operations."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict[str, Any]]]:
    """What the command prints, by model and way."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        host_time.main(["--json", "--rounds", "1", "--steps", "1"])
    return json.loads(printed.getvalue())["models"]


def test_every_choice_of_what_is_kept_is_a_row(found):
    for rows in found.values():
        assert list(rows)[:4] == [DENSE, MINIMAL, ONE_FUNCTION, OURS]
        assert {f"{OURS}, recompute: selective", f"{OURS}, recompute: full"} <= rows.keys()
        for way, settings in host_time.ways().items():
            assert settings is None or ParallelConfig(tp=2, **settings)
            assert min(*rows[way]["us"], *rows[way]["of_minimal"]) > 0
        assert rows[MINIMAL]["of_minimal"] == [1, 1]


def test_a_block_is_counted_alike_at_any_depth():
    for kind in host_time.KINDS.values():
        counts = [host_time.count_block(kind, OURS, host_time.Size(64, 16, 2), blocks) for blocks in (2, 3)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("name", host_time.KINDS)
def test_what_a_block_makes(found, name):
    rows = found[name]
    ours, minimal = rows[OURS], rows[MINIMAL]
    assert minimal["collectives"] == rows["ours, regather: false"]["collectives"] == 8
    assert ours["collectives"] == rows[ONE_FUNCTION]["collectives"] == 10  # they gather again
    assert rows[DENSE]["collectives"] == 0
    assert ours["kept"] <= minimal["kept"]
    assert all(
        ours[key] <= pin for key, pin in zip(("forward_calls", "backward_calls", "operations"), PINS[name], strict=True)
    )
