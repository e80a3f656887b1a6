"""What both sides of a trial did, compared, and what a wrong tensor looks like, in words that lead to the cause."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lightning_seqpar.verify.parity import (
    RUNS,
    ParityReport,
    Row,
    compare_losses,
    compare_norms,
    compare_tensors,
    norm_of,
    spread,
)
from lightning_seqpar.verify.training import ALONE, Digest, Outcome, Trial

_EXACT_RANKS = 1e-9  # relative difference of two ranks' digests from which on they hold different tensors
_EXACT = 1e-6  # error, of its own norm, up to which a tensor counts as an exact multiple, part or rearrangement
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


@dataclass
class Sides:
    """Both sides of a trial: the Outcome of one process, and of each rank those of two steps and of the resumed one."""

    trial: Trial
    whole: Outcome
    ranks: Sequence[tuple[Outcome, Outcome]]
    sizes: Mapping[str, int]  # axes of the ranks by name
    side: str = ALONE
    wrong: list[Wrong] = field(default_factory=list)  # what differs, in the order of computation

    def __post_init__(self) -> None:
        self._first = self.ranks[0][0]
        self._limits = RUNS[self.trial.dtype is torch.float32]

    def compare(self) -> ParityReport:
        """Compare all quantities; fills :attr:`wrong`."""
        rows, losses, wide = list[Row](), self.whole.losses, self.trial.dtype is not torch.float32
        for step, length in enumerate(self.whole.lengths[:2], start=1):
            what = f"the loss of step {step}" + (f" (length {length})" if length is not None else "")
            at = slice(step - 1, step)
            rows.append(compare_losses(what, losses[at], self._first.losses[at], self._limits))
        for step in range(1, len(self.whole.digests) + 1):
            rows += self._gradients(step)
        if wide:
            rows.append(self._weights("ranks", 0, "weight after 2 steps"))
        rows.append(self._agreement())
        what = "the loss of step 3, resumed from a checkpoint"
        rows.append(compare_losses(what, losses[2:], self.ranks[0][1].losses, self._limits))
        if wide:
            rows.append(self._weights("resumed", 1, "weight after step 3, resumed"))
        return ParityReport(tuple(rows))

    def _gradients(self, step: int) -> list[Row]:
        if len(self._first.digests) < step:
            told = "the ranks took no such step"
            return [Row(f"the gradients of step {step}", math.inf, self._limits.tensors, told)]
        what, norms = f"gradients-{step}", (self.whole.norms[step - 1], self._first.norms[step - 1])
        norm = norm_of(self._read(self.side, what))
        row = self._tensors(
            f"the gradients of step {step} (of their norm)", what, "ranks", f"gradient of step {step}", norm, step
        )
        return [row, compare_norms(f"the global norm of step {step} (relative)", *norms, norm, self._limits)]

    def _weights(self, side: str, epoch: int, what: str) -> Row:
        """The row of the weights at the end of an epoch; those whose gradients are wrong are known already."""
        return self._tensors(f"the {what.replace('weight', 'weights')} (absolute)", f"weights-{epoch}", side, what)

    def _tensors(self, row: str, file: str, side: str, quantity: str, norm: float | None = None, step: int = 0) -> Row:
        """The row of tensors that both sides left; notes what is wrong, with what it looks like."""
        right, got = self._read(self.side, file), self._read(side, file)
        compared, wrong = compare_tensors(row, right, got.items(), self._limits, norm)
        known = () if step else {one.name for one in self.wrong}
        for name, error, own_error, _ in wrong:
            if name not in known:
                hint = self._hint(name, quantity, right.get(name), got.get(name), step)
                self.wrong.append(Wrong(name, quantity, error, own_error, hint))
        return compared

    def _hint(self, name: str, quantity: str, right: Tensor | None, got: Tensor | None, step: int) -> str:
        """What a wrong tensor looks like, of a gradient also beside those of the other ranks."""
        hint = describe_difference(right, got, self.sizes)
        if not self.wrong or self.wrong[0].quantity == quantity:
            hint = describe_late(hint, quantity)
        if step and right is not None:
            digests = [rank.digests[step - 1].get(name) for rank, _ in self.ranks]
            seen = [digest for digest in digests if digest is not None]
            if len(seen) == len(digests) and _apart(seen) > _EXACT_RANKS * _largest(seen):
                hint = describe_ranks(seen, self.whole.digests[step - 1][name], self.sizes["dp"])
        return hint

    def _agreement(self) -> Row:
        """The row of what ranks must hold alike: whole gradients and weights."""
        worst, where = 0.0, "-"
        firsts = [first for first, _ in self.ranks]
        held = [("weight", [first.weight_digests for first in firsts])]
        for at in range(max(len(first.digests) for first in firsts)):
            # A rank that took fewer steps holds no gradient of this one.
            of_step = [first.digests[at] if at < len(first.digests) else {} for first in firsts]
            held.append((f"gradient of step {at + 1}", of_step))
        for what, of in held:
            scale = max((_largest(list(digests.values())) for digests in of if digests), default=1.0)
            for name in sorted(set().union(*of)):
                seen = [digests[name] for digests in of if name in digests]
                error = _apart(seen) / max(scale, 1e-300) if len(seen) == len(of) else math.inf
                if error > worst:
                    worst, where = error, f"{name}, {what}"
        return Row("what the ranks hold alike (of the largest)", worst, self._limits.tensors, where)

    def _read(self, side: str, what: str) -> Mapping[str, Any]:
        """The tensors that a side left, mapped into memory; None for one that is missing."""
        read: Mapping[str, Any] = torch.load(self.trial.path(side, what), weights_only=True, mmap=True)
        return read


def _apart(digests: Sequence[Digest]) -> float:
    return max(spread(values) for values in zip(*digests, strict=True))


def _largest(digests: Sequence[Digest]) -> float:
    return max(abs(value) for digest in digests for value in digest)


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
    if (multiple := _multiple(right, got)) is not None:
        return _of_multiple(multiple, sizes)
    one, other = (x.flatten().sort()[0] for x in (right, got))
    if right.numel() > 1 and torch.allclose(one, other, rtol=_EXACT, atol=0):
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
    square = float((right * right).sum())
    if square == 0.0:
        return 1.0 if not bool(got.any()) else None
    factor = float((right * got).sum()) / square
    return factor if float((got - factor * right).norm()) <= _EXACT * square**0.5 else None


def _of_multiple(factor: float, sizes: Mapping[str, int]) -> str:
    if abs(factor) < 1e-9:
        return "zero: is it detached, or does a collective have no backward?"
    axes = {size: axis for axis, size in reversed(list(sizes.items())) if size > 1}
    fraction = Fraction(factor).limit_denominator(64)
    if abs(float(fraction) - factor) > 1e-6:
        return f"{factor:.6g} times the right one, everywhere"
    above, below = fraction.numerator, fraction.denominator
    if below == 1 and above > 1:
        of = f" (as many as {axes[above]} ranks)" if above in axes else ""
        wrong = "summed where it should be averaged?" if axes.get(above) == "dp" else "summed twice?"
        return f"exactly {float(fraction):.1f} × too large{of}: {wrong}"
    if above == 1 and below > 1:
        of = f" (1 of {below} {axes[below]} ranks)" if below in axes else ""
        return f"exactly 1/{below} of the right one{of}: averaged where it should be summed, or twice?"
    if fraction == 1:
        return f"{_ROUNDED}: is something computed in float32 on the ranks alone?"
    return f"exactly {fraction} of the right one"


def describe_ranks(digests: Sequence[Digest], right: Digest, replicas: int) -> str:
    """What it says that ranks hold different gradients of a parameter that they should hold alike."""

    def is_right(shares: int) -> bool:
        divided = Digest(*(sum(values) / shares for values in zip(*digests, strict=True)))
        return _apart([divided, right]) <= _EXACT * _largest([divided, right])

    count = len(digests)
    if is_right(replicas) and count != replicas:
        return "each rank holds a part of it, and the parts add up to the right one: the sum over the ranks is missing"
    if is_right(count):
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
