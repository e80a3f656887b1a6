"""The two products of tensor parallelism, each one function of autograd with its collective: columns and rows (arXiv 2205.05198).

All columns that read one gathered activation are one function: it gathers, multiplies, and keeps the shard alone. Its backward
gathers again under the input-gradient products, which add up in one buffer, and reduce-scatters that under the weight-gradient
products. Each column then takes what was made for it. A row is one function, too: product and reduce-scatter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from lightning_seqpar.distributed.async_ops import PendingAllReduce, PendingGather, PendingReduceScatter
from lightning_seqpar.distributed.autograd import (
    Function,
    grad_hooks,
    identities,
    once_differentiable,
    saved_tensor_hooks,
    set_grad_enabled,
)
from lightning_seqpar.distributed.functional import GraphAllReduce, GraphGather, GraphReduceScatter, behind
from lightning_seqpar.layout.stand_in import Later, read


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


class Low(Protocol):
    """What computes the products of columns and rows in fewer bits, with the arguments of :class:`Products` and :class:`Row`."""

    over_data: bool  # whether replicas agree on scales

    def columns(self, how: Any, *tensors: Tensor | None, traced: bool = False, cuts_in: bool = False) -> Any:
        """Columns; with ``cuts_in`` and no tokens a row whose partial sums are left."""

    def row(self, how: Any, x: Tensor, weight: Tensor, *, traced: bool = False) -> Any:
        """A row."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """How the positions of one activation lie on the tensor-parallel ranks, and how they come together.

    ===============  ==================================  ====================================
    method           with sequence parallelism           without
    ===============  ==================================  ====================================
    start_gather     all-gather: shard → whole           nothing, the activation is whole
    start_sum        reduce-scatter: addend → shard      all-reduce: addend → sum
    ===============  ==================================  ====================================
    """

    traced: ClassVar[bool] = False  # whether the collectives are operations of a graph

    group: ProcessGroup  # the tensor-parallel ranks
    dim: int  # of the sequence in [b, s, h]
    sp: bool  # whether each rank holds a shard
    length: int = 0  # positions of the whole sequence
    batch: int = 0  # of flattened tokens [b·s, h] the size of the batch; 0 for an activation

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
    """The same in a compiled block, whose graph has the collectives as operations of its own, and no flattened tokens."""

    traced: ClassVar[bool] = True
    # By how many positions the shards of all ranks are longer together; the length is not read, so that one graph serves all
    # sequences with as much padding.
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


def owned(view: Tensor) -> Tensor:
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
    return owned(out) if out._is_view() else out


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
                whole = owned(whole)
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
        return owned(out) if not tokens.traced and out._is_view() else out

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


READERS = (Products, Row)
"""Autograd functions that read the weights of parallel linears."""

REDUCTIONS = (Row,)
"""Autograd functions behind which every rank has its shard of a sum over ranks."""


Hooks: TypeAlias = tuple[Any, Any] | None
"""Hooks on saved tensors, or none."""

_MADE = "_seqpar_made"
"""Attribute of a column with what was made for it where an activation was gathered: the activation and its version, the state of
autograd and autocast, what tells the column's parameters from others, and the output. The column may be called otherwise."""


class ColumnGroup:
    """The columns of a module that read what is gathered for it, which one function of autograd gathers and multiplies.

    At first these are all columns that could. One that is called with another tensor (a norm, an adapter or arithmetic of the
    user's stands in front of it) multiplies by itself, and is left out from the next step on.
    """

    def __init__(self, columns: Iterable[Any] = ()) -> None:
        self._all: tuple[Any, ...] = tuple(columns)
        self._columns = self._all
        self.left: set[Any] = set()
        self._whole: Tensor | None = None
        self._again: tuple[Tokens, Kept] | None = None
        self._joined = 0  # how many columns multiplied it
        self._low: Low | None = None  # what those multiply by that join
        for column in self._columns:
            self._low = column.float8 or self._low

    def gather(self, tokens: Tokens, x: Tensor, hooks: Hooks = None, *, regather: bool = True) -> Tensor:
        """A shard on its way to the columns, whole: ``[b, s/tp, h]`` → ``[b, s, h]``.

        ``hooks`` are those on saved tensors that apply; with ``regather`` the shard is kept, and the backward gathers it again.
        """
        joined: list[Any] = []
        transposed: list[bool] = []
        parameters: list[Tensor | None] = []
        dtype = autocast_dtype(x)
        for column in self._columns:
            own = column._parameters
            weight = own.get("weight")
            is_own = (type(weight) is Parameter or isinstance(weight, Parameter)) and "bias" in own
            if not is_own or column._forward_pre_hooks or column.float8 is not self._low:
                continue  # hooks in front of it may change its weight, or its input
            if weight.shape[0 if column.transposed else 1] == x.shape[-1] and (dtype is not None or weight.dtype == x.dtype):
                joined.append(column)
                transposed.append(column.transposed)
                parameters += weight, own["bias"]
        whole: Tensor
        kept = kept_of(x, traced=tokens.traced) if regather else None
        low = self._low if joined else None
        apply = Products.applied if low is None else low.columns
        whole, *made = apply((tokens, kept, transposed, dtype), x, *parameters, traced=tokens.traced)
        if joined:
            hand_out(joined, whole, made, hooks, dtype)
        if not tokens.traced:
            self._whole, self._joined = whole if joined else None, len(joined)
            # Of a shard that is kept in fewer bits, and not what it was made of, nothing can be gathered again as it was.
            is_kept = kept is not None and (low is None or kept[1] is not None)
            self._again = (tokens, kept) if joined and kept is not None and is_kept else None
            if low is not None and any(column._forward_hooks for column in joined):
                read(whole)  # by all ranks, whoever of them looks at it
        return whole

    def take_all(self) -> tuple[Tensor, list[Any], list[Tensor], Callable[[], Tensor]] | None:
        """What was gathered, the columns that multiplied it, what they made, and how it is gathered again.

        None unless all columns would make the same of it now.
        """
        whole, again = self._whole, self._again
        if whole is None or again is None or not self._all:
            return None
        made: list[Tensor] = []
        for column in self._all:
            noted = column.__dict__.get(_MADE)
            if (one := take_made(column, whole)) is None:
                return None
            column.__dict__[_MADE] = noted
            made.append(one)
        for column in self._all:
            del column.__dict__[_MADE]
        return whole, [*self._all], made, functools.partial(gather_again, *again, again[1][0]._version)

    def close(self, name: str, *, aborted: bool) -> None:
        """The module ``name`` returned, or raised: what no column has taken is let go of.

        Raises RuntimeError if a hook was registered on what was gathered when columns had read it.
        """
        left = []
        for column in self._columns:
            if column.__dict__.pop(_MADE, None) is not None:
                left.append(column)
        if self._whole is None:
            return
        whole, self._whole, self._again = self._whole, None, None
        if aborted:
            return
        if grad_hooks(whole) is not None and len(left) < self._joined:
            raise RuntimeError(
                f"{name}: a hook was registered on the gradient of its input when linears in it had read it, and would not see "
                "what they add to it; register it before (in a forward pre-hook of the module)"
            )
        self.left.update(left)

    def settle(self) -> None:
        """Leave out the columns that were not called with what was gathered.

        Call it where the backwards of all forwards have run: in one, a part of a forward may be run again as it ran.
        """
        if self.left:
            self._columns = tuple(column for column in self._columns if column not in self.left)
            self.left.clear()


NO_COLUMNS = ColumnGroup()
"""For what is gathered, and read by none that could join."""


def hand_out(columns: Sequence[Any], whole: Tensor, made: Sequence[Tensor], hooks: Hooks, dtype: torch.dtype | None) -> None:
    """Give columns what was made for them, for their next call with ``whole``; ``dtype`` is autocast's."""
    version, state = whole._version, (hooks, torch.is_grad_enabled(), dtype)
    for column, out in zip(columns, made, strict=True):
        column.__dict__[_MADE] = whole, version, state, identities(column._parameters.values()), out


@torch.compiler.substitute_in_graph(hand_out)
def _hand_out_in_graph(
    columns: Sequence[Any], whole: Tensor, made: Sequence[Tensor], hooks: Hooks, dtype: torch.dtype | None
) -> None:
    """The same in a graph, where nothing but the block's own code runs before the columns do, and is seen by who traces it."""
    state = torch.is_grad_enabled(), dtype
    for column, out in zip(columns, made, strict=True):
        column.__dict__[_MADE] = whole, 0, state, tuple(column._parameters.values()), out


def take_made(column: Any, x: Tensor) -> Tensor | None:
    """What was made for a column where ``x``, which it is called with, was gathered; None if it has to multiply by itself."""
    noted = column.__dict__.get(_MADE)
    if noted is None:
        return None
    whole, version, state, parameters, out = noted
    if whole is not x:
        return None
    if type(x) is Later:
        is_other = x.made is not None and x.made._version > 0
    else:  # a hook of x sees the gradient of those that read it, and of a leaf that x was made it is kept
        is_other = x._version != version or grad_hooks(x) is not None or (x.requires_grad and x.grad_fn is None)
    # An activation checkpoint that began since would run the column again, and not what made this.
    if (
        is_other
        or state != (saved_tensor_hooks(), torch.is_grad_enabled(), autocast_dtype(out))
        or parameters != identities(column._parameters.values())
    ):
        return None
    del column.__dict__[_MADE]
    return out  # type: ignore[no-any-return]


@torch.compiler.substitute_in_graph(take_made)
def _take_made_in_graph(column: Any, x: Tensor) -> Tensor | None:
    """The same in a graph. A change of ``x`` in place is refused when the graph is made."""
    noted = column.__dict__.get(_MADE)
    if noted is None:
        return None
    whole, _, state, parameters, out = noted
    if whole is not x or state != (torch.is_grad_enabled(), autocast_dtype(x)):
        return None
    for before, now in zip(parameters, column._parameters.values(), strict=True):
        if before is not now:
            return None
    del column.__dict__[_MADE]
    return out  # type: ignore[no-any-return]
