"""Weight-grad products of a backward that run under its collectives.

Nothing waits for the gradient of a weight, and everything for that of an activation. So the backward of a collective is
made to carry the weights of the linears that run shortly before it: their node in the graph is the collective's, which
starts, has their products made, and only then waits. To autograd these are gradients like all others: hooks, replicas'
reductions and ``autograd.grad`` see them as ever.

Which linears those are is known from the forward before: the first of all has no overlap, and a linear that is missing
in a later one, or new, costs nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from lightning_seqpar.collectives import (
    PendingAllReduce,
    PendingGather,
    PendingReduceScatter,
    all_gather,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter,
    reduce_scatter_to_sequence_parallel_region,
)
from lightning_seqpar.linearity import children, reach


class WeightGrad(NamedTuple):
    """The product that makes a weight's gradient, ``dW = dyᵀ x``, still to run.

    Attributes:
        grad: of the output, ``[b, s, f/tp]``.
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
        left, right = self.grad.flatten(0, -2).t(), self.read().flatten(0, -2).to(self.grad.dtype)
        if kept is not None and kept.dtype == left.dtype:
            (kept.t() if self.transposed else kept).addmm_(left, right)
            return None
        made = (left @ right).to(self.dtype)
        return made.t() if self.transposed else made


Late = Callable[[WeightGrad], None]
"""Takes the product that makes a weight's gradient, to run it later in the backward."""


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As ``once_differentiable``; ``ctx.is_plain`` says that nobody will differentiate the result."""
    differentiable: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def told(ctx: Any, *grads: Any) -> Any:
        ctx.is_plain = not torch.is_grad_enabled()
        return differentiable(ctx, *grads)

    return told


def kept_grad(ctx: Any, at: int) -> Tensor | None:
    """The gradient of earlier micro-batches that tensor argument ``at`` of a running backward has, if one may add to it in place.

    That is where autograd's own next act would be to add, with no hook to see it: not for ``torch.autograd.grad``, for
    weights that are computed, or where gradients are differentiated.
    """
    node = ctx.next_functions[at][0]
    weight = getattr(node, "variable", None)
    if weight is None or weight.grad is None or not ctx.is_plain:
        return None
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    kept: Tensor = weight.grad
    if type(kept) is not Tensor or kept.requires_grad or kept.layout != torch.strided or kept.shape != weight.shape:
        return None
    try:
        return kept if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad was asked for this weight
        return None


class Readers:
    """The weights that were multiplied with an activation, or after it, in the forwards so far."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Parameter]] = {}

    def add(self, weight: Tensor) -> None:
        """A linear has read it; what is no plain parameter (a computed weight, a shard of FSDP's) is left alone."""
        if type(weight) is Parameter and weight.requires_grad:
            self._known[id(weight)] = weakref.ref(weight)

    def only(self, weight: Tensor) -> None:
        """A linear has read it, and nothing else."""
        self._known.clear()
        self.add(weight)

    def __iter__(self) -> Any:
        found = (ref() for ref in self._known.values())
        return iter([weight for weight in found if weight is not None and weight.requires_grad])


class Cover:
    """One collective of the backward to come, and the products that wait for it.

    Args:
        readers: weights that it may carry.
        alone: where replicas reduce all that is in the graph, the identities of weights that were read without a cover.

    Attributes:
        node: the collective's, in the graph.
    """

    def __init__(self, readers: Iterable[Parameter] = (), alone: set[int] | None = None) -> None:
        self.weights = list(readers)
        self.node: Any = None
        self._alone = alone
        self._carried: dict[int, tuple[int, Tensor]] = {}
        self._waiting: dict[int, list[WeightGrad]] = {}
        self._made_in = self._run_in = torch._C._current_graph_task_id()

    def carry(self, out: Tensor, aliases: Iterable[Tensor]) -> None:
        """The collective ran: its result, and the weights as its node gives them out."""
        self.node = out.grad_fn
        pairs = zip(self.weights, aliases, strict=True)
        self._carried = {id(weight): (at, alias) for at, (weight, alias) in enumerate(pairs) if alias.requires_grad}

    def is_below(self, x: Tensor) -> bool:
        """Whether ``x`` is made of the collective's result: a gradient of ``x`` comes to it."""
        if self.node is None or x.grad_fn is None:
            return False
        first = self.node._sequence_nr()

        def below(node: Any) -> list[Any]:
            return [
                child for child in children(node) if child._sequence_nr() >= first and not hasattr(child, "variable")
            ]

        return any(node is self.node for node in reach(x.grad_fn, below))

    def lend(self, weight: Tensor) -> tuple[Tensor, Late | None]:
        """The weight for one product, and where to put the product that makes its gradient; none if it is not carried."""
        # A recompute in the backward is a graph of its own, which must not reach into that of the forward.
        if id(weight) not in self._carried or self._made_in != torch._C._current_graph_task_id():
            if self._alone is not None:
                self._alone.add(id(weight))
            return weight, None
        at, alias = self._carried[id(weight)]

        def late(product: WeightGrad) -> None:
            task = torch._C._current_graph_task_id()
            if self._run_in != task:  # of a backward that never came to the collective
                self._waiting, self._run_in = {}, task
            self._waiting.setdefault(at, []).append(product)

        return alias, late

    def run(self, ctx: Any) -> list[Tensor | None]:
        """The gradients of the weights, for the running backward of the collective; none where nothing is left to add.

        Raises:
            RuntimeError: for such a weight where each must have one.
        """
        waiting = self._waiting if self._run_in == torch._C._current_graph_task_id() else {}
        self._waiting = {}
        missing = [weight for at, weight in enumerate(self.weights) if at not in waiting]
        if self._alone is not None and any(id(weight) not in self._alone for weight in missing):
            shapes = [list(weight.shape) for weight in missing]
            raise RuntimeError(
                f"column- or row-parallel weights of shape {shapes} got no gradient in this step, and the reduction over "
                "replicas (dp > 1) waits for all; pass ddp={'find_unused_parameters': True}"
            )
        made: list[Tensor | None] = []
        for at in range(len(self.weights)):
            grads = [product.make(kept_grad(ctx, 1 + at)) for product in waiting.pop(at, [])]
            found = [grad for grad in grads if grad is not None]
            made.append(sum(found[1:], found[0]) if found else None)
        return made


class _GatherOver(torch.autograd.Function):
    """Forward: all-gather. Backward: reduce-scatter, over the products of the weights that it carries."""

    @staticmethod
    def forward(ctx: Any, cover: Cover, x: Tensor, dim: int, group: ProcessGroup, length: int, *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cover, ctx.dim, ctx.group = cover, dim, group
        return all_gather(x, dim, group, length), *(weight.detach() for weight in weights)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        pending = None if grad is None else PendingReduceScatter(grad, ctx.dim, ctx.group, async_op=True)
        made = ctx.cover.run(ctx)
        return None, None if pending is None else pending.wait(), None, None, None, *made


class _CopyOver(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce, over the products of the weights that it carries."""

    @staticmethod
    def forward(ctx: Any, cover: Cover, x: Tensor, group: ProcessGroup, *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cover, ctx.group = cover, group
        return x.view_as(x), *(weight.detach() for weight in weights)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        pending = None if grad is None else PendingAllReduce(grad, ctx.group, async_op=True)
        made = ctx.cover.run(ctx)
        return None, None if pending is None else pending.wait(), None, *made


class _ReduceScatterOver(torch.autograd.Function):
    """Forward: reduce-scatter. Backward: all-gather, over the products of the weights that it carries."""

    @staticmethod
    def forward(ctx: Any, cover: Cover, x: Tensor, dim: int, group: ProcessGroup, *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cover, ctx.dim, ctx.group, ctx.length = cover, dim, group, x.shape[dim]
        return reduce_scatter(x, dim, group), *(weight.detach() for weight in weights)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        pending = None if grad is None else PendingGather(grad, ctx.dim, ctx.group, ctx.length, async_op=True)
        made = ctx.cover.run(ctx)
        return None, None if pending is None else pending.wait(), None, None, *made


COVERS = (_GatherOver, _CopyOver, _ReduceScatterOver)
"""Whose nodes read the weights of linears."""


def gather_over(x: Tensor, dim: int, group: ProcessGroup, length: int, cover: Cover) -> Tensor:
    """As :func:`gather_from_sequence_parallel_region`; the backward has the products of ``cover`` made meanwhile."""
    if not cover.weights or not x.requires_grad:
        return gather_from_sequence_parallel_region(x, dim, group, length)
    whole, *aliases = _GatherOver.apply(cover, x, dim, group, length, *cover.weights)  # type: ignore[no-untyped-call]
    cover.carry(whole, aliases)
    return whole  # type: ignore[no-any-return]


def copy_over(x: Tensor, group: ProcessGroup, cover: Cover) -> Tensor:
    """As :func:`copy_to_tensor_parallel_region`; the backward has the products of ``cover`` made meanwhile."""
    if not cover.weights or not x.requires_grad:
        return copy_to_tensor_parallel_region(x, group)
    copied, *aliases = _CopyOver.apply(cover, x, group, *cover.weights)  # type: ignore[no-untyped-call]
    cover.carry(copied, aliases)
    return copied  # type: ignore[no-any-return]


def reduce_scatter_over(x: Tensor, dim: int, group: ProcessGroup, cover: Cover) -> Tensor:
    """As :func:`reduce_scatter_to_sequence_parallel_region`; the backward has the products of ``cover`` made meanwhile."""
    if not cover.weights or not x.requires_grad:
        return reduce_scatter_to_sequence_parallel_region(x, dim, group)
    shard, *aliases = _ReduceScatterOver.apply(cover, x, dim, group, *cover.weights)  # type: ignore[no-untyped-call]
    cover.carry(shard, aliases)
    return shard  # type: ignore[no-any-return]
