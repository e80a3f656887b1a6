"""Weight-gradient products that run while a collective of the backward is under way.

In a backward, nothing waits for a weight's gradient, and everything waits for an activation's. So the weight-gradient
product of a linear is made a node of its own in the autograd graph, and a collective becomes two nodes: one that starts it
and one that waits for it. Of the nodes that are ready, autograd runs the one with the highest sequence number first; the
products get a number between those two nodes, so they run between start and wait. For everyone else these are ordinary
gradients. If a version of torch does not let nodes be numbered, the products only run earlier.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from lightning_seqpar.distributed.async_ops import PendingAllReduce, PendingGather, PendingReduceScatter
from lightning_seqpar.distributed.autograd import (
    current_backward,
    input_node,
    once_differentiable,
    sequence_nr,
    set_sequence_nr,
    will_run,
)
from lightning_seqpar.distributed.collectives import all_gather, passes_none, reduce_scatter

T = TypeVar("T")
Pending: TypeAlias = PendingAllReduce | PendingGather | PendingReduceScatter


class PerBackward(Generic[T]):
    """A value for each backward that is under way; a hook may run another backward of the same graph inside the first."""

    def __init__(self) -> None:
        self._values: dict[int, T] = {}

    def put(self, value: T) -> None:
        """Set the value of the running backward."""
        self._values[current_backward()] = value

    def take(self) -> T | None:
        """Remove and return the value of the running backward; None if it has none."""
        return self._values.pop(current_backward(), None)


# ---- products --------------------------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    """``[..., h]`` → ``[b·s, h]``."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, with less host time if it has that type already."""
    return x if x.dtype == dtype else x.to(dtype)


class WgradProduct(NamedTuple):
    """The product of a weight's gradient, ``dW = dyᵀ x``, before it runs.

    Attributes:
        grad: the output's gradient ``dy``, ``[b·s, f/tp]``.
        read: returns the input ``x``, ``[b, s, h]``, gathered again if need be.
        dtype: of the weight.
        transposed: whether the weight is ``[h, f/tp]`` rather than ``[f/tp, h]``.
    """

    grad: Tensor
    read: Callable[[], Tensor]
    dtype: torch.dtype
    transposed: bool = False

    def make(self) -> Tensor:
        """Runs the product; returns the gradient, of the weight's shape."""
        made = cast(torch.mm(self.grad.t(), cast(rows_of(self.read()), self.grad.dtype)), self.dtype)
        return made.t() if self.transposed else made


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator like ``once_differentiable`` that sets ``ctx.is_plain``: whether the result will not be differentiated."""
    differentiable: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> Any:
        ctx.is_plain = not torch.is_grad_enabled()
        return (backward if ctx.is_plain else differentiable)(ctx, *grads)

    return wrapped


def is_wanted(ctx: Any, at: int) -> bool:
    """Whether the running backward needs a gradient for argument number ``at``; ``torch.autograd.grad`` asks for some only."""
    node = input_node(ctx, at)
    try:
        return node is not None and will_run(node)
    except RuntimeError:  # torch does not answer for a leaf that torch.autograd.grad was asked for
        return True


class DeferredWgrad(PerBackward[WgradProduct]):
    """Where the backward of one linear leaves its weight-gradient product for :class:`_DeferWgrad` to run."""


class _DeferWgrad(torch.autograd.Function):
    """A weight on its way to one linear; its backward runs the linear's weight-gradient product.

    Forward: the weight, ``[f/tp, h]``, unchanged. Backward: ``dW = dyᵀ x``, the product that the linear left in ``late``; if it
    left none, the gradient that it returned. Nothing is saved.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: DeferredWgrad) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.late = late
        return weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        product = ctx.late.take()
        return (grad if product is None else product.make()), None


def defer_wgrad(weight: Tensor, number: int | None) -> tuple[Tensor, DeferredWgrad | None]:
    """Prepare a weight so that its gradient's product runs at the sequence number ``number``, under a collective; None for not.

    Returns:
        The weight for the linear, and where to leave the product; the weight itself and None if it can't be deferred.
    """
    if number is None or not weight.requires_grad or type(weight) not in (Tensor, Parameter):
        return weight, None
    late = DeferredWgrad()
    given: Tensor = _DeferWgrad.apply(weight, late)  # type: ignore[no-untyped-call]
    set_sequence_nr(given, number)
    return given, late


# ---- collectives -----------------------------------------------------------------------------------------------


class BackwardExchange:
    """What the nodes of one collective's backward hand to each other.

    The column linears that read what the collective made sum their input gradients here, in one tensor. The node that starts
    the backward's collective leaves it here for the node that waits.

    Attributes:
        overlap_seq_nr: the sequence number at which weight-gradient products run under the collective; None for no overlap.
    """

    def __init__(self) -> None:
        self.overlap_seq_nr: int | None = None
        self._pending: PerBackward[Pending] = PerBackward()
        # The number of columns whose product is still to come, and the sum so far, [b·s, h]; None before the first product.
        self._sums: PerBackward[tuple[int, Tensor | None]] = PerBackward()
        self._columns: list[weakref.ref[Any]] = []

    def add_column(self, ctx: Any) -> None:
        """Register a column's node, whose backward will call :meth:`add_product` or :meth:`skip_product`."""
        self._columns.append(weakref.ref(ctx))

    def add_product(self, grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Add a column's input gradient, ``dx += dy W``.

        Args:
            grad: the column's output gradient ``dy``, ``[b·s, f/tp]``.
            weight: its weight, ``[f/tp, h]``.

        Returns:
            The sum, ``[b·s, h]``, for the last column of the backward; None for the others.
        """
        left, total = self._sums.take() or (self._count(), None)
        right = cast(weight, grad.dtype)
        if total is None:
            total = cast(torch.mm(grad, right), dtype)
        elif grad.dtype == dtype:
            total.addmm_(grad, right)
        else:
            total += torch.mm(grad, right)
        return self._end(left, total)

    def skip_product(self) -> Tensor | None:
        """Count a column whose output has no gradient; the sum if it is the last, else None."""
        left, total = self._sums.take() or (self._count(), None)
        return self._end(left, total)

    def _end(self, left: int, total: Tensor | None) -> Tensor | None:
        """Return the sum to the last column, and keep it for the next one otherwise."""
        if left <= 1:
            return total
        self._sums.put((left - 1, total))
        return None

    def _count(self) -> int:
        """Number of columns that the running backward will run."""
        nodes = [node for ref in self._columns if (node := ref()) is not None]
        return sum(will_run(node) for node in nodes)

    def give(self, pending: Pending) -> None:
        """Leave a started collective for the node that waits; autograd passes None on in place of its result."""
        self._pending.put(pending)

    def take(self, grad: Tensor | None) -> Tensor | None:
        """Wait for the collective and return its result; ``grad`` if none was started."""
        pending = self._pending.take()
        return grad if pending is None else pending.wait()


class _Wait(torch.autograd.Function):
    """Forward: identity. Backward: waits for the collective that the node behind it started, and returns its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: BackwardExchange) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot = slot
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # what was sent is no function of ``grad`` to autograd
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.slot.take(grad), None


class _CollectiveOver(torch.autograd.Function):
    """Forward: ``collective(x)``. Backward: starts its conjugate by ``start`` and leaves it in ``slot``; saves nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        slot: BackwardExchange,
        collective: Callable[[Tensor], Tensor],
        start: Callable[[Tensor], Pending],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.start = slot, start
        return collective(x)

    @staticmethod
    @passes_none
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.slot.give(ctx.start(grad)), None, None, None


class _ReduceScatterOver(_CollectiveOver):
    """The same of a reduce-scatter, behind which every rank has its shard of a sum over ranks."""


def _over(
    function: Any, x: Tensor, collective: Callable[[Tensor], Tensor], start: Callable[[Tensor], Pending]
) -> tuple[Tensor, BackwardExchange]:
    """Apply ``function`` behind a node that waits for its backward's collective, and number the two nodes."""
    exchange = BackwardExchange()
    waits: Tensor = _Wait.apply(x, exchange)  # type: ignore[no-untyped-call]
    if waits.grad_fn is not None:
        exchange.overlap_seq_nr = number = sequence_nr(waits.grad_fn)
        # The node that waits runs after the products; the one that starts is made next and has a higher number than they.
        set_sequence_nr(waits, max(number - 1, 0))
    return function.apply(waits, exchange, collective, start), exchange


def gather_over(x: Tensor, dim: int, group: ProcessGroup, length: int) -> tuple[Tensor, BackwardExchange]:
    """:func:`gather_from_sequence_parallel_region`, and the exchange of its backward's reduce-scatter."""
    return _over(
        _CollectiveOver,
        x,
        lambda x: all_gather(x, dim, group, length),
        lambda grad: PendingReduceScatter(grad, dim, group, async_op=True),
    )


def copy_over(x: Tensor, group: ProcessGroup) -> tuple[Tensor, BackwardExchange]:
    """:func:`copy_to_tensor_parallel_region`, and the exchange of its backward's all-reduce."""
    return _over(_CollectiveOver, x, lambda x: x.view_as(x), lambda grad: PendingAllReduce(grad, group, async_op=True))


def reduce_scatter_over(x: Tensor, dim: int, group: ProcessGroup) -> tuple[Tensor, BackwardExchange]:
    """:func:`reduce_scatter_to_sequence_parallel_region` of a term of a sum, and the exchange of its backward's all-gather."""
    length = x.shape[dim]
    return _over(
        _ReduceScatterOver,
        x,
        lambda x: reduce_scatter(x, dim, group),
        lambda grad: PendingGather(grad, dim, group, length, async_op=True),
    )


READERS = (_DeferWgrad,)
"""Autograd functions that read the weights of parallel linears, beside the linears' own."""

REDUCTIONS = (_ReduceScatterOver,)
"""Autograd functions behind which every rank has its shard of a sum over ranks."""
