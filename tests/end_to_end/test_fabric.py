"""A training loop of the user's own, by Fabric, against one process of plain Fabric."""

from __future__ import annotations

import pytest

from lightning_seqpar.parity import compare
from lightning_seqpar.testing import run_alone, run_distributed
from tests.helpers.fabric_loops import LOOPS, trained

TOPOLOGIES = {
    "tp2": (2, {"tp": 2}),
    "dp2-tp2": (4, {"tp": 2}),
    "tp2-fsdp": (4, {"tp": 2, "data_parallel": "fsdp"}),
    "tp4": (4, {"tp": 4}),
    "cp2": (2, {"cp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "ddp": (2, {}),
    "recomputed": (2, {"tp": 2, "recompute": "full"}),
    "chunks": (2, {"tp": 2, "loss_chunk": 8, "recompute": "activations"}),
    "whole sequences": (2, {"tp": 2, "sp": False, "vocab": False}),
}


@pytest.fixture(scope="module")
def alone():
    return run_alone(trained, None, 1)


@pytest.fixture(scope="module")
def start(request):
    world, fields = TOPOLOGIES[request.param]
    return run_distributed(trained, world, fields, world, timeout=200)


@pytest.mark.parametrize("start", TOPOLOGIES, indirect=True)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_what_one_process_trains(start, alone, loop):
    for rank in start:
        compare(alone[loop], rank[loop]).raise_if_failed()
