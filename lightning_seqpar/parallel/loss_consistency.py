"""The ranks of a replica must have one loss, at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.distributed.host import LateNumbers, OneStepLate
from lightning_seqpar.topology.process_groups import ParallelGroups

_CAUSES = (
    "They must see the same batch, and the loss must not read parameters (an L2 term sees shards; weight decay belongs into "
    "the optimizer), draw random numbers on its own, depend on the number of the process (global_rank; the number of the replica "
    "is self.trainer.strategy.dp_rank), or read what the model made of its activations inside of its blocks "
    "(pooled, detached or kept aside: each rank has a part there; read what the model returns, or set sp=False)"
)


def _limit(dtype: torch.dtype) -> float:
    """How far, relative to the loss, equal computations may lie apart on two ranks."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)


def _number(loss: Tensor) -> Tensor:
    """The loss as a number that can be compared; one that is no number counts as zero on every rank."""
    return loss.detach().double().sum().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _compare(numbers: Sequence[float], limit: float, when: str, then: str = "") -> None:
    """Raise RuntimeError if the ranks' losses lie further apart."""
    if max(numbers) - min(numbers) > limit * max(1.0, *map(abs, numbers)):
        losses = ", ".join(f"{number:.9g}" for number in numbers)
        raise RuntimeError(f"the loss {when}: {losses}. {then}{_CAUSES}")


def check_loss(loss: Tensor, groups: ParallelGroups) -> None:
    """The loss must be the same on all ranks of a replica; collective over the replica."""
    own = _number(loss)
    axes = groups.loss_axes
    values = [torch.zeros_like(own) for _ in range(groups.size(axes))]
    dist.all_gather(values, own, group=groups[axes])
    numbers = [float(value) for value in values]
    _compare(numbers, _limit(loss.dtype), "differs across the ranks of one replica")


class LossWatch:
    """Compares the losses of every step, at no collective of its own where gradients are summed over tp anyway.

    Each rank has a place in a row of zeros that rides along with the sum, so that all decide alike. The row is read when the next
    step's sum is due: a step with a wrong gradient is taken, but none behind it, and nothing is saved.

    Attributes:
        rides_over_tp: whether a sum over tp reaches all ranks of the replica.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self._size, self._rank = groups.size(groups.loss_axes), groups.rank(groups.loss_axes)
        self.rides_over_tp = groups.size("tp") == self._size
        self._own: Tensor | None = None
        self._limit = 0.0
        # All ranks' losses, and how far they may lie apart.
        self._unread: OneStepLate[tuple[LateNumbers, float]] = OneStepLate()

    def begin_step(self) -> None:
        """A step begins: losses that were taken until now can be read without a wait."""
        self._unread.begin_step()

    def note(self, loss: Tensor) -> None:
        """Add a loss to those of this step (accumulation, or several backwards)."""
        number = _number(loss)
        self._own = number if self._own is None else self._own + number
        self._limit = max(self._limit, _limit(loss.dtype))

    def row(self, dtype: torch.dtype) -> Tensor | None:
        """What is to be summed over tp, ``[tp]``; none without a loss since the last time."""
        if self._own is None:
            return None
        row = torch.zeros(self._size, dtype=dtype, device=self._own.device)
        row[self._rank] = self._own
        self._limit = max(self._limit, _limit(dtype))
        return row

    def take(self, summed: Tensor) -> None:
        """The row with every rank's loss, ``[tp]``; it is not read yet."""
        self._unread.add((LateNumbers(summed), self._limit))
        self._own, self._limit = None, 0.0

    def send(self) -> None:
        """Sum the row by itself, unless it has ridden along with a sum of gradients already; collective over tp."""
        if self._own is not None and (row := self.row(torch.float64)) is not None:
            dist.all_reduce(row, group=self._groups[self._groups.loss_axes])
            self.take(row)

    def settle(self, *, everything: bool = False) -> None:
        """Read and compare the losses of earlier steps, or those of this step too (``everything``), which may take a wait."""
        for losses, limit in self._unread.take(everything=everything):
            when = "differed across the ranks of one replica at the last step"
            then = "An update that was made of it is wrong: go on from a checkpoint before it. "
            _compare(losses.read(), limit, when, then)
