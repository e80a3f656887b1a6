"""A tensor that tells the shape of a whole sequence and holds this rank's positions of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isgetsetdescriptor
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_seqpar.context.chunks import Chunks, gather_for_parts, gather_positions, share
from lightning_seqpar.distributed.autograd import input_nodes, leaf_of, outputs_of, without_overrides
from lightning_seqpar.releases import NODES_STAY


@dataclass(frozen=True)
class Place:
    """Where a sequence lies in a tensor: in ``dim`` (0 or more), into which other dims may have been flattened."""

    chunks: Chunks  # how its positions are dealt out
    dim: int
    before: int = 1  # the size of what was flattened into it in front of the sequence: b in [b·s, h]
    behind: int = 1  # and behind it

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
    """A sequence of the whole shape, such as ``[b, s, h]``, of which this rank holds ``[b, s/cp, h]``, or ``[b, s/tp, h]``.

    Functions of each number, reductions, products and views run on what the rank holds; whole tensors that they are given
    beside it (rotary tables, masks, labels) count with the rank's positions alone. Losses run over all ranks, over cp attention too
    (:mod:`~lightning_seqpar.context.attention`, :mod:`~lightning_seqpar.context.loss`). Every other function gathers first, which
    is a collective: it must run on all ranks. A warning names it.

    Of a sequence that is dealt out over both axes the part over cp has a part over tp in it (:attr:`local`).
    """

    _local: Tensor
    _place: Place
    _guarded: bool = False
    _source: SeqPart | None = None  # without a graph, and this is a view of it

    @staticmethod
    def wrap(local: Tensor, place: Place) -> SeqPart:
        """The sequence of which ``local`` is this rank's part."""
        shape = list(local.shape)
        if shape[place.dim] != place.local_size:
            raise AssertionError(f"a part of {shape[place.dim]} at dim {place.dim}, where {place} has {place.local_size}")
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
        """The whole sequence as a plain tensor, ``[b, s, h]``, for work that all ranks do alike.

        Forward: all-gather. Backward: over cp a reduce-scatter, over tp a slice.
        """
        return self._gathered(gather_positions)

    def for_parts(self) -> Tensor:
        """The whole sequence as a plain tensor, ``[b, s, h]``, for work of each rank on a part of another sequence.

        Forward: all-gather. Backward: reduce-scatter; over cp alone where it lies over both axes (:func:`share` does the other).
        """
        return self._gathered(gather_for_parts)

    def _gathered(self, gather: Callable[[Tensor, int, Chunks], Tensor]) -> Tensor:
        _settle((self,))
        place, local = self._place, self._local
        if type(local) is not Tensor and hasattr(local, "whole"):  # a part over tp too, or sharded by vocabulary
            local = local.whole()
        if place.is_plain:
            return gather(local, place.dim, place.chunks)
        split = local.unflatten(place.dim, (place.before, place.chunks.local_length, place.behind))
        return gather(split, place.dim + 1, place.chunks).flatten(place.dim, place.dim + 2)

    def settled(self) -> SeqPart:
        """Itself, once its part has the graph that the object was given by an ``autograd.Function`` of somebody's."""
        _settle((self,))
        return self

    def _take_over_graph(self, node: Any, number: int) -> None:
        """Where an ``autograd.Function`` of somebody's made this sequence, give the part the graph that the Function has.

        One with several outputs, or with inputs that other functions made of plain tensors, is refused.
        """
        name = type(node).__name__.removesuffix("Backward")
        if not NODES_STAY:
            raise RuntimeError(
                f"{name}, an autograd.Function, made a sequence that ranks of {self._place.chunks.shown} hold in parts: that "
                f"needs torch 2.13, and {torch.__version__} is installed; write it without autograd.Function, use "
                f"checkpoint(..., use_reentrant=False), or set {self._place.chunks.off}"
            )
        with without_overrides():
            self.detach_()
        nodes = input_nodes(node)
        inputs = [None if each is None else leaf_of(each) for each in nodes]
        missing = [at for at, found in enumerate(inputs) if found is None and nodes[at] is not None]
        known = not missing
        if name == "CheckpointFunction":  # it keeps its inputs, each with its graph; over cp it would give plain ones a part
            known = self._place.chunks.axis == "tp"
            kept = node.saved_tensors if known and missing else ()
            inputs = [kept[at] if at in missing and known else found for at, found in enumerate(inputs)]
        if number or not known or outputs_of(node) != 1:
            raise RuntimeError(
                f"{name}, an autograd.Function, made a sequence of which each rank of {self._place.chunks.shown} holds a part, "
                "beside other outputs, of other tensors that have a graph, or by a graph of its own: its gradient can't be taken "
                "there; write the function without autograd.Function, use checkpoint(..., use_reentrant=False), or set "
                f"{self._place.chunks.off}"
            )
        with torch.enable_grad():  # a first look may be under no_grad, as to log a number
            self._local = _OfFunction.apply(node, self._place, inputs, self._local, *map(local_of, inputs))  # type: ignore[no-untyped-call]

    def _guard(self) -> None:
        """Refuse a gradient that reaches this object, where nothing reads it: of an ``autograd.Function`` of plain results."""
        chunks = self._place.chunks
        self._guarded = True

        def refuse(grad: Tensor) -> None:
            raise RuntimeError(
                f"an autograd.Function made a whole tensor of a sequence of which each rank of {chunks.shown} holds a part: its "
                "gradient can't be taken there; give it x.whole() (on all ranks), write it without autograd.Function, or set "
                f"{chunks.off}"
            )

        with without_overrides():
            self.register_hook(refuse)  # type: ignore[no-untyped-call]

    def _changed(self) -> None:
        """Make what a change in place has done to the part known to those that ask the object: whether it has a graph."""
        one: SeqPart | None = self
        with without_overrides():
            while one is not None:
                if one._local.requires_grad and not one.requires_grad:
                    one.requires_grad_()
                one = one._source

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The shape of the whole and the rank; no numbers, which would take a collective."""
        chunks = self._place.chunks
        return f"SeqPart(shape={list(self.shape)}, rank {chunks.rank} of {chunks.shown} holds {chunks.local_length} positions)"

    def __format__(self, format_spec: str) -> str:
        """As in :meth:`__repr__`."""
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on the part if it can be, else on the whole; not one that would change or name a copy alone."""
        named: dict[str, Any] = dict(kwargs) if kwargs else {}
        if func in FACTS:
            with without_overrides():
                return func(*args, **named)
        _settle((*args, *named.values()) if named else args)
        if not args and "input" in named:
            args = (named.pop("input"),)
        if named.get("out") is None:
            handling = HANDLERS.get(func)
            if handling is None and isinstance(func, OpOverload | OpOverloadPacket):
                packet = func.overloadpacket if isinstance(func, OpOverload) else func
                handling = OPERATORS.get(packet._qualified_op_name)
            if handling is not None and handling.fits(args, named):
                out = handling.run(func, *((args, named) if handling.composed else _shared(args, named)))
                if out is not NotImplemented:
                    first = args[0] if args else None
                    if (
                        type(out) is type(first) is SeqPart
                        and type(out._local) is Tensor
                        and out._local._base is not None
                        and not first._local.requires_grad
                        and out is not first
                    ):
                        out._source = first
                    return out
        return on_whole(func, args, named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what reads the tensor below autograd, where its gradient would be lost; not a checkpoint's ``detach``."""
        if func is torch.ops.aten.detach.default:
            return _detached(func, args, {})
        raise RuntimeError(
            f"{func} got a sequence of which each rank of {_chunks_of(args).shown} holds a part, past torch's functions (from an "
            "autograd.Function, a compiled extension or a reentrant activation checkpoint), where it can't be made whole; give "
            f"it x.whole() (on all ranks), use checkpoint(..., use_reentrant=False), or set {_chunks_of(args).off}"
        )


class _OfFunction(torch.autograd.Function):
    """Forward: the part of a sequence that somebody's ``autograd.Function`` made. Backward: that Function's, on sequences.

    To the Function all of them are whole: what it tells of a plain tensor is the gradient of all positions, the same on all ranks,
    of which each takes its share.
    """

    @staticmethod
    def forward(ctx: Any, node: Any, place: Place, given: list[Any], local: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.node, ctx.place = node, place
        ctx.places = [one._place if isinstance(one, SeqPart) else None for one in given]
        ctx.given = [(one, one._local._version) for one in given if isinstance(one, SeqPart)]
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        if any(one._local._version != version for one, version in ctx.given):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a sequence that "
                f"{type(ctx.node).__name__.removesuffix('Backward')} was given"
            )
        grads = ctx.node.apply(SeqPart.wrap(grad, ctx.place))
        grads = grads if isinstance(grads, tuple) else (grads,)
        needed = ctx.needs_input_grad[4:]
        if len(grads) != len(needed):  # one for each argument of the function, of which some are no tensors
            told = [one for one in grads if one is not None]
            if len(told) != sum(needed):
                raise RuntimeError(
                    f"{type(ctx.node).__name__.removesuffix('Backward')}, an autograd.Function, has no gradient for a tensor "
                    "that it was given, and made a sequence of which each rank holds a part; return zeros for it"
                )
            waiting = iter(told)
            grads = tuple(next(waiting) if wanted else None for wanted in needed)
        due = zip(grads, ctx.places, needed, strict=True)
        shares = [share_of(one, place, ctx.place.chunks) if wanted else None for one, place, wanted in due]
        return None, None, None, None, *shares


def share_of(grad: Tensor | None, place: Place | None, chunks: Chunks) -> Tensor | None:
    """Of the gradient of a whole tensor this rank's: of a sequence its positions, of any other tensor what its losses tell."""
    if grad is None:
        return None
    if place is None:
        return whole_of(grad) / chunks.losses  # type: ignore[no-any-return]
    if isinstance(grad, SeqPart) and grad._place.dim == place.dim and grad._place.same(place):
        return grad._local
    return place.own(whole_of(grad))


def _settle(values: Iterable[Any]) -> None:
    """Look after the sequences among the arguments of a function, before anything reads their parts."""
    enabled = torch.is_grad_enabled()
    for value in values:
        if type(value) is SeqPart:
            with without_overrides():
                node = value.grad_fn
                number = 0 if node is None else value.output_nr
                trains = node is None and value.requires_grad
            if node is not None:
                value._take_over_graph(node, number)
            elif trains and enabled and not value._local.requires_grad:
                # It comes out of hooks on saved tensors around a checkpoint, which give it back without the part's graph.
                value._local = value._local.detach().requires_grad_()
            elif trains and not enabled and not value._guarded:
                value._guard()
            elif not trains and enabled and value._local.requires_grad:
                value._changed()  # through a view of it
        elif type(value) in (tuple, list):
            _settle(value)


def _shared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function on parts over tp, with whole tensors that take a gradient shared (:func:`share`)."""
    if not torch.is_grad_enabled():
        return args, kwargs
    leaves, spec = tree_flatten((args, kwargs))
    chunks = next((leaf._place.chunks for leaf in leaves if isinstance(leaf, SeqPart)), None)
    if chunks is None or chunks.axis == "cp":
        return args, kwargs
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not isinstance(leaf, SeqPart) and leaf.requires_grad:
            leaves[at] = share(leaf, chunks)
    given: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, spec)
    return given


def _chunks_of(args: Any) -> Chunks:
    return next(one for one in tree_leaves(args) if isinstance(one, SeqPart))._place.chunks


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Handling(NamedTuple):
    """What runs a function on parts; it may return ``NotImplemented``, which leaves the function to :func:`on_whole`."""

    run: Handler  # gets the function and its arguments
    first: bool = False  # whether the first argument must be a sequence
    only: bool = False  # whether no other argument may be one
    composed: bool = False  # whether it runs other functions of sequences, which share the whole tensors beside them

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether sequences are among the arguments where they must be, and nowhere else."""
        if (self.first or self.only) and not (args and isinstance(args[0], SeqPart)):
            return False
        return not self.only or not any(isinstance(value, SeqPart) for value in (*args[1:], *kwargs.values()))


def _detached(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeqPart:
    return SeqPart.wrap(args[0]._local.detach(), args[0]._place)


HANDLERS: dict[Any, Handling] = {}
"""By function. Filled by the modules of this package."""
OPERATORS: dict[str, Handling] = {"aten::detach": Handling(_detached)}  # by which autograd saves a tensor under a mode
"""By qualified name: operators that are met below autograd, in functions of extensions, which may never be imported."""


def functions(names: str, *homes: Any) -> list[Any]:
    """torch's functions of these names, in each of ``homes`` that has them; those of attributes are what reads them."""
    found = (getattr(home, name, None) for name in names.split() for home in ((Tensor,) if name.startswith("__") else homes))
    return [
        one.__get__ if isgetsetdescriptor(one) else one for one in found if one is not None and not isinstance(one, torch.dtype)
    ]


_ATTRIBUTES = """
    shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mkldnn is_mps is_xla itemsize nbytes
    size dim ndimension numel nelement element_size is_floating_point is_complex get_device __len__ __hash__
"""
FACTS = frozenset(functions(_ATTRIBUTES, Tensor) + functions("is_floating_point is_complex numel is_tensor", torch))
"""Functions that read what the whole and its part have in common, and none of the numbers."""


def local_of(x: Any) -> Any:
    """What this rank holds of a sequence; anything else unchanged."""
    return x._local if isinstance(x, SeqPart) else x


def plain_of(x: Any) -> Any:
    """The plain tensor in a sequence that may be dealt out over two axes; anything else unchanged."""
    while isinstance(x, SeqPart):
        x = x.settled().local
    return x


def places_of(x: Any) -> tuple[Place, ...]:
    """Where it lies, the outer axis first; none for anything else."""
    return (x.place, *places_of(x.local)) if isinstance(x, SeqPart) else ()


def put_in(x: Tensor, places: Sequence[Place]) -> Tensor:
    """A plain tensor as such a sequence: what :func:`plain_of` undoes."""
    for place in reversed(places):
        x = SeqPart.wrap(x, place)
    return x


def whole_of(x: Any) -> Any:
    """A sequence as a whole plain tensor (collective over its axis); anything else unchanged."""
    return x.whole() if isinstance(x, SeqPart) else x


def lies_over_tp(x: Any) -> bool:
    """Whether this tensor-parallel rank holds a part of a sequence."""
    return isinstance(x, SeqPart) and (x._place.chunks.axis == "tp" or isinstance(x._local, SeqPart))


def over_tp(x: SeqPart) -> Tensor:
    """A sequence as what all tensor-parallel ranks have alike: whole, or their context-parallel part of it (collective over tp)."""
    if x._place.chunks.axis == "tp":
        return x.whole()
    return x.like(x._local.whole()) if isinstance(x._local, SeqPart) else x


def writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument: an in-place method, or ``inplace=True``."""
    name = getattr(func, "__name__", "")
    if kwargs.get("inplace") is True or name in ("__setitem__", "__set__", "__delete__"):
        return True
    is_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return is_operator or (name.endswith("_") and not name.endswith("__"))


RESHAPES = frozenset(
    ["__set__", "__delete__", *(f"{name}_" for name in (
        "resize", "resize_as", "set", "squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims", "as_strided",
        "detach", "share_memory", "rename", "apply", "map", "map2",
    ))]
)  # fmt: skip
"""Names of methods that change what their tensor is, rather than the numbers in it."""
_OF_MEMORY = frozenset(
    ["data_ptr", "storage", "untyped_storage", "_typed_storage", "storage_type", "__dlpack__", "__dlpack_device__",
     "__cuda_array_interface__", "_make_subclass", "module_load", "pin_memory", "share_memory_", "is_set_to"]
)  # fmt: skip
_OF_GRAPH = frozenset([torch.autograd.grad, torch.autograd.backward, Tensor.register_post_accumulate_grad_hook])


def on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on whole sequences; collective. A change in place is made to the whole, and then to the parts.

    One that would change a copy alone, or give it away, is refused.
    """
    name = getattr(func, "__name__", str(func))
    out = kwargs.get("out")
    target = args[0] if args and writes(func, kwargs) else None
    if (
        any(isinstance(one, SeqPart) for one in tree_leaves(out))
        or (isinstance(target, SeqPart) and name in RESHAPES)
        or name in _OF_MEMORY
    ):
        raise RuntimeError(
            f"{name} of a sequence of which each rank of {_chunks_of((args, kwargs)).shown} holds a part would read or change a "
            "copy: it is whole only where it is used. Write the change as a new tensor (torch.where, torch.cat, x = x + y), or "
            "x = x.whole() first (on all ranks)"
        )
    if func in _OF_GRAPH and any(isinstance(one, SeqPart) for one in _differentiated(func, args, kwargs)):
        raise RuntimeError(
            f"{name} by a sequence of which each rank of {_chunks_of((args, kwargs)).shown} holds a part would find a copy, "
            "that is not in the graph; take the gradient by x.whole() (on all ranks) that the rest is computed from, or set "
            f"{_chunks_of((args, kwargs)).off}"
        )
    chunks = _chunks_of((args, kwargs))
    if chunks.size > 1 and not chunks.rank:
        warn_of_gather(func, f"the positions of a sequence of which each rank of {chunks.shown}")
    wholes: dict[int, Tensor] = {}

    def whole(x: SeqPart) -> Tensor:
        if id(x) not in wholes:
            wholes[id(x)] = x.whole()
        return wholes[id(x)]

    plain_args, plain_kwargs = tree_map_only(SeqPart, whole, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if isinstance(target, SeqPart):
        write(target, plain_args[0])
        return None if result is None else target
    return result


def warn_of_gather(func: Any, what: str) -> None:
    """Say once for each line of the user's that a function makes ``what`` whole there."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{getattr(func, '__name__', func)}() needs all of {what} holds a part: they are gathered for it. The result is right; it "
        "takes a collective, and memory for the whole, at each call",
        stacklevel=level,
    )


_NOT_USERS = frozenset(["lightning_seqpar", "torch"])


def _differentiated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a function of the graph takes gradients by."""
    at = {torch.autograd.grad: 1, torch.autograd.backward: 4}.get(func, 0)
    return tree_leaves(args[at] if len(args) > at else kwargs.get("inputs"))


def write(target: SeqPart, whole: Tensor) -> None:
    """Give a sequence, in place, the numbers of a whole tensor, and its graph; views of it change with it."""
    target._local.copy_(target._place.own(share(whole, target._place.chunks)))
    target._changed()
