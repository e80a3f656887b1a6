"""Weight-grad products of a backward that run under its collectives.

Nothing waits for the gradient of a weight, and everything for that of an activation. So the weight-grad product of a linear
is a node of its own in the graph, and a collective that takes long a pair of them, one that starts and one that waits.
Autograd runs what is ready in the order of its numbers, the youngest first: products get the number between the two. To
everyone else these are gradients like all others, and where a torch can't number nodes they are only made earlier.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from lightning_seqpar.distributed.async_ops import PendingAllReduce, PendingGather, PendingReduceScatter
from lightning_seqpar.distributed.autograd import (
    current_backward,
    has_node_hooks,
    has_tensor_hooks,
    input_node,
    leaf_of,
    sequence_nr,
    set_sequence_nr,
    will_run,
)
from lightning_seqpar.distributed.collectives import (
    all_gather,
    gather_from_sequence_parallel_region,
    passes_none,
    reduce_from_tensor_parallel_region,
    reduce_scatter,
    reduce_scatter_to_sequence_parallel_region,
)

T = TypeVar("T")


class PerBackward(Generic[T]):
    """One thing for each backward under way: a hook may run another one of the same graph."""

    def __init__(self) -> None:
        self._held: dict[int, T] = {}

    def put(self, thing: T) -> None:
        """It is the running backward's."""
        self._held[current_backward()] = thing

    def take(self) -> T | None:
        """The running backward's, once."""
        return self._held.pop(current_backward(), None)


# ---- products --------------------------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    """``[..., h]`` → ``[b·s, h]``."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, at less host time where it is of that type."""
    return x if x.dtype == dtype else x.to(dtype)


class WgradProduct(NamedTuple):
    """The product that makes a weight's gradient, ``dW = dyᵀ x``, still to run.

    Attributes:
        grad: of the output, ``[b·s, f/tp]``.
        read: gives the input, ``[b, s, h]``.
        dtype: of the weight.
        transposed: whether the weight is ``[h, f/tp]``.
    """

    grad: Tensor
    read: Callable[[], Tensor]
    dtype: torch.dtype
    transposed: bool = False

    def make(self, kept: Tensor | None = None) -> Tensor | None:
        """The gradient; none if it was added to ``kept``, that of earlier micro-batches, without a tensor of its own."""
        left, right = self.grad.t(), cast(rows_of(self.read()), self.grad.dtype)
        if kept is not None and kept.dtype == left.dtype:
            (kept.t() if self.transposed else kept).addmm_(left, right)
            return None
        made = cast(torch.mm(left, right), self.dtype)
        return made.t() if self.transposed else made


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As ``once_differentiable``; ``ctx.is_plain`` says that nobody will differentiate the result."""
    differentiable: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def told(ctx: Any, *grads: Any) -> Any:
        ctx.is_plain = not torch.is_grad_enabled()
        return (backward if ctx.is_plain else differentiable)(ctx, *grads)

    return told


def is_wanted(ctx: Any, at: int) -> bool:
    """Whether the running backward needs a gradient for tensor argument ``at``: ``torch.autograd.grad`` asks for some."""
    node = input_node(ctx, at)
    try:
        return node is not None and will_run(node)
    except RuntimeError:  # a leaf that it was asked for
        return True


def kept_grad(ctx: Any, at: int) -> Tensor | None:
    """The gradient of earlier micro-batches that tensor argument ``at`` of a running backward has, if one may add to it.

    That is where autograd's own next act would be to add, with no hook to see it: not for ``torch.autograd.grad``, for
    weights that are computed, or where gradients are differentiated.
    """
    node = input_node(ctx, at)
    weight = leaf_of(node)
    if weight is None or weight.grad is None or not ctx.is_plain or not weight.requires_grad:
        return None  # the last: frozen since the forward
    if has_tensor_hooks(weight) or has_node_hooks(node):
        return None
    kept: Tensor = weight.grad
    if type(kept) is not Tensor or kept.requires_grad or kept.layout != torch.strided or kept.shape != weight.shape:
        return None
    try:
        return kept if will_run(node) else None
    except RuntimeError:  # torch.autograd.grad was asked for this weight
        return None


class DeferredWgrad(PerBackward[WgradProduct]):
    """Where the backward of one linear leaves its weight-grad product."""


class _DeferWgrad(torch.autograd.Function):
    """A weight on its way to one linear; its backward runs the linear's weight-grad product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: DeferredWgrad) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.late = late
        return weight.detach()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        product = ctx.late.take()
        return (grad if product is None else product.make(kept_grad(ctx, 0))), None


def defer_wgrad(weight: Tensor, number: int | None) -> tuple[Tensor, DeferredWgrad | None]:
    """A weight for one linear, and where to leave its weight-grad product, to run at a collective's number."""
    if number is None or not weight.requires_grad or type(weight) not in (Tensor, Parameter):
        return weight, None
    late = DeferredWgrad()
    given: Tensor = _DeferWgrad.apply(weight, late)  # type: ignore[no-untyped-call]
    set_sequence_nr(given, number)
    return given, late


# ---- collectives -----------------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """Of the input-grad products of one backward.

    Attributes:
        left: columns that will still come.
        total: of those that came; none before the first.
    """

    left: int
    total: Tensor | None


class BackwardExchange:
    """What the backward of a collective is made of, on its way from node to node.

    Column linears that read what it made sum their input-grad products here, in one tensor; the collective's node leaves the
    collective that it has started to the one that waits.
    """

    def __init__(self) -> None:
        self._pending: PerBackward[PendingAllReduce | PendingGather | PendingReduceScatter] = PerBackward()
        self._sums: PerBackward[_Sum] = PerBackward()
        self._columns: list[weakref.ref[Any]] = []

    def add_column(self, ctx: Any) -> None:
        """A node whose backward will call :meth:`add_product`."""
        self._columns.append(weakref.ref(ctx))

    def add_product(self, grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """``dx += dy W``; the last column of a backward gets the sum, ``[b·s, h]``.

        Args:
            grad: ``[b·s, f/tp]``.
            weight: ``[f/tp, h]``.
            dtype: of the sum.
        """
        left, total = self._sums.take() or _Sum(self._count(), None)
        right = cast(weight, grad.dtype)
        if total is None:
            total = cast(torch.mm(grad, right), dtype)
        elif grad.dtype == dtype:
            total.addmm_(grad, right)
        else:
            total += torch.mm(grad, right)
        return self._end(left, total)

    def skip_product(self) -> Tensor | None:
        """A column whose output has no gradient; it may be the last, and then gets the sum."""
        left, total = self._sums.take() or _Sum(self._count(), None)
        return self._end(left, total)

    def _end(self, left: int, total: Tensor | None) -> Tensor | None:
        if left <= 1:
            return total
        self._sums.put(_Sum(left - 1, total))
        return None

    def _count(self) -> int:
        """Columns that the running backward comes to."""
        nodes = [node for ref in self._columns if (node := ref()) is not None]
        return sum(will_run(node) for node in nodes)

    def give(self, pending: PendingAllReduce | PendingGather | PendingReduceScatter) -> None:
        """Leave it; autograd passes nothing on in its place."""
        self._pending.put(pending)

    def take(self, grad: Tensor | None) -> Tensor | None:
        """What the collective made; ``grad`` where none is under way."""
        pending = self._pending.take()
        return grad if pending is None else pending.wait()


class _Wait(torch.autograd.Function):
    """Forward: identity. Backward: the end of what the next node started."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: BackwardExchange) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot = slot
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.slot.take(grad), None


class _GatherOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: BackwardExchange, dim: int, group: ProcessGroup, length: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.dim, ctx.group = slot, dim, group
        return all_gather(x, dim, group, length)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the result will be differentiated
            return reduce_scatter_to_sequence_parallel_region(grad, ctx.dim, ctx.group), *_NONE
        pending = PendingReduceScatter(grad, ctx.dim, ctx.group, async_op=True)
        return ctx.slot.give(pending), *_NONE


class _ReduceScatterOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: BackwardExchange, dim: int, group: ProcessGroup, length: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.dim, ctx.group, ctx.length = slot, dim, group, x.shape[dim]
        return reduce_scatter(x, dim, group)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return gather_from_sequence_parallel_region(grad, ctx.dim, ctx.group, ctx.length), *_NONE
        pending = PendingGather(grad, ctx.dim, ctx.group, ctx.length, async_op=True)
        return ctx.slot.give(pending), *_NONE


class _CopyOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: BackwardExchange, dim: int, group: ProcessGroup, length: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.group = slot, group
        return x.view_as(x)

    @staticmethod
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return reduce_from_tensor_parallel_region(grad, ctx.group), *_NONE
        pending = PendingAllReduce(grad, ctx.group, async_op=True)
        return ctx.slot.give(pending), *_NONE


_NONE = (None, None, None, None)


class OverlapWindow(NamedTuple):
    """Where weight-gradient products may run during the backward of one collective.

    Attributes:
        overlap_seq_nr: the autograd sequence number at which to schedule them, or None for no overlap.
        exchange: where column linears that read what the collective made sum their input-gradient products.
    """

    overlap_seq_nr: int | None
    exchange: BackwardExchange


def _over(function: Any, x: Tensor, dim: int, group: ProcessGroup, length: int) -> tuple[Tensor, OverlapWindow]:
    slot = BackwardExchange()
    waits: Tensor = _Wait.apply(x, slot)  # type: ignore[no-untyped-call]
    number = None
    if waits.grad_fn is not None:
        number = sequence_nr(waits.grad_fn)
        set_sequence_nr(waits, max(number - 1, 0))  # below the number, the collective's own above it
    return function.apply(waits, slot, dim, group, length), OverlapWindow(number, slot)


def gather_over(x: Tensor, dim: int, group: ProcessGroup, length: int) -> tuple[Tensor, OverlapWindow]:
    """As :func:`gather_from_sequence_parallel_region`; and what may run under the backward's reduce-scatter."""
    return _over(_GatherOver, x, dim, group, length)


def copy_over(x: Tensor, group: ProcessGroup) -> tuple[Tensor, OverlapWindow]:
    """As :func:`copy_to_tensor_parallel_region`; and what may run under the backward's all-reduce."""
    return _over(_CopyOver, x, 0, group, 0)


def reduce_scatter_over(x: Tensor, dim: int, group: ProcessGroup) -> tuple[Tensor, OverlapWindow]:
    """As :func:`reduce_scatter_to_sequence_parallel_region`; and what may run under the backward's gather."""
    return _over(_ReduceScatterOver, x, dim, group, 0)


READERS = (_DeferWgrad,)
"""Functions that read the weights of linears."""

REDUCTIONS = (_ReduceScatterOver,)
"""Functions behind which every rank has its shard of a sum over ranks."""
