"""Numbers between the host and a device."""

from __future__ import annotations

import torch

from lightning_seqpar.distributed.host import LateNumbers, OneStepLate, default_backend
from tests.mutants import sees


def test_numbers_are_those_of_when_they_were_copied():
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    late = LateNumbers(given)
    given.zero_()
    assert late.read() == [[1.0, 2.0], [3.0, 4.0]]


@sees("what a step leaves is read in the same step", "OneStepLate.take", "        if everything:\n", "        if True:\n")
def test_what_a_step_leaves_is_looked_at_in_the_next():
    left: OneStepLate[str] = OneStepLate()
    left.begin_step()
    left.add("first")
    assert left.take() == []  # the device may still be at it
    left.begin_step()
    left.add("second")
    assert left.take() == ["first"]
    assert left.take() == []
    assert left.take(everything=True) == ["second"]
    left.add("third")
    left.begin_step()  # a step in which nobody looks
    left.add("fourth")
    left.begin_step()
    assert left.take() == ["third", "fourth"]


def test_groups_have_gloo_beside_the_backend_of_an_accelerator():
    assert default_backend(torch.device("cpu")) == "gloo"
    assert default_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
