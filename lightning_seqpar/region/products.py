"""The two products of tensor parallelism, each one function of autograd with its collective: columns and rows (arXiv 2205.05198).

All columns that read one gathered activation are one function: it gathers, multiplies, and keeps the shard alone. Its backward
gathers again under the input-gradient products, which add up in one buffer, and reduce-scatters that under the weight-gradient
products. A row is one function, too: product and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.async_ops import PendingAllReduce, PendingGather, PendingReduceScatter
from lightning_seqpar.distributed.autograd import Function, once_differentiable, set_grad_enabled
from lightning_seqpar.distributed.functional import GraphAllReduce, GraphGather, GraphReduceScatter, behind


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Wait for it, and return what it made."""


class _Whole:
    """What every rank has already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """How the positions of one activation lie on the tensor-parallel ranks, and how they come together.

    ===============  ==================================  ====================================
    method           with sequence parallelism           without
    ===============  ==================================  ====================================
    start_gather     all-gather: shard → whole           nothing, the activation is whole
    start_sum        reduce-scatter: addend → shard      all-reduce: addend → sum
    ===============  ==================================  ====================================

    Attributes:
        group: the tensor-parallel ranks.
        dim: the tensor dim of the sequence in ``[b, s, h]``.
        sp: whether each rank holds a shard.
        length: positions of the whole sequence.
        batch: of flattened tokens ``[b·s, h]`` the size of the batch; 0 for an activation.
        traced: whether the collectives are operations of a graph.
    """

    traced: ClassVar[bool] = False

    group: ProcessGroup
    dim: int
    sp: bool
    length: int = 0
    batch: int = 0

    def start_gather(self, shard: Tensor, *, async_op: bool = True) -> Pending:
        """Start to put the shards together. As given, so returned: flattened tokens flattened."""
        if not self.sp:
            return _Whole(shard)
        flat = self.batch > 0
        return PendingGather(self.folded(shard) if flat else shard, self.dim, self.group, self.length, async_op, flat)

    def start_sum(self, addend: Tensor, *, async_op: bool = True) -> Pending:
        """Start to sum one addend of each rank, likewise."""
        if not self.sp:
            return PendingAllReduce(addend, self.group, async_op)
        flat = self.batch > 0
        return PendingReduceScatter(self.folded(addend) if flat else addend, self.dim, self.group, async_op, flat)

    def folded(self, x: Tensor) -> Tensor:
        """Flattened tokens as an activation: ``[b·s, h]`` → ``[b, s, h]``, or ``[s, b, h]`` where the sequence is dim 0."""
        sizes = (self.batch, -1) if self.dim == 1 else (-1, self.batch)
        return x.reshape(*sizes, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class GraphTokens(Tokens):
    """The same in a compiled block, whose graph has the collectives as operations of its own, and no flattened tokens.

    Attributes:
        padding: by how many positions the shards of all ranks are longer together; the length is not read, so that one graph
            serves all sequences with as much padding.
    """

    traced: ClassVar[bool] = True
    padding: int = 0

    def start_gather(self, shard: Tensor, *, async_op: bool = True) -> Any:
        """Start to put the shards together."""
        return GraphGather(shard, self.dim, self.group, self.whole_length(shard)) if self.sp else _Whole(shard)

    def start_sum(self, addend: Tensor, *, async_op: bool = True) -> Any:
        """Start to sum one addend of each rank."""
        if not self.sp:
            return GraphAllReduce(addend, self.group)
        return GraphReduceScatter(addend, self.dim, self.group, self.padding)

    def whole_length(self, shard: Tensor) -> int:
        """Positions of the whole sequence of a shard."""
        return shard.shape[self.dim] * self.group.size() - self.padding


_NORM = "_seqpar_norm"
"""Attribute of a norm's output with the call that made it, and the version that the output had."""


class NormCall:
    """A call of a norm, which is run again to make its output from its input, with the attributes and the autocast that it had."""

    def __init__(self, forward: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module) -> None:
        self.forward, self.x, self.version = forward, x.detach(), x._version
        self._casts, self._held = autocast_dtype(x), vars(module)
        self._attributes = dict(self._held)

    def note(self, out: Tensor) -> None:
        """Let ``out``, which it made, tell of it."""
        setattr(out, _NORM, (self, out._version))

    def run(self, x: Tensor, *, graph: bool = False) -> Tensor:
        """The output for its input, without a graph or with one."""
        enabled, held, now = torch.is_grad_enabled(), self._held, None
        set_grad_enabled(graph)
        try:
            if held != self._attributes:  # an eps, a gain, the mode were set since
                now = dict(held)
                held.clear()
                held.update(self._attributes)
            if self._casts is None and autocast_dtype(x) is None:
                return self.forward(x)
            with as_autocast(x.device.type, self._casts):
                return self.forward(x)
        finally:
            set_grad_enabled(enabled)
            if now is not None:
                held.clear()
                held.update(now)


Kept: TypeAlias = tuple[Tensor, NormCall | None]
"""What columns keep of the shard that they gather: itself, or what the norm read that made it."""


def kept_of(x: Tensor, *, traced: bool = False) -> Kept:
    """What columns keep of a shard; in a graph (``traced``) no norm is run again."""
    noted = None if traced else x.__dict__.get(_NORM)
    if noted is None:
        return x, None
    call, version = noted
    if version != x._version or call.x._version != call.version:
        return x, None
    return call.x, call


def gather_again(tokens: Tokens, kept: Kept, version: int) -> Tensor:
    """What was gathered, made again of what had that version."""
    tensor, norm = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: what column linears "
            "were given, or the norm in front of them (x += ...); write the change as a new tensor"
        )
    return tokens.start_gather(tensor if norm is None else norm.run(tensor), async_op=False).wait()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type in which autocast would compute a product on the device of ``x``; None if it is off."""
    device = "cpu" if x.is_cpu else x.device.type  # which makes a string
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def as_autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """A context in which autocast computes in ``dtype``, or is off."""
    if dtype is None and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype, enabled=dtype is not None)


def _owned(view: Tensor) -> Tensor:
    """A view as none: one that is made inside a function of autograd may not be changed in place by who gets it."""
    out: Tensor = torch.unsafe_chunk(view, 1)[0]
    return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, dtype: torch.dtype | None) -> Tensor:
    """``F.linear`` in ``dtype``, the type that autocast asks for; None for the inputs' own type."""
    matrix = weight.t() if transposed else weight
    if dtype is None:
        out = F.linear(x, matrix, bias)
    else:
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(x.to(dtype), matrix.to(dtype), None if bias is None else bias.to(dtype))
    return _owned(out) if out._is_view() else out


@torch.compiler.substitute_in_graph(_product)
def _graph_product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, dtype: torch.dtype | None) -> Tensor:
    """The same in a graph, where views are no matter."""
    matrix = weight.t() if transposed else weight
    if dtype is None:
        return F.linear(x, matrix, bias)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), matrix.to(dtype), None if bias is None else bias.to(dtype))


def _input_grad(total: Tensor | None, rows: Tensor, weight: Tensor, transposed: bool, own: bool, dtype: torch.dtype) -> Tensor:
    """``dx + dy W``, ``[b·s, h]``, added in place where the sum so far is this function's ``own``."""
    matrix = (weight.t() if transposed else weight).to(rows.dtype)
    if total is None:
        return torch.mm(rows, matrix).to(dtype)
    if rows.dtype != total.dtype:
        made = torch.mm(rows, matrix)
        return total.add_(made) if own else total + made
    return total.addmm_(rows, matrix) if own else torch.addmm(total, rows, matrix)


def _weight_grad(rows: Tensor, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """``dW = dyᵀ x``, of the weight's shape and type."""
    x = x.flatten(0, -2).to(rows.dtype)
    made = torch.mm(x.t(), rows) if transposed else torch.mm(rows.t(), x)
    return made.to(weight.dtype)


class Products(Function):
    """The column linears that read one activation, which is gathered for them.

    ============  ====================  ======================  ==========================================
    tensor        global                local                   saved for backward
    ============  ====================  ======================  ==========================================
    x             ``[b, s, h]``         ``[b, s/tp, h]``        itself, or what ``kept`` says; the whole with None
    weights       ``[f, h]`` each       ``[f/tp, h]``           themselves
    biases        ``[f]``               ``[f/tp]``              —
    x_full        ``[b, s, h]``         ``[b, s, h]``           —
    outputs       ``[b, s, f]``         ``[b, s, f/tp]``        —
    ============  ====================  ======================  ==========================================

    Forward: gathers, and multiplies by each weight. Backward, where ``dy`` are the outputs' gradients and ``dx_full`` is that of
    other readers of ``x_full``: ``dx = dx_full + Σ dy W`` is one term of a sum over tp, which is reduce-scattered;
    ``dW = dyᵀ x_full`` with ``x_full`` gathered again; ``db = Σ dy``. What is frozen, or has no gradient, costs no product.

    The last of ``how`` is the type in which autocast has products computed. With ``tokens`` None nothing is gathered,
    ``x`` is whole and kept, and ``dx`` is left as this rank's term.
    """

    @staticmethod
    def forward(
        ctx: Any, how: tuple[Tokens | None, Kept | None, Sequence[bool], torch.dtype | None], *tensors: Tensor | None
    ) -> Any:
        # In one tuple, x in front: of a function with as many names as arguments dynamo thinks that it takes no ctx.
        x, *parameters = tensors
        assert x is not None
        tokens, kept, transposed, dtype = how
        ctx.set_materialize_grads(False)
        whole = x
        if tokens is not None:
            whole = tokens.start_gather(x, async_op=False).wait()
            if whole is x:
                whole = x.view_as(x)
            elif not tokens.traced and whole._is_view():
                whole = _owned(whole)
            if not ctx.needs_input_grad[1]:
                ctx.mark_non_differentiable(whole)
        made: list[Tensor] = [] if tokens is None else [whole]
        for at, flip in enumerate(transposed):
            weight, bias = parameters[2 * at : 2 * at + 2]
            assert weight is not None
            made.append(_product(whole, weight, bias, flip, dtype))
        held, ctx.norm = (whole, None) if kept is None else kept
        ctx.save_for_backward(held if True in ctx.needs_input_grad[2::2] else None, *parameters[::2])
        ctx.tokens, ctx.transposed, ctx.gathers_again = tokens, transposed, kept is not None
        ctx.dtype, ctx.shape = x.dtype, whole.shape
        return made[0] if tokens is None else tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tokens, needs = ctx.tokens, ctx.needs_input_grad
        total: Any = None
        if tokens is not None:
            total, *outer = grads
        else:
            outer = [*grads]
        read = [at for at, grad in enumerate(outer) if grad is not None]
        out: list[Tensor | None] = [None] * len(needs)
        if not read:  # what is kept for products that nobody read may have been changed since
            if total is not None and needs[1]:
                out[1] = tokens.start_sum(total).wait()
            return tuple(out)
        kept, *weights = ctx.saved_tensors
        again: Any = kept
        if kept is not None and ctx.gathers_again:
            again = kept if ctx.norm is None else ctx.norm.run(kept)
            if tokens.traced and tokens.sp:
                again = behind(again, outer[read[0]])  # type: ignore[arg-type]
            again = tokens.start_gather(again)
        pending: Any = None
        own = False  # the gradient of other readers is not changed in place
        total = None if total is None else total.flatten(0, -2)
        for at in read:
            grad: Any = outer[at]
            outer[at] = grad = grad.flatten(0, -2)
            if needs[1]:
                total, own = _input_grad(total, grad, weights[at], ctx.transposed[at], own, ctx.dtype), True
        if needs[1]:
            pending = total.view(ctx.shape)
            pending = pending if tokens is None else tokens.start_sum(pending)
        whole = again if again is kept else again.wait()
        for at in read:
            grad = outer[at]
            if needs[2 + 2 * at]:
                out[2 + 2 * at] = _weight_grad(grad, whole, weights[at], ctx.transposed[at])
            if needs[3 + 2 * at]:
                out[3 + 2 * at] = grad.sum(0).to(weights[at].dtype)
        if pending is not None:
            out[1] = pending if tokens is None else pending.wait()
        return tuple(out)


class Row(Function):
    """A row linear: this rank's features multiplied, and the ranks' products summed.

    ============  ====================  ======================  ==================
    tensor        global                local                   saved for backward
    ============  ====================  ======================  ==================
    x             ``[b, s, f]``         ``[b, s, f/tp]``        itself
    weight        ``[h, f]``            ``[h, f/tp]``           itself
    y             ``[b, s, h]``         ``[b, s/tp, h]``        —
    ============  ====================  ======================  ==================

    Forward: ``y = Σ_r x_r W_rᵀ``, reduce-scattered (all-reduced without sequence parallelism). Backward: ``dy`` is gathered,
    ``dx = dy W``, ``dW = dyᵀ x``.
    """

    @staticmethod
    def forward(ctx: Any, how: tuple[Tokens, bool, Any], x: Tensor, weight: Tensor) -> Tensor:
        tokens, transposed, held = how
        ctx.set_materialize_grads(False)
        ctx.tokens, ctx.transposed, ctx.dtype = tokens, transposed, x.dtype
        needs_x, needs_weight = ctx.needs_input_grad[1:3]
        ctx.held = held
        ctx.save_for_backward(x if needs_weight and held is None else None, weight if needs_x or needs_weight else None)
        partial = _product(x, weight, None, transposed, autocast_dtype(x))
        out = tokens.start_sum(partial, async_op=False).wait()
        return _owned(out) if not tokens.traced and out._is_view() else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        if ctx.held is not None:
            (x,) = ctx.held.saved_tensors
        whole = ctx.tokens.start_gather(grad, async_op=False).wait()
        rows, dx, dw = whole.flatten(0, -2), None, None
        if ctx.needs_input_grad[1]:
            dx = _input_grad(None, rows, weight, ctx.transposed, False, ctx.dtype)
            dx = dx.view(*whole.shape[:-1], dx.shape[-1])
        if ctx.needs_input_grad[2]:
            dw = _weight_grad(rows, x, weight, ctx.transposed)
        return None, dx, dw


class Hold(Function):
    """What a row reads, kept in front of it: where a forward runs again up to here, the row itself does not.

    Forward and backward: identity, ``[b, s, f/tp]``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


READERS = (Products, Row)
"""Autograd functions that read the weights of parallel linears."""

REDUCTIONS = (Row,)
"""Autograd functions behind which every rank has its shard of a sum over ranks."""
