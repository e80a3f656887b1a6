"""The parts of a sequence region that need no process group: lengths of a recompute, and the schedule of the watchers."""

from __future__ import annotations

import pytest
import torch

from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.observers import WatchSchedule


class Recompute(torch.autograd.Function):
    """Calls ``seen`` in the backward."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.seen()
        return grad, None


def test_a_recompute_of_two_lengths_is_refused():
    stack = FrameStack(2, 1)
    for length in (9, 10):
        stack.open()
        stack.begin(length, (3, length, 4))
        stack.remember(("norm", (3, 5, 4)))
        stack.close()

    def again() -> None:
        with pytest.raises(RuntimeError, match="norm: recomputed in the backward, but forwards of different lengths"):
            stack.open_recompute(torch.zeros(3, 5, 4), "norm")

    Recompute.apply(torch.zeros(1, requires_grad=True), again).sum().backward()


# ---- the schedule ----------------------------------------------------------------------------------------------


def due(every: int, steps: int) -> list[int]:
    schedule, found = WatchSchedule(every), []
    for step in range(1, steps + 1):
        schedule.begin_step("training")
        found += [step] if schedule.is_due("training") else []
    return found


def test_the_first_steps_powers_of_two_and_every_so_many_are_due():
    first = [*range(1, 17)]
    assert due(0, 100) == [*first, 32, 64]
    assert due(25, 100) == [*first, 25, 32, 50, 64, 75, 100]


def test_loops_are_counted_apart_and_from_their_beginning():
    schedule = WatchSchedule()
    for _ in range(20):
        schedule.begin_step("training")
    assert not schedule.is_due("training")
    assert not schedule.walks_graphs
    schedule.begin_step("validation")
    assert schedule.is_first("validation")
    assert schedule.is_due("validation")
    schedule.begin_loop("training")  # an epoch
    schedule.begin_step("training")
    assert schedule.walks_graphs
    assert not schedule.is_due("training")
    schedule.begin_run()
    schedule.begin_step("training")
    assert schedule.is_first("training")
