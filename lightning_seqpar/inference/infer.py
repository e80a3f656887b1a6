"""Inference: a plan for a model that nobody wrote one for.

The data flow of a recorded forward shows which linears are columns and rows and where to gather; gradients show which
features belong together; a rehearsal of each rank's part shows which attributes must change. What can't be decided is
refused, and what is decided is still proved by the self-check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_seqpar.distributed.rng import kept_streams, seed_streams
from lightning_seqpar.inference.dataflow import CantInferError, NothingToSplitError, UserDecidesError
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.model_copy import Quiet, default_dtype, detached_copy, without_checkpoints
from lightning_seqpar.inference.reduction import Reduction, is_large
from lightning_seqpar.inference.repeats import owner_of
from lightning_seqpar.inference.stack_planner import Inference, StackPlanner, left_whole, pattern_of_all
from lightning_seqpar.inference.stacks import activation, find_stacks, only_convolutions
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

    Raises:
        CantInferError: naming the module and why, with the rules that were tried and work, or the sentence that none was found.
    """
    with example_copy(model, example, dtype, prepare) as (copied, on_cpu):

        def attempt(more: Sequence[dict[str, Any]]) -> Inference:
            rules = ShardingPlan.from_rules(more).rules
            user_plan = replace(own, rules=(*own.rules, *rules)) if own is not None else ShardingPlan(rules)
            try:
                return _infer(copied, on_cpu, tp, user_plan if more else own, beside=beside, sums=sums)
            except CantInferError:
                raise
            except Exception as error:
                raise CantInferError(_of_the_run(model, error)) from error

        try:
            return attempt([])
        except CantInferError as error:
            raise with_tried_rules(error, attempt, tp, own) from None


@contextmanager
def example_copy(
    model: nn.Module,
    example: Any,
    dtype: torch.dtype | None,
    prepare: Callable[[nn.Module], None],
    *,
    adapted: bool = False,
) -> Iterator[tuple[nn.Module, Example]]:
    """A context with a copy of a model on the CPU and an example for it; the arguments are :func:`infer_plan`'s.

    With ``adapted`` adapters stay around the linears; else the copy has these alone.
    """
    if not isinstance(example, Example):
        kwargs = dict(example) if isinstance(example, Mapping) else {}
        args = () if kwargs else example if isinstance(example, tuple) else (example,)
        example = Example("the example", "forward", args, kwargs, reduction=Reduction(skips_repeats=is_large(model)))
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
    """The repeated blocks of ``model``, found as :func:`infer_plan` finds them, as rules that say nothing else.

    Raises CantInferError if there are none, or the copy does not run.
    """
    with example_copy(model, example, dtype, prepare) as (copied, on_cpu):
        try:
            trace = _record(copied, on_cpu)
        except Exception as error:
            raise CantInferError(_of_the_run(model, error)) from error
        patterns = [pattern_of_all(copied, calls) for calls in find_stacks(trace)]
        if not patterns:
            raise CantInferError(_no_blocks(model))
    return ShardingPlan.from_rules([{"pattern": one, "style": "blocks"} for one in patterns], source="inferred")


def _record(model: nn.Module, example: Example) -> ForwardTrace:
    """The record of a copy's forward on its example."""
    trace = ForwardTrace(model)
    with example.repeats(model), trace.watch(), Quiet(draws=example.draws):
        seed_streams()
        example.run(model, trace.run_backward)
    return trace


def _no_blocks(model: nn.Module) -> str:
    return (
        f"{type(model).__name__}: no repeated blocks found, that is modules of one class that hold linears and map an "
        "activation [b, s, h] to one of the same shape; name them by {pattern: ..., style: blocks}"
    )


def _of_the_run(model: nn.Module, error: Exception) -> str:
    """Why nothing is inferred where a run of the copy raised."""
    name = type(model).__name__
    if "use_reentrant" not in str(error):
        return f"{name}: a copy of it was run to see what it computes, which raised {describe_failure(error)}"
    return (
        f"{name}: its forward runs blocks under reentrant checkpointing, through which no plan can be inferred; turn that off, or "
        "write checkpoint(..., use_reentrant=False) (Hugging Face: "
        "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}))"
    )


def _infer(
    model: nn.Module,
    example: Example,
    tp: int,
    own: ShardingPlan | None,
    *,
    beside: Sequence[ShardingPlan] = (),
    sums: bool,
) -> Inference:
    """:func:`infer_plan` on the copy itself."""
    user_rules = _UserRules(model, own)
    trace = _record(model, example)
    if not trace.calls:
        raise CantInferError(
            f"{type(model).__name__}: a copy of it runs none of its own modules (its forward is a closure over the original?)"
        )
    planned = {match.name for plan in beside for match in plan.match(model)}
    stacks = user_rules.stacks(trace) or [
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
    planner = StackPlanner(trace, tp, user_rules.covers, sums=sums)
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
            error = caught if isinstance(caught, CantInferError) else CantInferError(why)
            failed.append(error)
            found.add(left_whole({pattern_of_all(model, calls): error.why}))
    if not found.rules:
        raise failed[0]
    return found


class _UserRules:
    """What the user's own rules decide, so that inference leaves it alone."""

    def __init__(self, model: nn.Module, own: ShardingPlan | None) -> None:
        self._matches = own.match(model) if own is not None else []
        self._wholes = [match.name for match in self._matches if match.rule.undoes_inside]
        self._linears = {match.name for match in self._matches if match.rule.slot == LINEAR}

    def stacks(self, trace: ForwardTrace) -> list[list[Call]]:
        """The stacks of blocks that the user named, in order of execution."""
        named = {match.name for match in self._matches if match.rule.style == "blocks"}
        by_parent: dict[str, dict[str, Call]] = {}
        for call in trace.calls:
            if call.name in named and activation(trace, call) is not None:
                by_parent.setdefault(call.name.rpartition(".")[0], {}).setdefault(call.name, call)
        return [list(calls.values()) for calls in by_parent.values()]

    def covers(self, *names: str) -> bool:
        """Whether the rules decide these modules: one of them is computed whole, or all have a rule of their own."""
        whole = any(inside(name, one) for name in names for one in self._wholes)
        return whole or all(name in self._linears for name in names)


# ---- rules that a refusal proposes ------------------------------------------------------------------------------


def with_tried_rules(
    error: CantInferError,
    attempt: Callable[[Sequence[dict[str, Any]]], object],
    tp: int,
    own: ShardingPlan | None = None,
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
