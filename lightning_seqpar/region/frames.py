"""The calls of a region's blocks: the length of each one's sequence, and what is gathered in it and not yet reduced.

The state of a forward belongs to a call, not to a module. Every call of a block (or of the module at which the region ends) opens a
frame and closes it, whether it returns or raises, so that repeated, nested and aborted forwards are right. Between the blocks there
is no frame: an activation knows by itself that it is a part (:class:`~lightning_seqpar.context.seq_part.SeqPart`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from lightning_seqpar.context.chunks import Chunks
from lightning_seqpar.context.seq_part import Place
from lightning_seqpar.distributed.async_ops import shard_length
from lightning_seqpar.distributed.autograd import NO_BACKWARD, current_backward, input_node, node_classes
from lightning_seqpar.region.products import Tokens

_PASSING = node_classes("ToCopy", "View", "UnsafeView", "Alias")
"""Nodes whose result is all of their input: casts and views."""

InputKey = tuple[str, tuple[int, ...]]
"""A module's name and the shape of its input."""


class InputRecord(NamedTuple):
    """What a module's input was in the forward, for a recompute in the backward that runs outside of any call."""

    length: int | None  # positions of the whole sequence (of this rank of cp) of which it was a shard; None if it was whole
    ndim: int  # of an activation
    batch: int  # size of an activation's dim that is neither sequence nor features
    chunks: Chunks | None = None  # how the sequence is dealt out over the context-parallel ranks


_OUTSIDE = InputRecord(None, 0, 1)


class Frame:
    """The state of one call: nested, repeated and aborted calls of blocks each have their own."""

    length: int | None  # positions of the whole sequence while activations are shards; None outside of the blocks
    chunks: Chunks | None  # how it is dealt out over the ranks of cp; length then counts this rank's positions
    part = 0  # positions of a shard of it, padding included
    ndim: int  # of an activation: 3 for [b, s, h], 2 for flattened tokens [b·s, h]
    batch: int  # size of an activation's dim that is neither sequence nor features; flattened tokens are folded by it
    tokens: Tokens | None = None  # how activations lie on the ranks, for those that gather and reduce them; None until one does
    of_samples = False  # the call was given [b, h], of whole samples, whose rows are taken for positions
    switched_streams = False  # draws come from the rank's own random stream since the call began
    dealt_out: Place | None = None  # in a module that deals positions out to experts: where they lie in its input
    # What ends with the forward of an MLP that runs again up to its row, who counts what is kept, the hooks that keep it.
    span: tuple[ExitStack, Callable[[Tensor], Any] | None, Any] | None = None

    def __init__(
        self,
        module: str = "",
        known: InputRecord | None = None,
        *,
        is_call: bool = False,
        task: int = NO_BACKWARD,
        resumed_by: str | None = None,
        repeats: bool = False,
    ) -> None:
        self.module, self.is_call = module, is_call  # whose call it is; it opened the frame, and not a backward or a tile in it
        self.task = task  # the backward in which the call began
        self.resumed_by = resumed_by  # the module that opened the frame because a backward computes it again
        self.repeats = repeats  # a backward computes a part of a call again in it, with the lengths that the call had
        # The graph nodes of what was gathered for each running module, the outermost first.
        self.gather_scopes: list[list[Any]] = []
        self.wholes: list[weakref.ref[Tensor]] = []  # activations that are the same on all ranks
        self.copied: list[int] = []  # lengths of activations that were whole already where columns read them
        # For each running module whose output is reduced where it returns, its features' nodes; None for whole activations.
        self.sum_features: list[list[Any] | None] = []
        self.partial_nodes: list[Any] = []  # of the partial sums that rows left for it
        # Always its own: a compiled block asks for a frame that has them, and a repeat's would make another graph.
        self.length, self.ndim, self.batch, self.chunks = known or _OUTSIDE

    @property
    def record(self) -> InputRecord:
        """The lengths, for a recompute."""
        return InputRecord(self.length, self.ndim, self.batch, self.chunks)

    @property
    def sources(self) -> list[Any]:
        """Graph nodes of everything that was gathered for the modules that are running."""
        return [node for scope in self.gather_scopes for node in scope]

    def is_call_of(self, module: str) -> bool:
        """Whether a call of the module of that name opened it."""
        return self.is_call and self.module == module


class FrameStack:
    """The calls of a region's blocks that are under way, and the inputs that a backward may compute from again.

    Where blocks are compiled (``traced``) nothing that happens in one is noted, and no code reads names: the graph would be
    that of one block alone.
    """

    def __init__(self, size: int, dim: int, *, traced: bool = False) -> None:
        self._size, self._dim, self.traced = size, dim, traced
        self.reset()

    def reset(self) -> None:
        """Forget all calls, at the beginning of a step."""
        self.current = Frame()  # of the innermost call; outside of any call one that no call opened
        self._outer: list[Frame] = []
        # A backward computes parts of a forward again outside of any call. None: calls of one shape had other lengths.
        self._inputs: dict[InputKey, InputRecord | None] = {}

    # ---- calls -----------------------------------------------------------------------------------------------

    def open(self, module: str = "") -> None:
        """Begin a call of a block, or of another module on shards."""
        self._outer.append(self.current)
        self.current = Frame(module, is_call=True, task=current_backward())

    def close(self, module: str = "") -> None:
        """End it, whether it returned or raised; what it left open is dropped."""
        if self.current.is_call and self.current.module == module:
            self.current = self._outer.pop()
            return
        if not any(frame.is_call_of(module) for frame in self._outer):
            return  # it raised before it began
        ends = False
        while not ends:
            ends = self.current.is_call_of(module)
            self.current = self._outer.pop()

    def open_recompute(self, x: Tensor, module: str) -> None:
        """Where a backward computes ``module`` again open a frame with the length that the forward had with such an input."""
        if self.traced:
            return
        task = current_backward()
        if task == NO_BACKWARD or self.current.task == task:
            return
        known = self._inputs.get((module, tuple(x.shape)), InputRecord(None, x.ndim, 1))
        if known is None:
            raise RuntimeError(
                f"{module}: recomputed in the backward, but forwards of different lengths had inputs of shape "
                f"{list(x.shape)}; pad the sequences to a multiple of tp={self._size}"
            )
        self._push(Frame(module, known, task=task, resumed_by=module))

    def finish(self, module: str) -> None:
        """A block or a module with gathered inputs ended: close the frame that :meth:`open_recompute` opened for it, if any."""
        if not self.traced and self.current.resumed_by == module:
            self.current = self._outer.pop()

    @contextmanager
    def repeating(self, known: InputRecord, tokens: Tokens | None = None) -> Iterator[None]:
        """A context in which a backward computes a part of a call again; ``known`` is the record that the call's frame had.

        Unlike :meth:`open_recompute` it needs no shape to find the call by, so calls of several lengths are told apart.
        """
        outer = self.begin_repeat(known, tokens)
        try:
            yield
        finally:
            self.end_repeat(outer)

    def begin_repeat(self, known: InputRecord, tokens: Tokens | None = None) -> tuple[Frame, int]:
        """Enter that context; returns what :meth:`end_repeat` takes."""
        outer = self.current, len(self._outer)
        self._push(Frame(self.current.module, known, task=current_backward(), repeats=True))
        self.current.tokens = tokens
        return outer

    def end_repeat(self, outer: tuple[Frame, int]) -> None:
        """Leave it; torch ends a recompute with an exception, as soon as all is there that it needs."""
        self.current, count = outer
        del self._outer[count:]

    @contextmanager
    def alone(self, shape: tuple[int, ...], *, is_shard: bool) -> Iterator[None]:
        """A context in which some positions of an activation are all there are, ``[b, s/tp, h]``, or ``[s/tp, h]`` of tokens.

        Each tensor-parallel rank has as many others if it is a shard.
        """
        task, dim = current_backward(), self._dim if len(shape) == 3 else 0
        length = shape[dim] * self._size if is_shard else None
        batch = shape[1 - dim] if len(shape) == 3 else 1
        known = InputRecord(length, 3, batch)
        outer = self.current, len(self._outer)
        self._push(Frame(self.current.module, known, task=task, repeats=task != NO_BACKWARD))
        try:
            yield
        finally:
            self.end_repeat(outer)

    def _push(self, frame: Frame) -> None:
        if frame.length is not None:
            frame.part = shard_length(frame.length, self._size)
        self._outer.append(self.current)
        self.current = frame

    @property
    def recomputes(self) -> bool:
        """Whether a backward computes again a part of a call that the forward made."""
        task = current_backward()
        return task != NO_BACKWARD and (self.current.repeats or self.current.task != task)

    # ---- lengths ---------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether activations are shards now."""
        return self.current.length is not None

    @property
    def length(self) -> int:
        """Positions of the whole sequence of the current call, in which activations must be shards."""
        assert self.current.length is not None
        return self.current.length

    @property
    def whole_length(self) -> int:
        """The same over all context-parallel ranks."""
        chunks = self.current.chunks
        return self.length if chunks is None else chunks.length

    def begin(self, length: int, shape: Sequence[int], chunks: Chunks | None = None) -> None:
        """In the current call activations are shards from here on, of a sequence of ``length`` positions (on this rank of cp).

        ``shape`` is that of the block's input, ``[b, s, h]``, ``[s, b, h]`` or ``[s, h]``, whole or a shard.
        """
        frame = self.current
        frame.length, frame.ndim, frame.chunks, frame.tokens = length, len(shape), chunks, None
        frame.batch = shape[1 - self._dim] if len(shape) == 3 else 1
        frame.part = -(-length // self._size)

    def end(self) -> int | None:
        """From here on activations are whole; returns the length that they had."""
        frame = self.current
        length, frame.length, frame.tokens = frame.length, None, None
        return length

    def folds(self, shape: Sequence[int], positions: int | None, of: Frame | InputRecord) -> bool:
        """Whether a tensor of that shape is of flattened tokens, ``[b·s, …]``, and no activation; with so many positions."""
        if positions is None or of.ndim != 3 or not shape or shape[0] != of.batch * positions:
            return False
        return len(shape) != 3 or shape[self._dim] != positions

    # ---- inputs, for a recompute -----------------------------------------------------------------------------

    def remember(self, key: InputKey) -> None:
        """Note the length of the call, of which the module's input is a shard, for a backward that computes the module again."""
        known = self.current.record
        if self._inputs.setdefault(key, known) != known:
            self._inputs[key] = None

    def remembered(self, key: InputKey) -> InputRecord | None:
        """In a recompute, what the forward noted; None outside of one, and where calls had different lengths."""
        return self._inputs.get(key) if self.recomputes else None

    # ---- activations that are the same on all ranks ----------------------------------------------------------

    def add_whole(self, whole: Tensor) -> None:
        """What was gathered or copied for the innermost module that is running."""
        if self.traced:
            return
        frame, node = self.current, whole.grad_fn
        frame.wholes.append(weakref.ref(whole))
        if frame.gather_scopes and node is not None:
            frame.gather_scopes[-1].append(node)

    def note_whole(self, x: Tensor) -> None:
        """``x`` was made of what is the same on all ranks alone, and so it is the same too."""
        self.current.wholes.append(weakref.ref(x))

    def is_whole(self, x: Tensor) -> bool:
        """Whether ``x`` is known to be the same on all ranks, or a view or cast of such a tensor."""
        wholes = [whole() for whole in self.current.wholes]
        if any(whole is x for whole in wholes):
            return True
        node, nodes = x.grad_fn, [whole.grad_fn for whole in wholes if whole is not None and whole.grad_fn is not None]
        while node is not None and type(node) in _PASSING:
            node = input_node(node, 0)
        return node is not x.grad_fn and node in nodes
