"""The one place that decides what is kept for the backward and what is recomputed, or gathered again."""

from __future__ import annotations

import inspect
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Literal

from lightning_seqpar.distributed.autograd import is_of_checkpoint, is_offloading, saved_tensor_hooks


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
        return shard_bytes * self.size > self.keep_up_to and not is_of_checkpoint(hooks_in_force())

    def remakes_between_blocks(self, held_bytes: int) -> bool:
        """The same for an activation between the blocks, of which a rank holds ``held_bytes``: without sequence parallelism all."""
        return self.remakes(held_bytes if self.sp else held_bytes // self.size)

    def overlaps(self, whole_bytes: int) -> bool:
        """Whether weight-gradient products are deferred to overlap the collective of an activation of ``whole_bytes``."""
        return whole_bytes > self.overlap_from or self.regather != "auto"


def hooks_in_force() -> tuple[Any, Any] | None:
    """The pair of saved-tensor hooks that decides what is kept: the innermost, or the one that it stands in for."""
    hooks = saved_tensor_hooks()
    while hooks is not None and (outer := getattr(_owner(hooks), "outer_hooks", None)) is not None:
        hooks = outer
    return hooks


@dataclass(frozen=True)
class Keeper:
    """Saved-tensor hooks that may do more with a tensor than keep it; equal to that of the same hooks.

    Attributes:
        pack: the hook, as a weak reference where that is possible: it may hold what a checkpoint runs again.
        is_checkpoint: whether it is an activation checkpoint's.
    """

    pack: Any
    is_checkpoint: bool


def keeper() -> Keeper | None:
    """Whose saved-tensor hooks are active; None if there are none, or such as are known to give back what they got.

    Activation checkpointing installs hooks, and runs the forward again in the backward from the checkpoint's inputs, which then
    have no history. So what is saved in place of a tensor must not depend on operations before the checkpoint began: whoever
    replaces a tensor compares the keepers (:func:`is_same_keeper`).
    """
    hooks = hooks_in_force()
    if hooks is None or getattr(_owner(hooks), "is_transparent", False) or is_offloading(hooks):
        return None
    pack = hooks[0]
    held = (
        weakref.WeakMethod(pack) if inspect.ismethod(pack) else weakref.ref(pack) if inspect.isfunction(pack) else pack
    )
    return Keeper(held, is_of_checkpoint(hooks))


def is_same_keeper(then: Keeper | None) -> bool:
    """Whether the hooks of a keeper are still those that decide, so that less may be saved in place of a tensor made then.

    Warns where hooks came or went that need not be a checkpoint's, but might be, and more is kept for that reason.
    """
    now = keeper()
    if then != now and not any(one is not None and one.is_checkpoint for one in (then, now)):
        warnings.warn(
            "saved-tensor hooks that are not torch's own begin or end between a norm (or a gather) and a column-parallel linear "
            "that reads it. They might run the forward again as an activation checkpoint does, so the linear keeps its own input "
            "rather than the norm's; begin them around the whole block to keep less",
            stacklevel=2,
        )
    return then == now


def _owner(hooks: tuple[Any, Any]) -> Any:
    """The object whose method a pack hook is; None if it is no method."""
    return getattr(hooks[0], "__self__", None)
