"""What a wrong tensor looks like beside the right one, in words that lead to the cause."""

from __future__ import annotations

import re
from collections import Counter
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
    kind: str  # the class of the module that holds it
    quantity: str  # what of it is wrong: ``gradient of step 1``, ``weight after 2 steps``,
    error: float  # its largest error, of gradients relative to the global norm
    own_error: float  # the same relative to its own largest element
    hint: str  # what it looks like, in words


@dataclass(frozen=True)
class Group:
    """Wrong tensors that look alike."""

    what: str  # their names, with ``*`` for indices, or all of a kind
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
    for parts in dict.fromkeys((*sorted(size for size in sizes.values() if size > 1), 2, 3, 4)):
        for dim, length in enumerate(right.shape):
            if length % parts == 0 and length > parts and (text := _in_parts(right, got, dim, parts, sizes)):
                return text
    similar = float((right * got).sum() / (right.norm() * got.norm()).clamp_min(1e-300))
    return f"{_NO_MULTIPLE} (cosine {similar:.4f}): is something left out of a sum, or counted twice in it?"


def describe_late(hint: str, quantity: str) -> str:
    """What a hint says of a quantity that differs first, if others were right before it."""
    if not hint.startswith((_NO_MULTIPLE, _ROUNDED)) or quantity in ("gradient of step 1", "weight before step 1"):
        return hint
    what = hint.partition(": is")[0]
    if quantity == "gradient of step 2":
        return (
            f"{what}, and all gradients of step 1 are right: is the update another one (rate, clipping, decay, a hook in front), "
            "or is it the other length?"
        )
    if "resumed" in quantity:
        return f"{what}, and all was right before: does the checkpoint lose something (moments, the rate's schedule)?"
    return f"{what}, and the gradients are right: is the update another one (rate, clipping, decay, a hook in front)?"


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


def _in_parts(right: Tensor, got: Tensor, dim: int, parts: int, sizes: Mapping[str, int]) -> str:
    """What is wrong of each part of a dim, if every part is a multiple of the right one; empty otherwise."""
    factors = [_multiple(a, b) for a, b in zip(right.chunk(parts, dim), got.chunk(parts, dim), strict=True)]
    if all(factor is None for factor in factors):
        return ""
    right_parts = [str(at + 1) for at, factor in enumerate(factors) if factor is not None and abs(factor - 1) < 1e-6]
    where = f"of {parts} along dim {dim}"
    if None in factors:
        if not right_parts:
            return ""
        return f"right in part {', '.join(right_parts)} {where}, wrong in the others: do the others lie on another rank, or move?"
    odd = [(at, factor) for at, factor in enumerate(factors) if factor is not None and abs(factor - 1) >= 1e-6]
    at, factor = odd[0]
    rest = f"right in part {', '.join(right_parts)}, but " if right_parts else "another factor in each part; "
    return f"{rest}part {at + 1} {where} is {_of_multiple(factor, sizes)}"


def describe_ranks(digests: Sequence[Digest], right: Digest, replicas: int) -> str:
    """What it says that ranks hold different gradients of a parameter that they should hold alike."""

    def close(a: Digest, b: Digest) -> bool:
        scale = max(*map(abs, (*a, *b)), 1e-300)
        return all(abs(x - y) <= _EXACT * scale for x, y in zip(a, b, strict=True))

    total = Digest(*(sum(values) for values in zip(*digests, strict=True)))
    count = len(digests)
    mean = Digest(*(value / count for value in total))
    summed = Digest(*(value / replicas for value in total))
    if close(mean, right) and count == replicas:
        return "each replica holds its own, and their mean is the right one: they are not averaged"
    if close(summed, right):
        return "each rank holds a part of it, and the parts add up to the right one: the sum over the ranks is missing"
    if close(mean, right):
        return "each rank holds its own, and their mean is the right one: they are not averaged"
    return "the ranks hold different ones: which of them is kept is chance"


def group_first_wrong(wrong: Sequence[Wrong], kinds: Mapping[str, str]) -> list[Group]:
    """The wrong tensors that were computed first, by what they look like: what is wrong later follows from them."""
    return group_alike([one for one in wrong if one.quantity == wrong[0].quantity], kinds)


def group_alike(wrong: Sequence[Wrong], kinds: Mapping[str, str]) -> list[Group]:
    """Wrong tensors by what they look like, the worst group first."""
    groups: dict[tuple[str, str], list[Wrong]] = {}
    for one in wrong:
        groups.setdefault((re.sub(r"cosine [-\d.]+", "", one.hint), one.quantity), []).append(one)
    out = []
    for members in groups.values():
        worst = max(members, key=lambda one: one.error)
        out.append(Group(_named(members, kinds), len(members), worst))
    return sorted(out, key=lambda group: (group.worst.quantity, -group.worst.error))


def _named(members: Sequence[Wrong], kinds: Mapping[str, str]) -> str:
    """Names of tensors, short: all of a kind by the kind, others with ``*`` for indices."""
    names = {one.name for one in members}
    if len(names) == 1:
        return next(iter(names))
    if len(names) == len(kinds):
        return "every parameter"
    found = {kinds.get(name, "") for name in names}
    of_these = {name for name, kind in kinds.items() if kind in found}
    if of_these == names and len(found) <= 2:
        return f"every {' and '.join(sorted(found))}"
    starred = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one) for one in sorted(names))
    shown = list(starred)[:3]
    return ", ".join(shown) + (f" and {len(starred) - 3} more" if len(starred) > 3 else "")
