"""Saved-tensor hooks of somebody else (offloading, a counter, a profiler), called by those that stand in for them.

What is kept for the backward is theirs to keep: it goes through their pair of hooks as if nobody stood in between. What can be
made again is not kept, and they never see it. An activation checkpoint's hooks are no such pair: its recomputation counts
what is saved, so nothing may be left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pack hook and its unpack hook."""


class HandedOver:
    """A tensor that somebody else's hooks keep, in whatever form.

    Args:
        hooks: theirs.
        tensor: what they are given.
    """

    __slots__ = ("_given", "_packed", "_unpack", "_version")

    def __init__(self, hooks: Hooks, tensor: Tensor) -> None:
        pack, self._unpack = hooks
        self._given, self._version = weakref.ref(tensor), tensor._version
        with torch.no_grad():  # as autograd itself calls the hook
            self._packed = pack(tensor)

    def take(self) -> Tensor:
        """The tensor as their unpack hook returns it.

        Raises:
            RuntimeError: if they kept the tensor itself, and it was changed in place.
        """
        tensor = self._unpack(self._packed)
        if tensor is self._given() and tensor._version != self._version:
            raise RuntimeError(
                "a tensor between column and row linears was modified by an inplace operation, and the backward needs it as it "
                "was (saved-tensor hooks are active, which keep it); write the change as a new tensor"
            )
        return tensor


class HandedOverSource(HandedOver):
    """A tensor that somebody else's hooks keep, and from which others are computed: it comes back with the strides that it had.

    Args:
        hooks: theirs.
        tensor: what is kept; :func:`can_be_source` holds for it.
    """

    __slots__ = ("_shape", "_stride", "_whole")

    def __init__(self, hooks: Hooks, tensor: Tensor) -> None:
        given = _without_repeats(tensor)
        super().__init__(hooks, given)
        self._whole, self._shape, self._stride = tensor.shape, given.shape, given.stride()

    def take(self) -> Tensor:
        """The tensor as it lay, in memory that begins with it."""
        tensor = super().take()
        lies = all(size == 1 or a == b for size, a, b in zip(self._shape, tensor.stride(), self._stride, strict=True))
        if lies and tensor.storage_offset() == 0:
            tensor = tensor.as_strided(self._shape, self._stride)
        else:
            tensor = tensor.new_empty_strided(self._shape, self._stride).copy_(tensor)
        return tensor.expand(self._whole)


def can_be_source(tensor: Tensor) -> bool:
    """Whether a copy of a tensor can be laid out as it lies: every element has memory of its own, but for expanded dims."""
    given, end = _without_repeats(tensor), 1
    for stride, size in sorted(zip(given.stride(), given.shape, strict=True)):
        if size > 1:
            if stride < end:
                return False
            end += stride * (size - 1)
    return True


def _without_repeats(tensor: Tensor) -> Tensor:
    """A tensor without the dims along which it was expanded, which become 1."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def fills_its_storage(tensor: Tensor) -> bool:
    """Whether a tensor lies contiguously from the first byte of its storage to the last."""
    return (
        tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()
    )
