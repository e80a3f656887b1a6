"""Activations of which this rank has a part, and the whole of those that the model gives away (hidden states, attention maps)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.collectives import gather_replicated_from_sequence_parallel_region

_MANY = 4096
"""Parts that are remembered outside any step, which would forget them."""


class ShardedOutput(NamedTuple):
    """Of one tensor: which part of what it is."""

    tensor: weakref.ref[Tensor]
    name: str
    dim: int
    length: int | None
    sizes: tuple[int, int] | None


class ShardedOutputs:
    """The parts that a step made, known by the tensor objects themselves.

    Args:
        group: the tensor-parallel process group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._parts: dict[int, ShardedOutput] = {}

    def note(
        self, tensor: Tensor, name: str, dim: int, length: int | None, sizes: tuple[int, int] | None = None
    ) -> None:
        """``tensor``, made by the module ``name``, is this rank's part along ``dim``.

        Args:
            tensor: the part.
            name: of the module.
            dim: the tensor dim that is dealt out.
            length: its whole length; none if it can't be put together.
            sizes: the two dims that its first one was flattened from.
        """
        if len(self._parts) > _MANY:
            self._parts = {key: part for key, part in self._parts.items() if part.tensor() is not None}
        self._parts[id(tensor)] = ShardedOutput(weakref.ref(tensor), name, dim, length, sizes)

    def _part(self, tensor: Tensor) -> ShardedOutput | None:
        part = self._parts.get(id(tensor))
        return part if part is not None and part.tensor() is tensor else None

    def has(self, leaves: Iterable[object]) -> bool:
        """Whether one of ``leaves`` is a part."""
        return bool(self._parts) and any(isinstance(leaf, Tensor) and self._part(leaf) is not None for leaf in leaves)

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of what ``tensor`` is a part of, for consumers that all ranks compute alike; itself if it is no part.

        Raises:
            ValueError: if it can't be put together.
        """
        part = self._part(tensor)
        if part is None:
            return tensor
        if part.length is None:
            raise ValueError(
                f"{part.name}: the model returns something that it made of this rank's heads, of shape {list(tensor.shape)}, "
                "and nothing tells how the ranks' parts are put together; do not ask for it (output_attentions=False), or "
                f"leave the module whole: {{pattern: {part.name}, style: whole}}"
            )
        if part.sizes is None:
            return gather_replicated_from_sequence_parallel_region(tensor, part.dim, self._group, part.length)
        folded = tensor.reshape(*part.sizes, *tensor.shape[1:])
        return gather_replicated_from_sequence_parallel_region(folded, part.dim, self._group, part.length).flatten(0, 1)

    def check_none(self, leaves: Iterable[object], region: str) -> None:
        """What a step returns must not be a part.

        Raises:
            ValueError: if one is.
        """
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (part := self._part(leaf)) is not None:
                raise ValueError(
                    f"the step returns an activation from inside {region}, made by {part.name}, of which this rank has a part "
                    f"({list(leaf.shape)}); return what the model itself returns, or what comes behind the region's end, or "
                    "set sp=False"
                )

    def forget(self) -> None:
        """A new step."""
        self._parts = {}
