"""Code between the blocks that works on the sequence as a whole: as in one process, whether the first batch ran it or not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers.between import KINDS
from tests.helpers.fit import fit
from tests.helpers.slices import rest


def traces(world: int, strategy: dict[str, Any] | None, kinds: list[str], **args: Any) -> dict[str, Trace]:
    """Train every kind in this process, one after the other."""
    found = {}
    for kind in kinds:
        given = {"steps": 3, "length": 10, "global_batch": 4, "strategy": strategy, "world": world}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[kind] = fit("Between", {"kind": kind, **args}, **given)
    return found


TOPOLOGIES = {
    "tp2": (2, {"tp": 2, "self_check": False}),
    "tp4": (4, {"tp": 4, "self_check": False}),  # shards with padding, and one with nothing else
    "dp2xtp2": (4, {"tp": 2, "self_check": False}),
    "tp2xcp2": (4, {"tp": 2, "cp": 2, "self_check": False}),
    "fsdp2xtp2": (4, {"tp": 2, "data_parallel": "fsdp", "self_check": False}),
}


@pytest.mark.parametrize("topology", ["tp2", "tp4", rest("dp2xtp2"), "tp2xcp2", rest("fsdp2xtp2")])
def test_code_that_begins_in_the_second_step(topology):
    world, strategy = TOPOLOGIES[topology]
    kinds = [kind for kind in KINDS if not (kind in OVER_CP and "cp" in strategy)]
    expected = traces(1, None, kinds)
    for found in run_distributed(traces, world, world, strategy, kinds, timeout=280):
        for kind, trace in found.items():
            result = compare(expected[kind], trace)
            assert result.ok, f"{kind}: {result}"


OVER_CP = {"reentrant"}
"""What cp refuses."""
