"""The storage of one rank's part of logits that are sharded by vocabulary: logits in memory, or the head's inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


class StoredLogits:
    """One rank's part of logits, in memory as the head made it.

    A cast to a wider type is not carried out before somebody reads the part: the loss casts a few tokens at a time.

    Args:
        base: the logits ``[..., ceil(v/tp)]``.
        dtype: the type that readers get; it represents every number of ``base``.

    Attributes:
        tensors: the logits and two Nones; in :class:`DeferredLogits` the head's input, weight and bias.
        dtype: the type that readers get.
        chunk: how many tokens' logits a loss makes at a time; 0 for as many as fit into its own limit.
    """

    def __init__(self, base: Tensor, dtype: torch.dtype) -> None:
        self.tensors: tuple[Tensor, Tensor | None, Tensor | None] = (base, None, None)
        self.dtype, self.chunk = dtype, 0

    def read(self) -> Tensor:
        """The logits as a tensor of :attr:`dtype`."""
        return self.tensors[0].to(self.dtype)

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> StoredLogits:
        """The part with other leading dims: ``change`` reshapes the tokens or chooses among them, and leaves the last dim."""
        return StoredLogits(change(self.tensors[0]), self.dtype)

    def cast(self, dtype: torch.dtype) -> StoredLogits:
        """The same part, for readers of another type."""
        return StoredLogits(self.tensors[0], dtype)

    def detached(self) -> StoredLogits:
        """The same part without a graph."""
        return self.of_tokens(lambda x: x.detach())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part: ``(..., ceil(v/tp))``."""
        return tuple(self.tensors[0].shape)


class DeferredLogits(StoredLogits):
    """One rank's part of logits that the head has not computed yet: its input, weight and bias.

    Args:
        x: the head's input ``[..., h]``.
        weight: this rank's part of the head's weight, ``[ceil(v/tp), h]``.
        bias: this rank's part of its bias, ``[ceil(v/tp)]``, or None.
        dtype: the type that readers get.
        compute: the type in which the product is computed, as autocast was when the head was called.
        chunk: how many tokens' logits a loss makes at a time.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, compute: torch.dtype, chunk: int
    ) -> None:
        self.tensors = (x, weight, bias)
        self.dtype, self.compute, self.chunk = dtype, compute, chunk
        self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        """The versions of the tensors, which in-place changes count up; tensors made in inference mode have none."""
        return [one._version for one in self.tensors if one is not None and not one.is_inference()]

    def check(self) -> None:
        """Refuse to read logits whose inputs were changed in place after the head was called, as an optimizer does.

        Raises:
            RuntimeError: naming the remedies.
        """
        if self._read_versions() != self._versions:
            raise RuntimeError(
                "logits that were not made yet (loss_chunk) are read after the head's weight or its input has changed, and would "
                "be other logits; read them before the optimizer steps (logits.whole() keeps all, on all ranks), or leave "
                "loss_chunk out"
            )

    def read(self) -> Tensor:
        """The logits, computed now.

        Raises:
            RuntimeError: if the inputs were changed.
        """
        self.check()
        x, weight, bias = self.tensors
        assert weight is not None
        with torch.autocast(x.device.type, enabled=False):
            made = F.linear(
                x.to(self.compute), weight.to(self.compute), None if bias is None else bias.to(self.compute)
            )
        return made.to(self.dtype)

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """The part for other leading dims of the head's input."""
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return DeferredLogits(change(x), weight, bias, self.dtype, self.compute, self.chunk)

    def detached(self) -> DeferredLogits:
        """The same part without a graph."""
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return DeferredLogits(
            x.detach(), weight.detach(), None if bias is None else bias.detach(), self.dtype, self.compute, self.chunk
        )

    def cast(self, dtype: torch.dtype) -> DeferredLogits:
        """The same part, for readers of another type."""
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return DeferredLogits(x, weight, bias, dtype, self.compute, self.chunk)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part: ``(..., ceil(v/tp))``."""
        x, weight, _ = self.tensors
        assert weight is not None
        return (*x.shape[:-1], weight.shape[0])
