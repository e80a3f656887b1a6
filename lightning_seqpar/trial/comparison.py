"""What both sides of a trial did, compared: losses, gradients, norms, weights, and what ranks must hold alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_seqpar.trial.hints import Wrong, describe_difference, describe_late, describe_ranks
from lightning_seqpar.trial.training import ALONE, Outcome, Trial
from lightning_seqpar.verify.parity import (
    FLOAT32_LOSS_TOLERANCE,
    FLOAT64_TOLERANCE,
    Row,
    largest_gap,
    largest_number,
    norm_of,
)
from lightning_seqpar.verify.run_comparison import NOISE, OWN_LIMIT

_GRADIENTS32 = 1e-4
"""Largest error of gradients in float32, of the global norm."""

_EXACT_RANKS = 1e-9
"""Relative difference of two ranks' digests from which on they hold different tensors."""


@dataclass
class Comparison:
    """What was compared, and what differs.

    Attributes:
        rows: each quantity with its largest error.
        wrong: the tensors that differ, in the order in which they were computed.
    """

    rows: list[Row] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return all(row.ok for row in self.rows)


def compare_sides(
    trial: Trial,
    whole: Outcome,
    ranks: Sequence[tuple[Outcome, Outcome]],
    sizes: Mapping[str, int],
    side: str = ALONE,
) -> Comparison:
    """Compare what one process did with what the ranks did.

    Args:
        trial: whose folder holds the tensors of both sides.
        whole: of one process.
        ranks: of every rank, in the first two steps and in the resumed one.
        sizes: axes of the ranks by name.
        side: that of the one process.
    """
    return _Sides(trial, whole, ranks, sizes, side).compare()


class _Sides:
    """Both sides of a trial.

    Args:
        trial: whose folder holds the tensors of both sides.
        whole: of one process.
        ranks: of every rank.
        sizes: axes of the ranks by name.
        side: that of the one process.
    """

    def __init__(
        self,
        trial: Trial,
        whole: Outcome,
        ranks: Sequence[tuple[Outcome, Outcome]],
        sizes: Mapping[str, int],
        side: str,
    ) -> None:
        self._trial, self._whole, self._ranks, self._sizes, self._side = trial, whole, ranks, sizes, side
        self._first, self._resumed = ranks[0]
        self._narrow = trial.dtype is torch.float32
        self._limit = _GRADIENTS32 if self._narrow else FLOAT64_TOLERANCE
        self._found = Comparison()

    def compare(self) -> Comparison:
        """Compare all quantities, in the order in which they were computed."""
        rows, losses = self._found.rows, self._whole.losses
        rows.append(self._beginning())
        for step, length in enumerate(self._whole.lengths[:2], start=1):
            of = f" (length {length})" if length is not None else ""
            rows.append(self._loss(f"the loss of step {step}{of}", losses, self._first.losses, step - 1))
        for step in range(1, len(self._whole.digests) + 1):
            rows += self._gradients(step)
        if not self._narrow:
            rows.append(self._weights("ranks", 0, "weight after 2 steps"))
        rows.append(self._agreement())
        rows.append(self._loss("the loss of step 3, resumed from a checkpoint", losses[2:], self._resumed.losses, 0))
        if not self._narrow:
            rows.append(self._weights("resumed", 1, "weight after step 3, resumed"))
        return self._found

    def _beginning(self) -> Row:
        """The row of the weights before the first step."""
        right, got = self._whole.initial_digests, self._first.initial_digests
        worst, where = 0.0, "-"
        for name in sorted(set(right) & set(got)):  # another reference may have others
            scale = max(1.0, *map(abs, right[name]))
            error = max(_gap(values) for values in zip(right[name], got[name], strict=True)) / scale
            if error > worst:
                worst, where = error, name
            if error > self._limit:
                hint = "it is another one before anything was trained: initialised on the ranks, or changed as it was sharded?"
                kind = self._whole.kinds.get(name, "")
                self._found.wrong.append(Wrong(name, kind, "weight before step 1", error, error, hint))
        return Row("the weights before step 1 (by two sums)", worst, self._limit, where)

    def _loss(self, quantity: str, right: Sequence[float], got: Sequence[float], at: int) -> Row:
        """The row of one step's loss: relative to it, or absolute where it is below 1."""
        limit = FLOAT32_LOSS_TOLERANCE if self._narrow else FLOAT64_TOLERANCE
        if at >= len(right) and at >= len(got):  # of a module that optimizes by itself
            return Row(quantity, 0.0, limit, "the step returns none")
        if at >= len(right) or at >= len(got):
            return Row(quantity, math.inf, limit, f"{len(got)} steps instead of {len(right)}")
        error = _gap((right[at], got[at])) / max(1.0, abs(right[at]))
        return Row(quantity, error, limit, f"{got[at]:.9g} instead of {right[at]:.9g}")

    def _gradients(self, step: int) -> list[Row]:
        """The rows of a step's gradients and of their norm.

        A gradient is wrong if its error exceeds the limit relative to the global norm, or, since a small one may stay below that,
        if it is wrong by its own size.
        """
        if len(self._first.digests) < step:
            return [Row(f"the gradients of step {step}", math.inf, self._limit, "the ranks took no such step")]
        right, got = self._read(self._side, f"gradients-{step}"), self._read("ranks", f"gradients-{step}")
        scale = max(norm_of(right), 1e-30)
        worst, where = 0.0, "-"
        for name in sorted(set(right) | set(got)):
            a, b = right.get(name), got.get(name)
            error = largest_gap(a, b) / scale
            if error > NOISE[self._narrow] and _own_error(a, b) > OWN_LIMIT:
                error = max(error, 2 * self._limit)
            if error > worst:
                worst, where = error, name
            if error > self._limit:
                self._found.wrong.append(self._wrong(name, f"gradient of step {step}", a, b, error, step))
        norms = self._whole.norms[step - 1], self._first.norms[step - 1]
        told = f"{norms[1]:.9g} instead of {norms[0]:.9g}"
        return [
            Row(f"the gradients of step {step} (of their norm)", worst, self._limit, where),
            Row(f"the global norm of step {step} (relative)", _gap(norms) / scale, self._limit, told),
        ]

    def _weights(self, side: str, epoch: int, what: str) -> Row:
        """The row of the weights at the end of an epoch; those whose gradients are wrong are known already."""
        right, got = self._read(self._side, f"weights-{epoch}"), self._read(side, f"weights-{epoch}")
        known = {one.name for one in self._found.wrong}
        worst, where = 0.0, "-"
        for name in sorted(set(right) | set(got)):
            a, b = right.get(name), got.get(name)
            if (error := largest_gap(a, b)) > worst:
                worst, where = error, name
            if error > self._limit and name not in known:
                self._found.wrong.append(self._wrong(name, what, a, b, error))
        return Row(f"the {what.replace('weight', 'weights')} (absolute)", worst, self._limit, where)

    def _wrong(
        self, name: str, quantity: str, right: Tensor | None, got: Tensor | None, error: float, step: int = 0
    ) -> Wrong:
        """A wrong tensor with what it looks like; of gradients, also beside those of the other ranks."""
        hint = describe_difference(right, got, self._sizes)
        if not self._found.wrong or self._found.wrong[0].quantity == quantity:
            hint = describe_late(hint, quantity)
        if step and right is not None:
            digests = [rank.digests[step - 1].get(name) for rank, _ in self._ranks]
            seen = [digest for digest in digests if digest is not None]
            scale = max((abs(value) for digest in seen for value in digest), default=0.0)
            spread = max((_gap(values) for values in zip(*seen, strict=True)), default=0.0)
            if len(seen) == len(digests) and spread > _EXACT_RANKS * scale:
                hint = describe_ranks(seen, self._whole.digests[step - 1][name], self._sizes["dp"])
        return Wrong(name, self._whole.kinds.get(name, ""), quantity, error, _own_error(right, got), hint)

    def _agreement(self) -> Row:
        """The row of what ranks must hold alike: losses within a replica, whole gradients and weights on all."""
        worst, where = 0.0, "-"
        firsts = [first for first, _ in self._ranks]
        # Of stages the last alone has the loss.
        for replica in {first.replica for first in firsts} if self._sizes.get("pp", 1) == 1 else ():
            losses = [first.own_losses for first in firsts if first.replica == replica]
            for step, values in enumerate(zip(*losses, strict=False), start=1):
                if (error := _gap(values) / max(1.0, *map(abs, values))) > worst:
                    worst, where = error, f"the loss of step {step} within replica {replica}"
        held = [("weight", [first.weight_digests for first in firsts])]
        for at in range(max(len(first.digests) for first in firsts)):
            # A rank that took fewer steps holds no gradient of this one.
            of_step = [first.digests[at] if at < len(first.digests) else {} for first in firsts]
            held.append((f"gradient of step {at + 1}", of_step))
        for what, of in held:
            scale = max((abs(value) for digests in of for digest in digests.values() for value in digest), default=1.0)
            for name in sorted(set().union(*of)):
                seen = [digests[name] for digests in of if name in digests]
                error = max(_gap(values) for values in zip(*seen, strict=True)) / max(scale, 1e-300)
                error = error if len(seen) == len(of) else math.inf
                if error > worst:
                    worst, where = error, f"{name}, {what}"
        return Row("what the ranks hold alike (of the largest)", worst, self._limit, where)

    def _read(self, side: str, what: str) -> dict[str, Tensor | None]:
        """The tensors that a side left, mapped into memory."""
        read: dict[str, Tensor | None] = torch.load(self._trial.path(side, what), weights_only=True, mmap=True)
        return read


def _gap(values: Iterable[float]) -> float:
    """The largest difference of some numbers; infinite if one of them is not finite."""
    numbers = list(values)
    return max(numbers) - min(numbers) if all(map(math.isfinite, numbers)) else math.inf


def _own_error(right: Tensor | None, got: Tensor | None) -> float:
    """The largest difference of two tensors, relative to the largest number of the right one."""
    gap = largest_gap(right, got)
    return gap if right is None or math.isinf(gap) or not right.numel() else gap / max(largest_number(right), 1e-300)
