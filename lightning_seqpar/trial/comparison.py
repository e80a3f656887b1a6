"""What both sides of a trial did, compared: losses, gradients, norms, weights, and what ranks must hold alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_seqpar.trial.hints import Wrong, describe_difference, describe_late, describe_ranks
from lightning_seqpar.trial.training import ALONE, Outcome, Trial
from lightning_seqpar.verify.comparison import (
    RUNS,
    Compared,
    ParityReport,
    Row,
    compare_gradients,
    compare_losses,
    compare_weights,
    norm_of,
    spread,
)

_Tensors: TypeAlias = Mapping[str, Any]
"""Tensors by name; None for one that is missing."""

_EXACT_RANKS = 1e-9
"""Relative difference of two ranks' digests from which on they hold different tensors."""


@dataclass
class Sides:
    """Both sides of a trial: the Outcome of one process, and of each rank those of two steps and of the resumed one."""

    trial: Trial
    whole: Outcome
    ranks: Sequence[tuple[Outcome, Outcome]]
    sizes: Mapping[str, int]  # axes of the ranks by name
    side: str = ALONE

    def __post_init__(self) -> None:
        self._first, self._resumed = self.ranks[0]
        self._narrow = self.trial.dtype is torch.float32
        self._limits = RUNS[self._narrow]
        self._limit = self._limits.tensors
        self._wrong: list[Wrong] = []

    def compare(self) -> tuple[ParityReport, list[Wrong]]:
        """Compare all quantities: the rows, and the tensors that differ, in the order in which they were computed."""
        rows, losses = list[Row](), self.whole.losses
        for step, length in enumerate(self.whole.lengths[:2], start=1):
            of = f" (length {length})" if length is not None else ""
            at = slice(step - 1, step)
            rows.append(
                compare_losses(f"the loss of step {step}{of}", losses[at], self._first.losses[at], self._limits)
            )
        for step in range(1, len(self.whole.digests) + 1):
            rows += self._gradients(step)
        if not self._narrow:
            rows.append(self._weights("ranks", 0, "weight after 2 steps"))
        rows.append(self._agreement())
        what = "the loss of step 3, resumed from a checkpoint"
        rows.append(compare_losses(what, losses[2:], self._resumed.losses, self._limits))
        if not self._narrow:
            rows.append(self._weights("resumed", 1, "weight after step 3, resumed"))
        return ParityReport(tuple(rows)), self._wrong

    def _gradients(self, step: int) -> list[Row]:
        """The rows of a step's gradients and of their norm."""
        if len(self._first.digests) < step:
            return [Row(f"the gradients of step {step}", math.inf, self._limit, "the ranks took no such step")]
        right, got = self._read(self.side, f"gradients-{step}"), self._read("ranks", f"gradients-{step}")
        norm, norms = norm_of(right), (self.whole.norms[step - 1], self._first.norms[step - 1])
        what = f"the gradients of step {step} (of their norm)"
        found = compare_gradients(what, right, got.items(), norm, self._limits)
        self._note(found, f"gradient of step {step}", right, got, step)
        told = f"{norms[1]:.9g} instead of {norms[0]:.9g}"
        error = spread(norms) / max(norm, 1e-30)
        return [found.row, Row(f"the global norm of step {step} (relative)", error, self._limit, told)]

    def _weights(self, side: str, epoch: int, what: str) -> Row:
        """The row of the weights at the end of an epoch; those whose gradients are wrong are known already."""
        right, got = self._read(self.side, f"weights-{epoch}"), self._read(side, f"weights-{epoch}")
        found = compare_weights(f"the {what.replace('weight', 'weights')} (absolute)", right, got, self._limits)
        self._note(found, what, right, got)
        return found.row

    def _note(self, found: Compared, quantity: str, right: _Tensors, got: _Tensors, step: int = 0) -> None:
        """Note what is wrong, with what it looks like; of gradients, also beside those of the other ranks."""
        known = () if step else {one.name for one in self._wrong}
        for name, error, own_error, _ in found.wrong:
            if name not in known:
                hint = self._hint(name, quantity, right.get(name), got.get(name), step)
                self._wrong.append(Wrong(name, quantity, error, own_error, hint))

    def _hint(self, name: str, quantity: str, right: Tensor | None, got: Tensor | None, step: int) -> str:
        """What a wrong tensor looks like."""
        hint = describe_difference(right, got, self.sizes)
        if not self._wrong or self._wrong[0].quantity == quantity:
            hint = describe_late(hint, quantity)
        if step and right is not None:
            digests = [rank.digests[step - 1].get(name) for rank, _ in self.ranks]
            seen = [digest for digest in digests if digest is not None]
            scale = max((abs(value) for digest in seen for value in digest), default=0.0)
            apart = max((spread(values) for values in zip(*seen, strict=True)), default=0.0)
            if len(seen) == len(digests) and apart > _EXACT_RANKS * scale:
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
            scale = max((abs(value) for digests in of for digest in digests.values() for value in digest), default=1.0)
            for name in sorted(set().union(*of)):
                seen = [digests[name] for digests in of if name in digests]
                error = max(spread(values) for values in zip(*seen, strict=True)) / max(scale, 1e-300)
                error = error if len(seen) == len(of) else math.inf
                if error > worst:
                    worst, where = error, f"{name}, {what}"
        return Row("what the ranks hold alike (of the largest)", worst, self._limit, where)

    def _read(self, side: str, what: str) -> _Tensors:
        """The tensors that a side left, mapped into memory."""
        read: _Tensors = torch.load(self.trial.path(side, what), weights_only=True, mmap=True)
        return read
