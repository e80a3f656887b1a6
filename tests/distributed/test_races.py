"""Late collectives change nothing: what is sent stays as it is, and what comes is not read, until it is waited for."""

from __future__ import annotations

import loopback
import pytest
import torch

from tests.helpers import races
from tests.mutants import sees

CORE = ("gathered again", "without sp", "loss in chunks", "norms and MLPs again", "ring")
NEWER = ("fsdp", "compiled")  # some releases of torch lack what these take
REST = tuple(name for name in races.CASES if name not in (*CORE, *NEWER))


@sees(
    "what is gathered is read before it has come",
    "PendingGather.wait",
    "                self._work.wait()\n",
    "                pass\n",
    case="core",
)
@sees(
    "what is summed is read before it has come",
    "PendingReduceScatter.wait",
    "                self._work.wait()\n",
    "                pass\n",
    case="core",
)
@sees(
    "a gradient is changed while it is summed",
    "Products.backward",
    "            pending = pending if tokens is None else tokens.start_sum(pending)\n",
    "            pending = pending if tokens is None else tokens.start_sum(pending)\n            total.mul_(2)\n",
    case="core",
)
@sees(
    "what comes around a ring is read before it has come",
    "pass_on",
    "            work.wait()\n",
    "            pass\n",
    case="core",
)
@pytest.mark.parametrize("names", [
    pytest.param(CORE, id="core"),
    pytest.param(NEWER, id="fsdp and compile", marks=pytest.mark.more),
    pytest.param(REST, id="rest", marks=pytest.mark.more),
])  # fmt: skip
def test_late_collectives_change_no_bit(names):
    found = races.in_a_process(list(names), "cpu")
    assert {name: told if isinstance(told, str) else told[1] for name, told in found.items()} == {key: [] for key in names}
    assert all(not isinstance(told, str) and told[0] > 300 for told in found.values())


def test_a_thread_carries_as_late_as_can_be():
    wire, done = loopback.ThreadWire(), list[int]()
    works = [wire.carry([torch.zeros(1)], lambda at=at: done.append(at), 0) for at in range(4)]
    assert done == []
    works[2].wait()
    assert done == [0, 1, 2]
    works[1].wait()
    works[3].wait()
    assert done == [0, 1, 2, 3]
