"""The columns that read what is gathered for a module, and the activations that are the same on all ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_seqpar.distributed.autograd import grad_hooks, identities, input_node, node_classes, saved_tensor_hooks
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.products import Kept, Products, Tokens, gather_again

_PASSING = node_classes("ToCopy", "View", "UnsafeView", "Alias")
"""Nodes whose result is all of their input: casts and views."""

Hooks: TypeAlias = tuple[Any, Any] | None
"""Hooks on saved tensors, or none."""

_MADE = "_seqpar_made"
"""Attribute of a column with what was made for it (:class:`_Made`)."""


class _Made(NamedTuple):
    """What was made for a column where an activation was gathered, and what it was made with: the column may be called otherwise.

    Attributes:
        whole: the activation.
        version: its version.
        state: the state of autograd and autocast (:func:`_state`).
        parameters: what tells the column's parameters from others.
        out: the column's output.
    """

    whole: Tensor
    version: int
    state: tuple[Any, ...]
    parameters: tuple[Any, ...]
    out: Tensor


def _state(device: str, hooks: Hooks) -> tuple[Any, ...]:
    """What decides how a product is made, and what is kept of it."""
    return hooks, torch.is_grad_enabled(), torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


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

    def gather(self, tokens: Tokens, x: Tensor, hooks: Hooks = None, *, regather: bool = True) -> Tensor:
        """A shard on its way to the columns, whole: ``[b, s/tp, h]`` → ``[b, s, h]``.

        Args:
            hooks: those on saved tensors that apply.
            regather: whether the shard is kept, and gathered again in the backward.
        """
        joined: list[Any] = []
        transposed: list[bool] = []
        parameters: list[Tensor | None] = []
        casts = torch.is_autocast_enabled(x.device.type)
        for column in self._columns:
            own = column._parameters
            weight = own.get("weight")
            is_own = (type(weight) is Parameter or isinstance(weight, Parameter)) and "bias" in own
            if not is_own or column._forward_pre_hooks:
                continue  # hooks in front of it may change its weight, or its input
            if weight.shape[0 if column.transposed else 1] == x.shape[-1] and (casts or weight.dtype == x.dtype):
                joined.append(column)
                transposed.append(column.transposed)
                parameters += weight, own["bias"]
        whole: Tensor
        kept = Kept.of(x, traced=tokens.traced) if regather else None
        whole, *made = Products.apply((tokens, kept, transposed), x, *parameters)  # type: ignore[no-untyped-call]
        hand_out(joined, whole, made, hooks)
        if not tokens.traced:
            self._whole, self._joined = whole if joined else None, len(joined)
            self._again = (tokens, kept) if joined and kept is not None else None
        return whole

    def take_all(self) -> tuple[Tensor, list[Any], list[Tensor], Callable[[], Tensor]] | None:
        """What was gathered, the columns that multiplied it, what they made, and how it is gathered again.

        Returns:
            None unless all columns would make the same of it now.
        """
        whole, again = self._whole, self._again
        if whole is None or again is None or not self._all:
            return None
        made = []
        for column in self._all:
            if (one := _made_for(column, whole)) is None:
                return None
            made.append(one.out)
        for column in self._all:
            del column.__dict__[_MADE]
        return whole, [*self._all], made, functools.partial(gather_again, *again)

    def close(self, name: str, *, aborted: bool) -> None:
        """The module ``name`` returned, or raised: what no column has taken is let go of.

        Raises:
            RuntimeError: if a hook was registered on what was gathered when columns had read it.
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


def hand_out(columns: Sequence[Any], whole: Tensor, made: Sequence[Tensor], hooks: Hooks) -> None:
    """Give columns what was made for them, for their next call with ``whole``."""
    version, state = whole._version, _state(whole.device.type, hooks)
    for column, out in zip(columns, made, strict=True):
        column.__dict__[_MADE] = _Made(whole, version, state, identities(column._parameters.values()), out)


@torch.compiler.substitute_in_graph(hand_out)
def _hand_out_in_graph(columns: Sequence[Any], whole: Tensor, made: Sequence[Tensor], hooks: Hooks) -> None:
    """The same in a graph, where nothing but the block's own code runs before the columns do, and is seen by who traces it."""
    state = _state(whole.device.type, None)
    for column, out in zip(columns, made, strict=True):
        column.__dict__[_MADE] = _Made(whole, 0, state, tuple(column._parameters.values()), out)


def _made_for(column: Any, x: Tensor) -> _Made | None:
    """What was made for a column, if it would make the same of ``x`` now."""
    made: _Made | None = column.__dict__.get(_MADE)
    if made is None or made.whole is not x or x._version != made.version:
        return None
    # A hook of x sees the gradient of those that read it, and of a leaf that x was made it is kept. An activation checkpoint that
    # began since would run the column again, and not what made this.
    if (
        grad_hooks(x) is not None
        or (x.requires_grad and x.grad_fn is None and type(x) is Tensor)
        or made.state != _state(x.device.type, saved_tensor_hooks())
        or made.parameters != identities(column._parameters.values())
    ):
        return None
    return made


def take_made(column: Any, x: Tensor) -> Tensor | None:
    """What was made for a column where ``x``, which it is called with, was gathered; None if it has to multiply by itself."""
    made = _made_for(column, x)
    if made is None:
        return None
    del column.__dict__[_MADE]
    return made.out


@torch.compiler.substitute_in_graph(take_made)
def _take_made_in_graph(column: Any, x: Tensor) -> Tensor | None:
    """The same in a graph. A change of ``x`` in place is refused when the graph is made."""
    made: _Made | None = column.__dict__.get(_MADE)
    if made is None or made.whole is not x or made.state != _state(x.device.type, None):
        return None
    for before, now in zip(made.parameters, column._parameters.values(), strict=True):
        if before is not now:
            return None
    del column.__dict__[_MADE]
    return made.out


class WholeActivations:
    """What was gathered or copied for the modules that are running."""

    def __init__(self, frames: FrameStack) -> None:
        self._frames = frames

    def open(self) -> None:
        """A module with gathered inputs begins."""
        if not self._frames.traced:
            self._frames.current.gather_scopes.append([])

    def close(self) -> None:
        """It ended, or raised."""
        frame = self._frames.current
        if self._frames.traced:
            return
        del frame.gather_scopes[-1:]
        if not frame.gather_scopes:
            frame.wholes = []

    def add(self, whole: Tensor) -> None:
        """An activation that is the same on all ranks, for the innermost module that is running."""
        if self._frames.traced:
            return
        frame, node = self._frames.current, whole.grad_fn
        frame.wholes.append(weakref.ref(whole))
        if frame.gather_scopes and node is not None:
            frame.gather_scopes[-1].append(node)

    def note(self, x: Tensor) -> None:
        """``x`` was made of what is the same on all ranks alone, and so it is the same too."""
        self._frames.current.wholes.append(weakref.ref(x))

    def has(self, x: Tensor) -> bool:
        """Whether ``x`` is known to be the same on all ranks, or a view or cast of such a tensor."""
        wholes = [whole() for whole in self._frames.current.wholes]
        if any(whole is x for whole in wholes):
            return True
        node, nodes = x.grad_fn, [whole.grad_fn for whole in wholes if whole is not None and whole.grad_fn is not None]
        while node is not None and type(node) in _PASSING:
            node = input_node(node, 0)
        return node is not x.grad_fn and node in nodes
