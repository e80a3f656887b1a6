"""A record of one forward: every operation with what it read and made, and the module calls around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_seqpar.distributed.autograd import storage_id

_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "mv",
    "addmv",
    "_grouped_mm",
)
"""Products of matrices."""

_EMPTY = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "new_empty_strided",
)

"""What takes a tensor's shape alone."""

_RESHAPES = (
    "t",
    "transpose",
    "permute",
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "alias",
    "detach",
    "clone",
    "_to_copy",
    "contiguous",
    "split",
    "chunk",
    "as_strided",
    "split_with_sizes",
    "unbind",
    "unfold",
)
"""What passes its one input's content on."""


_ORDERED = (
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "_cummax_helper",
    "_cummin_helper",
    "logcumsumexp",
    "sort",
    "argsort",
    "topk",
    "kthvalue",
    "flip",
    "roll",
)
"""What puts the elements of a dim in an order, or goes through them in one; no gradient need show it."""


_REDUCING = (
    "sum",
    "mean",
    "prod",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "norm",
    "linalg_vector_norm",
    "logsumexp",
    "amax",
    "amin",
    "max",
    "min",
    "median",
    "argmax",
    "argmin",
)
"""What makes one number of a dim, or of all where none is named; where it is clamped or compared, no gradient need show it."""


def _ordered_dims(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    name = name.removesuffix("_")
    if name not in (*_ORDERED, *_REDUCING) or not args or not isinstance(args[0], Tensor):
        return ()
    schema = [argument.name for argument in func._schema.arguments]
    if "other" in schema or (name in _REDUCING and not args[0].is_floating_point()):
        return ()  # the larger of two tensors; a count of classes, as one_hot looks at
    given = {**dict(zip(schema, args, strict=False)), **kwargs}
    count = max(1, args[0].ndim)
    dims = given.get("dim", given.get("dims"))
    if dims is None or dims == []:
        dims = range(count) if name in _REDUCING else -1
    return tuple(dim % count for dim in (dims if isinstance(dims, list | tuple | range) else [dims]))


@dataclass(frozen=True)
class Value:
    """A tensor at one moment: written again in place, it is another value.

    Attributes:
        id: its number.
        shape: its shape.
        floating: whether gradients can flow through it.
        root: number of the content; views and copies share it.
        parameter: the parameter that it is, or is a view or cast of.
    """

    id: int
    shape: tuple[int, ...]
    floating: bool
    root: int
    parameter: str | None = None


@dataclass(frozen=True)
class Op:
    """One operation; ``stack`` holds the numbers of the module calls that were open, outermost first.

    ``dims`` are the dims of its input along which it puts elements in an order, goes through them in one or reduces them.
    """

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stack: tuple[int, ...]
    dims: tuple[int, ...] = ()

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices."""
        return self.name in _PRODUCTS

    @property
    def is_empty(self) -> bool:
        """Whether it takes a tensor's shape alone."""
        return self.name in _EMPTY


@dataclass
class Call:
    """One call of a module.

    Attributes:
        args: the value of each tensor argument by position, name, or (argument, index) inside a nested one.
        outputs: the values that it returned.
        first_op: index of the first operation inside it; ``last_op`` is one past the last.
    """

    id: int
    name: str
    module: nn.Module
    parent: int | None
    first_op: int
    args: dict[int | str, int] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    last_op: int = -1
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})


class ForwardTrace(TorchDispatchMode):
    """Records the forward that runs under it.

    All tensors are kept alive until :meth:`forget`, so that a storage's address means one thing.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self._open: list[int] = []
        self._alive: list[Any] = []
        self._current: dict[tuple[Any, ...], int] = {}
        self._roots: dict[int, int] = {}
        self._keys: dict[int, list[tuple[Any, ...]]] = {}
        self._parameters: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            self._parameters[storage_id(parameter)] = name
        self._model = model

    # ---- values ------------------------------------------------------------------------------------------------

    @staticmethod
    def _key(tensor: Tensor) -> tuple[Any, ...]:
        return (
            storage_id(tensor),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )

    def _make(self, tensor: Tensor, parameter: str | None = None, copied: int | None = None) -> int:
        key = self._key(tensor)
        storage = key[0]
        if storage not in self._roots:
            self._roots[storage] = len(self.values) if copied is None else self.values[copied].root
        value = Value(
            len(self.values), tuple(tensor.shape), tensor.is_floating_point(), self._roots[storage], parameter
        )
        self.values.append(value)
        if key not in self._current:
            self._keys.setdefault(storage, []).append(key)
        self._current[key] = value.id
        self._alive.append(tensor)
        return value.id

    def value_of(self, tensor: Tensor) -> int:
        """The value that a tensor has now."""
        found = self._current.get(self._key(tensor))
        if found is None:
            found = self._make(tensor, self._parameters.get(storage_id(tensor)))
        return found

    def _strided(self, value: Any) -> list[Tensor]:
        return [
            leaf
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested
        ]

    # ---- operations --------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = self._strided((args, kwargs))
        inputs = [self.value_of(tensor) for tensor in tensors]
        out = func(*args, **kwargs)
        name = func.name().split("::")[-1].split(".")[0]
        results = self._strided(out)
        dims = _ordered_dims(func, name, args, kwargs)
        tag = copied = None
        if name in _RESHAPES and len(inputs) == 1:
            copied, tag = inputs[0], self.values[inputs[0]].parameter
        elif name in ("index", "index_select") and len(self.values[inputs[0]].shape) > 2:
            tag = self.values[inputs[0]].parameter  # some of the matrices that a parameter stacks
        outputs: list[int] = []
        if func._schema.is_mutable:
            stripped = name.removesuffix("_")
            written = {storage_id(tensor) for tensor in (results or tensors[:1])}
            for storage in sorted(written & set(self._roots)):
                outputs += self._rewrite(storage)
            self._add(stripped, inputs, outputs, dims)
        else:
            outputs = [self._make(tensor, tag, copied) for tensor in results]
            self._add(name, inputs, outputs, dims)
        return out

    def _rewrite(self, storage: int) -> list[int]:
        """Every view of a storage that was written to is another value now."""
        self._roots[storage] = len(self.values)
        made = []
        for key in self._keys.get(storage, []):
            old = self.values[self._current[key]]
            value = Value(len(self.values), old.shape, old.floating, self._roots[storage])
            self.values.append(value)
            self._current[key] = value.id
            made.append(value.id)
            # What the other views held is still in it.
            self._add("rewrite", [old.id], [value.id])
        return made

    def _add(self, name: str, inputs: list[int], outputs: list[int], dims: tuple[int, ...] = ()) -> None:
        self.ops.append(Op(len(self.ops), name, tuple(inputs), tuple(outputs), tuple(self._open), dims))

    # ---- calls -------------------------------------------------------------------------------------------------

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(len(self.calls), name, module, self._open[-1] if self._open else None, len(self.ops))
            call.given = (args, kwargs)
            given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            for key, arg in given:
                if isinstance(arg, Tensor) and self._strided(arg):
                    call.args[key] = self.value_of(arg)
            self.calls.append(call)
            self._open.append(call.id)

        return hook

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        call = self.calls[self._open.pop()]
        call.last_op = len(self.ops)
        call.outputs = [self.value_of(tensor) for tensor in self._strided(out)]

    @contextmanager
    def watch(self) -> Iterator[ForwardTrace]:
        """Record what runs inside, with the calls of the model's modules."""
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def forget(self) -> None:
        """Let go of the tensors; the record stays."""
        self._alive, self._current, self._keys = [], {}, {}

    # ---- questions ---------------------------------------------------------------------------------------------

    def calls_of(self, name: str) -> list[Call]:
        """The calls of the module of that name, in order."""
        return [call for call in self.calls if call.name == name]

    def ops_in(self, call: Call) -> list[Op]:
        """The operations inside a call, in order."""
        return self.ops[call.first_op : call.last_op]
