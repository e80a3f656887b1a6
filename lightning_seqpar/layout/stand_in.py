"""A tensor of a rank's width for modules that read the width of their input off it, where linears read the whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_seqpar.distributed.autograd import as_plain_tensors, without_subclasses

_PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
"""Functions whose first argument is an activation that is multiplied with a weight."""


class StandIn(Tensor):
    """An activation that tells this rank's width, and stands for a whole one.

    A module may write ``b, s, h = x.shape``, project ``x`` and bring what its attention made back to ``[b, s, h]``: on a rank, that
    must be its own features, and the projections must read all of ``x``. Columns resolve it (:func:`resolve`), and so do
    products with a weight. Every number in it is NaN, so that whoever else computes with it is found out.
    """

    whole: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS and args and isinstance(args[0], StandIn) and args[0].whole is not None:
            return func(args[0].whole, *args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, tuple(args), kwargs or {})  # type: ignore[no-untyped-call]


def stand_in(whole: Tensor, size: int) -> StandIn:
    """``[..., h]`` → a tensor of the shape ``[..., h/tp]`` that stands for it; ``size`` is tp."""
    narrow = whole.detach().new_full((), float("nan")).expand(*whole.shape[:-1], whole.shape[-1] // size)
    out = narrow.as_subclass(StandIn)
    out.whole = whole
    return out


class Later(Tensor):
    """A tensor that is made when a function first reads it, and tells its shape and type before."""

    make: Callable[[], Tensor]
    made: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ in ("__get__", "size", "dim", "numel"):
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Later, Later._read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _read(self) -> Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self._make()
        return self.made

    def _make(self) -> Tensor:
        return self.make().requires_grad_(self.requires_grad)


class GatheredLater(Later):
    """The same as an output of an autograd function: who reads it is behind that function in the graph."""

    __torch_function__ = as_plain_tensors

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what is compiled by itself is given what was made
    def _make(self) -> Tensor:
        return self.make()


def later(like: Tensor, shape: Sequence[int], make: Callable[[], Tensor], *, requires_grad: bool) -> Later:
    """A tensor of a shape, and of the type of ``like``, that ``make`` makes when it is read."""
    out: Later = Tensor._make_wrapper_subclass(Later, shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad)
    out.make = make
    return out


def gathered_later(like: Tensor, shape: Sequence[int], make: Callable[[], Tensor]) -> Tensor:
    """Likewise, for an autograd function to return."""
    out: GatheredLater = Tensor._make_wrapper_subclass(GatheredLater, shape, dtype=like.dtype, device=like.device)
    out.make = make
    return out


def read(x: Tensor) -> None:
    """Make a tensor now that would be made when it is read."""
    if isinstance(x, Later):
        x._read()


def resolve(x: Tensor) -> Tensor:
    """The activation that ``x`` stands for; ``x`` itself if it stands for none."""
    return x.whole if isinstance(x, StandIn) and x.whole is not None else x
