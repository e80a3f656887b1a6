"""torch's functions on parts of sequences: those that compute each position by itself, and those that only move dims.

Each handler gets a function with its arguments, and returns what it makes of them, or ``NotImplemented`` to have the sequences
made whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seqpar.context.exchange import sum_over_ranks
from lightning_seqpar.context.seq_part import HANDLERS, Handler, Place, SeqPart, local_of, writes
from lightning_seqpar.distributed.rng import drawn_apart


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Decorate the handler of the functions of these names, in ``torch``, ``torch.Tensor`` and ``torch.nn.functional``."""

    def register(handler: Handler) -> Handler:
        for name in names:
            for home in (torch, Tensor, F, torch.special):
                if (func := getattr(home, name, None)) is not None:
                    HANDLERS[func] = handler
        return handler

    return register


# ---- each number by itself -------------------------------------------------------------------------------------


_ELEMENTWISE = ["abs", "absolute", "acos", "acosh", "add", "addcdiv", "addcmul", "angle", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous", "copysign", "cos", "cosh", "detach", "digamma", "div", "divide", "elu", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix", "floor", "floor_divide", "fmax", "fmin", "fmod", "frac", "ge", "gelu", "greater", "greater_equal", "gt", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "heaviside", "hypot", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp", "less", "less_equal", "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logsigmoid", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply", "nan_to_num", "ne", "neg", "negative", "not_equal", "positive", "pow", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sgn", "sigmoid", "sign", "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "subtract", "tan", "tanh", "tanhshrink", "threshold", "true_divide", "trunc", "where", "xlogy", "float", "double", "half", "bfloat16", "long", "int", "short", "bool", "to", "type", "type_as", "nan_to_num", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__pow__", "__rpow__", "__neg__", "__abs__", "__and__", "__rand__", "__or__", "__ror__", "__xor__", "__rxor__", "__invert__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "zeros_like", "ones_like", "full_like", "empty_like", "hinge_embedding_loss"]
_IN_PLACE = ["add_", "sub_", "mul_", "div_", "pow_", "neg_", "exp_", "relu_", "sigmoid_", "tanh_", "clamp_", "clamp_min_", "clamp_max_", "masked_fill_", "zero_", "fill_", "copy_", "addcmul_", "addcdiv_", "sqrt_", "rsqrt_", "lerp_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"]
_DRAWS = ["dropout", "alpha_dropout", "feature_alpha_dropout", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "dropout_", "normal_", "uniform_", "exponential_", "rrelu"]


def _aligned(place: Place, ndim: int, values: Iterable[Any]) -> Any:
    """What stands for ``values`` beside a part ``place`` of a tensor of ``ndim`` dims, under broadcasting: their own positions.

    Returns:
        a list; NotImplemented if one of them is longer than the sequence there.
    """
    from_right = ndim - place.dim
    out: list[Any] = []
    for value in values:
        if isinstance(value, SeqPart):
            other = value._place
            if value.ndim - other.dim == from_right and other.same(place):
                out.append(value._local)
                continue
            value = value.whole()
        if isinstance(value, Tensor) and value.ndim >= from_right:
            size = value.shape[value.ndim - from_right]
            if size == place.whole_size:
                value = place.own(value, value.ndim - from_right)
            elif size != 1:
                if place.whole_size == 1:
                    return NotImplemented
                raise RuntimeError(
                    f"The size of the sequence ({place.whole_size}) must match the size of the other tensor ({size}) at dim "
                    f"{-from_right}"
                )
        out.append(value)
    return out


@handles(*_ELEMENTWISE)
def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each number by itself, under broadcasting."""
    values = (*args, *kwargs.values())
    first = next((value for value in values if isinstance(value, SeqPart)), None)
    if first is None or (writes(func, kwargs) and first is not args[0]):
        return NotImplemented
    locals_ = _aligned(first._place, first.ndim, values)
    if locals_ is NotImplemented:
        return locals_
    out = func(*locals_[: len(args)], **dict(zip(kwargs, locals_[len(args) :], strict=True)))
    if out is first._local:
        return first
    if not isinstance(out, Tensor):
        return out
    return SeqPart.wrap(out, first._place.at(out.ndim - (first.ndim - first._place.dim)))


@handles(*_IN_PLACE)
def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A change of each number by itself, in place."""
    target = args[0]
    if not isinstance(target, SeqPart):
        return NotImplemented
    values = (*args[1:], *kwargs.values())
    locals_ = _aligned(target._place, target.ndim, values)
    if locals_ is NotImplemented:
        return locals_
    func(target._local, *locals_[: len(args) - 1], **dict(zip(kwargs, locals_[len(args) - 1 :], strict=True)))
    return target


@handles(*_DRAWS)
def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that draws a random number for each of the tensor's: each rank draws for its own positions."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, SeqPart):
        return NotImplemented
    handler = in_place if func.__name__.endswith("_") else elementwise
    with drawn_apart(x._place.chunks.rank):
        return handler(func, args, kwargs)


# ---- along other dims ------------------------------------------------------------------------------------------


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _dims(dim: Any, ndim: int) -> list[int]:
    return [each % ndim for each in (dim if isinstance(dim, tuple | list) else (dim,))]


def _wrap_all(out: Any, place: Place) -> Any:
    if isinstance(out, Tensor):
        return SeqPart.wrap(out, place)
    wrapped = [SeqPart.wrap(each, place) for each in out]
    return type(out)(wrapped) if isinstance(out, tuple | list) and type(out) in (tuple, list) else type(out)(wrapped)


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: int, default: Any = None) -> Any:
    """A function along a dim that is not the sequence's, of which the result has all dims."""
    x = args[0] if args else kwargs.get("input")
    dim = _argument(args, kwargs, at, "dim", default)
    if not isinstance(x, SeqPart) or dim is None or isinstance(dim, Tensor | str):
        return NotImplemented
    if x._place.dim in _dims(dim, x.ndim) or any(isinstance(v, SeqPart) for v in (*args[1:], *kwargs.values())):
        return NotImplemented
    arguments = {**kwargs, "input": x._local} if not args else kwargs
    return _wrap_all(func(*(local_of(arg) for arg in args), **arguments), x._place)


_ALONG_FIRST = ["softmax", "log_softmax", "softmin", "cumsum", "cumprod", "argsort", "sort", "flip", "logcumsumexp", "glu", "chunk", "split", "tensor_split", "unflatten_"]


@handles(
    "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "flip", "index_select"
)
def along_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function whose first argument behind the tensor is its dim."""
    return _along(func, args, kwargs, 1)


@handles("sort", "argsort", "glu")
def along_last(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, along the last dim by default."""
    return _along(func, args, kwargs, 1, -1)


@handles("topk", "normalize", "kthvalue")
def along_second(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function whose second argument behind the tensor is its dim."""
    return _along(func, args, kwargs, 2, 1 if func.__name__ == "normalize" else -1)


@handles("roll")
def roll(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A roll of other dims."""
    return _along(func, args, kwargs, 2)


@handles("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def cut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces along another dim."""
    return _along(func, args, kwargs, 2, 0)


@handles("layer_norm", "rms_norm")
def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm over the last dims, which the sequence is not among."""
    x, shape = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "normalized_shape")
    if not isinstance(x, SeqPart) or x._place.dim >= x.ndim - len(shape):
        return NotImplemented
    if any(isinstance(value, SeqPart) for value in (*args[1:], *(v for k, v in kwargs.items() if k != "input"))):
        return NotImplemented
    return x.like(func(*map(local_of, args), **{k: local_of(v) for k, v in kwargs.items()}))


_SUMS = frozenset(f for home in (torch, Tensor) for f in (home.sum, home.mean))


@handles("sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "logsumexp", "all", "any", "prod", "var", "std", "median",
         "nansum", "count_nonzero", "std_mean", "var_mean")  # fmt: skip
def reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction over other dims; a sum or a mean also over the sequence, of which the ranks' are added."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, SeqPart):
        return NotImplemented
    dim = _argument(args, kwargs, 1, "dim", kwargs.get("axis"))
    if isinstance(dim, Tensor):  # the other of two tensors, for max and min
        return elementwise(func, args, kwargs)
    if isinstance(dim, bool):  # var(unbiased)
        return NotImplemented
    place, keep = x._place, bool(_argument(args, kwargs, 2, "keepdim", False))
    dims = list(range(x.ndim)) if dim is None or dim == () or dim == [] else _dims(dim, x.ndim)
    if place.dim in dims:
        if func not in _SUMS or len(args) > 3:
            return NotImplemented
        dtype = kwargs.get("dtype")
        total = sum_over_ranks(torch.sum(x._local, dims, keepdim=keep, dtype=dtype), place.chunks)
        if func in (torch.sum, Tensor.sum):
            return total
        if not (total.is_floating_point() or total.is_complex()):
            return NotImplemented
        return total / prod(x.shape[each] for each in dims)
    if dim is None:
        return NotImplemented
    arguments = {**kwargs, "input": x._local} if not args else kwargs
    out = func(*map(local_of, args), **arguments)
    return _wrap_all(out, place if keep else place.at(place.dim - sum(each < place.dim for each in dims)))


@handles("norm", "vector_norm")
def norm_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm over other dims."""
    x, dim = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "dim")
    if not isinstance(x, SeqPart) or dim is None or x._place.dim in _dims(dim, x.ndim):
        return NotImplemented
    keep = bool(_argument(args, kwargs, 3, "keepdim", False))
    place = x._place
    out = func(*map(local_of, args), **{k: local_of(v) for k, v in kwargs.items()})
    return SeqPart.wrap(out, place if keep else place.at(place.dim - sum(d < place.dim for d in _dims(dim, x.ndim))))


HANDLERS[torch.linalg.vector_norm] = HANDLERS[torch.linalg.norm] = norm_of


# ---- products --------------------------------------------------------------------------------------------------


@handles("linear")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear over the last dim, which the sequence is not."""
    x, *rest = args
    if (
        not isinstance(x, SeqPart)
        or x._place.dim == x.ndim - 1
        or any(isinstance(v, SeqPart) for v in (*rest, *kwargs.values()))
    ):
        return NotImplemented
    return x.like(func(x._local, *rest, **kwargs))


@handles("addmm")
def addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A bias and the product of rows, which are the sequence, with a plain matrix."""
    bias, x, weight = args[:3] if len(args) > 2 else (None, None, None)
    if not isinstance(x, SeqPart) or x._place.dim != 0 or isinstance(bias, SeqPart) or isinstance(weight, SeqPart):
        return NotImplemented
    if bias.ndim == 2 and bias.shape[0] != 1:
        return NotImplemented
    return x.like(func(bias, x._local, weight, *args[3:], **kwargs))


@handles("baddbmm", "__baddbmm__")
def baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum of a tensor and products of batches."""
    given = {**dict(zip(("input", "batch1", "batch2"), args, strict=False)), **kwargs}
    added, a, b = given.get("input"), given.get("batch1"), given.get("batch2")
    if added is None or given.keys() - {"input", "batch1", "batch2", "beta", "alpha"}:
        return NotImplemented
    product = matmul(torch.bmm, (a, b), {})
    if product is NotImplemented:
        return product
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    return (product if alpha == 1 else product * alpha) + (added if beta == 1 else added * beta)


@handles("matmul", "__matmul__", "__rmatmul__", "mm", "bmm")
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product: rows or columns that are a sequence stay one, and so do batches; what is summed over is made whole."""
    a, b = args if func is not Tensor.__rmatmul__ else args[::-1]
    if kwargs or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return NotImplemented
    ndim = max(a.ndim, b.ndim)
    for x, kept, summed in ((a, a.ndim - 2, a.ndim - 1), (b, b.ndim - 1, b.ndim - 2)):
        if not isinstance(x, SeqPart) or x.ndim < 2 or x._place.dim == summed:
            continue
        place, other = x._place, b if x is a else a
        if place.dim == kept:  # rows of the first, columns of the second
            plain = other.whole() if isinstance(other, SeqPart) else other
            out = torch.matmul(x._local, plain) if x is a else torch.matmul(plain, x._local)
            if other.ndim == 1:
                return SeqPart.wrap(out, place.at(out.ndim - 1))
            return SeqPart.wrap(out, place.at(out.ndim - (2 if x is a else 1)))
        beside = _aligned(place, x.ndim, [other])  # a batch dim
        if beside is NotImplemented or other.ndim < 2:
            continue
        out = torch.matmul(x._local, beside[0]) if x is a else torch.matmul(beside[0], x._local)
        return SeqPart.wrap(out, place.at(ndim - (x.ndim - place.dim)))
    return NotImplemented


@handles("einsum")
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum of products: one letter that the result has stays a sequence, the others are made whole."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return NotImplemented
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or len(terms) != len(operands):
        return _einsum_with_dots(func, args, operands, terms, right, arrow)
    chosen: tuple[str, Place] | None = None
    for term, x in zip(terms, operands, strict=True):
        if isinstance(x, SeqPart) and len(set(term)) == len(term) and right.count(term[x._place.dim]) == 1:
            chosen = term[x._place.dim], x._place
            break
    if chosen is None:
        return NotImplemented
    letter, place = chosen
    locals_ = []
    for term, x in zip(terms, operands, strict=True):
        at = term.find(letter)
        if isinstance(x, SeqPart) and x._place.dim == at and x._place.same(place):
            locals_.append(x._local)
            continue
        plain = x.whole() if isinstance(x, SeqPart) else x
        locals_.append(place.own(plain, at) if at >= 0 and plain.shape[at] == place.whole_size else plain)
    return SeqPart.wrap(func(equation, *locals_), place.at(right.index(letter)))


def _einsum_with_dots(
    func: Any, args: tuple[Any, ...], operands: list[Any], terms: list[str], right: str, arrow: str
) -> Any:
    """An equation with an ellipsis, written out with letters that it does not use."""
    if not arrow or len(terms) != len(operands) or any(term.count("...") > 1 for term in (*terms, right)):
        return NotImplemented
    used = set("".join((*terms, right)))
    spare = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if letter not in used]
    widths = [
        x.ndim - len(term.replace("...", "")) if "..." in term else 0 for term, x in zip(terms, operands, strict=True)
    ]
    longest = max(widths)
    written = [
        term.replace("...", "".join(spare[longest - width : longest]))
        for term, width in zip(terms, widths, strict=True)
    ]
    equation = ",".join(written) + "->" + right.replace("...", "".join(spare[:longest]))
    return einsum(func, (equation, *operands), {}) if "." not in equation else NotImplemented


@handles("embedding", "one_hot")
def look_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a table for indices that are a sequence."""
    x, *rest = args
    if not isinstance(x, SeqPart) or any(isinstance(value, SeqPart) for value in (*rest, *kwargs.values())):
        return NotImplemented
    return SeqPart.wrap(func(x._local, *rest, **kwargs), x._place)


# ---- dims ------------------------------------------------------------------------------------------------------


def _shape_of(func: Any, shape: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """What shape the function makes of a tensor of a shape."""
    return tuple(func(torch.empty(shape, device="meta"), *args, **kwargs).shape)


@handles("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze")
def reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape, in which the sequence still lies in one dim."""
    x, *rest = args
    if not isinstance(x, SeqPart) or any(isinstance(arg, torch.dtype) for arg in rest):
        return NotImplemented
    target = _shape_of(
        func, x.shape, [torch.empty(r.shape, device="meta") if isinstance(r, Tensor) else r for r in rest], kwargs
    )
    if 0 in x.shape:
        return NotImplemented
    place = x._place.reshaped(tuple(x.shape), target)
    if place is None:
        return NotImplemented
    local = list(target)
    local[place.dim] = place.local_size
    return SeqPart.wrap(x._local.reshape(local), place)


@handles("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint")
def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims in another order."""
    x, *rest = args
    if not isinstance(x, SeqPart):
        return NotImplemented
    marked = _shape_of(func, tuple(range(2, 2 + x.ndim)), rest, kwargs)  # each dim told by its size
    return SeqPart.wrap(func(x._local, *rest, **kwargs), x._place.at(marked.index(2 + x._place.dim)))


def _moved(name: str) -> None:
    HANDLERS[getattr(Tensor, name).__get__] = move


for _name in ("T", "mT", "H", "mH"):
    _moved(_name)


@handles("unsqueeze")
def unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One more dim."""
    x, dim = args[0], _argument(args, kwargs, 1, "dim")
    if not isinstance(x, SeqPart):
        return NotImplemented
    at = dim % (x.ndim + 1)
    return SeqPart.wrap(func(x._local, dim), x._place.at(x._place.dim + (at <= x._place.dim)))


@handles("expand", "expand_as", "broadcast_to")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeats of other dims, without memory."""
    x, *rest = args
    if not isinstance(x, SeqPart):
        return NotImplemented
    target = list(
        _shape_of(
            func, x.shape, [torch.empty(r.shape, device="meta") if isinstance(r, Tensor) else r for r in rest], kwargs
        )
    )
    place = x._place.at(x._place.dim + len(target) - x.ndim)
    if target[place.dim] != place.whole_size:
        return NotImplemented
    target[place.dim] = place.local_size
    return SeqPart.wrap(x._local.expand(target), place)


@handles("repeat", "tile")
def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies along other dims."""
    x, *rest = args
    if not isinstance(x, SeqPart) or kwargs:
        return NotImplemented
    times = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple | torch.Size) else list(rest)
    times = [1] * (x.ndim - len(times)) + times
    place = x._place.at(x._place.dim + len(times) - x.ndim)
    return SeqPart.wrap(x._local.repeat(times), place) if times[place.dim] == 1 else NotImplemented


@handles("repeat_interleave")
def repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each entry of another dim several times."""
    return _along(func, args, kwargs, 2)


@handles("unbind", "select", "narrow")
def take(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Entries of another dim; of the sequence one position, or a run of them."""
    x, name = args[0], func.__name__
    dim = _argument(args, kwargs, 1, "dim", 0)
    if not isinstance(x, SeqPart) or isinstance(dim, str):
        return NotImplemented
    place, at = x._place, dim % x.ndim
    if at == place.dim:
        items: list[Any] = [slice(None)] * x.ndim
        if name == "select":
            items[at] = _argument(args, kwargs, 2, "index")
        elif name == "narrow":
            start, length = _argument(args, kwargs, 2, "start"), _argument(args, kwargs, 3, "length")
            items[at] = slice(start, start + length)
        if name == "unbind" or isinstance(items[at], Tensor):
            return NotImplemented
        return index(func, (x, tuple(items)), {})
    out = func(x._local, *args[1:], **kwargs)
    return _wrap_all(out, place if name == "narrow" else place.at(place.dim - (at < place.dim)))


@handles("__getitem__")
def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An index: of other dims anything but tensors; of the sequence a run of positions, or one of them."""
    x, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if not isinstance(x, SeqPart) or any(isinstance(i, Tensor | list | range) or isinstance(i, bool) for i in items):
        return NotImplemented
    items = tuple(items)
    used = sum(item is not None and item is not Ellipsis for item in items)
    full = (slice(None),) * (x.ndim - used)
    at = next((n for n, item in enumerate(items) if item is Ellipsis), len(items))
    items = (*items[:at], *full, *items[at + 1 :])
    dim, out_dim, place = 0, 0, x._place
    for number, item in enumerate(items):
        if item is None:
            out_dim += 1
            continue
        if dim == place.dim:
            return _index_sequence(x, items, number, out_dim)
        dim, out_dim = dim + 1, out_dim + isinstance(item, slice)
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
        runs = place.chunks.held_between(start, stop)
        pieces = [local.narrow(place.dim, first, last - first) for first, last in runs]
        kept = (
            pieces[0] if len(pieces) == 1 else torch.cat(pieces, place.dim) if pieces else local.narrow(place.dim, 0, 0)
        )
        return SeqPart.wrap(kept[others], Place(place.chunks.sliced(start, stop), out_dim))
    if not place.is_plain or not isinstance(item, int):
        return NotImplemented
    at = item + place.whole_size * (item < 0)
    if not 0 <= at < place.whole_size:
        raise IndexError(f"index {item} is out of bounds for the sequence, of size {place.whole_size}")
    held = place.chunks.held_between(at, at + 1)
    if not (local.is_floating_point() or local.dtype in (torch.int64, torch.int32)):
        return NotImplemented
    mine = local.select(place.dim, held[0][0]) if held else (local.sum(place.dim) * 0).to(local.dtype)
    return sum_over_ranks(mine, place.chunks)[tuple(i for n, i in enumerate(others) if n != number)]


@handles("cat", "concat", "concatenate", "stack")
def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sequences of one layout side by side, whole tensors with their own positions; nothing behind nothing."""
    tensors, dim = list(args[0]), _argument(args, kwargs, 1, "dim", kwargs.get("axis", 0))
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


@handles("pad")
def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros at the ends of the last dims, which the sequence is not among."""
    x, amounts = args[0], _argument(args, kwargs, 1, "pad")
    if not isinstance(x, SeqPart) or x._place.dim >= x.ndim - len(amounts) // 2:
        return NotImplemented
    return x.like(func(x._local, *args[1:], **kwargs))


@handles("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of any shape, of the same type on the same device."""
    return func(*map(local_of, args), **kwargs)


def _of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a sequence is in the graph: as this rank's part of it."""
    return func(*map(local_of, args), **kwargs)


for _func in (
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_version", "retains_grad", "is_inference")
      if hasattr(getattr(Tensor, name), "__get__") and not callable(getattr(Tensor, name))),
    Tensor.is_inference, Tensor.is_contiguous, Tensor.is_conj, Tensor.is_neg, torch.is_conj, torch.is_inference,
):  # fmt: skip
    HANDLERS[_func] = _of_local
