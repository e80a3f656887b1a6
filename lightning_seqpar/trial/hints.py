"""What a wrong tensor looks like beside the right one, in words that lead to the cause."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lightning_seqpar.trial.training import Digest

_EXACT = 1e-6
"""Error, relative to a tensor's own norm, up to which it counts as an exact multiple, part or rearrangement of another."""


_NO_MULTIPLE = "no multiple of the right one"
_ROUNDED = "right to rounding of a narrower type"


@dataclass(frozen=True)
class Wrong:
    """A tensor that is not what one process has."""

    name: str  # the parameter's
    quantity: str  # what of it is wrong: ``gradient of step 1``, ``weight after 2 steps``,
    error: float  # its largest error, of gradients relative to the global norm
    own_error: float  # the same relative to its own largest element
    hint: str  # what it looks like, in words


@dataclass(frozen=True)
class Group:
    """Wrong tensors that look alike."""

    what: str  # their names, with ``*`` for indices
    count: int  # how many there are
    worst: Wrong  # the one with the largest error


def describe_difference(right: Tensor | None, got: Tensor | None, sizes: Mapping[str, int]) -> str:
    """What a wrong tensor looks like beside the right one."""
    if right is None:
        return "there is one, and one process has none: does something read this parameter on the ranks alone?"
    if got is None:
        return "there is none: the parameter is not reached on the ranks"
    if right.shape != got.shape:
        return f"its shape is {list(got.shape)} instead of {list(right.shape)}: not gathered, or cut twice?"
    right, got = right.detach().double(), got.detach().double()
    if not bool(torch.isfinite(got).all()):
        return "not finite"
    multiple = _multiple(right, got)
    if multiple is not None:
        return _of_multiple(multiple, sizes)
    if right.numel() > 1 and bool(
        torch.allclose(right.flatten().sort()[0], got.flatten().sort()[0], rtol=1e-6, atol=0)
    ):
        return "the same numbers in other places: are rows, heads or parts of a fused weight in another order?"
    similar = float((right * got).sum() / (right.norm() * got.norm()).clamp_min(1e-300))
    return f"{_NO_MULTIPLE} (cosine {similar:.4f}): is something left out of a sum, or counted twice in it?"


def describe_late(hint: str, quantity: str) -> str:
    """What a hint says of a quantity that differs first, if others were right before it."""
    if not hint.startswith((_NO_MULTIPLE, _ROUNDED)) or quantity == "gradient of step 1":
        return hint
    what = hint.partition(": is")[0]
    if "resumed" in quantity:
        return f"{what}, and all was right before: does the checkpoint lose something (moments, the rate's schedule)?"
    update = f"{what}, and the gradients before are right: is the update another one (rate, clipping, decay, a hook in front)"
    return f"{update}, or is it the other length?" if quantity == "gradient of step 2" else f"{update}?"


def _multiple(right: Tensor, got: Tensor) -> float | None:
    """The factor by which one tensor is another one everywhere; None if it is no multiple."""
    square = float((right * right).sum())
    if square == 0.0:
        return 1.0 if not bool(got.any()) else None
    factor = float((right * got).sum()) / square
    return factor if float((got - factor * right).norm()) <= _EXACT * square**0.5 else None


def _of_multiple(factor: float, sizes: Mapping[str, int]) -> str:
    """What a factor says."""
    if abs(factor) < 1e-9:
        return "zero: is it detached, or does a collective have no backward?"
    axes = {size: axis for axis, size in reversed(list(sizes.items())) if size > 1}
    fraction = Fraction(factor).limit_denominator(64)
    if abs(float(fraction) - factor) > 1e-6:
        return f"{factor:.6g} times the right one, everywhere"
    if fraction.denominator == 1 and fraction > 1:
        axis = axes.get(int(fraction))
        of = f" (as many as {axis} ranks)" if axis else ""
        wrong = "summed where it should be averaged?" if axis == "dp" else "summed twice?"
        return f"exactly {float(fraction):.1f} × too large{of}: {wrong}"
    if fraction.numerator == 1 and fraction.denominator > 1:
        axis = axes.get(fraction.denominator)
        of = f" (1 of {fraction.denominator} {axis} ranks)" if axis else ""
        return f"exactly 1/{fraction.denominator} of the right one{of}: averaged where it should be summed, or twice?"
    if fraction == 1:
        return f"{_ROUNDED}: is something computed in float32 on the ranks alone?"
    return f"exactly {fraction} of the right one"


def describe_ranks(digests: Sequence[Digest], right: Digest, replicas: int) -> str:
    """What it says that ranks hold different gradients of a parameter that they should hold alike."""

    def close(a: Digest, b: Digest) -> bool:
        scale = max(*map(abs, (*a, *b)), 1e-300)
        return all(abs(x - y) <= _EXACT * scale for x, y in zip(a, b, strict=True))

    count, total = len(digests), [sum(values) for values in zip(*digests, strict=True)]
    mean, summed = Digest(*(value / count for value in total)), Digest(*(value / replicas for value in total))
    if close(summed, right) and not (close(mean, right) and count == replicas):
        return "each rank holds a part of it, and the parts add up to the right one: the sum over the ranks is missing"
    if close(mean, right):
        holder = "replica" if count == replicas else "rank"
        return f"each {holder} holds its own, and their mean is the right one: they are not averaged"
    return "the ranks hold different ones: which of them is kept is chance"


def group_first_wrong(wrong: Sequence[Wrong]) -> list[Group]:
    """The wrong tensors that were computed first (others follow from them), by what they look like, the worst first."""
    groups: dict[str, list[Wrong]] = {}
    for one in wrong:
        if one.quantity == wrong[0].quantity:
            groups.setdefault(re.sub(r"cosine [-\d.]+", "", one.hint), []).append(one)
    out = []
    for members in groups.values():
        starred = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one.name) for one in members))
        what = ", ".join(starred[:3]) + (f" and {len(starred) - 3} more" if len(starred) > 3 else "")
        out.append(Group(what, len(members), max(members, key=lambda one: one.error)))
    return sorted(out, key=lambda group: -group.worst.error)
