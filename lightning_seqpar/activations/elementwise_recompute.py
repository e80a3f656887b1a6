"""Recomputing the element-wise functions between column linears and their row linear in the backward.

Activation functions, gates and biases save tensors there, and the row saves its input; all of them are functions of the
columns' outputs. Only the outputs are kept. The autograd graph stays as the user's code built it, but the tensors that its
nodes saved are replaced (by saved-tensor hooks) with recipes: in the backward the recorded functions run again on the same
numbers, so the values are the same to the last bit. What lies between the columns and the row is called a span here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_seqpar.activations.replay import REPLAYED, Autocast, is_constant, is_plain
from lightning_seqpar.distributed.autograd import (
    function_mode,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
    saved_tensor_hooks_allowed,
    storage_id,
)


class _Slot(NamedTuple):
    """In the arguments of a recorded call, the index of the tensor that stands there."""

    at: int


class _Step(NamedTuple):
    """One recorded call.

    Attributes:
        call: the function.
        args: its positional arguments, a :class:`_Slot` in place of each tensor.
        kwargs: its named arguments, likewise.
        out: index of the result, or of each of its parts.
        autocast: the autocast state around the call.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: tuple[int, ...]
    autocast: Autocast


class _SavedTensor:
    """What a graph node saves in place of a tensor: the tensor itself, or the place in the span from which it is recomputed."""

    __slots__ = ("_offset", "_shape", "_slot", "_span", "_stride", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._slot, self._span = -1, cast(ElementwiseRecompute | None, None)

    def drop(self, span: ElementwiseRecompute, slot: int) -> None:
        """Let go of the tensor, whose memory is that of the value ``slot`` of ``span``, which can be recomputed."""
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        self._shape, self._stride, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._span, self._slot = span, slot

    def unpack(self) -> Tensor:
        """The tensor, recomputed if it was let go of.

        Raises:
            RuntimeError: if it was changed in place since it was saved.
        """
        if self.tensor is not None:
            if self.tensor._version != self._version:  # with hooks installed, autograd does not check this itself
                raise RuntimeError(
                    f"a tensor of shape {list(self.tensor.shape)} between column and row linears was modified by an inplace "
                    "operation, and the backward needs it as it was; write the change as a new tensor"
                )
            return self.tensor
        assert self._span is not None
        made = self._span.value(self._slot, self)
        return made.as_strided(self._shape, self._stride, self._offset)


class ElementwiseRecompute(TorchFunctionMode):
    """Records the functions that run on the outputs of column linears, and what autograd saves, until :meth:`close`.

    It is a function mode and a pair of saved-tensor hooks, which are opened and closed around the user's code. A counter of kept
    bytes (``count``) is told of each tensor that is kept in the end.
    """

    is_transparent = True  # this mode changes no result

    def __init__(self, count: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self._count = count
        self._slots: dict[int, int] = {}  # by the id of a tensor, its index in _tensors
        self._tensors: list[Tensor | None] = []  # sources are kept, other values only until close
        self._versions: list[int] = []
        self._steps: list[_Step] = []
        self._sources: list[int] = []
        self._homes: dict[int, int] = {}  # by storage, the index of the value that was made in it
        self._source_storages: set[int] = set()
        self._packed: list[_SavedTensor] = []  # cleared at close, since they refer to the span
        self._dropped: frozenset[int] = frozenset()
        self._spoiled = False
        self._records = self._keeps = self._has_mode = self._has_hooks = True
        self._values: dict[int, Tensor] = {}
        self._waiting: set[int] = set()

    @staticmethod
    def open() -> ElementwiseRecompute | None:
        """Open a span, which records from now on.

        None where it must not: under somebody's function mode or saved-tensor hooks, such as an activation checkpoint's, whose
        recomputation must save alike. A counter of kept bytes (:attr:`SavedBytes.keep`) is told what is kept.
        """
        outer = saved_tensor_hooks()
        count = getattr(getattr(outer[0], "__self__", None), "counted", None) if outer is not None else None
        if function_mode() is not None or (outer is not None and count is None) or not saved_tensor_hooks_allowed():
            return None  # a mode may change what functions do, and would not see the recomputation
        made = ElementwiseRecompute(count)
        made.__enter__()  # type: ignore[no-untyped-call]
        push_saved_tensor_hooks(made._pack, _SavedTensor.unpack)
        return made

    def pause(self) -> None:
        """Stop recording where the row linear begins; what it saves still counts."""
        self._records = False
        if self._has_mode and function_mode() is self:
            self.__exit__(None, None, None)
            self._has_mode = False

    def close(self, *, done: bool) -> bool:
        """End the span: replace saved tensors by recipes, if that saves memory.

        Args:
            done: whether a row linear ran, and saved its input.

        Returns:
            Whether anything was replaced.
        """
        self._keeps = False
        # If the user's code began a mode or hooks within it, the record may be incomplete.
        gained = self.remove() and done and not self._spoiled and self._is_intact() and self._settle()
        if not gained:
            self._steps, self._sources = [], []
        self._tensors = [tensor if at in self._sources else None for at, tensor in enumerate(self._tensors)]
        if self._count is not None:
            kept = (*self._tensors, *(packed.tensor for packed in self._packed))
            for tensor in kept:
                if tensor is not None and not isinstance(tensor, Parameter):
                    self._count(tensor)
        self._slots, self._homes, self._packed = {}, {}, []
        return gained

    def remove(self) -> bool:
        """Take its mode and its hooks off torch's stacks if they are on top; returns whether none of them is left there."""
        self.pause()
        top = saved_tensor_hooks()
        if self._has_hooks and top is not None and top[0] == self._pack:
            pop_saved_tensor_hooks()
            self._has_hooks = False
        return not (self._has_mode or self._has_hooks)

    # ---- recording -------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and record it if it may be run again; a change in place of a recorded tensor spoils the span."""
        kwargs = kwargs or {}
        for kind in types:
            if getattr(kind, "runs_on_parts", False):  # it calls the function again with the tensors that it holds
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if self._spoiled or not self._records or name == "__get__":
            return func(*args, **kwargs)
        if (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set")) or "out" in kwargs:
            self._spoiled = any(id(value) in self._slots for value in (*args, *kwargs.values()))
        elif kwargs.get("inplace"):
            self._spoiled = True
        out = func(*args, **kwargs)
        if name in REPLAYED and not self._spoiled:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record a call, if it reads a recorded tensor and could be run again with the same arguments."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not any(id(tensor) in self._slots for tensor in tensors):
            return
        if not all(isinstance(value, Tensor) or is_constant(value) for value in (*args, *kwargs.values())):
            return
        parts = (out,) if isinstance(out, Tensor) else tuple(out) if isinstance(out, list | tuple) else ()
        if not parts or not all(is_plain(part) for part in parts):
            return
        for tensor in tensors:
            if id(tensor) not in self._slots:
                self.add_source(tensor)
        slots = tuple(self._slots[id(p)] if id(p) in self._slots else self._add(p) for p in parts)
        for part, slot in zip(parts, slots, strict=True):
            home = storage_id(part)
            if home not in self._source_storages:
                self._homes.setdefault(home, slot)
        positional = tuple(self._recorded(value) for value in args)
        named = {name: self._recorded(value) for name, value in kwargs.items()}
        self._steps.append(_Step(call, positional, named, slots, Autocast(parts[0].device.type)))

    def _recorded(self, value: Any) -> Any:
        """An argument as it is recorded."""
        if isinstance(value, Tensor):
            return _Slot(self._slots[id(value)])
        return tuple(value) if isinstance(value, list) else value  # a list may change later

    def _add(self, tensor: Tensor) -> int:
        """Give a tensor an index."""
        self._slots[id(tensor)] = slot = len(self._tensors)
        self._tensors.append(tensor)
        self._versions.append(tensor._version)
        return slot

    def add_source(self, tensor: Tensor) -> None:
        """Add a tensor that nothing recorded makes, as a column's output ``[b, s, f/tp]``: it is kept if it is needed."""
        self._sources.append(self._add(tensor))
        home = storage_id(tensor)
        if home not in self._homes:
            self._source_storages.add(home)

    # ---- keeping ---------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        """The hook that autograd calls to save a tensor."""
        packed = _SavedTensor(tensor)
        if self._keeps:
            self._packed.append(packed)
        return packed

    def _is_intact(self) -> bool:
        """Whether no recorded tensor was changed in place."""
        return all(t is None or t._version == v for t, v in zip(self._tensors, self._versions, strict=True))

    def _settle(self) -> bool:
        """Let go of saved tensors that can be recomputed; False if they are no larger than what must be kept for that."""
        saved = [(packed, packed.tensor) for packed in self._packed if packed.tensor is not None]
        kept = {storage_id(tensor) for _, tensor in saved if not self._can_view(tensor)}
        dropped = [(packed, self._homes[home]) for packed, tensor in saved if (home := storage_id(tensor)) not in kept]
        needed = {slot for _, slot in dropped}
        steps = []
        for step in reversed(self._steps):
            if needed & set(step.out):
                steps.append(step)
                needed |= {value.at for value in (*step.args, *step.kwargs.values()) if isinstance(value, _Slot)}
        sources = [at for at in self._sources if at in needed]
        kept_sources = [(at, tensor) for at in sources if (tensor := self._tensors[at]) is not None]
        extra = {
            storage_id(tensor): tensor
            for _, tensor in kept_sources
            if not isinstance(tensor, Parameter) and storage_id(tensor) not in kept
        }
        gain = {
            home: tensor.untyped_storage().nbytes() for _, tensor in saved if (home := storage_id(tensor)) not in kept
        }
        if sum(tensor.untyped_storage().nbytes() for tensor in extra.values()) >= sum(gain.values()):
            return False
        self._steps, self._sources = steps[::-1], sources
        for at, tensor in kept_sources:
            self._tensors[at] = tensor.detach()  # with its graph, the graph would refer to itself and never be freed
        for packed, slot in dropped:
            packed.drop(self, slot)
        self._dropped = frozenset(id(packed) for packed, _ in dropped)
        return True

    def _can_view(self, tensor: Tensor) -> bool:
        """Whether a view of what is recomputed has the tensor's numbers: not as another type than it was made as, or conjugated."""
        slot = self._homes.get(storage_id(tensor))
        made = None if slot is None else self._tensors[slot]
        return (
            made is not None
            and tensor.dtype == made.dtype
            and not any(t.is_conj() or t.is_neg() for t in (tensor, made))
        )

    # ---- recomputing -----------------------------------------------------------------------------------------

    def value(self, slot: int, packed: _SavedTensor) -> Tensor:
        """The recomputed value of an index, for a node's saved tensor.

        All values are recomputed at the first call, and freed when every saved tensor has had its own.
        """
        if not self._values:
            self._values = self._replay()
            self._waiting = set(self._dropped)
        value = self._values[slot]
        self._waiting.discard(id(packed))
        if not self._waiting:
            self._values = {}
        return value

    def _replay(self) -> dict[int, Tensor]:
        """Run the recorded calls again.

        Raises:
            RuntimeError: if a source was changed in place since the row read it.
        """
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
    """Opens and closes the spans of one region, one at a time: at its column and row linears."""

    def __init__(self, worth: Callable[[int], bool]) -> None:
        self._worth = worth
        self._span: ElementwiseRecompute | None = None
        self._columns: list[Any] = []
        self._left: list[ElementwiseRecompute] = []  # below a mode or hooks that the user's code began within them

    def after_column(self, out: Tensor, column: Any) -> None:
        """Note the output of a column linear, and open a span at the first one.

        Args:
            out: the output, ``[b, s, f/tp]``.
        """
        if not column.recomputes_elementwise or not out.requires_grad or not torch.is_grad_enabled():
            return
        if self._span is None:
            if not self._worth(out.nbytes):
                return
            self._span, self._columns = ElementwiseRecompute.open(), []
        if self._span is not None:
            self._span.add_source(out)
            self._columns.append(column)

    @contextmanager
    def row(self) -> Iterator[None]:
        """Wraps the product of a row linear, which saves its input, and ends the span."""
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
        """End a span that no row ended, where the block ends, and take what others left on torch's stacks off them."""
        if self._span is not None:
            self._end(done=False)
        while self._left and self._left[-1].remove():
            self._left.pop()

    def _end(self, *, done: bool) -> None:
        """Close the span; columns whose span saved no memory once are not recorded again."""
        span, self._span = self._span, None
        assert span is not None
        gained = span.close(done=done)
        if not span.remove():
            self._left.append(span)
        for column in self._columns:
            column.recomputes_elementwise = column.recomputes_elementwise and gained
        self._columns = []
