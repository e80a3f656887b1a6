"""The one comparison of two runs: which losses, gradients and weights are wrong, and how wrong they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT64_TOLERANCE = 1e-9
"""Largest difference of two runs in float64 that counts as equal: a parallel run sums in another order."""

OWN_LIMIT = 2e-2
"""Largest error of a gradient relative to its own largest element: one that is counted twice is wrong however small it is."""

_PIECE = 2**20
"""Numbers that are compared at a time."""


@dataclass(frozen=True)
class Limits:
    """The largest errors that count as equal."""

    losses: float  # of a loss, relative to itself, or to ``least_loss`` where it is below that
    tensors: float  # of a gradient, relative to the global gradient norm; of a weight, absolute
    noise: float  # of a gradient, relative to the global norm, up to which it is rounding however small the gradient is
    least_loss: float = 1.0
    none_is_zero: bool = False  # whether a gradient that is missing is one of zeros

    @classmethod
    def up_to(cls, limit: float) -> Limits:
        """One limit for all; one for float64 looks at the own size of gradients too."""
        return cls(limit, limit, 1e-13 if limit <= 1e-8 else limit)


RUNS = {False: Limits.up_to(FLOAT64_TOLERANCE), True: Limits(1e-5, 1e-4, 1e-7)}
"""Limits of runs of a Trainer in float64 (False) and in float32 (True)."""

COPIES = {
    False: Limits(1e-8, 1e-8, 1e-13, least_loss=1e-12, none_is_zero=True),
    True: Limits(1e-4, 1e-4, 1e-7, least_loss=1e-12, none_is_zero=True),
}
"""Limits of copies of a model whose own forward computes in float64 (False), or in 32 bits or less (True)."""


@dataclass(frozen=True)
class Row:
    """One line of a report.

    Attributes:
        quantity: what is compared.
        error: its largest error.
        limit: the largest error that counts as equal.
        where: the step or the parameter with the largest error.
    """

    quantity: str
    error: float
    limit: float
    where: str

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit (a NaN never is)."""
        return self.error <= self.limit


@dataclass(frozen=True)
class ParityReport:
    """The comparison of two runs; ``str()`` is a table."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every quantity is within its limit."""
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row that lies highest against its limit."""
        return max(self.rows, key=lambda row: math.inf if math.isnan(row.error) else row.error / row.limit)

    def raise_if_failed(self) -> None:
        """Raise ``AssertionError`` with the table if anything is out of its limit."""
        if not self.ok:
            raise AssertionError(f"the runs differ\n{self}")

    def __str__(self) -> str:
        width = max(34, *(len(row.quantity) for row in self.rows))
        lines = [f"{'quantity':<{width}} {'largest error':>13} {'limit':>8}  {'':<4}  where"]
        for row in self.rows:
            ok = "ok" if row.ok else "FAIL"
            lines.append(f"{row.quantity:<{width}} {row.error:>13.2e} {row.limit:>8.0e}  {ok:<4}  {row.where}")
        return "\n".join(lines)


class WrongTensor(NamedTuple):
    """A tensor that is not what it is in the other run."""

    name: str  # the parameter's
    error: float  # its largest error; of a gradient, relative to the global norm
    own_error: float  # its largest error, relative to its largest number
    ratio: float  # its norm, relative to the norm that it should have


def compare_losses(quantity: str, right: Sequence[float], got: Sequence[float], limits: Limits) -> Row:
    """The row of the losses of some steps."""
    if len(right) != len(got):
        return Row(quantity, math.inf, limits.losses, f"{len(got)} steps against {len(right)}")
    gaps = [(spread(pair), max(limits.least_loss, abs(pair[0]))) for pair in zip(right, got, strict=True)]
    errors = [gap if math.isinf(gap) else gap / size for gap, size in gaps]
    if not errors:
        return Row(quantity, 0.0, limits.losses, "the step returns none")
    at = errors.index(max(errors))
    step = f"step {at + 1} of {len(errors)}"
    if errors[at] <= limits.losses:
        return Row(quantity, errors[at], limits.losses, step if len(errors) > 1 else f"{got[at]:.9g}")
    told = f"{got[at]:.9g} instead of {right[at]:.9g}" + f" in {step}" * (len(errors) > 1)
    return Row(quantity, errors[at], limits.losses, told)


def compare_norms(quantity: str, right: float, got: float, norm: float, limits: Limits) -> Row:
    """The row of two global gradient norms, relative to the ``norm`` of the right gradients."""
    return Row(quantity, spread((right, got)) / max(norm, 1e-30), limits.tensors, f"{got:.9g} instead of {right:.9g}")


def compare_tensors(
    quantity: str,
    right: Mapping[str, Tensor | None],
    got: Iterable[tuple[str, Tensor | None]],
    limits: Limits,
    norm: float | None = None,
    part: Callable[[str, Tensor], Tensor] | None = None,
) -> tuple[Row, list[WrongTensor]]:
    """Compare named tensors: the row, and those that are wrong, in the order of ``got``.

    Gradients are compared relative to the global ``norm`` of the right ones, and a small one also by its own size: some are zero
    analytically (a key bias before a softmax), so that their own relative error has no meaning. Without a ``norm``, as of
    weights, differences are absolute. Those of ``got`` are read one by one: only one of them need be in memory. ``part`` makes
    of a right one the part of it that the other run has.
    """
    scale, limit = 1.0 if norm is None else max(norm, 1e-30), limits.tensors
    wrong: list[WrongTensor] = []
    worst, where, missing = 0.0, "-", dict.fromkeys(right)

    def pairs() -> Iterable[tuple[str, Tensor | None]]:
        yield from got
        yield from list(missing.items())

    for name, tensor in pairs():
        missing.pop(name, None)
        whole, b = _plain(right.get(name)), _plain(tensor)
        a = whole if part is None or whole is None else part(name, whole)
        if limits.none_is_zero:
            a = torch.zeros_like(b) if a is None and b is not None else a
            b = torch.zeros_like(a) if b is None and a is not None else b
        gap = largest_gap(a, b)
        error = gap if math.isinf(gap) else gap / scale
        own = gap / max(0.0 if whole is None else largest_number(whole), 1e-300)
        if error > limit or (norm is not None and own > OWN_LIMIT and error > limits.noise):
            wrong.append(WrongTensor(name, error, own, norm_of({name: b}) / max(norm_of({name: a}), 1e-300)))
            error = max(error, 2 * limit)  # of a small one, whose own size shows it
        if error > worst:
            shapes = [None if t is None else list(t.shape) for t in (b, a)]
            worst, where = error, name if shapes[0] == shapes[1] else f"{name}: {shapes[0]} against {shapes[1]}"
    return Row(quantity, worst, limit, where), wrong


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to_dense().cpu()


def spread(values: Iterable[float]) -> float:
    """The largest difference of some numbers; infinite if one of them is not finite."""
    numbers = list(values)
    return max(numbers) - min(numbers) if all(map(math.isfinite, numbers)) else math.inf


def norm_of(grads: Mapping[str, Tensor | None]) -> float:
    """The global 2-norm of whole gradients; a parameter without a gradient counts as zero."""
    norms = [float(torch.linalg.vector_norm(grad.to_dense().double())) for grad in grads.values() if grad is not None]
    return math.hypot(*norms)


def largest_number(x: Tensor) -> float:
    """The largest absolute number of a tensor, in one pass over it; 0 of an empty one, NaN where there is one."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.abs() if x.is_complex() else x)
    return max(-float(low), float(high))


def largest_gap(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of two tensors' numbers; infinite if it is not a number, if shapes differ, or one is missing.

    They are compared piece by piece: new memory for all differences costs more than numbers.
    """
    if one is None or other is None or one.shape != other.shape:
        return 0.0 if one is other else math.inf
    pieces = zip(one.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True)
    gaps = [largest_number(a.double() - b.double()) for a, b in pieces]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps, default=0.0)


def is_close(one: Tensor, other: Tensor, limit: float, least: float = 1e-12) -> bool:
    """Whether two tensors have the same numbers, up to ``limit`` of the largest finite one, or of ``least``."""
    if one.shape != other.shape:
        return False
    a, b = one.double(), other.double()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())  # equal infinities would give NaN
    size = torch.where(a.isfinite(), a.abs(), 0.0)
    return not gap.numel() or bool(gap.max() <= limit * size.max().clamp_min(least))
