"""The one place that decides what is kept for the backward and what is recomputed, or gathered again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal

from lightning_seqpar.distributed.autograd import is_of_checkpoint, saved_tensor_hooks


@dataclass(frozen=True)
class SavePolicy:
    """Decides which activations are recomputed or gathered again, and which weight-gradient products overlap collectives.

    With ``regather`` true or false, all are or none is. With ``"auto"`` it depends on the bytes of the whole activation. Small
    ones are kept: their step time is spent on starting operations and on the latency of collectives, so that recomputing
    or gathering costs more than the memory is worth. In an activation checkpoint all are: it makes them again itself, shortly
    before they are needed, and making them twice would cost a second gather.

    Attributes:
        regather: the field of the configuration.
        size: number of tensor-parallel ranks.
        sp: whether activations between the blocks are sharded along the sequence.
        keep_up_to: with ``"auto"``, a whole activation of up to so many bytes is kept.
        overlap_from: with ``"auto"``, weight-gradient products overlap the collective of a whole activation of more than so
            many bytes; for smaller ones, deferring them costs more than it gains.
    """

    regather: bool | Literal["auto"]
    size: int
    sp: bool
    keep_up_to: int = 2**21
    overlap_from: int = 2**18

    def remakes(self, shard_bytes: int) -> bool:
        """Whether an activation of which each rank has ``shard_bytes`` is recomputed (or gathered again) rather than kept."""
        if self.regather != "auto":
            return self.regather
        return shard_bytes * self.size > self.keep_up_to and not is_of_checkpoint(saved_tensor_hooks())

    def remakes_between_blocks(self, held_bytes: int) -> bool:
        """The same for an activation between the blocks, of which a rank holds ``held_bytes``: without sequence parallelism all."""
        return self.remakes(held_bytes if self.sp else held_bytes // self.size)

    def overlaps(self, whole_bytes: int) -> bool:
        """Whether weight-gradient products are deferred to overlap the collective of an activation of ``whole_bytes``."""
        return whole_bytes > self.overlap_from or self.regather != "auto"


def keeper() -> weakref.ref[Any] | None:
    """The activation checkpoint that keeps what is saved now, by its hook, which may hold what it runs again; None outside of any.

    A checkpoint runs the forward again in the backward from its inputs, which then have no history. So what is saved in place of a
    tensor must not depend on operations before the checkpoint began: whoever replaces a tensor compares the keepers. Other hooks on
    saved tensors (offloading, counting) are taken to give back what they got.
    """
    hooks = saved_tensor_hooks()
    return weakref.ref(hooks[0]) if hooks is not None and is_of_checkpoint(hooks) else None
