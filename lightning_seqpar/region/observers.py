"""What watches a sequence region: the data path tells of events, and each watcher looks when the schedule says so."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from lightning_seqpar.context.chunks import Chunks
from lightning_seqpar.context.seq_part import Place, SeqPart
from lightning_seqpar.distributed.autograd import (
    NO_BACKWARD,
    children,
    current_backward,
    leaf_of,
    next_sequence_nr,
    reach,
    sequence_nr,
)
from lightning_seqpar.distributed.collectives import gather_replicated_from_sequence_parallel_region
from lightning_seqpar.distributed.rng import DEVICES
from lightning_seqpar.layout.module_names import in_all_layers
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.partial_sum_check import LossLeakCheck, PartialSumCheck


class WatchSchedule:
    """Says when each watcher looks, over the steps of a run and within a forward.

    =========================================  =========================================================================
    watched                                    when
    =========================================  =========================================================================
    activations are shards where they must be  at each use by a block, a gather, a row or the exit
    modules that may see nothing but shards    at each call in a forward, not in a recompute
    inputs of columns: whole, and gathered     at each column in a forward, not where a backward repeats a part of one
                                               (``recomputes``); most read what was gathered itself
    sums over ranks: made of rows alone        at each module that returns one where the step is due (:attr:`walks_graphs`)
    what else a loss reads of such a module    noted there
    tensors of which this rank has a part      noted in a forward, not in a recompute, and looked for in what each module
                                               around the blocks, and each step, returns
    batch, loss, buffers, gradients, outputs,  where the step is due
    who reads parameters
    =========================================  =========================================================================

    A step is due if it is one of the first 16, a power of two, or a multiple of ``every``, if that is not 0. Graphs of losses and
    of whole modules are walked (``walks_graphs``) where it is due, counted from the beginning of the run or of the loop.
    """

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._since_start: Counter[str] = Counter()
        self.begin_run()

    # ---- steps -----------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A model was set up: its steps are counted from here, and nothing is known of what they draw."""
        self._due = dict.fromkeys(("training", "validation", "test", "predict"), True)
        self._steps: Counter[str] = Counter()
        self._drawn: frozenset[str] = frozenset()
        self.walks_graphs = True

    def begin_loop(self, loop: str) -> None:
        """An epoch, or an evaluation, begins: its loaders may be new ones."""
        self._since_start[loop] = 0

    def begin_step(self, loop: str) -> None:
        """Count a step of ``loop``: ``training``, ``validation``, ``test`` or ``predict``."""
        self._steps[loop] += 1
        self._since_start[loop] += 1
        self._due[loop] = self.is_due_at(self._steps[loop])
        self.walks_graphs = self._due[loop] or self.is_due_at(self._since_start[loop])

    @contextmanager
    def as_of(self, loop: str, step: int) -> Generator[None, None, None]:
        """A context in which an earlier step of ``loop`` is the current one: it was put off."""
        now, due, walks = self._steps[loop], self._due[loop], self.walks_graphs
        self._steps[loop] = step
        self._due[loop] = self.walks_graphs = self.is_due_at(step)
        try:
            yield
        finally:
            self._steps[loop], self._due[loop], self.walks_graphs = now, due, walks

    def number(self, loop: str) -> int:
        """The number of the current step of ``loop``, from 1 on."""
        return self._steps[loop]

    def is_first(self, loop: str) -> bool:
        """Whether the current step is the first of its loop in this run."""
        return self._steps[loop] == 1

    def is_due(self, loop: str) -> bool:
        """Whether the current step is due, counted from the beginning of the run."""
        return self._due[loop]

    def is_due_at(self, step: int) -> bool:
        """Whether step number ``step``, from 1 on, is due."""
        return step <= 16 or step & (step - 1) == 0 or (self._every > 0 and step % self._every == 0)

    # ---- random draws ----------------------------------------------------------------------------------------

    def expects_draws(self, loop: str) -> frozenset[str]:
        """Types of the devices on which the current step may draw: those on which a training step has, unless it is due."""
        return DEVICES if loop != "training" or self.is_due(loop) else self._drawn

    def note_draws(self, devices: frozenset[str]) -> None:
        """Notes types of the devices on which a training step drew random numbers."""
        self._drawn |= devices


_MANY = 4096
"""Calls, and tensors, that are remembered outside any step, which would forget them."""
_OPEN = 2**62
"""The end of an interval that has none yet: a number that no node has."""


class GraphSpan:
    """For each call in the region, the numbers of the first node that it made and of the first one behind it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the graph of the last step."""
        self._begins: list[int] = []
        self._ends: list[int] = []

    def begin(self) -> None:
        """Nodes that are made from here on are inside; of calls outside any step only the last ones are remembered."""
        if len(self._begins) >= 2 * _MANY:
            self._begins, self._ends = self._begins[-_MANY:], self._ends[-_MANY:]
        self._begins.append(next_sequence_nr())
        self._ends.append(_OPEN)

    def end(self) -> None:
        """Nodes that are made from here on are outside."""
        if self._ends and self._ends[-1] == _OPEN:
            self._ends[-1] = next_sequence_nr()

    def holds(self, node: Any) -> bool:
        """Whether a node of this step's graph was made inside."""
        number = sequence_nr(node)
        at = bisect_right(self._begins, number) - 1
        return at >= 0 and number < self._ends[at]


class ShardPlacement:
    """Refuses activations by their shape, for the region that messages call ``region``."""

    def __init__(self, region: str, dim: int, frames: FrameStack) -> None:
        self._region, self._dim, self._frames = region, dim, frames
        self.is_copy = False  # whether the region belongs to a copy of a sharded model, for which nothing is gathered

    def check_layout(self, x: Tensor, block: str) -> None:
        """Raises ValueError unless a block's input has its sequence in front of its features: ``[b, s, h]`` or ``[s, b, h]``."""
        if self._dim >= x.ndim - 1:
            raise ValueError(
                f"{block}: its input has shape {list(x.shape)}, so dim {self._dim} holds features, not the sequence; "
                "batch the input, or set 'dim' in the plan's blocks rule (1 for [b, s, h], 0 for [s, b, h])"
            )

    def check_shard(self, x: Tensor, module: str) -> None:
        """Raises ValueError unless a module among the blocks reads a shard, ``[b, s/tp, h]`` or flattened ``[b·s/tp, h]``."""
        self.check_called_among_shards(module)
        frame = self._frames.current
        if self._frames.folds(x.shape, frame.part, frame):
            return
        if x.ndim != frame.ndim or x.shape[self._dim] != frame.part:
            raise ValueError(
                f"{module}: its input has shape {list(x.shape)}; a shard of {self._region} has {frame.part} of "
                f"{frame.length} positions at dim {self._dim}. Where a block cuts the sequence itself (feed-forward in "
                "chunks), switch that off or set sp=False"
            )

    def check_called_among_shards(self, module: str) -> None:
        """Raises ValueError if a module whose parameters see shards is called where activations are whole."""
        if not self._frames.active:
            raise ValueError(
                f"{module}: called outside the sequence region of {self._region}, where its input is whole; its gradient "
                "could not be synced by one rule. Call it only between the region's blocks, or leave it out of the plan"
            )

    def check_column_input(self, x: Tensor, module: str) -> None:
        """Raises ValueError unless a column reads a whole activation, ``[b, s, h]``, that was gathered for a module around it."""
        frame = self._frames.current
        if not frame.gather_scopes:
            if self.is_copy:
                raise ValueError(
                    f"{module}: this is a copy of a module that was made while it was sharded, and nothing gathers for copies. "
                    "Make copies (an average of weights, a reference) in __init__ or configure_model, or set sp=False"
                )
            raise ValueError(
                f"{module}: this column-parallel linear runs where nothing was gathered for it, so it would see a part "
                f"of the sequence only; add a rule {{pattern: {module}, style: gather}}, or one for the module around it"
            )
        whole = (frame.length, *frame.copied)
        if x.ndim == frame.ndim and frame.length is not None and x.shape[self._dim] not in whole:
            raise ValueError(
                f"{module}: its input has {x.shape[self._dim]} positions at dim {self._dim}, the sequence {frame.length}; "
                "this argument was not gathered: name it in the gather rule's args"
            )

    def check_row_output(self, shape: tuple[int, ...], module: str) -> None:
        """Raises ValueError unless a row's partial sums are an activation that can be scattered: ``[b, s, h]``."""
        frame = self._frames.current
        if frame.length is None or len(shape) != frame.ndim or shape[self._dim] != frame.length:
            outside = frame.length is None
            expected = "an open sequence region" if outside else f"{frame.length} positions at dim {self._dim}"
            raise ValueError(
                f"{module}: the output of this row-parallel linear has shape {list(shape)} and can't be scattered along "
                f"the sequence ({expected} expected in {frame.ndim or 'its'} dims); give it the activation in the layout "
                "of the block's input, or set sp=False"
            )

    def check_whole_output(self, x: Tensor, module: str) -> None:
        """Raises ValueError unless a module that every rank computed whole returns an activation of the call: ``[b, s, h]``."""
        length = self._frames.current.length
        if length is None or x.ndim <= self._dim or x.shape[self._dim] != length:
            raise ValueError(
                f"{module}: its output has shape {list(x.shape)}, which is no activation of {length} positions at "
                f"dim {self._dim}; 'whole' takes a module that maps activations to activations"
            )


def check_ancestry(x: Tensor, gathers: Sequence[Any], module: str) -> None:
    """Raises ValueError unless a column's input depends on activations through ``gathers`` alone, the nodes of what was gathered.

    The gradient of a column's input is one term of a sum on each rank, and only the backward of a gather (or of a copy) sums the
    terms.
    """
    if x.grad_fn is None or not gathers or x.grad_fn in gathers:
        return
    first = min(sequence_nr(node) for node in gathers)

    def follow(node: Any) -> list[Any]:
        return [] if node in gathers else children(node)

    for node in reach(x.grad_fn, follow):
        if node in gathers:
            continue
        leaf = leaf_of(node)
        if sequence_nr(node) < first if leaf is None else not isinstance(leaf, Parameter):
            raise ValueError(
                f"{module}: its input depends on a whole activation that was not gathered for it (encoder states?), "
                "whose gradient would be a part on each rank; name that argument in a gather rule if it is a shard, in a "
                "copy rule if it is whole already"
            )


class ShardedOutput(NamedTuple):
    """What is known of a tensor of which this rank has a part."""

    tensor: weakref.ref[Tensor]  # itself; gone when nobody else holds it
    name: str  # of the module that made it
    dim: int  # of which this rank has a part
    length: int | None  # of that dim as a whole; None if the ranks' parts can't be put together
    sizes: tuple[int, int] | None  # the two dims that its first one was flattened from; None if it was not
    chunks: Chunks | None  # how the sequence is dealt out over the context-parallel ranks, if dim is the sequence; else None


class ShardedOutputs:
    """The tensors of a step of which this rank has a part, known by the objects themselves."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._parts: dict[int, tuple[Any, ...]] = {}  # the fields of a ShardedOutput, which is made where one is found

    def note(
        self,
        tensor: Tensor,
        name: str,
        dim: int,
        length: int | None,
        sizes: tuple[int, int] | None = None,
        chunks: Chunks | None = None,
    ) -> None:
        """Note a tensor; the arguments are the fields of :class:`ShardedOutput`."""
        if len(self._parts) > _MANY:
            self._parts = {key: part for key, part in self._parts.items() if part[0]() is not None}
        self._parts[id(tensor)] = weakref.ref(tensor), name, dim, length, sizes, chunks

    def _part(self, tensor: Tensor) -> ShardedOutput | None:
        part = self._parts.get(id(tensor))
        return ShardedOutput(*part) if part is not None and part[0]() is tensor else None

    def has(self, leaves: Iterable[object]) -> bool:
        """Whether this rank has only a part of one of ``leaves``."""
        return bool(self._parts) and any(isinstance(leaf, Tensor) and self._part(leaf) is not None for leaf in leaves)

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor, for consumers that all ranks compute alike: ``[b, s/tp, h]`` → ``[b, s, h]``.

        Forward: all-gather. Backward: slice. ValueError if the ranks' parts can't be put together; other tensors as they are.
        """
        part = self._part(tensor)
        if part is None:
            return tensor
        if part.length is None:
            raise ValueError(
                f"{part.name}: the model returns something that it made of this rank's heads, of shape {list(tensor.shape)}, "
                "and nothing tells how the ranks' parts are put together; do not ask for it (output_attentions=False), or "
                f"leave the module whole: {{pattern: {in_all_layers(part.name)}, style: whole}}"
            )
        if isinstance(tensor, SeqPart):  # heads of a part of a sequence
            return tensor.like(
                gather_replicated_from_sequence_parallel_region(tensor.local, part.dim, self._group, part.length)
            )
        shape = tensor.shape if part.sizes is None else (*part.sizes, *tensor.shape[1:])
        whole = gather_replicated_from_sequence_parallel_region(tensor.reshape(shape), part.dim, self._group, part.length)
        if part.chunks is not None:
            whole = SeqPart.wrap(whole, Place(part.chunks, part.dim))
        return whole if part.sizes is None else whole.flatten(0, 1)

    def check_none(self, leaves: Iterable[object], region: str) -> None:
        """Raises ValueError, which names the module that made it, if a step returns something of which this rank has a part."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (part := self._part(leaf)) is not None:
                raise ValueError(
                    f"the step returns an activation from inside {region}, made by {part.name}, of which this rank has a part "
                    f"({list(leaf.shape)}); return what the model itself returns, or what comes behind the region's end, or "
                    "set sp=False"
                )

    def forget(self) -> None:
        """Forget the tensors of the last step."""
        self._parts = {}


class Observers:
    """The watchers of one region; each method is an event, named by what has happened.

    None of them changes an activation. They note what was made, and raise where the user's code does with shards what would
    give a wrong result.
    """

    def __init__(self, region: str, group: ProcessGroup, dim: int, sp: bool, frames: FrameStack) -> None:
        self._size, self._dim, self._sp, self._frames = group.size(), dim, sp, frames
        self.schedule = WatchSchedule()  # a strategy puts its own here, which counts steps
        self.placement = ShardPlacement(region, dim, frames)
        self.span = GraphSpan()
        self.sharded_outputs = ShardedOutputs(group)
        self.loss_leaks = LossLeakCheck()

    # ---- steps and calls -------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """A step begins: forget what the last one made."""
        self.span.reset()
        self.sharded_outputs.forget()
        self.loss_leaks.forget()

    def region_begins(self) -> None:
        """Activations become shards."""
        if current_backward() == NO_BACKWARD:
            self.span.begin()

    def region_ends(self) -> None:
        """Activations become whole, or a module raised."""
        if current_backward() == NO_BACKWARD:
            self.span.end()

    # ---- blocks and modules on shards ------------------------------------------------------------------------

    def shard_made(self, out: Any, module: str) -> None:
        """A module on shards made ``out``: this rank's part, if it has a shard's dims and activations are shards."""
        frame, sizes = self._frames.current, None
        if frame.length is None or not isinstance(out, Tensor) or current_backward() != NO_BACKWARD:
            return
        if out.ndim != frame.ndim or out.shape[self._dim] != frame.part:
            if not self._frames.folds(out.shape, frame.part, frame):
                return
            sizes = (frame.batch, frame.part) if self._dim == 1 else (frame.part, frame.batch)
        self.sharded_outputs.note(out, module, self._dim, frame.length, sizes, frame.chunks)

    def heads_made(self, out: Tensor, module: str, heads: int) -> None:
        """A module on some of ``heads`` query heads made ``out`` beside its activation: ``[b, heads/tp, s, s]``, or a mean."""
        if self._frames.traced or current_backward() != NO_BACKWARD:
            return
        if out.ndim == 4 and out.shape[1] * self._size == heads:
            self.sharded_outputs.note(out, module, 1, heads)
        elif out.ndim == 4 or (out.ndim == 3 and out.shape[-1] == out.shape[-2] != 1):
            self.sharded_outputs.note(out, module, 1, None)

    def shard_reader_called(self, module: str) -> None:
        """A module is called whose parameters may see nothing but shards."""
        if current_backward() == NO_BACKWARD:
            self.placement.check_called_among_shards(module)

    # ---- columns and rows ------------------------------------------------------------------------------------

    def column_begins(self, x: Tensor, module: str) -> None:
        """A column linear is about to read ``x``, ``[b, s, h]``."""
        if self._frames.traced or self._frames.recomputes:
            return
        check_ancestry(x, self._frames.current.sources, module)
        if self._sp:
            self.placement.check_column_input(x, module)

    # ---- sums over ranks -------------------------------------------------------------------------------------

    def partial_left(self, partial: Tensor) -> None:
        """A row linear made ``partial``, a sum that a module around it will reduce."""
        if partial.grad_fn is not None:
            self._frames.current.partial_nodes.append(partial.grad_fn)

    def sum_returned(
        self, out: Tensor, module: str, gathers: Collection[Any], rows: Collection[Parameter], once: Collection[Parameter]
    ) -> None:
        """A module returned ``out``, one term of a sum over ranks, ``[b, s, h]``."""
        if self.schedule.walks_graphs:
            PartialSumCheck(self._frames.current.partial_nodes, rows, once).check(out, gathers, module)

    def sum_reduced(self, reduced: Tensor, module: str, gathers: Collection[Any]) -> None:
        """Such an output was reduced over the ranks."""
        if self.schedule.walks_graphs and not self._frames.recomputes:
            self.loss_leaks.note(module, reduced, gathers)
