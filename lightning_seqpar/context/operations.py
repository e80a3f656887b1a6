"""torch's functions on parts of sequences: those that compute each position by itself, and those that only move dims.

Each handler gets a function with its arguments, and returns what it makes of them, or ``NotImplemented`` to have the sequences
made whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seqpar.context.exchange import sum_over_ranks
from lightning_seqpar.context.seq_part import (
    COMPOSED,
    HANDLERS,
    VIEWS,
    Handler,
    Place,
    SeqPart,
    changes,
    local_of,
    share_of,
)
from lightning_seqpar.distributed.autograd import without_subclasses
from lightning_seqpar.distributed.rng import drawn_apart


def handles(
    *names: str,
    views: bool = False,
    composed: bool = False,
    homes: tuple[Any, ...] = (torch, Tensor, F, torch.special),
) -> Callable[[Handler], Handler]:
    """Decorate the handler of the functions of these names, in ``torch``, ``torch.Tensor`` and ``torch.nn.functional``.

    Args:
        names: of the functions.
        views: whether what they return is a view of their first argument.
        composed: whether the handler runs other functions of sequences.
        homes: where functions of these names are looked for; one of another signature may have the same name elsewhere.
    """

    def register(handler: Handler) -> Handler:
        for name in names:
            for home in (Tensor,) if name.startswith("__") else homes:
                func = getattr(home, name, None)
                if func is not None and not isinstance(func, torch.dtype):
                    HANDLERS[func] = handler
                    if views:
                        VIEWS.add(func)
                    if composed:
                        COMPOSED.add(func)
        return handler

    return register


# ---- each number by itself -------------------------------------------------------------------------------------


_ELEMENTWISE = [
    "abs",
    "absolute",
    "acos",
    "acosh",
    "add",
    "addcdiv",
    "addcmul",
    "angle",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "ceil",
    "celu",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "clone",
    "contiguous",
    "copysign",
    "cos",
    "cosh",
    "detach",
    "digamma",
    "div",
    "divide",
    "elu",
    "eq",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fix",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "ge",
    "gelu",
    "greater",
    "greater_equal",
    "gt",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "heaviside",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "leaky_relu",
    "lerp",
    "less",
    "less_equal",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "logsigmoid",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mish",
    "mul",
    "multiply",
    "nan_to_num",
    "ne",
    "neg",
    "negative",
    "not_equal",
    "positive",
    "pow",
    "reciprocal",
    "relu",
    "relu6",
    "remainder",
    "round",
    "rsqrt",
    "rsub",
    "selu",
    "sgn",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "softplus",
    "softshrink",
    "softsign",
    "sqrt",
    "square",
    "sub",
    "subtract",
    "tan",
    "tanh",
    "tanhshrink",
    "threshold",
    "true_divide",
    "trunc",
    "xlogy",
    "float",
    "double",
    "half",
    "bfloat16",
    "long",
    "int",
    "short",
    "bool",
    "type",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__rtruediv__",
    "__floordiv__",
    "__rfloordiv__",
    "__mod__",
    "__pow__",
    "__rpow__",
    "__neg__",
    "__abs__",
    "__and__",
    "__rand__",
    "__or__",
    "__ror__",
    "__xor__",
    "__rxor__",
    "__invert__",
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
]
_IN_PLACE = [
    "add_",
    "sub_",
    "mul_",
    "div_",
    "pow_",
    "neg_",
    "exp_",
    "relu_",
    "sigmoid_",
    "tanh_",
    "clamp_",
    "clamp_min_",
    "clamp_max_",
    "masked_fill_",
    "zero_",
    "fill_",
    "copy_",
    "addcmul_",
    "addcdiv_",
    "sqrt_",
    "rsqrt_",
    "lerp_",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "remainder_",
    "floor_divide_",
    "fmod_",
]
_DRAWS = [
    "dropout",
    "alpha_dropout",
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "bernoulli_",
    "normal_",
    "uniform_",
    "exponential_",
    "rrelu",
]


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
            if value._local.ndim - other.dim == from_right and other.same(place):
                out.append(value._local)
                continue
            value = value.for_parts()
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
    if first is None:
        return NotImplemented
    changed = func in _MAY_CHANGE and (kwargs.get("inplace") is True or any(value is True for value in args[1:]))
    if changed and first is not args[0]:
        return NotImplemented
    ndim = first._local.ndim
    locals_ = _aligned(first._place, ndim, values)
    if locals_ is NotImplemented:
        return locals_
    if changed:
        changes(first)
    out = (
        func(*locals_[: len(args)], **dict(zip(kwargs, locals_[len(args) :], strict=True)))
        if kwargs
        else func(*locals_)
    )
    if out is first._local:
        if changed:
            first._changed()
        return first
    if not isinstance(out, Tensor):  # x.type() without arguments
        return out
    return SeqPart.wrap(out, first._place.at(out.ndim - (ndim - first._place.dim)))


@handles("where")
def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A choice between numbers; with a condition alone, the indices of the whole."""
    return elementwise(func, args, kwargs) if len(args) + len(kwargs) > 1 else NotImplemented


@handles("type_as")
def cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another dtype and device, told by a tensor of any shape."""
    x, *rest = args
    if not isinstance(x, SeqPart):
        return func(*map(local_of, args), **{name: local_of(value) for name, value in kwargs.items()})
    out = func(x._local, *map(local_of, rest), **{name: local_of(value) for name, value in kwargs.items()})
    return x if out is x._local else x.like(out)


HANDLERS[Tensor.to] = HANDLERS[Tensor.cpu] = HANDLERS[Tensor.cuda] = cast
VIEWS.update([Tensor.detach, torch.detach])


@handles(*_IN_PLACE)
def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A change of each number by itself, in place."""
    target = args[0]
    if not isinstance(target, SeqPart):
        return NotImplemented
    values = (*args[1:], *kwargs.values())
    locals_ = _aligned(target._place, target.ndim, values)
    if locals_ is NotImplemented or any(isinstance(value, Tensor) and value.ndim > target.ndim for value in values):
        return NotImplemented
    changes(target)
    func(target._local, *locals_[: len(args) - 1], **dict(zip(kwargs, locals_[len(args) - 1 :], strict=True)))
    target._changed()
    return target


@handles(*_DRAWS)
def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that draws a random number for each of the tensor's: each rank draws for its own positions."""
    x = args[0] if args else None
    if not isinstance(x, SeqPart) or kwargs.get("generator") is not None:
        return NotImplemented
    handler = in_place if func.__name__.endswith("_") else elementwise
    if func in _DROPOUTS:
        p, training = (
            _argument(args, kwargs, 1, "p", 0.5),
            _argument(args, kwargs, 2, "training", func is not F.alpha_dropout),
        )
        if not training or p == 0:
            return handler(func, args, kwargs)
    with drawn_apart(x._place.chunks.rank):
        return handler(func, args, kwargs)


_DROPOUTS = frozenset([F.dropout, torch.dropout, F.alpha_dropout])
_MAY_CHANGE = frozenset(getattr(F, name) for name in (
    "celu", "dropout", "alpha_dropout", "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "relu6",
    "rrelu", "selu", "silu", "threshold",
))  # fmt: skip


# ---- along other dims ------------------------------------------------------------------------------------------


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _dims(dim: Any, ndim: int) -> list[int]:
    return [each % ndim for each in (dim if isinstance(dim, tuple | list) else (dim,))]


def _wrap_all(out: Any, place: Place) -> Any:
    if isinstance(out, Tensor):
        return SeqPart.wrap(out, place)
    wrapped = [SeqPart.wrap(each, place) for each in out]
    return type(out)(wrapped)


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: int, default: Any = None) -> Any:
    """A function along a dim that is not the sequence's, of which the result has all dims."""
    x = args[0] if args else None
    dim = _argument(args, kwargs, at, "dim", default)
    if not isinstance(x, SeqPart) or dim is None or isinstance(dim, Tensor | str):
        return NotImplemented
    if x._place.dim in _dims(dim, x.ndim) or any(isinstance(v, SeqPart) for v in (*args[1:], *kwargs.values())):
        return NotImplemented
    return _wrap_all(func(x._local, *args[1:], **kwargs), x._place)


@handles("softmax", "log_softmax", "softmin", "cumsum", "index_select")
def along_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function whose first argument behind the tensor is its dim."""
    return _along(func, args, kwargs, 1)


@handles("sort", "argsort", "glu")
def along_last(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, along the last dim by default."""
    return _along(func, args, kwargs, 1, -1)


@handles("topk", "normalize")
def along_second(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function whose second argument behind the tensor is its dim."""
    return _along(func, args, kwargs, 2, 1 if func.__name__ == "normalize" else -1)


@handles("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split", views=True)
def cut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces along another dim."""
    return _along(func, args, kwargs, 2, 0)


@handles("layer_norm", "rms_norm")
def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm over the last dims, which the sequence is not among."""
    x, shape = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "normalized_shape")
    if not isinstance(x, SeqPart) or x._place.dim >= x.ndim - len(shape):
        return NotImplemented
    if any(isinstance(value, SeqPart) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    return x.like(func(x._local, *args[1:], **kwargs))


_SUMS = frozenset(f for home in (torch, Tensor) for f in (home.sum, home.mean))


@handles("sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "logsumexp", "all", "any", "prod", "var", "std", "median",
         "nansum", "count_nonzero", "std_mean", "var_mean", "nanmean", "nanmedian")  # fmt: skip
def reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction over other dims; a sum or a mean also over the sequence, of which the ranks' are added."""
    x = args[0] if args else None
    if not isinstance(x, SeqPart):
        return NotImplemented
    dim = _argument(args, kwargs, 1, "dim", kwargs.get("axis"))
    if isinstance(dim, Tensor) or "other" in kwargs:  # the other of two tensors, for max and min
        return elementwise(func, args, kwargs)
    if isinstance(dim, bool | str):  # var(unbiased), and names
        return NotImplemented
    dims = list(range(x.ndim)) if dim is None or (isinstance(dim, tuple | list) and not dim) else _dims(dim, x.ndim)
    if x._place.dim in dims:
        return _sum_of_all(func, x, dims, args, kwargs) if func in _SUMS and len(args) <= 3 else NotImplemented
    return _reduced(x, dims, func(x._local, *args[1:], **kwargs))


def _reduced(x: SeqPart, dims: list[int], out: Any) -> Any:
    """What a reduction of the part over other dims has left, with these dims of size 1 or without them."""
    place = x._place
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


@handles("norm", "vector_norm")
def norm_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm over other dims."""
    x, dim = args[0] if args else None, _argument(args, kwargs, 2, "dim")
    if not isinstance(x, SeqPart) or dim is None or x._place.dim in _dims(dim, x.ndim):
        return NotImplemented
    return _reduced(x, _dims(dim, x.ndim), func(x._local, *args[1:], **kwargs))


HANDLERS[torch.linalg.vector_norm] = HANDLERS[torch.linalg.norm] = norm_of


# ---- products --------------------------------------------------------------------------------------------------


@handles("linear")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear over the last dim, which the sequence is not."""
    x, *rest = args or (None,)
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
        bias = x._place.own(bias, 0) if bias.shape[0] == x._place.whole_size else bias
    return x.like(func(bias, x._local, weight, *args[3:], **kwargs))


@handles("baddbmm", "__baddbmm__", composed=True)
def baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum of a tensor and products of batches."""
    given = {**dict(zip(("input", "batch1", "batch2"), args, strict=False)), **kwargs}
    added, a, b = given.get("input"), given.get("batch1"), given.get("batch2")
    if added is None or a is None or b is None or given.keys() - {"input", "batch1", "batch2", "beta", "alpha"}:
        return NotImplemented
    product = torch.bmm(a, b)
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    return (product if alpha == 1 else product * alpha) + (added if beta == 1 else added * beta)


@handles("matmul", "__matmul__", "__rmatmul__", "mm", "bmm")
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product: rows or columns that are a sequence stay one, and so do batches; what is summed over is made whole."""
    if kwargs or len(args) != 2:
        return NotImplemented
    a, b = args if func is not Tensor.__rmatmul__ else args[::-1]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return NotImplemented
    ndim = max(a.ndim, b.ndim)
    for x, kept, summed in ((a, a.ndim - 2, a.ndim - 1), (b, b.ndim - 1, b.ndim - 2)):
        if not isinstance(x, SeqPart) or x.ndim < 2 or x._place.dim == summed:
            continue
        place, other = x._place, b if x is a else a
        if place.dim == kept:  # rows of the first, columns of the second
            plain = other.for_parts() if isinstance(other, SeqPart) else other
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
    equation, *operands = args or (None,)
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
    if any(term.count(letter) > 1 for term in terms):  # a diagonal
        return NotImplemented
    locals_ = []
    for term, x in zip(terms, operands, strict=True):
        at = term.find(letter)
        if isinstance(x, SeqPart) and x._place.dim == at and x._place.same(place):
            locals_.append(x._local)
            continue
        if at >= 0 and x.shape[at] not in (1, place.whole_size):
            return NotImplemented  # torch's own message
        plain = x.for_parts() if isinstance(x, SeqPart) else x
        locals_.append(place.own(plain, at) if at >= 0 and x.shape[at] == place.whole_size else plain)
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


_OF_HEADS = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights", "attn_mask",
    "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v", "average_attn_weights",
    "is_causal",
)  # fmt: skip


@handles("multi_head_attention_forward", composed=True)
def multi_head_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.multi_head_attention_forward`` of queries ``[s, b, h]``: projections of the part around torch's attention."""
    given = {
        "training": True,
        "need_weights": True,
        "average_attn_weights": True,
        **dict(zip(_OF_HEADS, args, strict=False)),
        **kwargs,
    }
    q: Any
    k: Any
    v: Any
    q, k, v, mask = (given.get(name) for name in ("query", "key", "value", "attn_mask"))
    batched = q is not None and q.ndim == 3
    rare = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")
    if (
        not isinstance(q, SeqPart)
        or q._place.dim
        or not q._place.is_plain
        or any(given.get(name) is not None and given.get(name) is not False for name in rare)
    ):
        return NotImplemented
    if given.get("is_causal") and mask is None:
        return NotImplemented  # torch's own message
    padding = given.get("key_padding_mask")
    if not batched:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        padding = None if padding is None else padding.unsqueeze(0)
    separate = given.get("use_separate_proj_weight")
    weights = [given[f"{name}_proj_weight"] for name in "qkv"] if separate else given["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if given.get("in_proj_bias") is None else given["in_proj_bias"].chunk(3)
    heads, (length, count, width) = given["num_heads"], q.shape
    q, k, v = (
        F.linear(x, weight, bias).reshape(x.shape[0], count, heads, -1).permute(1, 2, 0, 3)
        for x, weight, bias in zip((q, k, v), weights, biases, strict=True)
    )
    dropout = given.get("dropout_p", 0.0) if given["training"] else 0.0
    causal = bool(given.get("is_causal")) and padding is None and not given["need_weights"]
    if causal:
        mask = None
    added = (
        None if mask is None else _added(mask, q.dtype).reshape(-1, 1 if mask.ndim == 2 else heads, *mask.shape[-2:])
    )
    if padding is not None:
        padded = _added(padding, q.dtype)[:, None, None, :]
        added = padded if added is None else added + padded
    shares = None
    if given["need_weights"]:
        scores = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
        shares = F.dropout((scores if added is None else scores + added).softmax(-1), dropout, dropout > 0)
        out = shares @ v
        shares = shares.mean(1) if given["average_attn_weights"] else shares
        shares = shares if batched else shares.squeeze(0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, added, dropout, causal)
    out = out.permute(2, 0, 1, 3).reshape(length, count, width)
    out = F.linear(out, given["out_proj_weight"], given["out_proj_bias"])
    return out if batched else out.squeeze(1), shares


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers that are added to scores; where a mask of truth values is true no query looks."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


@handles("embedding", homes=(F,))
def look_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a table for indices that are a sequence; not where they count how often a row is used, or change it."""
    x, *rest = args or (None,)
    if not isinstance(x, SeqPart) or any(isinstance(value, SeqPart) for value in (*rest, *kwargs.values())):
        return NotImplemented
    given = {**dict(zip(_OF_EMBEDDING, args, strict=False)), **kwargs}
    if any(given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        return NotImplemented
    return SeqPart.wrap(func(x._local, *rest, **kwargs), x._place)


_OF_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


@handles("one_hot")
def one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Classes as vectors; how many there are must be told, as the largest may be another rank's."""
    x, classes = args[0] if args else None, _argument(args, kwargs, 1, "num_classes", -1)
    return x.like(func(x._local, classes)) if isinstance(x, SeqPart) and classes > 0 else NotImplemented


# ---- dims ------------------------------------------------------------------------------------------------------


def _shape_of(func: Any, shape: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """What shape the function makes of a tensor of a shape."""
    given = [torch.empty(arg.shape, device="meta") if isinstance(arg, Tensor) else arg for arg in args]
    named = {k: torch.empty(v.shape, device="meta") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return tuple(func(torch.empty(shape, device="meta"), *given, **named).shape)


def _target(shape: tuple[int, ...], sizes: Sequence[Any]) -> tuple[int, ...] | None:
    """The shape that is asked for, with the size that ``-1`` stands for; None if torch has to say what it is."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    if not all(type(size) is int for size in sizes):
        return None
    known = prod(size for size in sizes if size != -1)
    unknown, numbers = sizes.count(-1), prod(shape)
    if known <= 0 or unknown > 1 or numbers % known or (not unknown and known != numbers):
        return None
    return tuple(numbers // known if size == -1 else size for size in sizes)


_OF_SIZES = frozenset([Tensor.view, Tensor.reshape, torch.reshape])
_MAY_COPY = frozenset(f for home in (torch, Tensor) for f in (home.reshape, home.flatten)) | {Tensor.reshape_as}


@handles("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", views=True)
def reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape, in which the sequence still lies in one dim."""
    x, *rest = args or (None,)
    if not isinstance(x, SeqPart) or any(isinstance(v, torch.dtype) for v in (*rest, *kwargs.values())):
        return NotImplemented
    sizes = list(x._local.shape)
    sizes[x._place.dim] = x._place.whole_size
    whole = tuple(sizes)
    if 0 in whole:
        return NotImplemented
    target = _target(whole, rest) if func in _OF_SIZES and rest else None
    if target is None:
        target = _shape_of(func, whole, rest, kwargs)
    place = x._place.reshaped(whole, target)
    if place is None:
        return NotImplemented
    local = list(target)
    local[place.dim] = place.local_size
    return SeqPart.wrap(x._local.reshape(local) if func in _MAY_COPY else x._local.view(local), place)


@handles("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint", views=True)
def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims in another order."""
    x, *rest = args or (None,)
    if not isinstance(x, SeqPart):
        return NotImplemented
    at = x._place.dim
    if func in _SWAPS and len(rest) == 2:
        ndim = x._local.ndim
        one, other = rest[0] % ndim, rest[1] % ndim
        at = other if at == one else one if at == other else at
    else:
        at = _shape_of(func, tuple(range(2, 2 + x.ndim)), rest, kwargs).index(2 + at)  # each dim told by its size
    return SeqPart.wrap(func(x._local, *rest, **kwargs), x._place.at(at))


_SWAPS = frozenset(f for home in (torch, Tensor) for f in (home.transpose, home.swapaxes, home.swapdims))


def _moved(name: str) -> None:
    HANDLERS[getattr(Tensor, name).__get__] = move
    VIEWS.add(getattr(Tensor, name).__get__)


for _name in ("T", "mT", "H", "mH"):
    _moved(_name)


@handles("unsqueeze", views=True)
def unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One more dim."""
    x, dim = args[0] if args else None, _argument(args, kwargs, 1, "dim")
    if not isinstance(x, SeqPart):
        return NotImplemented
    at = dim % (x._local.ndim + 1)
    return SeqPart.wrap(func(x._local, dim), x._place.at(x._place.dim + (at <= x._place.dim)))


@handles("expand", "expand_as", "broadcast_to", views=True)
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeats of other dims, without memory."""
    x, *rest = args or (None,)
    if not isinstance(x, SeqPart):
        return NotImplemented
    target = list(_shape_of(func, x.shape, rest, kwargs))
    place = x._place.at(x._place.dim + len(target) - x.ndim)
    if target[place.dim] != place.whole_size:
        return NotImplemented
    target[place.dim] = place.local_size
    return SeqPart.wrap(x._local.expand(target), place)


@handles("repeat", "tile")
def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies along other dims."""
    x, *rest = args or (None,)
    if not isinstance(x, SeqPart) or kwargs or not rest:
        return NotImplemented
    times = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple | torch.Size) else list(rest)
    if func is Tensor.repeat and len(times) < x.ndim:
        return NotImplemented  # torch's own message
    times = [1] * (x.ndim - len(times)) + times
    place = x._place.at(x._place.dim + len(times) - x.ndim)
    return SeqPart.wrap(x._local.repeat(times), place) if times[place.dim] == 1 else NotImplemented


@handles("repeat_interleave")
def repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each entry of another dim several times."""
    return _along(func, args, kwargs, 2)


@handles("unbind", "select", "narrow", views=True)
def take(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Entries of another dim; of the sequence one position, or a run of them."""
    x, name = args[0] if args else None, func.__name__
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
            if (
                not isinstance(start, int)
                or not isinstance(length, int)
                or not -place.whole_size <= start < place.whole_size
            ):
                return NotImplemented
            start %= place.whole_size
            if start + length > place.whole_size:
                return NotImplemented  # torch's own message
            items[at] = slice(start, start + length)
        if name == "unbind" or isinstance(items[at], Tensor):
            return NotImplemented
        return index(func, (x, tuple(items)), {})
    out = func(x._local, *args[1:], **kwargs)
    return _wrap_all(out, place if name == "narrow" else place.at(place.dim - (at < place.dim)))


_BASIC = (slice, type(None), type(Ellipsis))


@handles("__getitem__", views=True)
def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An index: of other dims anything but several tensors; of the sequence a run of positions, or one of them."""
    x, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if not isinstance(x, SeqPart):
        return NotImplemented
    lists = [n for n, i in enumerate(items) if not (isinstance(i, _BASIC) or type(i) is int)]
    if lists and (len(lists) > 1 or not _is_row(items[lists[0]])):
        return NotImplemented
    used = sum(item is not None and item is not Ellipsis for item in items)
    full = (slice(None),) * (x._local.ndim - used)
    at = next((n for n, item in enumerate(items) if item is Ellipsis), len(items))
    items = (*items[:at], *full, *items[at + 1 :])
    dim, out_dim, place = 0, 0, x._place
    for number, item in enumerate(items):
        if item is None:
            out_dim += 1
            continue
        if dim == place.dim:
            if not lists:
                return _index_sequence(x, items, number, out_dim)
            return _index_list(x, items, number)
        dim, out_dim = dim + 1, out_dim + (type(item) is not int)
    return NotImplemented


def _is_row(item: Any) -> bool:
    """Whether an index is a row of numbers or of truth values."""
    if isinstance(item, Tensor):
        return item.ndim == 1 and not isinstance(item, SeqPart)
    return isinstance(item, list) and len(item) > 0 and all(type(each) is int for each in item)


def _index_list(x: SeqPart, items: tuple[Any, ...], sequence: int) -> Any:
    """An index of which one item is a row of numbers, and ``items[sequence]`` that of the sequence."""
    number = next(n for n, item in enumerate(items) if not (isinstance(item, _BASIC) or type(item) is int))
    if number == sequence:
        return NotImplemented
    rest = index(Tensor.__getitem__, (x, (*items[:number], slice(None), *items[number + 1 :])), {})
    if not isinstance(rest, SeqPart):
        return NotImplemented
    at = sum(type(item) is not int for item in items[:number])
    picked = [slice(None)] * at + [items[number]]
    return rest.like(rest._local[tuple(picked)])


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
            x._gave_copy(kept)
        return SeqPart.wrap(kept[others], Place(place.chunks.sliced(start, stop), out_dim))
    if not place.is_plain or type(item) is not int:
        return NotImplemented
    at = item + place.whole_size * (item < 0)
    if not 0 <= at < place.whole_size:
        raise IndexError(f"index {item} is out of bounds for the sequence, of size {place.whole_size}")
    held = place.chunks.held_between(at, at + 1)
    if not (local.is_floating_point() or local.dtype in (torch.int64, torch.int32)):
        return NotImplemented
    mine = (
        local.select(place.dim, held[0][0]) if held else local.narrow(place.dim, 0, 0).sum(place.dim, dtype=local.dtype)
    )
    rest = tuple(i for n, i in enumerate(others) if n != number)
    return sum_over_ranks(mine[rest], place.chunks)


@handles("cat", "concat", "concatenate", "stack")
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


@handles("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of any shape, of the same type on the same device."""
    return func(*map(local_of, args), **kwargs)


def _of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a sequence is in the graph: as this rank's part of it."""
    return func(*map(local_of, args), **kwargs)


@handles("is_contiguous", "is_conj", "is_neg", "is_inference")
def fact(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is said of the part."""
    return _of_local(func, args, kwargs)


for _name in ("grad_fn", "is_leaf", "_version", "retains_grad"):
    HANDLERS[getattr(Tensor, _name).__get__] = _of_local


def _requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the part has a gradient; or the object, as one has that was kept for a backward by hooks on saved tensors."""
    if func(local_of(args[0])):
        return True
    with without_subclasses():
        return bool(func(args[0]))


HANDLERS[getattr(Tensor, "requires_grad").__get__] = _requires_grad  # noqa: B009


@handles("stride", "storage_offset")
def memory_layout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a whole tensor of which all numbers lie in a row."""
    return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)


def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The part without its graph."""
    return args[0].like(args[0]._local.data)


HANDLERS[Tensor.data.__get__] = _data  # type: ignore[attr-defined]
VIEWS.add(Tensor.data.__get__)  # type: ignore[attr-defined]


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
    """Set whether a sequence that has no graph has a gradient."""
    require_gradient(Tensor.requires_grad_, args, kwargs)


HANDLERS[getattr(Tensor, "requires_grad").__set__] = _set_requires_grad  # noqa: B009


def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.backward`` by gradients of sequences over tp: from the parts, as a reentrant checkpoint asks for it."""
    given = dict(zip(("tensors", "grad_tensors"), args, strict=False)) | kwargs
    tensors, grads = given.pop("tensors"), given.pop("grad_tensors", None)
    if len(args) > 2 or given.get("inputs") is not None or grads is None or isinstance(tensors, Tensor):
        return NotImplemented
    if any(isinstance(x, SeqPart) and x._place.chunks.losses > 1 for x in tensors):
        return NotImplemented
    pairs = zip(tensors, grads, strict=True)
    shares = [share_of(grad, x._place, x._place.chunks) if isinstance(x, SeqPart) else grad for x, grad in pairs]
    return func([local_of(x) for x in tensors], shares, **given)


HANDLERS[torch.autograd.backward] = backward


def gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` of plain numbers by sequences over tp, whose gradients are sequences."""
    outputs, inputs = _argument(args, kwargs, 0, "outputs"), _argument(args, kwargs, 1, "inputs")
    several = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if any(isinstance(x, SeqPart) for x in ((outputs,) if isinstance(outputs, Tensor) else outputs)):
        return NotImplemented
    if any(isinstance(x, SeqPart) and x._place.chunks.losses > 1 for x in several):
        return NotImplemented
    options = {name: value for name, value in kwargs.items() if name not in ("outputs", "inputs")}
    grads = func(outputs, tuple(map(local_of, several)), *args[2:], **options)
    return tuple(
        x.like(grad) if isinstance(x, SeqPart) and grad is not None else grad
        for x, grad in zip(several, grads, strict=True)
    )


HANDLERS[torch.autograd.grad] = gradients


@handles("retain_grad")
def retain_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep the gradient of a sequence, as ``x.grad``."""
    return func(args[0]._local)


def _gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient that a sequence got: a part's is that of all ranks' losses, of which the mean is due."""
    x, grad = args[0], func(args[0]._local)
    return None if grad is None else x.like(grad / x._place.chunks.losses)


HANDLERS[getattr(Tensor, "grad").__get__] = _gradient  # noqa: B009


@handles("register_hook")
def register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a hook with the gradient of the whole, a sequence; what it returns, or makes of it in place, goes on."""
    x, hook = args[0], _argument(args, kwargs, 1, "hook")
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


@handles("__deepcopy__")
def deep_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sequence with a copy of the part."""
    x, memo = args[0], _argument(args, kwargs, 1, "memo")
    if id(x) not in memo:
        memo[id(x)] = x.like(copy.deepcopy(x._local, memo))
    return memo[id(x)]


@handles("numpy", "__array__")
def numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole as an array that can't be changed, as a change would not reach the sequence."""
    array = func(args[0].whole(), *args[1:], **kwargs)
    array.flags.writeable = False
    return array


@handles("__format__")
def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a text: no numbers, unless it is one."""
    return NotImplemented if args[0].ndim == 0 else object.__format__(args[0], "")
