"""Tensors of which this rank has a part: found in what the model returns (hidden states, attention maps), and made whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.context.chunks import Chunks
from lightning_seqpar.context.seq_part import Place, SeqPart
from lightning_seqpar.distributed.collectives import gather_replicated_from_sequence_parallel_region
from lightning_seqpar.layout.module_names import in_all_layers

_MANY = 4096
"""Number of tensors that are remembered outside any step, which would forget them."""


class ShardedOutput(NamedTuple):
    """What is known of one such tensor.

    Attributes:
        tensor: itself; gone when nobody else holds it.
        name: of the module that made it.
        dim: the tensor dim of which this rank has a part.
        length: the whole length of that dim; None if the ranks' parts can't be put together.
        sizes: the two dims that its first one was flattened from; None if it was not.
        chunks: how the sequence is dealt out over the context-parallel ranks, if ``dim`` is the sequence; else None.
    """

    tensor: weakref.ref[Tensor]
    name: str
    dim: int
    length: int | None
    sizes: tuple[int, int] | None
    chunks: Chunks | None


class ShardedOutputs:
    """The tensors of a step of which this rank has a part, known by the objects themselves."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._parts: dict[int, tuple[Any, ...]] = {}  # the fields of a ShardedOutput, which is made where one is found

    def note(
        self,
        tensor: Tensor,
        name: str,
        dim: int,
        length: int | None,
        sizes: tuple[int, int] | None = None,
        chunks: Chunks | None = None,
    ) -> None:
        """Note a tensor; the arguments are the fields of :class:`ShardedOutput`."""
        if len(self._parts) > _MANY:
            self._parts = {key: part for key, part in self._parts.items() if part[0]() is not None}
        self._parts[id(tensor)] = weakref.ref(tensor), name, dim, length, sizes, chunks

    def _part(self, tensor: Tensor) -> ShardedOutput | None:
        part = self._parts.get(id(tensor))
        return ShardedOutput(*part) if part is not None and part[0]() is tensor else None

    def has(self, leaves: Iterable[object]) -> bool:
        """Whether this rank has only a part of one of ``leaves``."""
        return bool(self._parts) and any(isinstance(leaf, Tensor) and self._part(leaf) is not None for leaf in leaves)

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor, for consumers that all ranks compute alike: ``[b, s/tp, h]`` → ``[b, s, h]``.

        Forward: all-gather. Backward: slice. A tensor that was not noted is returned as it is.

        Raises:
            ValueError: if the ranks' parts can't be put together.
        """
        part = self._part(tensor)
        if part is None:
            return tensor
        if part.length is None:
            raise ValueError(
                f"{part.name}: the model returns something that it made of this rank's heads, of shape {list(tensor.shape)}, "
                "and nothing tells how the ranks' parts are put together; do not ask for it (output_attentions=False), or "
                f"leave the module whole: {{pattern: {in_all_layers(part.name)}, style: whole}}"
            )
        if isinstance(tensor, SeqPart):  # heads of a part of a sequence
            return tensor.like(
                gather_replicated_from_sequence_parallel_region(tensor.local, part.dim, self._group, part.length)
            )
        shape = tensor.shape if part.sizes is None else (*part.sizes, *tensor.shape[1:])
        whole = gather_replicated_from_sequence_parallel_region(tensor.reshape(shape), part.dim, self._group, part.length)
        if part.chunks is not None:
            whole = SeqPart.wrap(whole, Place(part.chunks, part.dim))
        return whole if part.sizes is None else whole.flatten(0, 1)

    def check_none(self, leaves: Iterable[object], region: str) -> None:
        """Require that a step returns nothing of which this rank has a part.

        Raises:
            ValueError: naming the module that made such a tensor.
        """
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (part := self._part(leaf)) is not None:
                raise ValueError(
                    f"the step returns an activation from inside {region}, made by {part.name}, of which this rank has a part "
                    f"({list(leaf.shape)}); return what the model itself returns, or what comes behind the region's end, or "
                    "set sp=False"
                )

    def forget(self) -> None:
        """Forget the tensors of the last step."""
        self._parts = {}
