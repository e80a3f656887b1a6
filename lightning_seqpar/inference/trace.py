"""A record of one forward: every operation with the values that it read and made, and the module calls around it.

Operations are seen as torch's dispatcher is given them, so a model's own code, functional calls and libraries all look alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_seqpar.distributed.autograd import storage_id

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "mv", "addmv", "_grouped_mm")  # products of matrices
_EMPTY = (
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
)
"""Operations that read a tensor's shape alone, so that nothing flows from its content."""

_COPIES = ("_unsafe_view", "clone", "_to_copy")  # no views, but their result has the content of their one input
_ORDERED = (
    *("cumsum", "cumprod", "cummax", "cummin", "_cummax_helper", "_cummin_helper", "logcumsumexp"),
    *("sort", "argsort", "topk", "kthvalue", "flip", "roll"),
)
"""Operations that put the elements of a dim in an order, or go through them in one; gradients need not show it."""

REDUCTIONS = {
    *("all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "linalg__powsum", "linalg_vector_norm"),
    *("logsumexp", "max", "mean", "median", "min", "nansum", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean"),
}
"""What torch tags as a reduction, where it has such a tag, and the median."""


def _ordered_dims(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The dims of its first argument along which an operation orders or reduces elements; none for other operations."""
    name = name.removesuffix("_")
    reduces = name in REDUCTIONS and func._overloadname != "other"  # max and min of two tensors
    if not (reduces or name in _ORDERED) or not args or not isinstance(args[0], Tensor):
        return ()
    if reduces and not args[0].is_floating_point():
        return ()  # such as one_hot's look at the largest class
    given = {**{argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    count = max(1, args[0].ndim)
    dims = given.get("dim", given.get("dims"))
    if dims is None or dims == []:
        dims = range(count) if reduces else -1
    return tuple(dim % count for dim in (dims if isinstance(dims, list | tuple | range) else [dims]))


@dataclass(frozen=True)
class Value:
    """A tensor between two writes: a tensor that is written in place has another value from then on."""

    shape: tuple[int, ...]  # its shape
    floating: bool  # whether gradients can flow through it
    root: int  # id of the value whose content it has; views and copies have the same root
    parameter: str | None = None  # name of the parameter that it is, or is a view or a cast of; None for an activation


@dataclass(frozen=True)
class Op:
    """One operation."""

    index: int  # its index in :attr:`ForwardTrace.ops`
    name: str  # as torch's dispatcher calls it; `rewrite` for a view of memory that an operation wrote to
    inputs: tuple[int, ...]  # ids of the values that it read
    outputs: tuple[int, ...]  # ids of the values that it made
    stack: tuple[int, ...]  # ids of the module calls that were open, outermost first
    dims: tuple[int, ...] = ()  # the dims of its first input along which it orders or reduces elements

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices."""
        return self.name in _PRODUCTS

    @property
    def is_empty(self) -> bool:
        """Whether it reads a tensor's shape alone."""
        return self.name in _EMPTY


@dataclass
class Call:
    """One call of a module."""

    id: int  # its index in :attr:`ForwardTrace.calls`
    name: str  # the module's name in the model
    module: nn.Module  # the module
    around: tuple[int, ...]  # ids of the calls around it, outermost first
    first_op: int  # index of the first operation inside it
    args: dict[int | str, int] = field(default_factory=dict)  # values of tensor arguments, by position or name
    outputs: list[int] = field(default_factory=list)  # ids of the values that it returned
    last_op: int = -1  # one past the index of the last operation inside it
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # the arguments themselves, positional and named


class ForwardTrace(TorchDispatchMode):
    """Records the forward of a model that runs under it; all tensors are kept alive, so that no address is used twice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[Value] = []  # every tensor that was read or made
        self.ops: list[Op] = []  # every operation, in order
        self.calls: list[Call] = []  # every call of a module, in the order in which they began
        self._open: list[int] = []
        self._alive: list[Any] = []
        self._current: dict[tuple[Any, ...], int] = {}
        self._roots: dict[int, int] = {}
        self._keys: dict[int, list[tuple[Any, ...]]] = {}
        self._parameters = {storage_id(parameter): name for name, parameter in model.named_parameters()}
        self.model, self.modules = model, dict(model.named_modules())
        self._is_paused = False

    def _make(self, tensor: Tensor, parameter: str | None = None, copied: int | None = None) -> int:
        """Record a tensor as a new value; ``copied`` is the value whose content it has, if it is a copy."""
        key = _view(tensor)
        storage, number = key[0], len(self.values)
        root = self._roots.setdefault(storage, number if copied is None else self.values[copied].root)
        floating = tensor.is_floating_point() or tensor.is_complex()
        self.values.append(Value(tuple(tensor.shape), floating, root, parameter))
        if key not in self._current:
            self._keys.setdefault(storage, []).append(key)
        self._current[key] = number
        self._alive.append(tensor)
        return number

    def value_of(self, tensor: Tensor) -> int:
        """Id of the value that a tensor has now; it is recorded if it was not seen yet."""
        value = self._current.get(_view(tensor))
        return self._make(tensor, self._parameters.get(storage_id(tensor))) if value is None else value

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        tensors = _strided((args, kwargs))
        inputs = [self.value_of(tensor) for tensor in tensors]
        out = func(*args, **kwargs)
        name = func.name().split("::")[-1].split(".")[0]
        results = _strided(out)
        dims = _ordered_dims(func, name, args, kwargs)
        tag = copied = None
        if (func.is_view or name in _COPIES) and len(inputs) == 1:
            copied, tag = inputs[0], self.values[inputs[0]].parameter
        elif name in ("index", "index_select") and len(self.values[inputs[0]].shape) > 2:
            # A choice among the matrices that a parameter stacks, such as experts' weights, is still that parameter.
            tag = self.values[inputs[0]].parameter
        if func._schema.is_mutable:
            written = {storage_id(tensor) for tensor in (results or tensors[:1])} & set(self._roots)
            outputs = [made for storage in sorted(written) for made in self._rewrite(storage)]
            self._add(name.removesuffix("_"), inputs, outputs, dims)
        else:
            outputs = [self._make(tensor, tag, copied) for tensor in results]
            self._add(name, inputs, outputs, dims)
        return out

    def _rewrite(self, storage: int) -> list[int]:
        """Record a new value for every view of a storage that was written to."""
        root = self._roots[storage] = len(self.values)
        for key in self._keys.get(storage, []):
            before, self._current[key] = self._current[key], len(self.values)
            self.values.append(Value(self.values[before].shape, self.values[before].floating, root))
            # An operation of its own says that the old content may still be in the new value.
            self._add("rewrite", [before], [self._current[key]])
        return list(range(root, len(self.values)))

    def _add(self, name: str, inputs: list[int], outputs: list[int], dims: tuple[int, ...] = ()) -> None:
        self.ops.append(Op(len(self.ops), name, tuple(inputs), tuple(outputs), tuple(self._open), dims))

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(len(self.calls), name, module, tuple(self._open), len(self.ops), given=(args, kwargs))
            given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            for key, arg in given:
                if isinstance(arg, Tensor) and _strided(arg):
                    call.args[key] = self.value_of(arg)
            self.calls.append(call)
            self._open.append(call.id)

        return hook

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        call = self.calls[self._open.pop()]
        call.last_op = len(self.ops)
        call.outputs = [self.value_of(tensor) for tensor in _strided(out)]

    @contextmanager
    def watch(self) -> Iterator[ForwardTrace]:
        """While open, record all operations and the calls of the model's modules."""
        with ExitStack() as stack:
            for name, module in self.modules.items():
                begins = module.register_forward_pre_hook(self._enter(name), with_kwargs=True, prepend=True)
                stack.enter_context(begins)
                stack.enter_context(module.register_forward_hook(self._leave, always_call=True))
            yield stack.enter_context(self)

    def run_backward(self, loss: Tensor) -> None:
        """Compute gradients of a loss in the middle of a step, for code that reads them; nothing of that is recorded."""
        self._is_paused = True
        try:
            loss.backward(retain_graph=True)
        finally:
            self._is_paused = False

    def calls_of(self, name: str) -> list[Call]:
        """The calls of the module of that name, in order."""
        return [call for call in self.calls if call.name == name]

    def call_inside(self, block: Call, name: str) -> Call | None:
        """The first call of the module ``name`` in a block's call; None if there is none."""
        inside = (call for call in self.calls_of(name) if block.first_op <= call.first_op < block.last_op)
        return next(inside, None)

    def ops_in(self, call: Call) -> list[Op]:
        """The operations inside a call, in order."""
        return self.ops[call.first_op : call.last_op]

    def activation(self, call: Call) -> int | str | None:
        """The argument that is the activation: the first floating-point one with the shape of the call's first output; or None.

        Shapes are ``[tokens, h]``, ``[b, s, h]`` or, with positions in several dims, ``[b, h, w, c]`` and ``[b, c, h, w]``.
        """
        out = self.values[call.outputs[0]] if call.outputs else None
        if out is None or not out.floating or len(out.shape) < 2:
            return None
        given = ((key, self.values[value]) for key, value in call.args.items())
        return next((key for key, value in given if value.floating and value.shape == out.shape), None)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    """What tells one view of memory from another."""
    return storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _strided(value: Any) -> list[Tensor]:
    """The ordinary tensors in any nest of containers; sparse and nested ones are left out."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_nested]
