"""Rules that a refusal proposes: they were tried on the same copy, and a plan is found with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_seqpar.inference.dataflow import CantInferError, NothingToSplitError
from lightning_seqpar.plan.sharding_plan import ShardingPlan

_MOST_RULES = 6
"""Rules that are tried together: a model needs one for each kind of part that can't be split."""


def with_tried_rules(
    error: CantInferError, attempt: Callable[[Sequence[dict[str, Any]]], object], tp: int
) -> CantInferError:
    """The error with rules that let inference go on, or with the sentence that no such rule was found.

    The rule of each error is tried together with those of the errors before it, so that what is proposed works as a whole.

    Args:
        error: where inference stopped.
        attempt: inference with more rules of the user's; raises where it stops.
        tp: number of tensor-parallel ranks, for the sentence.
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
        them, it = ("them", "these rules") if len(rules) > 1 else ("it", "this rule")
        return type(error)(
            f"{text}\n  To have every rank compute that whole, and shard the rest, give {it} as plan={{'rules': [...]}}; with "
            f"{them} a plan is found for tp={tp}:{shown(rules)}",
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
