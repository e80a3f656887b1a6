"""torch's functions that run on parts of sequences: of each number by itself, along other dims, products, and views.

A handler gets a function with its arguments, and returns what it makes of them, or ``NotImplemented`` to have the sequences made
whole. A function without a handler is run on whole sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from math import prod
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_seqpar.context.chunks import sum_over_ranks
from lightning_seqpar.context.seq_part import HANDLERS, Handler, Handling, Place, SeqPart, functions, local_of, share_of, writes
from lightning_seqpar.distributed.autograd import without_subclasses
from lightning_seqpar.distributed.rng import drawn_apart
from lightning_seqpar.releases import is_look

_HOMES = (torch, Tensor, F, torch.special)


def handles(
    *names: str, homes: tuple[Any, ...] = _HOMES, first: bool = False, only: bool = False, composed: bool = False
) -> Callable[[Handler], Handler]:
    """Decorate the handler of the functions of these names, in ``homes``; the flags are those of ``Handling``."""

    def register(handler: Handler) -> Handler:
        for func in functions(" ".join(names), *homes):
            HANDLERS[func] = Handling(handler, first, only, composed)
        return handler

    return register


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a Python function by name, with its defaults."""
    names, defaults = _parameters_of(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@functools.cache
def _parameters_of(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of a function's parameters, and its defaults: looked up once, since that takes 90 calls."""
    found = signature(func).parameters
    return tuple(found), {name: one.default for name, one in found.items() if one.default is not one.empty}


# ---- each number by itself -------------------------------------------------------------------------------------


_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
    ceil celu clamp clamp_max clamp_min clip clone contiguous copysign cos cosh detach digamma div divide elu eq erf erfc erfinv exp
    exp2 expm1 fix floor floor_divide fmax fmin fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish
    hardtanh heaviside hypot isfinite isinf isnan le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp
    logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul multiply nan_to_num ne
    neg negative not_equal positive pow reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh
    softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc xlogy
    float double half bfloat16 long int short bool type zeros_like ones_like full_like empty_like
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __pow__ __rpow__
    __neg__ __abs__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
_IN_PLACE = """
    add_ sub_ mul_ div_ pow_ neg_ exp_ relu_ sigmoid_ tanh_ clamp_ clamp_min_ clamp_max_ masked_fill_ zero_ fill_ copy_ addcmul_
    addcdiv_ sqrt_ rsqrt_ lerp_ remainder_ floor_divide_ fmod_
    __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__
"""


def _aligned(place: Place, ndim: int, values: Iterable[Any]) -> Any:
    """What stands for ``values`` beside a part ``place`` of a tensor of ``ndim`` dims, under broadcasting: their own positions.

    NotImplemented if one of them has another size there.
    """
    from_right = ndim - place.dim
    out: list[Any] = []
    for value in values:
        if isinstance(value, SeqPart):
            other = value._place
            if value._local.ndim - other.dim == from_right and other.same(place):
                out.append(value._local)
                continue
            value = value.for_parts()
        if isinstance(value, Tensor) and value.ndim >= from_right:
            size = value.shape[value.ndim - from_right]
            if size == place.whole_size:
                value = place.own(value, value.ndim - from_right)
            elif size != 1:
                return NotImplemented
        out.append(value)
    return out


@handles(_ELEMENTWISE, _IN_PLACE)
def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each number by itself, under broadcasting; it may change the first argument in place."""
    changed = func in _CHANGE or kwargs.get("inplace") is True
    values = (*args, *kwargs.values())
    first = args[0] if changed else next((value for value in values if isinstance(value, SeqPart)), None)
    if not isinstance(first, SeqPart):
        return NotImplemented
    ndim = first._local.ndim
    if changed and any(isinstance(value, Tensor) and value.ndim > ndim for value in values):
        return NotImplemented  # torch's own message
    locals_ = _aligned(first._place, ndim, values)
    if locals_ is NotImplemented:
        return locals_
    out = func(*locals_[: len(args)], **dict(zip(kwargs, locals_[len(args) :], strict=True)))
    if changed:
        first._changed()
    if changed or out is first._local:
        return first
    if not isinstance(out, Tensor):  # x.type() without arguments
        return out
    return SeqPart.wrap(out, first._place.at(out.ndim - (ndim - first._place.dim)))


@handles("where")
def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A choice between numbers; with a condition alone, the indices of the whole."""
    return elementwise(func, args, kwargs) if len(args) + len(kwargs) > 1 else NotImplemented


@handles("type_as to cpu cuda", homes=(Tensor,))
def cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another dtype and device, told by a tensor of any shape."""
    x = args[0]
    out = func(*map(local_of, args), **{name: local_of(value) for name, value in kwargs.items()})
    if not isinstance(x, SeqPart):
        return out
    return x if out is x._local else x.like(out)


@handles(
    "dropout alpha_dropout rrelu bernoulli bernoulli_ rand_like randn_like randint_like normal_ uniform_ exponential_",
    first=True,
)
def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that draws a random number for each of the tensor's: each rank draws for its own positions."""
    if kwargs.get("generator") is not None:
        return NotImplemented
    if func in _DROPOUTS and not (
        _argument(args, kwargs, 1, "p", 0.5) and _argument(args, kwargs, 2, "training", func is not F.alpha_dropout)
    ):
        return elementwise(func, args, kwargs)
    with drawn_apart(args[0]._place.chunks.rank):
        return elementwise(func, args, kwargs)


_DROPOUTS = frozenset([F.dropout, torch.dropout, F.alpha_dropout])
_CHANGE = frozenset(func for func in HANDLERS if writes(func, {}))


# ---- along other dims ------------------------------------------------------------------------------------------


def _dims(dim: Any, ndim: int) -> list[int]:
    return [each % ndim for each in (dim if isinstance(dim, tuple | list) else (dim,))]


def _wrap_all(out: Any, place: Place) -> Any:
    if isinstance(out, Tensor):
        return SeqPart.wrap(out, place)
    return type(out)([SeqPart.wrap(each, place) for each in out])


def _along(at: int, default: int | None) -> Handler:
    """Makes the handler of functions along one dim, their argument ``at``, which is not the sequence's; the result has all dims."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dim = args[0], _argument(args, kwargs, at, "dim", default)
        if not isinstance(dim, int) or x._place.dim == dim % x.ndim:
            return NotImplemented
        return _wrap_all(func(x._local, *args[1:], **kwargs), x._place)

    return handler


handles("softmax log_softmax", only=True)(_along(1, None))
handles("glu", only=True)(_along(1, -1))
handles("normalize", only=True)(_along(2, 1))
handles("repeat_interleave", only=True)(_along(2, None))
handles("chunk split tensor_split", only=True)(_along(2, 0))


@handles("linear layer_norm rms_norm", only=True)
def over_last(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear over the last dim, or a norm over the last dims, which the sequence is not among."""
    x, shape = args[0], (0,) if func in _LINEAR else _argument(args, kwargs, 1, "normalized_shape")
    return NotImplemented if x._place.dim >= x.ndim - len(shape) else x.like(func(x._local, *args[1:], **kwargs))


_LINEAR = functions("linear", *_HOMES)
_SUMS = frozenset(f for home in (torch, Tensor) for f in (home.sum, home.mean))
_NORMS = frozenset([torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm])


@handles("sum mean amax amin argmax argmin max min logsumexp all any prod var std norm", homes=(torch, Tensor), first=True)
@handles("vector_norm norm", homes=(torch.linalg,), first=True)
def reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction over other dims; a sum or a mean also over the sequence, of which the ranks' are added."""
    x = args[0]
    dim = _argument(args, kwargs, 2 if func in _NORMS else 1, "dim", kwargs.get("axis"))
    if isinstance(dim, Tensor) or "other" in kwargs:  # the other of two tensors, for max and min
        return elementwise(func, args, kwargs)
    if isinstance(dim, bool | str):  # var(unbiased), and names
        return NotImplemented
    dims = list(range(x.ndim)) if dim is None or (isinstance(dim, tuple | list) and not dim) else _dims(dim, x.ndim)
    if x._place.dim in dims:
        return _sum_of_all(func, x, dims, args, kwargs) if func in _SUMS and len(args) <= 3 else NotImplemented
    out, place = func(x._local, *args[1:], **kwargs), x._place
    kept = (out if isinstance(out, Tensor) else out[0]).ndim == x.ndim
    return _wrap_all(out, place if kept else place.at(place.dim - sum(each < place.dim for each in dims)))


def _sum_of_all(func: Any, x: SeqPart, dims: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum or a mean over dims of which the sequence is one: the ranks' sums are added, as float32 where x is less."""
    keep = bool(_argument(args, kwargs, 2, "keepdim", kwargs.get("keepdims", False)))
    asked, mean = kwargs.get("dtype"), func not in (torch.sum, Tensor.sum)
    dtype: torch.dtype = asked or x._local.dtype
    if asked is None and torch.is_autocast_enabled(x._local.device.type):
        dtype = func(x._local.new_empty(0)).dtype  # on some devices autocast sums in float32
    if mean and not (dtype.is_floating_point or dtype.is_complex):
        return NotImplemented  # torch's own message
    if not mean and asked is None and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.int64
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = sum_over_ranks(torch.sum(x._local, dims, keepdim=keep, dtype=wide), x._place.chunks)
    return (total / prod(x.shape[each] for each in dims) if mean else total).to(dtype)


# ---- products --------------------------------------------------------------------------------------------------


def _factors(a: Any, b: Any) -> tuple[Tensor, Tensor, Place] | None:
    """The factors of this rank's part of ``a @ b``, and where the sequence lies in it; None if it is summed over, or in none."""
    for x, other, rows in ((a, b, True), (b, a, False)):
        if not isinstance(x, SeqPart) or not isinstance(other, Tensor) or x.ndim < 2:
            continue
        place, ndim = x._place, max(x.ndim, other.ndim)
        from_right = x.ndim - place.dim
        if from_right == (2 if rows else 1):  # rows of the first, columns of the second
            beside = other.for_parts() if isinstance(other, SeqPart) else other
            at = x.ndim - 2 if other.ndim == 1 else ndim - from_right
        elif from_right > 2 and other.ndim > 1:  # a batch dim
            aligned = _aligned(place, x.ndim, [other])
            if aligned is NotImplemented:
                continue
            (beside,), at = aligned, ndim - from_right
        else:
            continue
        return (x._local, beside, place.at(at)) if rows else (beside, x._local, place.at(at))
    return None


@handles("matmul __rmatmul__ mm bmm")
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product: rows or columns that are a sequence stay one, and so do batches; what is summed over is made whole."""
    if kwargs or len(args) != 2:
        return NotImplemented
    found = _factors(*(args if func is not Tensor.__rmatmul__ else args[::-1]))
    return NotImplemented if found is None else SeqPart.wrap(torch.matmul(found[0], found[1]), found[2])


@handles("addmm baddbmm")
def add_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum of a tensor and a product."""
    found = _factors(*args[1:]) if len(args) == 3 else None
    beside = NotImplemented if found is None else _aligned(found[2], found[0].ndim, args[:1])
    if found is None or beside is NotImplemented:
        return NotImplemented
    return SeqPart.wrap(func(*beside, found[0], found[1], **kwargs), found[2])


@handles("einsum")
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum of products, with its result's letters written: one of them stays a sequence, the others are made whole."""
    equation, *operands = args or (None,)
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != len(operands) or any(len(set(term)) < len(term) for term in terms):  # a diagonal
        return NotImplemented
    pairs = list(zip(terms, operands, strict=True))
    parts = ((term[x._place.dim], x._place) for term, x in pairs if isinstance(x, SeqPart) and len(term) == x.ndim)
    letter, place = next((found for found in parts if found[0] in right), (None, None))
    if letter is None or place is None:
        return NotImplemented
    locals_ = []
    for term, x in pairs:
        at = term.find(letter)
        if isinstance(x, SeqPart) and x._place.dim == at and x._place.same(place):
            locals_.append(x._local)
            continue
        if at >= 0 and x.shape[at] not in (1, place.whole_size):
            return NotImplemented  # torch's own message
        plain = x.for_parts() if isinstance(x, SeqPart) else x
        locals_.append(place.own(plain, at) if at >= 0 and x.shape[at] == place.whole_size else plain)
    return SeqPart.wrap(func(equation, *locals_), place.at(right.index(letter)))


@handles("multi_head_attention_forward", composed=True)
def multi_head_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.multi_head_attention_forward``: torch's own Python code, whose functions then run on parts, past its first question."""
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(func.__code__, names, func.__name__, func.__defaults__)(*args, **kwargs)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of ``[b, heads, s, d]``, and its weights ``[b, heads, s, t]`` if they are wanted; ``mask`` is added to scores."""
    if not need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout, dropout > 0)
    return weights @ v, weights


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to scores: minus infinity where a bool mask is true."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


@handles("embedding", homes=(F,), only=True)
def look_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a table for indices that are a sequence; not where they count how often a row is used, or change it."""
    x, *rest = args
    given = arguments_of(func, args, kwargs)
    if any(given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        return NotImplemented
    return SeqPart.wrap(func(x._local, *rest, **kwargs), x._place)


# ---- dims ------------------------------------------------------------------------------------------------------


def _shape_of(func: Any, shape: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """What shape the function makes of a tensor of a shape."""
    given = [torch.empty(arg.shape, device="meta") if isinstance(arg, Tensor) else arg for arg in args]
    named = {k: torch.empty(v.shape, device="meta") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return tuple(func(torch.empty(shape, device="meta"), *given, **named).shape)


_MAY_COPY = frozenset(f for home in (torch, Tensor) for f in (home.reshape, home.flatten)) | {Tensor.reshape_as}


@handles("reshape view flatten unflatten view_as reshape_as squeeze", first=True)
def reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape, in which the sequence still lies in one dim."""
    x, *rest = args
    if any(isinstance(v, torch.dtype) for v in (*rest, *kwargs.values())):
        return NotImplemented
    whole = tuple(x.shape)
    place = None if 0 in whole else x._place.reshaped(whole, target := _shape_of(func, whole, rest, kwargs))
    if place is None:
        return NotImplemented
    local = list(target)
    local[place.dim] = place.local_size
    return SeqPart.wrap(x._local.reshape(local) if func in _MAY_COPY else x._local.view(local), place)


@handles("transpose permute movedim moveaxis swapaxes swapdims t adjoint unsqueeze", first=True)
@handles("T mT H mH", homes=(Tensor,), first=True)
def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims in another order, or one more."""
    x, *rest = args
    sizes = tuple(range(2, 2 + x.ndim))  # each dim told by its size
    at = _shape_of(func, sizes, rest, kwargs).index(sizes[x._place.dim])
    return SeqPart.wrap(func(x._local, *rest, **kwargs), x._place.at(at))


@handles("expand expand_as broadcast_to", first=True)
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeats of other dims, without memory."""
    x, *rest = args
    target = list(_shape_of(func, x.shape, rest, kwargs))
    place = x._place.at(x._place.dim + len(target) - x.ndim)
    if target[place.dim] != place.whole_size:
        return NotImplemented
    target[place.dim] = place.local_size
    return SeqPart.wrap(x._local.expand(target), place)


@handles("select narrow unbind", first=True)
def take(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Entries of one dim."""
    x, dim = args[0], _argument(args, kwargs, 1, "dim", 0)
    if not isinstance(dim, int):
        return NotImplemented
    size, before = x.shape[dim], (slice(None),) * (dim % x.ndim)
    if func in (torch.unbind, Tensor.unbind):
        of_others = dim % x.ndim != x._place.dim
        return tuple(index(func, (x, (*before, at)), {}) for at in range(size)) if of_others else NotImplemented
    length = _argument(args, kwargs, 3, "length")
    start = _argument(args, kwargs, 2, "index" if length is None else "start")
    if not isinstance(start, int):
        return NotImplemented
    _shape_of(func, x.shape, args[1:], kwargs)  # raises where torch does
    start = start + size if start < 0 else start
    return index(func, (x, (*before, start if length is None else slice(start, start + length))), {})


_BASIC = (slice, type(None), type(Ellipsis))


@handles("__getitem__", first=True)
def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An index of numbers and slices: of the sequence a run of positions, or one of them."""
    x, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(isinstance(item, _BASIC) or type(item) is int for item in items):
        return NotImplemented
    used = sum(item is not None and item is not Ellipsis for item in items)
    full = (slice(None),) * (x._local.ndim - used)
    at = next((n for n, item in enumerate(items) if item is Ellipsis), len(items))
    items = (*items[:at], *full, *items[at + 1 :])
    dim, out_dim = 0, 0
    for number, item in enumerate(items):
        if item is None:
            out_dim += 1
            continue
        if dim == x._place.dim:
            return _index_sequence(x, items, number, out_dim)
        dim, out_dim = dim + 1, out_dim + (type(item) is not int)
    return NotImplemented


def _index_sequence(x: SeqPart, items: tuple[Any, ...], number: int, out_dim: int) -> Any:
    """An index of which ``items[number]`` is that of the sequence, which comes to lie in ``out_dim``."""
    place, item, local = x._place, items[number], x._local
    others = (*items[:number], slice(None), *items[number + 1 :])
    if isinstance(item, slice):
        start, stop, step = item.indices(place.whole_size)
        if (start, stop, step) == (0, place.whole_size, 1):
            return SeqPart.wrap(local[others], place.at(out_dim))
        if not place.is_plain or step != 1 or stop <= start:
            return NotImplemented
        runs = place.chunks.held_between(start, stop) or [(0, 0)]
        pieces = [local.narrow(place.dim, first, last - first) for first, last in runs]
        kept = pieces[0]
        if any(len(held) != 1 for held in place.chunks.ranges):  # a copy on one rank is one on all
            kept = torch.cat(pieces, place.dim)
        return SeqPart.wrap(kept[others], Place(place.chunks.sliced(start, stop), out_dim))
    at = item + place.whole_size * (item < 0)
    if not place.is_plain or not 0 <= at < place.whole_size:
        return NotImplemented  # or torch's own message
    held = place.chunks.held_between(at, at + 1)
    if not (local.is_floating_point() or local.dtype in (torch.int64, torch.int32)):
        return NotImplemented
    nothing = local.narrow(place.dim, 0, 0)
    mine = local.select(place.dim, held[0][0]) if held else nothing.sum(place.dim, dtype=local.dtype)
    rest = (*items[:number], *items[number + 1 :])
    return sum_over_ranks(mine[rest], place.chunks)


@handles("cat concat concatenate stack")
def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sequences of one layout side by side, whole tensors with their own positions; nothing behind nothing."""
    tensors = list(_argument(args, kwargs, 0, "tensors", ()))
    dim = _argument(args, kwargs, 1, "dim", kwargs.get("axis", 0))
    first = next((x for x in tensors if isinstance(x, SeqPart)), None)
    if first is None or "out" in kwargs:
        return NotImplemented
    stacks = func is torch.stack
    if not stacks:
        tensors = [x for x in tensors if isinstance(x, SeqPart) or x.shape != (0,)]  # an empty cache
        if len(tensors) == 1:
            return first.like(first._local.clone())
    at = dim % (first.ndim + stacks)
    if not stacks and at == first._place.dim:
        return NotImplemented
    if any(x.ndim != first.ndim or x.shape[first._place.dim] != first.shape[first._place.dim] for x in tensors):
        return NotImplemented
    locals_ = _aligned(first._place, first.ndim, tensors)
    if locals_ is NotImplemented:
        return locals_
    shift = stacks and at <= first._place.dim
    return SeqPart.wrap(func(locals_, at), first._place.at(first._place.dim + shift))


@handles("new_zeros new_ones new_empty new_full new_tensor is_contiguous is_conj is_neg is_inference retain_grad")
@handles("grad_fn is_leaf _version retains_grad", homes=(Tensor,))
def of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of any shape, of the same type on the same device; what a sequence is in the graph and in memory."""
    return func(*map(local_of, args), **kwargs)


@handles("requires_grad", homes=(Tensor,))
def _requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the part has a gradient; or the object, as one has that was kept for a backward by hooks on saved tensors."""
    if func(local_of(args[0])):
        return True
    with without_subclasses():
        return bool(func(args[0]))


@handles("data", homes=(Tensor,))
def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The part without its graph."""
    return args[0].like(args[0]._local.data)


@handles("requires_grad_")
def require_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask for a gradient of a sequence that has no graph."""
    x = args[0]
    func(x._local, *args[1:], **kwargs)
    x._changed()
    if not x._local.requires_grad:
        with without_subclasses():
            func(x, *args[1:], **kwargs)
    return x


def _set_requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    require_gradient(Tensor.requires_grad_, args, kwargs)


HANDLERS[getattr(Tensor, "requires_grad").__set__] = Handling(_set_requires_grad)  # noqa: B009


def _losses_of(*tensors: Any) -> int:
    return max((x._place.chunks.losses for x in tensors if isinstance(x, SeqPart)), default=1)


@handles("backward", homes=(torch.autograd,), composed=True)
def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.backward`` by gradients of sequences over tp: from the parts, as a reentrant checkpoint asks for it."""
    given = dict(zip(("tensors", "grad_tensors"), args, strict=False)) | kwargs
    tensors, grads = given.pop("tensors"), given.pop("grad_tensors", None)
    if len(args) > 2 or given.get("inputs") is not None or grads is None or isinstance(tensors, Tensor):
        return NotImplemented
    if _losses_of(*tensors) > 1:
        return NotImplemented
    pairs = zip(tensors, grads, strict=True)
    shares = [share_of(grad, x._place, x._place.chunks) if isinstance(x, SeqPart) else grad for x, grad in pairs]
    return func([local_of(x) for x in tensors], shares, **given)


@handles("grad", homes=(torch.autograd,), composed=True)
def gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` of plain numbers by sequences over tp, whose gradients are sequences."""
    given = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
    outputs, inputs = given.pop("outputs"), given.pop("inputs")
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if any(isinstance(x, SeqPart) for x in tree_leaves(outputs)) or _losses_of(*inputs) > 1:
        return NotImplemented
    grads = func(outputs, tuple(map(local_of, inputs)), *args[2:], **given)
    pairs = zip(inputs, grads, strict=True)
    return tuple(x.like(grad) if isinstance(x, SeqPart) and grad is not None else grad for x, grad in pairs)


@handles("grad", homes=(Tensor,))
def _gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient that a sequence got: a part's is that of all ranks' losses, of which the mean is due."""
    x, grad = args[0], func(args[0]._local)
    return None if grad is None else x.like(grad / x._place.chunks.losses)


@handles("register_hook")
def register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a hook with the gradient of the whole, a sequence; what it returns, or makes of it in place, goes on."""
    x, hook = args[0], _argument(args, kwargs, 1, "hook")
    if is_look(hook):
        return func(x._local, hook)
    like, place, losses = x.like, x._place, x._place.chunks.losses

    def hooked(grad: Tensor) -> Tensor | None:
        told = grad / losses if losses > 1 else grad.clone()
        version = told._version
        changed = hook(like(told))
        if changed is None:
            return None if told._version == version else told * losses
        mine = share_of(changed, place, place.chunks)
        return None if mine is None else mine * losses

    return func(x._local, hooked)
