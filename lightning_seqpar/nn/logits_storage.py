"""The storage of one rank's part of logits that are sharded by vocabulary: logits in memory, or the head's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.meeting import Meeting
from lightning_seqpar.layout.shard import Shard


@dataclass(frozen=True)
class VocabPart:
    """Which part of a vocabulary a layer on this rank has; copies of the layer have the same."""

    shard: Shard
    group: ProcessGroup  # over tp
    rank: int
    loss_chunk: int | None = None  # of a head: tokens of which a loss makes the logits at a time; None for all
    meeting: Meeting | None = None  # of a head: where ranks meet before its logits are gathered

    @property
    def columns(self) -> tuple[int, int]:
        """Start and stop of this rank's part of the vocabulary, without padding."""
        ((start, stop),) = self.shard.ranges[self.rank]
        return start, stop

    def __deepcopy__(self, memo: dict[int, object]) -> VocabPart:
        """Itself: process groups are not copied."""
        return self


class StoredLogits:
    """One rank's part of logits: in memory as the head made it, or its input, weight and bias, of which a reader makes them.

    A cast to a wider type is not carried out before somebody reads the part: the loss casts a few tokens at a time. So ``dtype`` is
    what readers get, and ``compute`` the type of the product, as autocast was when the head was called. ``x`` is the logits,
    ``[..., ceil(v/tp)]``, or the head's input ``[..., h]`` with this rank's ``weight``, ``[ceil(v/tp), h]``, and ``bias``; a loss
    makes the logits of ``chunk`` tokens at a time (0 for as many as fit into its own limit).
    """

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        compute: torch.dtype | None = None,
        chunk: int = 0,
    ) -> None:
        self.tensors = (x, weight, bias)
        self.dtype, self.compute, self.chunk = dtype, compute or x.dtype, chunk
        self._versions = None if weight is None else self._read_versions()

    @property
    def is_deferred(self) -> bool:
        """Whether the logits are not made yet."""
        return self.tensors[1] is not None

    def _read_versions(self) -> list[int]:
        """The versions of the tensors, which in-place changes count up; tensors made in inference mode have none."""
        return [one._version for one in self.tensors if one is not None and not one.is_inference()]

    def check(self) -> None:
        """Refuse to read logits whose inputs were changed in place after the head was called, as an optimizer does."""
        if self._versions is not None and self._read_versions() != self._versions:
            raise RuntimeError(
                "logits that were not made yet (loss_chunk) are read after the head's weight or its input has changed, and would "
                "be other logits; read them before the optimizer steps (logits.whole() keeps all, on all ranks), or leave "
                "loss_chunk out"
            )

    def read(self) -> Tensor:
        """The logits as a tensor of :attr:`dtype`; raises RuntimeError if they are computed now, and the inputs were changed."""
        self.check()
        x, weight, bias = self.tensors
        return (x if weight is None else made_logits(x, weight, bias, self.compute)).to(self.dtype)

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> StoredLogits:
        """The part with other leading dims: ``change`` reshapes the tokens or chooses among them, and leaves the last dim."""
        x, *head = self.tensors
        return self._like(self.dtype, change(x), *head)

    def cast(self, dtype: torch.dtype) -> StoredLogits:
        """The same part, for readers of another type."""
        return self._like(dtype, *self.tensors)

    def detached(self) -> StoredLogits:
        """The same part without a graph."""
        return self._like(self.dtype, *(None if one is None else one.detach() for one in self.tensors))

    def _like(self, dtype: torch.dtype, x: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> StoredLogits:
        self.check()
        assert x is not None
        return StoredLogits(x, dtype, weight, bias, self.compute, self.chunk)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part: ``(..., ceil(v/tp))``."""
        x, weight, _ = self.tensors
        return tuple(x.shape) if weight is None else (*x.shape[:-1], weight.shape[0])


def made_logits(x: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> Tensor:
    """The logits ``x Wᵀ + b`` of a head's inputs, computed in the type ``compute`` whatever autocast says."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
