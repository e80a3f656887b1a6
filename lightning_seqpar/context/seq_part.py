"""A tensor that tells the shape of a whole sequence and holds this rank's positions of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_seqpar.context.chunks import Chunks
from lightning_seqpar.context.exchange import gather_positions
from lightning_seqpar.distributed.autograd import without_overrides


@dataclass(frozen=True)
class Place:
    """Where a sequence lies in a tensor: in ``dim``, into which other dims may have been flattened.

    Args:
        chunks: how its positions are dealt out.
        dim: the dim, 0 or more.
        before: the size of what was flattened into it in front of the sequence: ``b`` in ``[b·s, h]``.
        behind: the size of what was flattened into it behind the sequence.
    """

    chunks: Chunks
    dim: int
    before: int = 1
    behind: int = 1

    @property
    def whole_size(self) -> int:
        """The size of the dim in the whole tensor."""
        return self.before * self.chunks.length * self.behind

    @property
    def local_size(self) -> int:
        """The size of the dim in what this rank holds."""
        return self.before * self.chunks.local_length * self.behind

    @property
    def is_plain(self) -> bool:
        """Whether the dim is the sequence and nothing else."""
        return self.before == 1 and self.behind == 1

    def same(self, other: Place) -> bool:
        """Whether both deal a dim out alike; the dims themselves may differ."""
        return (self.before, self.behind) == (other.before, other.behind) and self.chunks.same(other.chunks)

    def at(self, dim: int) -> Place:
        """The same in another dim."""
        return self if dim == self.dim else replace(self, dim=dim)

    def own(self, x: Tensor, dim: int | None = None) -> Tensor:
        """This rank's positions of a whole tensor, of which ``dim`` is dealt out as this one; nothing is sent."""
        return self.chunks.own(x, self.dim if dim is None else dim, self.before, self.behind)

    def reshaped(self, whole: tuple[int, ...], target: tuple[int, ...]) -> Place | None:
        """Where the sequence lies once a tensor of the shape ``whole`` has the shape ``target``; None if that cuts it up."""
        in_front = prod(whole[: self.dim]) * self.before
        length, seen = self.chunks.length, 1
        for dim, size in enumerate(target):
            if in_front % seen == 0:
                before = in_front // seen
                if size % (before * length) == 0 and size:
                    behind = size // (before * length)
                    if seen * before * behind * prod(target[dim + 1 :]) == in_front * self.behind * prod(
                        whole[self.dim + 1 :]
                    ) and (length > 1 or size == self.whole_size or dim == self.dim):
                        return Place(self.chunks, dim, before, behind)
            seen *= size
        return None


class SeqPart(Tensor):
    """A sequence of the whole shape, such as ``[b, s, h]``, of which this rank holds ``[b, s/cp, h]``.

    Functions on each position by itself run on what the rank holds; whole tensors that they are given beside it (rotary tables,
    masks, labels) count with the rank's positions alone. Attention and losses run over all ranks
    (:mod:`~lightning_seqpar.context.attention`, :mod:`~lightning_seqpar.context.loss`). Every other function gathers first, which is
    a collective over cp: it must run on all ranks.
    """

    runs_on_parts = True
    """A function mode hands functions of these on, and sees those of the parts (ElementwiseRecompute)."""

    _local: Tensor
    _place: Place

    @staticmethod
    def wrap(local: Tensor, place: Place) -> SeqPart:
        """The sequence of which ``local`` is this rank's part."""
        shape = list(local.shape)
        if shape[place.dim] != place.local_size:
            raise AssertionError(
                f"a part of {shape[place.dim]} at dim {place.dim}, where {place} has {place.local_size}"
            )
        shape[place.dim] = place.whole_size
        out: SeqPart = Tensor._make_wrapper_subclass(
            SeqPart, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        out._local, out._place = local, place
        return out

    @property
    def local(self) -> Tensor:
        """What this rank holds, with its graph: ``[b, s/cp, h]``."""
        return self._local

    @property
    def place(self) -> Place:
        """Where the sequence lies."""
        return self._place

    def like(self, local: Tensor) -> SeqPart:
        """The same sequence with another part of the same layout."""
        return SeqPart.wrap(local, self._place)

    def whole(self) -> Tensor:
        """The whole sequence as a plain tensor, ``[b, s, h]``. Forward: all-gather over cp. Backward: reduce-scatter."""
        place, local = self._place, self._local
        if type(local) is not Tensor and hasattr(local, "whole"):  # sharded by vocabulary too
            local = local.whole()
        if place.is_plain:
            return gather_positions(local, place.dim, place.chunks)
        split = local.unflatten(place.dim, (place.before, place.chunks.local_length, place.behind))
        return gather_positions(split, place.dim + 1, place.chunks).flatten(place.dim, place.dim + 2)

    def _take_over_graph(self) -> None:
        """Where an ``autograd.Function`` of somebody's made this sequence, give the part the graph that the Function has.

        Raises:
            RuntimeError: for a Function with several outputs, or with inputs that other functions made of plain tensors.
        """
        with without_overrides():
            node: Any = self.grad_fn
            number = self.output_nr
            if node is None:
                return
            self.detach_()
        inputs = [getattr(each, "variable", None) for each, _ in node.next_functions]
        known = all(
            found is not None or each is None for found, (each, _) in zip(inputs, node.next_functions, strict=True)
        )
        if number or not known:
            raise RuntimeError(
                f"{type(node).__name__.removesuffix('Backward')}, an autograd.Function, made a sequence of which each rank of "
                f"cp={self._place.chunks.size} holds a part, beside other outputs or of other tensors that have a graph: its gradient "
                "can't be taken there; write the function without autograd.Function, or set cp=1"
            )
        self._local = _OfFunction.apply(node, self._place, self._local, *map(local_of, inputs))  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The shape of the whole and the rank; no numbers, which would take a collective."""
        chunks = self._place.chunks
        return f"SeqPart(shape={list(self.shape)}, rank {chunks.rank} of cp={chunks.size} holds {chunks.local_length} positions)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on the part if it can be, else on the whole.

        Raises:
            RuntimeError: for a change in place that would reach a copy alone.
        """
        kwargs = dict(kwargs or {})
        if func in _FACTS:
            with without_overrides():
                return func(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, SeqPart):
                value._take_over_graph()
        handler = HANDLERS.get(func)
        if handler is not None:
            out = handler(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what reads the tensor below autograd, such as somebody's ``autograd.Function``: its gradient would be lost.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{func} got a sequence of which each rank of cp={_chunks_of(args).size} holds a part, past torch's functions (from an "
            "autograd.Function, a compiled extension or a reentrant activation checkpoint), where it can't be made whole; give "
            "it x.whole() (on all ranks), use checkpoint(..., use_reentrant=False), or set cp=1"
        )


class _OfFunction(torch.autograd.Function):
    """Forward: the part of a sequence that somebody's ``autograd.Function`` made. Backward: that Function's, on sequences."""

    @staticmethod
    def forward(ctx: Any, node: Any, place: Place, local: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.node, ctx.place = node, place
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        grads = ctx.node.apply(SeqPart.wrap(grad, ctx.place))
        return None, None, None, *map(local_of, grads if isinstance(grads, tuple) else (grads,))


def _chunks_of(args: Any) -> Chunks:
    found: list[SeqPart] = []
    tree_map_only(SeqPart, found.append, args)
    return found[0]._place.chunks


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}
"""By function, what runs it on parts; ``NotImplemented`` leaves it to :func:`on_whole`. Filled by the modules of this package."""

_FACTS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested",
            "is_mkldnn", "is_mps", "is_xla", "itemsize", "nbytes",
        )),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
        Tensor.is_complex, Tensor.get_device, Tensor.__len__, Tensor.__hash__, torch.is_floating_point, torch.is_complex, torch.numel,
        torch.is_tensor,
    ]
)  # fmt: skip


def local_of(x: Any) -> Any:
    """What this rank holds of a sequence; anything else unchanged."""
    return x._local if isinstance(x, SeqPart) else x


def whole_of(x: Any) -> Any:
    """A sequence as a whole plain tensor (collective over cp); anything else unchanged."""
    return x.whole() if isinstance(x, SeqPart) else x


def writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument: an in-place method, or ``inplace=True``."""
    name = getattr(func, "__name__", "")
    if kwargs.get("inplace") is True or "out" in kwargs or name in ("__setitem__", "__set__", "__delete__"):
        return True
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    )


def on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on whole sequences; collective over cp.

    Raises:
        RuntimeError: if it would change a sequence in place, which would reach the gathered copy alone.
    """
    if writes(func, kwargs) and any(isinstance(x, SeqPart) for x in (*args[:1], kwargs.get("out"))):
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} of a sequence of which each rank of cp={_chunks_of((args, kwargs)).size} holds a part "
            "would change a copy: it is whole only where it is used. Write the change as a new tensor (torch.where, torch.cat, "
            "x = x + y), or x = x.whole() first (on all ranks)"
        )
    plain_args, plain_kwargs = tree_map_only(SeqPart, SeqPart.whole, (args, kwargs))
    return func(*plain_args, **plain_kwargs)
