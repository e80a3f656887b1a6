"""Inference: a plan for a model that nobody wrote one for.

The data flow of a recorded forward shows which linears are columns and rows and where to gather; gradients show which
features belong together; a rehearsal of each rank's part shows which attributes must change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_seqpar.distributed.rng import kept_streams, seed_streams
from lightning_seqpar.inference.block_kinds import owner_of
from lightning_seqpar.inference.dataflow import BlockFlow, CantInferError, NothingToSplitError, UserDecidesError
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.feature_dependence import Block
from lightning_seqpar.inference.model_copy import Quiet, default_dtype, detached_copy, without_checkpoints
from lightning_seqpar.inference.reduction import Reduction, is_large
from lightning_seqpar.inference.stack_planner import (
    Inference,
    StackPlanner,
    find_stacks,
    left_whole,
    only_convolutions,
    pattern_of_all,
)
from lightning_seqpar.inference.trace import Call, ForwardTrace
from lightning_seqpar.inference.trainer_view import describe_failure
from lightning_seqpar.layout.linear_kind import without_adapters
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.styles.style import LINEAR

PROPOSAL = "\n  To have every rank compute that whole, and shard the rest, write what follows"
"""Where the proposal begins in a message; it is the end of it."""
_MOST_RULES = 6  # rules that are tried together: a model needs one for each kind of part that can't be split


def infer_plan(
    model: nn.Module,
    example: Any,
    tp: int,
    own: ShardingPlan | None = None,
    *,
    beside: Sequence[ShardingPlan] = (),
    sums: bool = True,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda copied: None,
) -> Inference:
    """Infer a plan for ``model`` from a run of a copy on this process's CPU; the model itself is not touched.

    Args:
        model: any module, on any device; one on meta, or a large one, is never materialised whole.
        example: what ``forward`` takes (a tensor, a tuple or a dict), or an :class:`Example`.
        tp: number of tensor-parallel ranks.
        own: the user's own rules, which inference leaves alone.
        beside: plans for other parts of the model; their blocks are left out.
        sums: whether a module that deals its tokens out to experts may be reduced where it returns; if not, each expert is
            reduced by itself, which needs whole sequences between the blocks.
        dtype: of the copy; None keeps the model's.
        prepare: is called with the copy before its forward.

    Raises CantInferError with the module and why, and the rules that were tried and work, or the sentence that none was found.
    """
    with example_copy(model, example, dtype, prepare) as (copied, on_cpu):

        def attempt(more: Sequence[dict[str, Any]]) -> Inference:
            rules = ShardingPlan.from_rules(more).rules
            user_plan = replace(own, rules=(*own.rules, *rules)) if own is not None else ShardingPlan(rules)
            with _explained(model):
                return _infer(trace, tp, user_plan if more else own, beside=beside, sums=sums)

        try:
            trace = _record(model, copied, on_cpu)
            return attempt([])
        except CantInferError as error:
            raise with_tried_rules(error, attempt, tp, own) from None


@contextmanager
def example_copy(
    model: nn.Module, example: Any, dtype: torch.dtype | None, prepare: Callable[[nn.Module], None], *, adapted: bool = False
) -> Iterator[tuple[nn.Module, Example]]:
    """A context with a copy of a model on the CPU and an example for it, by :func:`infer_plan`'s arguments; ``adapted`` or not."""
    if not isinstance(example, Example):
        example = Example.of_forward("the example", example, reduction=Reduction(skips_repeats=is_large(model)))
    cpu = torch.device("cpu")
    if dtype is torch.float64 and is_large(model):
        dtype = torch.float32
    with kept_streams(), default_dtype(dtype):
        detached = detached_copy(model, cpu, dtype, example.reduction, frozen=example.frozen)
        copied = without_checkpoints(detached if adapted else without_adapters(detached))
        prepare(copied)
        yield copied, example.to(cpu, dtype)


def infer_blocks(
    model: nn.Module,
    example: Any,
    *,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda copied: None,
) -> ShardingPlan:
    """The repeated blocks of ``model``, found as :func:`infer_plan` finds them, and along which dim each mixes positions."""
    rules: list[dict[str, Any]] = []
    with example_copy(model, example, dtype, prepare) as (copied, on_cpu):
        trace = _record(model, copied, on_cpu)
        for calls in find_stacks(trace):
            rules.append({"pattern": pattern_of_all(copied, calls), "style": "blocks"})
            if _sequence_dim(trace, calls[0]) == 0:
                rules[-1]["dim"] = 0
    if not rules:
        raise CantInferError(_no_blocks(model))
    return ShardingPlan.from_rules(rules, source="inferred")


def _sequence_dim(trace: ForwardTrace, call: Call) -> int | None:
    """Along which dim a block mixes positions; None if that does not show (it keeps no graph, or works in place)."""
    try:
        arg = trace.activation(call)
        return None if arg is None else Block(BlockFlow(trace, call, arg)).sequence_dim()
    except Exception:  # of the block's own code
        return None


def _record(model: nn.Module, copied: nn.Module, example: Example) -> ForwardTrace:
    """The record of the forward of a model's copy on its example."""
    trace = ForwardTrace(copied)
    with _explained(model), example.repeats(copied), trace.watch(), Quiet(draws=example.draws):
        seed_streams()
        example.run(copied, trace.run_backward)
    return trace


def _no_blocks(model: nn.Module) -> str:
    return (
        f"{type(model).__name__}: no repeated blocks found, that is modules of one class that hold linears and map an "
        "activation [b, s, h] to one of the same shape; name them by {pattern: ..., style: blocks}"
    )


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """While open, what a run of the copy raises becomes a CantInferError."""
    try:
        yield
    except CantInferError:
        raise
    except Exception as error:
        why = f"a copy of it was run to see what it computes, which raised {describe_failure(error)}"
        if "use_reentrant" in str(error):
            why = (
                "its forward runs blocks under reentrant checkpointing, through which no plan can be inferred; turn that off, or "
                "write checkpoint(..., use_reentrant=False) (Hugging Face: "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}))"
            )
        raise CantInferError(f"{type(model).__name__}: {why}") from error


def _infer(trace: ForwardTrace, tp: int, own: ShardingPlan | None, *, beside: Sequence[ShardingPlan], sums: bool) -> Inference:
    model = trace.model
    matches = own.match(model) if own is not None else []
    wholes = [match.name for match in matches if match.rule.undoes_inside]
    linears = {match.name for match in matches if match.rule.slot == LINEAR}

    def covers(*names: str) -> bool:
        """Whether the user's rules decide these modules: one of them is computed whole, or all have a rule of their own."""
        return any(inside(name, one) for name in names for one in wholes) or all(name in linears for name in names)

    if not trace.calls:
        raise CantInferError(
            f"{type(model).__name__}: a copy of it runs none of its own modules (its forward is a closure over the original?)"
        )
    planned = {match.name for plan in beside for match in plan.match(model)}
    stacks = _stacks_named(trace, {match.name for match in matches if match.rule.style == "blocks"}) or [
        calls
        for calls in find_stacks(trace)
        if not any(inside(name, call.name) or inside(call.name, name) for call in calls for name in planned if name)
    ]
    if not stacks and (convolutions := only_convolutions(model)):
        raise NothingToSplitError(
            f"{type(model).__name__}: its repeated modules ({convolutions}) hold convolutions and no linears, so tensor "
            "parallelism has nothing to split, whatever the rules: train it with data parallelism alone (tp=1)"
        )
    if not stacks:
        raise CantInferError(_no_blocks(model))
    found = Inference()
    planner = StackPlanner(trace, tp, covers, sums=sums)
    owners = [owner_of(model, calls[0].name) for calls in stacks]
    failed: list[CantInferError] = []
    for calls, owner in zip(stacks, owners, strict=True):
        try:
            found.add(planner.plan(calls, alone=owners.count(owner) == 1))
        except UserDecidesError:
            raise
        except Exception as caught:  # the other stacks are planned all the same
            if "use_reentrant" in str(caught):
                raise
            why = f"{calls[0].name}: planning it was tried, which raised {describe_failure(caught)}"
            failed.append(caught if isinstance(caught, CantInferError) else CantInferError(why))
            found.add(left_whole({pattern_of_all(model, calls): failed[-1].why}))
    if not found.rules:
        raise failed[0]
    return found


def _stacks_named(trace: ForwardTrace, names: set[str]) -> list[list[Call]]:
    """The stacks of the blocks of these names, in order of execution."""
    by_parent: dict[str, dict[str, Call]] = {}
    for call in trace.calls:
        if call.name in names and trace.activation(call) is not None:
            by_parent.setdefault(call.name.rpartition(".")[0], {}).setdefault(call.name, call)
    return [list(calls.values()) for calls in by_parent.values()]


def with_tried_rules(
    error: CantInferError, attempt: Callable[[Sequence[dict[str, Any]]], object], tp: int, own: ShardingPlan | None = None
) -> CantInferError:
    """The error with rules that let inference go on, or with the sentence that no such rule was found.

    The rule of each error is tried together with those of the errors before it, so that what is proposed works as a whole:
    ``attempt`` is inference with more rules, and raises where it stops. The user's ``own`` stand in front of what is proposed.
    """
    if isinstance(error, NothingToSplitError):
        return error

    def told(text: str) -> CantInferError:
        return type(error)(text, error.whole, error.why)

    rules: list[dict[str, Any]] = []
    reasons = [error.why]
    stopped = error
    while stopped.rules and len(rules) < _MOST_RULES and not any(rule in rules for rule in stopped.rules):
        rules += stopped.rules
        try:
            attempt(rules)
        except CantInferError as next_error:
            stopped = next_error
            reasons.append(stopped.why)
            continue
        text = "\n  ".join(dict.fromkeys(reasons))
        more = [*(rule.dump() for rule in own.rules), *rules] if own is not None else rules
        return told(f"{text}{PROPOSAL}; with it a plan is found for tp={tp}:\n    plan={{'rules': {more}}}")
    if not rules:
        return told(f"{error}\n  No rule was found that works")
    instead = "it stops there too" if stopped.why == error.why else f"inference stops at\n  {stopped.why}"
    shown = ShardingPlan.from_rules(rules).to_yaml().strip().replace("\n", "\n    ").removeprefix("rules:")
    return told(f"{error}\n  No rule was found that works. Tried:{shown}\n  with which {instead}")
