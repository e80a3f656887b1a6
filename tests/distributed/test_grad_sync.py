"""The sum of partial gradients: who sent what, what was there before, and what it costs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_seqpar.distributed.counters import Traffic
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout, Reason
from lightning_seqpar.parallel.grad_checks import Spread, check_reduced, tolerance
from lightning_seqpar.parallel.grad_sync import GradSync, step_traffic
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups
from tests.mutants import sees

SIZE = 6


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(SIZE, dtype=torch.float64)) for _ in range(2))
        self.c = nn.Parameter(torch.ones(SIZE, dtype=torch.float32))


def build(tp: int) -> tuple[Any, ...]:
    world = dist.get_world_size()
    groups = ParallelGroups(ProcessTopology(["dp", "tp"], [world // tp, tp]), dist.get_rank())
    model = Holder()
    layouts = {
        name: ParamLayout(name, (SIZE,), None, frozenset({"tp"}), Reason.SEES_SHARDS) for name, _ in model.named_parameters()
    }
    layout = ModelLayout(model, layouts)
    return model, layout, groups, GradSync(layout, groups)


def push(parameter: nn.Parameter, number: float) -> None:
    (parameter * number).sum().backward()


def check(tp: int) -> None:
    model, _, groups, sync = build(tp)
    rank, size = groups.rank("tp"), groups.size("tp")
    full = torch.ones(SIZE, dtype=torch.float64)
    total = sum(range(1, size + 1))
    push(model.a, rank + 1.0)
    if rank == 0:
        push(model.b, 5.0)
    sync.flush()
    assert torch.equal(model.a.grad, full * total)  # everybody's
    assert torch.equal(model.b.grad, full * 5)  # the first rank's alone
    assert model.c.grad is None  # nobody's
    before = model.a.grad
    sync.flush()
    assert model.a.grad is before  # nothing new
    assert torch.equal(before, full * total)
    if rank == 0:  # not zeroed since: what is whole is not summed again, also where a rank has nothing to add
        push(model.a, 7.0)
    sync.flush()
    torch.testing.assert_close(model.a.grad, full * (total + 7), rtol=1e-15, atol=0)
    model.zero_grad()
    push(model.c, rank + 1.0)  # another type: another sum
    push(model.a, 1.0)
    model.a.requires_grad_(False)  # frozen meanwhile
    sync.flush()
    assert torch.equal(model.c.grad, torch.ones(SIZE) * total)
    assert torch.equal(model.a.grad, full * size)


@sees(
    "a whole gradient summed again by ranks that add nothing",
    "GradSync._own_term",
    "if not partial.fired and not is_new:  # whole on every rank since the last sum",
    "if False:",
)
@sees(
    "a rank that lacks a gradient does not ask the others",
    "GradSync._sum",
    "        if late is not None and not all(arrived):\n",
    "        if False:\n",
)
@sees(
    "what no rank has becomes zeros",
    "GradSync._sum",
    "            if fired:\n",
    "            if partial.own_term is not None:\n",
)
def test_every_rank_has_what_some_rank_sent():
    for world, tp in ((2, 2), (4, 4), (4, 2)):
        run_distributed(check, world, tp)


def count(tp: int, frozen: bool) -> tuple[Any, ...]:
    model, layout, _, sync = build(tp)
    model.a.requires_grad_(not frozen)
    sync.flush()  # looks at what is frozen
    sync.begin_step()
    sync.begin_backward()
    push(model.b, 1.0)
    push(model.c, 1.0)
    if not frozen:
        push(model.a, 1.0)
    sync.losses.note(torch.zeros(()))
    with Traffic() as traffic:
        sync.flush()
    dp = dist.get_world_size() // tp
    return (traffic.total_calls, traffic.total_bytes), step_traffic(layout, tp, dp)


@sees(
    "what stays frozen is summed for ever",
    "GradSync.begin_step",
    "                partial.unhook()\n",
    "                pass\n",
)
def test_one_sum_for_each_type_and_the_flags_and_losses_ride():
    for frozen in (False, True):
        measured, formula = run_distributed(count, 2, 2, frozen)[0]
        trained = 1 if frozen else 2
        # The float32 sum comes first: it takes two flags of each parameter that trains and the two ranks' losses along.
        assert measured == formula == (2, (SIZE + 2 * (1 + trained) + 2) * 4 + SIZE * 8 * trained)
    measured, formula = run_distributed(count, 4, 2, False)[0]
    assert measured == formula == (3, (SIZE + 2) * 4 + SIZE * 8 * 2 + 6)  # over replicas they go alone, as bytes


def norms_apart() -> None:
    """One number far back differs between the ranks; the transposed tensor has no memory in one piece."""
    groups = ParallelGroups(ProcessTopology(["dp", "tp"], [1, 2]), dist.get_rank())
    for dtype, count in itertools.product((torch.float64, torch.float32, torch.bfloat16), (3, 2**18 + 1)):
        torch.manual_seed(0)
        grad = torch.randn(count, 2).to(dtype).t()
        exact = float(grad.double().norm())
        grad[1, count - 1] += 100.0 * groups.rank("tp")
        lows, highs = Spread([grad, torch.zeros(0, dtype=dtype), torch.full((3,), 2.0, dtype=dtype)], groups).read()
        # In the gradients' own precision: far below how far ranks may lie apart.
        limit = 1e-9 if dtype == torch.float64 else tolerance(torch.float32) / 10
        assert abs(lows[0] - exact) <= limit * exact
        assert highs[0] > lows[0] * (1 + 1e-3)
        assert (lows[1], highs[1]) == (0.0, 0.0)
        assert all(abs(number - 12**0.5) <= limit for number in (lows[2], highs[2]))


@sees("gradients compared by their beginning", "grad_checks:_norm", "flat.split(block), 2", "flat.split(block)[:1], 2")
def test_norms_that_ranks_compare_are_those_of_whole_gradients():
    run_distributed(norms_apart, 2)


def told_of_replicas(cases: list[tuple[float, float]]) -> list[str]:
    """What the comparison of the replicas' gradients says: of a parameter that no loss reads, and one with these numbers."""
    model, _, groups, _ = build(1)
    told = []
    for number, apart in cases:
        model.a.grad = torch.full((SIZE,), number, dtype=torch.float64) + apart * groups.rank("dp")
        model.c.grad = torch.ones(SIZE)
        try:
            check_reduced(model.parameters(), model, groups)()
            told.append("alike")
        except RuntimeError as error:
            told.append(str(error))
    return told


@sees(
    "an overflow is a difference of replicas",
    "check_reduced.comparison",
    "if high - low > tolerance(dtype) * high:",
    "if not high - low <= tolerance(dtype) * high:",
)
def test_gradients_of_replicas_are_compared_and_no_numbers_are_no_difference():
    # An overflow is everywhere alike: the scaler skips the step, and one process would train on with it.
    cases = [(1.0, 0.0), (float("inf"), 0.0), (float("nan"), 0.0), (0.0, 0.0), (1.0, 0.5)]
    for *told, last in run_distributed(told_of_replicas, 2, cases):
        assert told == ["alike"] * 4
        assert last.startswith("the gradient of a that reaches the optimizer differs between the replicas, and b got none: ")
