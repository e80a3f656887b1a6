"""The parts of a sequence region that need no process group: frames and lengths, and the schedule of the watchers."""

from __future__ import annotations

import pytest
import torch

from lightning_seqpar.distributed.autograd import backward_classes, node_classes
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.graph_span import GraphSpan
from lightning_seqpar.region.partial_sum_check import MarkRow
from lightning_seqpar.region.schedule import WatchSchedule


def frames(dim: int = 1) -> FrameStack:
    return FrameStack(2, dim, "the model")


# ---- frames ----------------------------------------------------------------------------------------------------


def test_each_call_has_a_length_of_its_own():
    stack = frames()
    stack.open("outer")
    stack.begin(9, (3, 9, 4))
    assert (stack.length, stack.shard_length) == (9, 5)  # the last rank's shard is padded
    stack.open("inner")  # a call of a block inside a call of another
    assert not stack.active
    stack.begin(4, (3, 4, 4))
    assert (stack.length, stack.shard_length) == (4, 2)
    assert stack.end() == 4
    stack.close("inner")
    assert (stack.length, stack.shard_length) == (9, 5)
    stack.close("outer")
    assert not stack.active


def test_a_call_that_ends_drops_what_it_left_open_and_one_that_never_began_drops_nothing():
    stack = frames()
    stack.open("outer")
    stack.begin(8, (3, 8, 4))
    stack.open("inner")
    stack.current.gather_scopes.append(["a node"])
    assert stack.current.sources == ["a node"]
    stack.open("raised")
    stack.close("inner")
    assert (stack.active, stack.current.sources) == (True, [])
    stack.close("another")
    assert stack.active
    stack.close("outer")
    assert not stack.active


@pytest.mark.parametrize(("dim", "shape"), [(1, (3, 5, 4)), (0, (5, 3, 4))])
def test_flattened_tokens_are_folded_in_the_order_of_an_activation(dim, shape):
    stack = frames(dim)
    stack.begin(9, (3, 9, 4) if dim == 1 else (9, 3, 4))
    part = torch.arange(60.0).view(shape)
    folded = stack.fold(part.flatten(0, 1), stack.shard_length)
    assert folded is not None
    assert torch.equal(folded, part)
    assert stack.fold(part, stack.shard_length) is None  # it is no tokens, but an activation
    assert stack.fold(torch.zeros(7, 4), stack.shard_length) is None


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


def in_a_backward(seen) -> None:
    Recompute.apply(torch.zeros(1, requires_grad=True), seen).sum().backward()


def test_a_recompute_has_the_length_of_its_forward():
    stack, x = frames(), torch.zeros(3, 9, 4)
    stack.open()
    stack.begin(9, (3, 9, 4))
    stack.remember(("norm", (3, 5, 4)))
    stack.close()

    def again() -> None:
        assert stack.recomputes
        stack.open_recompute(x[:, :5], "norm")
        assert (stack.length, stack.recomputes) == (9, False)
        stack.finish("another")
        assert stack.active
        stack.finish("norm")
        assert not stack.active
        stack.open_recompute(x, "first")
        assert not stack.active  # its input was whole
        stack.finish("first")

    in_a_backward(again)


def test_a_recompute_of_two_lengths_is_refused():
    stack = frames()
    for length in (9, 10):
        stack.open()
        stack.begin(length, (3, length, 4))
        stack.remember(("norm", (3, 5, 4)))
        stack.close()

    def again() -> None:
        with pytest.raises(RuntimeError, match="norm: recomputed in the backward, but forwards of different lengths"):
            stack.open_recompute(torch.zeros(3, 5, 4), "norm")

    in_a_backward(again)


def test_a_part_that_is_repeated_has_the_length_of_its_own_call():
    stack, found = frames(), []
    for length in (9, 10):  # shards of both are as long
        stack.open()
        stack.begin(length, (3, length, 4))
        known = stack.lengths()
        stack.close()

        def again(known=known) -> None:
            outer = stack.current
            with pytest.raises(KeyError), stack.repeating(known):
                found.append((stack.length, stack.recomputes))
                stack.open()  # a call of a block that the end of the recompute cuts off
                raise KeyError
            assert stack.current is outer

        in_a_backward(again)
    assert found == [(9, True), (10, True)]


# ---- the graph -------------------------------------------------------------------------------------------------


def test_nodes_are_known_by_class():
    x = torch.ones(2, 2, requires_grad=True)
    assert type((x + x).grad_fn) in node_classes("Add")
    assert type((x + 1).grad_fn) in node_classes("Add")
    assert type((x @ x).grad_fn) in node_classes("Mm", "Mul")
    assert type((x @ x).grad_fn) not in node_classes("Add", "Mul")
    assert node_classes("NoSuchOperation") == frozenset()
    assert type(MarkRow.apply(x, torch.zeros(1)).grad_fn) in backward_classes([MarkRow])


def test_a_node_is_inside_if_it_was_made_between_begin_and_end():
    x, span = torch.ones(2, requires_grad=True), GraphSpan()
    before = x + 1
    span.begin()
    within = before * 2
    assert span.holds(within.grad_fn)  # before the end is known, too
    span.end()
    behind = within + 1
    assert [span.holds(y.grad_fn) for y in (before, within, behind)] == [False, True, False]
    span.reset()
    assert not span.holds(within.grad_fn)


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


def test_draws_are_expected_in_due_steps_and_once_a_step_drew():
    schedule = WatchSchedule()
    for step in range(1, 33):
        schedule.begin_step("training")
        assert schedule.expects_draws("training") is (step <= 16 or step == 32)
        schedule.note_draws(drawn=step == 32)
    assert schedule.expects_draws("validation")
    schedule.begin_step("training")
    assert schedule.expects_draws("training")


def test_a_recompute_is_not_watched_again():
    schedule, stack = WatchSchedule(), frames()
    assert schedule.watches_forward()
    assert schedule.watches_columns(stack)

    def again() -> None:
        assert not schedule.watches_forward()
        assert not schedule.watches_columns(stack)
        stack.open()  # a whole call, made in the backward
        assert not schedule.watches_forward()
        assert schedule.watches_columns(stack)
        stack.close()

    in_a_backward(again)
