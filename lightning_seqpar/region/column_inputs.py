"""The columns that read what is gathered for a module, and the activations that are the same on all ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_seqpar.distributed.autograd import grad_hooks, identities, input_node, node_classes, saved_tensor_hooks
from lightning_seqpar.layout.stand_in import Later
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.products import Kept, Products, Tokens, autocast_dtype, gather_again, kept_of

_PASSING = node_classes("ToCopy", "View", "UnsafeView", "Alias")
"""Nodes whose result is all of their input: casts and views."""

Hooks: TypeAlias = tuple[Any, Any] | None
"""Hooks on saved tensors, or none."""

_MADE = "_seqpar_made"
"""Attribute of a column with what was made for it where an activation was gathered: the activation and its version, the state of
autograd and autocast, what tells the column's parameters from others, and the output. The column may be called otherwise."""


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
        dtype = autocast_dtype(x)
        for column in self._columns:
            own = column._parameters
            weight = own.get("weight")
            is_own = (type(weight) is Parameter or isinstance(weight, Parameter)) and "bias" in own
            if not is_own or column._forward_pre_hooks:
                continue  # hooks in front of it may change its weight, or its input
            if weight.shape[0 if column.transposed else 1] == x.shape[-1] and (dtype is not None or weight.dtype == x.dtype):
                joined.append(column)
                transposed.append(column.transposed)
                parameters += weight, own["bias"]
        whole: Tensor
        kept = kept_of(x, traced=tokens.traced) if regather else None
        whole, *made = Products.applied((tokens, kept, transposed, dtype), x, *parameters, traced=tokens.traced)
        if joined:
            hand_out(joined, whole, made, hooks, dtype)
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
        made: list[Tensor] = []
        for column in self._all:
            noted = column.__dict__.get(_MADE)
            if (one := take_made(column, whole)) is None:
                return None
            column.__dict__[_MADE] = noted
            made.append(one)
        for column in self._all:
            del column.__dict__[_MADE]
        return whole, [*self._all], made, functools.partial(gather_again, *again, again[1][0]._version)

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


def hand_out(columns: Sequence[Any], whole: Tensor, made: Sequence[Tensor], hooks: Hooks, dtype: torch.dtype | None) -> None:
    """Give columns what was made for them, for their next call with ``whole``; ``dtype`` is autocast's."""
    version, state = whole._version, (hooks, torch.is_grad_enabled(), dtype)
    for column, out in zip(columns, made, strict=True):
        column.__dict__[_MADE] = whole, version, state, identities(column._parameters.values()), out


@torch.compiler.substitute_in_graph(hand_out)
def _hand_out_in_graph(
    columns: Sequence[Any], whole: Tensor, made: Sequence[Tensor], hooks: Hooks, dtype: torch.dtype | None
) -> None:
    """The same in a graph, where nothing but the block's own code runs before the columns do, and is seen by who traces it."""
    state = torch.is_grad_enabled(), dtype
    for column, out in zip(columns, made, strict=True):
        column.__dict__[_MADE] = whole, 0, state, tuple(column._parameters.values()), out


def take_made(column: Any, x: Tensor) -> Tensor | None:
    """What was made for a column where ``x``, which it is called with, was gathered; None if it has to multiply by itself."""
    noted = column.__dict__.get(_MADE)
    if noted is None:
        return None
    whole, version, state, parameters, out = noted
    if whole is not x:
        return None
    if type(x) is Later:
        is_other = x.made is not None and x.made._version > 0
    else:  # a hook of x sees the gradient of those that read it, and of a leaf that x was made it is kept
        is_other = x._version != version or grad_hooks(x) is not None or (x.requires_grad and x.grad_fn is None)
    # An activation checkpoint that began since would run the column again, and not what made this.
    if (
        is_other
        or state != (saved_tensor_hooks(), torch.is_grad_enabled(), autocast_dtype(out))
        or parameters != identities(column._parameters.values())
    ):
        return None
    del column.__dict__[_MADE]
    return out  # type: ignore[no-any-return]


@torch.compiler.substitute_in_graph(take_made)
def _take_made_in_graph(column: Any, x: Tensor) -> Tensor | None:
    """The same in a graph. A change of ``x`` in place is refused when the graph is made."""
    noted = column.__dict__.get(_MADE)
    if noted is None:
        return None
    whole, _, state, parameters, out = noted
    if whole is not x or state != (torch.is_grad_enabled(), autocast_dtype(x)):
        return None
    for before, now in zip(parameters, column._parameters.values(), strict=True):
        if before is not now:
            return None
    del column.__dict__[_MADE]
    return out  # type: ignore[no-any-return]


class WholeActivations:
    """What was gathered or copied for the modules that are running."""

    def __init__(self, frames: FrameStack) -> None:
        self._frames = frames

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
