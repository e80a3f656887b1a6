"""A rank's part of logits that are sharded by vocabulary: as the head made it, or still to be made."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Held:
    """A rank's part of logits, as the head made it; read as ``dtype``, which holds every number of it."""

    def __init__(self, base: Tensor, dtype: torch.dtype) -> None:
        self.tensors: tuple[Tensor, Tensor | None, Tensor | None] = (base, None, None)
        self.dtype, self.chunk = dtype, 0

    def read(self) -> Tensor:
        """The part."""
        return self.tensors[0].to(self.dtype)

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> Held:
        """The part after something was done to the tokens: a reshape, a choice among them."""
        return Held(change(self.tensors[0]), self.dtype)

    def cast(self, dtype: torch.dtype) -> Held:
        """The part, read as another type."""
        return Held(self.tensors[0], dtype)

    def detached(self) -> Held:
        """The part, of no graph."""
        return self.of_tokens(lambda x: x.detach())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(self.tensors[0].shape)


class Product(Held):
    """A rank's part that is not made yet: what the head's product would make it of, ``chunk`` tokens at a time."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, compute: torch.dtype, chunk: int
    ) -> None:
        self.tensors = (x, weight, bias)
        self.dtype, self.compute, self.chunk = dtype, compute, chunk
        self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        """Of tensors that have one: not those of an inference."""
        return [one._version for one in self.tensors if one is not None and not one.is_inference()]

    def check(self) -> None:
        """What the head would read must be what it read when it was called.

        Raises:
            RuntimeError: if an optimizer has stepped since.
        """
        if self._read_versions() != self._versions:
            raise RuntimeError(
                "logits that were not made yet (loss_chunk) are read after the head's weight or its input has changed, and would "
                "be other logits; read them before the optimizer steps (logits.whole() keeps all, on all ranks), or leave "
                "loss_chunk out"
            )

    def read(self) -> Tensor:
        """The part, made now."""
        self.check()
        x, weight, bias = self.tensors
        assert weight is not None
        with torch.autocast(x.device.type, enabled=False):
            made = F.linear(
                x.to(self.compute), weight.to(self.compute), None if bias is None else bias.to(self.compute)
            )
        return made.to(self.dtype)

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> Product:
        """The part of what the head would make of other tokens."""
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return Product(change(x), weight, bias, self.dtype, self.compute, self.chunk)

    def detached(self) -> Product:
        """The part, of no graph."""
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return Product(
            x.detach(), weight.detach(), None if bias is None else bias.detach(), self.dtype, self.compute, self.chunk
        )

    def cast(self, dtype: torch.dtype) -> Product:
        """The part, read as another type."""
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return Product(x, weight, bias, dtype, self.compute, self.chunk)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        x, weight, _ = self.tensors
        assert weight is not None
        return (*x.shape[:-1], weight.shape[0])


def are_known(x: Tensor) -> bool:
    """Whether numbers are at hand: on a device it would wait for them, and fake tensors have none."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)
