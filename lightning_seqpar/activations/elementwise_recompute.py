"""The element-wise span between column linears and their row linear, computed again in the backward.

What an activation function, a gate or a bias keeps there, and the row's own input, all come from what the columns made:
that alone is kept. The graph stays as the user's code built it; only the values that its nodes saved are made anew,
by the same functions on the same numbers, so that they are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_seqpar.activations.norm_recompute import apply_mask, dropout, drops
from lightning_seqpar.activations.replay import Autocast, is_plain
from lightning_seqpar.distributed.autograd import (
    function_mode,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
    storage_id,
)
from lightning_seqpar.distributed.counters import SavedBytes

_ARITHMETIC = (
    "add", "__add__", "__radd__", "sub", "subtract", "__sub__", "__rsub__", "rsub", "mul", "multiply", "__mul__", "__rmul__",
    "div", "divide", "true_divide", "__truediv__", "__rtruediv__", "__div__", "__rdiv__", "pow", "__pow__", "__rpow__", "neg",
    "negative", "__neg__", "square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "abs", "tanh", "sigmoid",
    "erf", "sin", "cos", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "where", "addcmul", "lerp",
)  # fmt: skip
_ACTIVATIONS = (
    "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardswish", "hardsigmoid", "hardtanh",
    "logsigmoid", "softplus", "softsign", "tanhshrink", "softshrink", "hardshrink", "threshold", "prelu", "glu",
)  # fmt: skip
_SHAPES = (
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "chunk", "split", "narrow", "unbind",
    "select", "squeeze", "unsqueeze", "expand", "contiguous", "clone", "__getitem__", "t",
    "to", "type_as", "float", "double", "half", "bfloat16",
)  # fmt: skip
REPLAYED = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_SHAPES))
"""Functions that give each number (or each place) of their result from few of their arguments' and draw nothing."""


class _Slot(NamedTuple):
    """In recorded arguments: the value that stands there."""

    at: int


class _Step(NamedTuple):
    """One recorded call."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: tuple[int, ...]  # slots of the result, or of its parts
    autocast: Autocast


class _Packed:
    """What a graph node keeps in place of a tensor: the tensor, or where in the span it comes from."""

    __slots__ = ("_offset", "_shape", "_slot", "_span", "_stride", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._slot, self._span = -1, cast(ElementwiseRecompute | None, None)

    def drop(self, span: ElementwiseRecompute, slot: int) -> None:
        """The tensor lies on the memory of a value that can be made again."""
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        self._shape, self._stride, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._span, self._slot = span, slot

    def unpack(self) -> Tensor:
        """The tensor."""
        if self.tensor is not None:
            if self.tensor._version != self._version:  # hooks take this check from autograd
                raise RuntimeError(
                    f"a tensor of shape {list(self.tensor.shape)} between column and row linears was modified by an inplace "
                    "operation, and the backward needs it as it was; write the change as a new tensor"
                )
            return self.tensor
        assert self._span is not None
        made = self._span.value(self._slot, self)
        return made.as_strided(self._shape, self._stride, self._offset)


class ElementwiseRecompute(TorchFunctionMode):
    """Records what is done to the outputs of column linears, until :meth:`close`.

    Opened and closed around user code, on top of whatever modes and hooks are active then.
    """

    is_transparent = True  # it changes no result

    def __init__(self, outer: SavedBytes | None) -> None:
        super().__init__()
        self._outer = outer
        self._slots: dict[int, int] = {}  # by the tensor's identity
        self._tensors: list[Tensor | None] = []  # sources for good, the others until close
        self._versions: list[int] = []
        self._steps: list[_Step] = []
        self._sources: list[int] = []
        self._homes: dict[int, int] = {}  # storages of made values → slot
        self._given: set[int] = set()  # storages of sources
        self._packed: list[_Packed] = []  # until close: they hold the span
        self._dropped: frozenset[int] = frozenset()
        self._spoiled = False
        self._records = self._keeps = self._has_mode = self._has_hooks = True
        self._values: dict[int, Tensor] = {}
        self._waiting: set[int] = set()

    @staticmethod
    def open() -> ElementwiseRecompute | None:
        """A span that records from now on; none where another's hooks decide what is kept (activation checkpointing)."""
        if function_mode() is not None:
            return None  # what it does to a function it would not do again
        top = saved_tensor_hooks()
        outer = getattr(top[0], "__self__", None) if top is not None else None
        if top is not None and not isinstance(outer, SavedBytes):
            return None
        made = ElementwiseRecompute(outer)
        made.__enter__()  # type: ignore[no-untyped-call]
        push_saved_tensor_hooks(made._pack, made._unpack)
        return made

    def add(self, out: Tensor) -> None:
        """A column's output: it is kept."""
        self._add_source(out)

    def pause(self) -> None:
        """The row begins: what it calls is no part of the span, what it keeps is."""
        self._records = False
        self._pop_mode()

    def close(self, *, done: bool) -> bool:
        """The row has kept its input (or, not ``done``, there was no row): whether anything is gained."""
        self._keeps = False
        # With a mode or hooks of the user's code over them, what was recorded may be part of what happened.
        alone = not self._has_mode and self._pop_hooks()
        gained = done and alone and not self._spoiled and self._is_intact() and self._settle()
        for packed in self._packed:
            self._tell_outer(packed.tensor)
        if not gained:
            self._steps, self._sources = [], []
        self._slots, self._homes, self._packed = {}, {}, []
        needed = set(self._sources)
        self._tensors = [tensor if at in needed else None for at, tensor in enumerate(self._tensors)]
        return gained

    def release(self) -> bool:
        """Take what is left of it off the stacks of modes and hooks, if nothing lies over it; whether that is done."""
        self._pop_mode()
        self._pop_hooks()
        return not self._has_mode and not self._has_hooks

    def _pop_mode(self) -> None:
        if self._has_mode and function_mode() is self:
            self.__exit__(None, None, None)
            self._has_mode = False

    def _pop_hooks(self) -> bool:
        top = saved_tensor_hooks()
        if self._has_hooks and top is not None and top[0] == self._pack:
            pop_saved_tensor_hooks()
            self._has_hooks = False
        return not self._has_hooks

    # ---- recording -------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._spoiled or not self._records or name == "__get__":
            return func(*args, **kwargs)
        if name == "dropout" and (found := self._dropout(*args, **kwargs)) is not None:
            return found
        if (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set")) or "out" in kwargs:
            self._spoiled = any(id(given) in self._slots for given in (*args, *kwargs.values()))
        elif kwargs.get("inplace"):
            self._spoiled = True
        out = func(*args, **kwargs)
        if name in REPLAYED and not self._spoiled:
            self._note(func, args, kwargs, out)
        return out

    def _dropout(self, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
        if not training or inplace or not drops(x, p):
            return None
        top = saved_tensor_hooks()
        if top is None or top[0] != self._pack:
            return None  # a checkpoint's part runs again without this mode, and must keep the same
        out, mask = dropout(x, p)
        self._note(apply_mask, (x, mask, p), {}, out)
        return out

    def _note(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not any(id(tensor) in self._slots for tensor in given):
            return
        if not all(isinstance(value, Tensor) or _is_constant(value) for value in (*args, *kwargs.values())):
            return
        parts = (out,) if isinstance(out, Tensor) else tuple(out) if isinstance(out, list | tuple) else ()
        if not parts or not all(is_plain(part) for part in parts):
            return
        for tensor in given:
            if id(tensor) not in self._slots:
                self._add_source(tensor)
        slots = tuple(self._slots[id(p)] if id(p) in self._slots else self._add(p) for p in parts)
        for part, slot in zip(parts, slots, strict=True):
            home = storage_id(part)
            if home not in self._given:
                self._homes.setdefault(home, slot)
        told = tuple(self._tell(value) for value in args)
        named = {name: self._tell(value) for name, value in kwargs.items()}
        self._steps.append(_Step(call, told, named, slots, Autocast(parts[0].device.type)))

    def _tell(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Slot(self._slots[id(value)])
        return tuple(value) if isinstance(value, list) else value  # a list may change later

    def _add(self, tensor: Tensor) -> int:
        self._slots[id(tensor)] = slot = len(self._tensors)
        self._tensors.append(tensor)
        self._versions.append(tensor._version)
        return slot

    def _add_source(self, tensor: Tensor) -> None:
        self._sources.append(self._add(tensor))
        home = storage_id(tensor)
        if home not in self._homes:
            self._given.add(home)

    # ---- keeping ---------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _Packed:
        packed = _Packed(tensor)
        if self._keeps:
            self._packed.append(packed)
        else:
            self._tell_outer(tensor)
        return packed

    @staticmethod
    def _unpack(kept: _Packed) -> Tensor:
        return kept.unpack()

    def _tell_outer(self, tensor: Tensor | None) -> None:
        if self._outer is not None and tensor is not None:
            self._outer.keep(tensor)

    def _is_intact(self) -> bool:
        return all(t is None or t._version == v for t, v in zip(self._tensors, self._versions, strict=True))

    def _settle(self) -> bool:
        """Let go of what can be made again, if that is more than what must be kept for it."""
        homes = [(packed, packed.tensor.untyped_storage()) for packed in self._packed if packed.tensor is not None]
        self._keep_odd_views()
        dropped = [(packed, self._homes[storage_id(home)]) for packed, home in homes if storage_id(home) in self._homes]
        kept = {storage_id(home) for _, home in homes if storage_id(home) not in self._homes}
        needed = {slot for _, slot in dropped}
        steps = []
        for step in reversed(self._steps):
            if needed & set(step.out):
                steps.append(step)
                needed |= {value.at for value in (*step.args, *step.kwargs.values()) if isinstance(value, _Slot)}
        sources = [at for at in self._sources if at in needed]
        held = [(at, tensor) for at in sources if (tensor := self._tensors[at]) is not None]
        extra = {
            storage_id(tensor): tensor
            for _, tensor in held
            if not isinstance(tensor, Parameter) and storage_id(tensor) not in kept
        }
        gain = {storage_id(home): home.nbytes() for _, home in homes if storage_id(home) in self._homes}
        if sum(tensor.untyped_storage().nbytes() for tensor in extra.values()) >= sum(gain.values()):
            return False
        for tensor in extra.values():
            self._tell_outer(tensor)
        self._steps, self._sources = steps[::-1], sources
        for at, tensor in held:
            self._tensors[at] = tensor.detach()  # the graph must not hold itself
        for packed, slot in dropped:
            packed.drop(self, slot)
        self._dropped = frozenset(id(packed) for packed, _ in dropped)
        return True

    def _keep_odd_views(self) -> None:
        """Memory that a node reads as another type, or conjugated, than it was made as is kept."""
        for packed in self._packed:
            tensor = packed.tensor
            home = None if tensor is None else storage_id(tensor)
            slot = None if home is None else self._homes.get(home)
            made = None if slot is None else self._tensors[slot]
            if tensor is None or home is None or made is None:
                continue
            if tensor.dtype != made.dtype or any(t.is_conj() or t.is_neg() for t in (tensor, made)):
                del self._homes[home]

    # ---- making again ----------------------------------------------------------------------------------------

    def value(self, slot: int, packed: _Packed) -> Tensor:
        """The value of a slot; all are made at the first call and let go when every node has had its own."""
        if not self._values:
            self._values = self._replay()
            self._waiting = set(self._dropped)
        found = self._values[slot]
        self._waiting.discard(id(packed))
        if not self._waiting:
            self._values = {}
        return found

    def _replay(self) -> dict[int, Tensor]:
        values: dict[int, Tensor] = {}
        for at in self._sources:
            tensor = self._tensors[at]
            assert tensor is not None
            if tensor._version != self._versions[at]:
                raise RuntimeError(
                    "the output of a column-parallel linear (or what was combined with it) was changed in place after its "
                    "row-parallel linear had read it, and the backward needs it; write the change as a new tensor"
                )
            values[at] = tensor
        with torch.no_grad():
            for step in self._steps:
                args = [values[value.at] if isinstance(value, _Slot) else value for value in step.args]
                kwargs = {k: values[v.at] if isinstance(v, _Slot) else v for k, v in step.kwargs.items()}
                with step.autocast.again():
                    out = step.call(*args, **kwargs)
                values.update(zip(step.out, (out,) if isinstance(out, Tensor) else out, strict=True))
        return values


class ElementwiseSpans:
    """The spans of one region's calls.

    Args:
        worth: whether activations of so many bytes on a rank are worth making again.
    """

    def __init__(self, worth: Callable[[int], bool]) -> None:
        self._worth = worth
        self._span: ElementwiseRecompute | None = None
        self._columns: list[Any] = []
        self._left_open: list[ElementwiseRecompute] = []

    def after_column(self, out: Tensor, column: Any) -> None:
        """What a column linear made: what is computed from it up to the row can be computed again."""
        if not column.recomputes_elementwise or not out.requires_grad or not torch.is_grad_enabled():
            return
        if self._span is None:
            if not self._worth(out.nbytes):
                return
            self._span, self._columns = ElementwiseRecompute.open(), []
        if self._span is not None:
            self._span.add(out)
            self._columns.append(column)

    @contextmanager
    def row(self) -> Iterator[None]:
        """Around the product of a row linear, which keeps its input."""
        if self._span is None:
            yield
            return
        self._span.pause()
        done = False
        try:
            yield
            done = True
        finally:
            self._end(done=done)

    def drop(self) -> None:
        """A block ended: no row came, or what lay over a span has gone."""
        if self._span is not None:
            self._span.pause()
            self._end(done=False)
        self._left_open = [one for one in reversed(self._left_open) if not one.release()][::-1]

    def _end(self, *, done: bool) -> None:
        span, self._span = self._span, None
        assert span is not None
        gained = span.close(done=done)
        for column in self._columns:
            # Where nothing was gained once, nothing is recorded again.
            column.recomputes_elementwise = column.recomputes_elementwise and gained
        self._columns = []
        if not span.release():
            self._left_open.append(span)


def _is_constant(value: Any) -> bool:
    """Whether an argument that is no tensor will be the same in the backward."""
    if isinstance(value, list | tuple):
        return all(_is_constant(item) for item in value)
    if isinstance(value, slice):
        return all(_is_constant(item) for item in (value.start, value.stop, value.step))
    kinds = (int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout)
    return value is None or value is Ellipsis or isinstance(value, kinds)
