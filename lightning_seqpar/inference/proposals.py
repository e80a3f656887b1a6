"""Rules that a refusal proposes: they were tried on the same copy, and a plan is found with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_seqpar.inference.dataflow import CantInferError, NothingToSplitError
from lightning_seqpar.plan.sharding_plan import ShardingPlan

PROPOSAL = "\n  To have every rank compute that whole, and shard the rest, write what follows"
"""Where the proposal begins in a message; it is the end of it."""
_MOST_RULES = 6
"""Rules that are tried together: a model needs one for each kind of part that can't be split."""


def with_tried_rules(
    error: CantInferError,
    attempt: Callable[[Sequence[dict[str, Any]]], object],
    tp: int,
    own: ShardingPlan | None = None,
) -> CantInferError:
    """The error with rules that let inference go on, or with the sentence that no such rule was found.

    The rule of each error is tried together with those of the errors before it, so that what is proposed works as a whole.

    Args:
        error: where inference stopped.
        attempt: inference with more rules of the user's; raises where it stops.
        tp: number of tensor-parallel ranks, for the sentence.
        own: the user's own rules, which stand in front of those.
    """
    if isinstance(error, NothingToSplitError):
        return error
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
        return type(error)(
            f"{text}{PROPOSAL}; with it a plan is found for tp={tp}:\n    plan={{'rules': {more}}}",
            error.whole,
            error.why,
        )
    if not rules:
        return type(error)(f"{error}\n  No rule was found that works", error.whole, error.why)
    instead = "it stops there too" if stopped.why == error.why else f"inference stops at\n  {stopped.why}"
    return type(error)(
        f"{error}\n  No rule was found that works. Tried:{shown(rules)}\n  with which {instead}", error.whole, error.why
    )


def shown(rules: Sequence[dict[str, Any]]) -> str:
    """Rules as lines of a plan's file, indented."""
    lines = ShardingPlan.from_rules(rules).to_yaml().splitlines()
    return "".join(f"\n    {line}" for line in lines if line.startswith("- "))
