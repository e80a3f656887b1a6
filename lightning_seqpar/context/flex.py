"""FlexAttention over a rank's heads: score and mask functions are given the whole model's head, and sequences may be dealt out.

``flex_attention`` is a function of Python, mostly compiled at the level of a module, of which no tensor is asked. So a module that
calls it gets methods of its own: copies of its class's that read, under another name of the same file, a :class:`FlexCall`. What
others read there, and the class, stay as they are.
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._pytree import tree_map_only

from lightning_seqpar.context.attention import are_parts, dealt_heads
from lightning_seqpar.context.chunks import heads_to_positions
from lightning_seqpar.context.seq_part import SeqPart, whole_of

_DEPTH = 4
"""How many functions of the user's may lie between a method of the module and the call."""

_MANY = 256
"""Copies of functions that are remembered."""


class Heads(NamedTuple):
    """Which heads of a module are a tensor-parallel rank's: the ``rank``-th of ``size`` equal parts."""

    rank: int = 0
    size: int = 1


def _origin(value: Any) -> tuple[Any, dict[str, Any]]:
    """The function that a compiled or partial one calls, and the keywords that are bound in it."""
    keywords: dict[str, Any] = {}
    while True:
        if isinstance(value, functools.partial) and not value.args:
            keywords, value = {**value.keywords, **keywords}, value.func
        elif hasattr(value, "_torchdynamo_orig_callable"):
            value = value._torchdynamo_orig_callable
        else:
            return value, keywords


def rebound(module: nn.Module, heads: Heads) -> dict[str, Any]:
    """Attributes that let a module call FlexAttention for its rank's ``heads``; none if it does not call it by any name."""
    out, seen = dict[str, Any](), set[str]()
    for kind in (None, *type(module).__mro__):
        if kind is nn.Module:
            break
        for name, value in vars(module if kind is None else kind).items():
            if name in seen or name.startswith("__"):
                continue  # what a class before has of that name, or the instance, is what runs
            seen.add(name)
            if (other := _swapped(value, heads)) is not None:
                out[name] = other
                continue
            of_module = kind is not None or (isinstance(value, types.MethodType) and value.__self__ is module)
            function = value.__func__ if isinstance(value, types.MethodType) else value
            if isinstance(function, types.FunctionType) and (made := _copied(function, heads, _DEPTH)) is not None:
                out[name] = types.MethodType(made, module) if of_module else made
    return out


def calls_flex(module: nn.Module) -> bool:
    """Whether a module calls FlexAttention by a name that :func:`rebound` finds."""
    return not type(module).__module__.startswith("torch.nn.modules") and bool(rebound(module, Heads()))


def _swapped(value: Any, heads: Heads) -> Any:
    if not callable(value):
        return None
    origin, keywords = _origin(value)
    return FlexCall(value, keywords, heads) if origin is flex_attention else None


@functools.lru_cache(_MANY)  # so that layers share what is compiled of them
def _copied(function: types.FunctionType, heads: Heads, depth: int) -> types.FunctionType | None:
    """A copy that reads names which stand for calls for ``heads``, as do functions that it calls; None if it reads none.

    The names stand in its own file, beside those that they stand for: what else it reads there and writes to is as ever.
    """

    def other(value: Any) -> Any:
        made = _swapped(value, heads)
        if (
            made is None
            and depth
            and isinstance(value, types.FunctionType)
            and not (value.__module__ or "").startswith("torch")
        ):
            made = _copied(value, heads, depth - 1)
        return made

    world, others = function.__globals__, dict[str, str]()
    for name in set(_read_names(function.__code__)) & world.keys():
        if (made := other(world[name])) is not None:
            others[name] = f"_seqpar_{name}_{heads.rank}_of_{heads.size}"
            world[others[name]] = made
    cells = []
    for cell in function.__closure__ or ():
        try:
            made = other(cell.cell_contents)
        except ValueError:  # it is empty yet
            made = None
        cells.append(cell if made is None else types.CellType(made))
    if not others and all(one is before for one, before in zip(cells, function.__closure__ or (), strict=True)):
        return None
    code = _renamed(function.__code__, others)
    out = types.FunctionType(code, world, function.__name__, function.__defaults__, tuple(cells) or None)
    out.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    functools.update_wrapper(out, function)
    return out


def _read_names(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code, or that of functions inside it, reads in its file."""
    yield from _own_names(code)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _read_names(one)


def _own_names(code: types.CodeType) -> list[str]:
    """Those that it reads itself, and for nothing else, such as an attribute."""
    as_other = {one.argval for one in dis.get_instructions(code) if one.opcode in dis.hasname and one.opname != "LOAD_GLOBAL"}
    return [name for name in code.co_names if name not in as_other]


def _renamed(code: types.CodeType, others: Mapping[str, str]) -> types.CodeType:
    """The same code with other names; those that it reads otherwise, as an attribute's, stay."""
    own = set(_own_names(code))
    names = tuple(others.get(name, name) if name in own else name for name in code.co_names)
    inner = tuple(_renamed(one, others) if isinstance(one, types.CodeType) else one for one in code.co_consts)
    return code.replace(co_names=names, co_consts=inner)


_OWN = "_seqpar_own"
"""Attribute of a mask: which heads of it were asked for last, and the mask of those."""

_ARGUMENTS = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options")


class FlexCall:
    """Takes the place of ``flex_attention``, or of what is compiled of it."""

    def __init__(self, function: Callable[..., Any], bound: dict[str, Any], heads: Heads) -> None:
        self._function, self._bound, self._heads = function, bound, heads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Queries ``[b, heads, s, d]`` of this rank's heads, or parts of sequences ``[b, heads, s/cp, d]``: as its own result."""
        given = {**self._bound, **dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        q, k, v = (given[name] for name in _ARGUMENTS[:3])
        if not any(isinstance(x, SeqPart) for x in (q, k, v)):
            return self._run(given, q.shape[1])
        if not isinstance(q, SeqPart) or not are_parts(q, k, v):
            return self._run(given | {name: whole_of(given[name]) for name in _ARGUMENTS[:3]}, q.shape[1])
        chunks, place = q.place.chunks, q.place
        if q.shape[1] % chunks.size:  # every rank computes all heads, and takes its positions
            wholes = {name: given[name].for_parts() for name in _ARGUMENTS[:3]}
            own = functools.partial(place.own, dim=2)
            return tree_map_only(Tensor, lambda x: SeqPart.wrap(own(x), place), self._run(given | wholes, q.shape[1]))
        of_rank = dict(zip(_ARGUMENTS, dealt_heads(q, k, v), strict=False))
        out = self._run(given | of_rank, q.shape[1], chunks.rank, chunks.size)

        def back(x: Tensor) -> Tensor:
            joined = heads_to_positions(x if x.ndim == 4 else x.unsqueeze(-1), chunks)
            return SeqPart.wrap(joined if x.ndim == 4 else joined.squeeze(-1), place)

        return tree_map_only(Tensor, back, out)

    def _run(self, given: dict[str, Any], heads: int, rank: int = 0, size: int = 1) -> Any:
        """Attention of the ``rank``-th of ``size`` (cp) parts of the ``heads`` that this rank's projections make."""
        count = heads // size
        behind = rank * count
        first = self._heads.rank * heads + behind
        score, mask = given.get("score_mod"), given.get("block_mask")
        if score is not None and first:
            given = given | {"score_mod": _shifted(score, first, 1)}
        if mask is not None and (first or count < mask.kv_num_blocks.shape[1]):
            given = given | {"block_mask": self._own(mask, heads, count, behind, first)}
        return self._function(**given)

    def _own(self, mask: BlockMask, heads: int, count: int, behind: int, first: int) -> BlockMask:
        """Of a mask that of some heads, which the mask keeps for the next layer."""
        key = heads, count, behind, first
        before, kept = getattr(mask, _OWN, (None, mask))
        if before == key:
            return kept
        rows, start, shift = mask.kv_num_blocks.shape[1], first, first
        own = copy.copy(mask)
        if rows == heads < heads * self._heads.size:  # made where it is used, for as many heads as this rank has
            start, shift = behind, behind
            if first > behind:
                moved = _shifted(mask.mask_mod, first - behind, 0)
                size, lengths = len(mask.kv_num_blocks), mask.seq_lengths
                own = create_block_mask(moved, size, rows, *lengths, mask.kv_num_blocks.device, mask.BLOCK_SIZE)
        if rows > count:
            for name, value in vars(own).items():
                if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == rows:
                    setattr(own, name, value[:, start : start + count].contiguous())
        if shift:
            own.mask_mod = _shifted(own.mask_mod, shift, 0)
        setattr(mask, _OWN, (key, own))
        return own


def _shifted(mod: Callable[..., Tensor], first: int, scores: int) -> Callable[..., Tensor]:
    """A score or mask function for heads that begin at ``first``."""
    if scores:
        return lambda score, b, h, q, k: mod(score, b, h + first, q, k)
    return lambda b, h, q, k: mod(b, h + first, q, k)
