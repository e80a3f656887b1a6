"""What is kept for the backward, and what is made again: the one place that decides."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any, Literal

from lightning_seqpar.distributed.autograd import saved_tensor_hooks


@dataclass(frozen=True)
class SavePolicy:
    """Which activations are made or gathered again in the backward, and which products wait for a collective to run under.

    Where ``regather`` is true or false, all are or none; ``"auto"`` goes by the bytes of the whole activation. Small ones are
    kept: there the time of a step is that of starting its parts, a collective's is its latency, and what is made or gathered
    again costs more than it frees.

    Attributes:
        regather: the configuration's field.
        size: number of tensor-parallel ranks.
        sp: whether activations between blocks are shards along the sequence.
        keep_up_to: with ``"auto"``, bytes of a whole activation up to which it is kept.
        overlap_from: with ``"auto"``, bytes of a whole activation above which a product that runs under its collective gains
            more than the waiting costs.
    """

    regather: bool | Literal["auto"]
    size: int
    sp: bool
    keep_up_to: int = 2**21
    overlap_from: int = 2**18

    def remakes(self, count: int) -> bool:
        """Whether an activation of ``count`` bytes on each rank is made (or gathered) again rather than kept."""
        return count * self.size > self.keep_up_to if self.regather == "auto" else self.regather

    def remakes_between_blocks(self, count: int) -> bool:
        """The same for an activation between the blocks, which is a shard only with sequence parallelism."""
        return self.remakes(count if self.sp else count // self.size)

    def overlaps(self, count: int) -> bool:
        """Whether products wait for the collective of a whole activation of ``count`` bytes, to run under it."""
        return count > self.overlap_from or self.regather != "auto"


def keeper() -> Any:
    """Whose hooks decide what the graph keeps now, weakly; none where it is nobody, or one who changes nothing.

    Under activation checkpointing a forward runs again from tensors that are what they were and have another past. What is
    kept in place of a tensor must not depend on what was done before the checkpoint began: only on what is done within it.
    """
    top = saved_tensor_hooks()
    if top is None or getattr(getattr(top[0], "__self__", None), "is_transparent", False):
        return None
    if inspect.ismethod(top[0]):
        return weakref.WeakMethod(top[0])
    return weakref.ref(top[0]) if inspect.isfunction(top[0]) else top[0]
