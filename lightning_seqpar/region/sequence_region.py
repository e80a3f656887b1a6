"""The sequence region: where activations are shards along the sequence, and how they enter and leave.

Its state belongs to a call, not to a module: every call of the region's owner (the module that runs the blocks)
opens a frame and closes it, whether it returns or raises, so that repeated, nested and aborted forwards are right.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_seqpar.activations.elementwise_spans import ElementwiseSpans
from lightning_seqpar.activations.policy import SavePolicy, keeper
from lightning_seqpar.activations.regather import RegatheredInput
from lightning_seqpar.activations.wgrad_overlap import (
    BackwardExchange,
    DeferredWgrad,
    OverlapWindow,
    copy_over,
    defer_wgrad,
    gather_over,
    reduce_scatter_over,
)
from lightning_seqpar.distributed.autograd import (
    NO_BACKWARD,
    current_backward,
    in_backward,
    input_node,
    next_sequence_nr,
    sequence_nr,
)
from lightning_seqpar.distributed.collectives import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_replicated_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    shard_length,
)
from lightning_seqpar.distributed.rng import Drawn, RankStreams
from lightning_seqpar.region.ancestry import check_ancestry, passes_by_rows
from lightning_seqpar.region.frame import Frame, GatheredActivation, InputRecord
from lightning_seqpar.region.partial_sum_check import LossLeakCheck, PartialSumCheck
from lightning_seqpar.region.rng_checks import ActivationShards, DrawContext, check_alike
from lightning_seqpar.region.sharded_outputs import ShardedOutputs

_MANY = 4096  # calls that are remembered outside any step
_PASSING = ("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "AliasBackward0")  # casts and views of all of it


class SequenceRegion:
    """The region of one stack of blocks.

    Args:
        group: the tensor-parallel process group.
        dim: the tensor dim of the sequence: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or flattened tokens.
        sp: whether activations between blocks are sharded; if not, they stay whole and the region only
            stands for f and f̄.
        name: how messages call it.
        regather: gather column inputs again in the backward, and make norms and activations again, instead of keeping
            them; ``auto`` keeps small ones.

    Attributes:
        policy: what is kept for the backward, see :class:`~lightning_seqpar.activations.policy.SavePolicy`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        dim: int = 1,
        *,
        sp: bool = True,
        name: str = "",
        regather: bool | Literal["auto"] = "auto",
    ) -> None:
        self.group, self.dim, self.sp = group, dim, sp
        self.name = name or "the model"
        self.size, self.rank = group.size(), group.rank()
        self.policy = SavePolicy(regather, self.size, sp)
        self.is_copy = False
        self._frames = [Frame()]
        # What each block's input was, by its shape: a recompute in the backward runs outside any frame.
        self._seen: dict[tuple[str, tuple[int, ...]], InputRecord | None] = {}
        self.intervals: list[list[int]] = []
        self.sharded_outputs = ShardedOutputs(group)
        self.streams = RankStreams(self.rank)
        self.loss_leaks = LossLeakCheck()
        self.blocks: tuple[str, ...] = ()  # their names
        self._in_block = 0
        self.elementwise_spans = ElementwiseSpans(self.policy.remakes)

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceRegion:
        copied = SequenceRegion(self.group, self.dim, sp=self.sp, name=self.name, regather=self.policy.regather)
        memo[id(self)] = copied
        copied.is_copy = True
        return copied

    @property
    def _frame(self) -> Frame:
        return self._frames[-1]

    @property
    def active(self) -> bool:
        """Whether shards flow in the current call."""
        return self._frame.length is not None

    @property
    def busy(self) -> bool:
        """Whether shards flow, or a module with gathered inputs runs."""
        return self.active or bool(self._frame.gather_scopes)

    def open_frame(self) -> None:
        """A call begins."""
        if len(self.intervals) > _MANY:  # calls outside any step, which would clear them
            self.intervals = self.intervals[-_MANY:]
        self._frames.append(Frame(task=current_backward()))

    def close_frame(self, *, aborted: bool = False) -> None:
        """A call ended; one that returned must have left the region."""
        frame = self._frames.pop() if len(self._frames) > 1 else self._frame
        if frame.length is not None and frame.resumed_by is None and not aborted:
            frame.length = None
            self._raise_open()

    def check_closed(self) -> None:
        """A step ended: shards must not flow any more."""
        if self.active:
            self.reset()
            self._raise_open()

    def note_shard(self, out: Any, module: str) -> None:
        """What a module on shards made: as long as shards flow, it is one if it has a shard's dims."""
        if not self.active or not isinstance(out, Tensor):
            return
        if (folded := self._fold(out, self.shard_length)) is not None:
            self.sharded_outputs.note(out, module, self.dim, self.length, (folded.shape[0], folded.shape[1]))
        elif out.ndim == self._frame.ndim and out.shape[self.dim] == self.shard_length:
            self.sharded_outputs.note(out, module, self.dim, self.length)

    def note_heads(self, out: Tensor, module: str, heads: int) -> None:
        """What a module made besides its activation, of the query heads that are this rank's: ``[b, heads/tp, s, s]``."""
        if out.ndim == 4 and out.shape[1] * self.size == heads:
            self.sharded_outputs.note(out, module, 1, heads)
        elif out.ndim == 4 or (out.ndim == 3 and out.shape[-1] == out.shape[-2] != 1):
            self.sharded_outputs.note(out, module, 1, None)

    def _raise_open(self) -> None:
        raise ValueError(
            f"the forward entered the sequence region of {self.name} but ended before the region did, so its result is "
            "made of shards; run every block and the module of the plan's exit rule, or end the region where the "
            "forward ends (style: exit)"
        )

    def reset(self) -> None:
        """A new step: nothing of earlier calls is left."""
        self._frames = [Frame()]
        self._seen = {}
        self.intervals = []
        self.sharded_outputs.forget()
        self._in_block = 0
        self.streams.forget()
        self.loss_leaks.forget()

    @contextmanager
    def call(self) -> Iterator[SequenceRegion]:
        """A call of the owner, as a context."""
        self.open_frame()
        try:
            yield self
        except BaseException:
            self.close_frame(aborted=True)
            raise
        self.close_frame()

    # ---- blocks ----------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, block: str = "block") -> Tensor:
        """The input of a block: scattered if it is the call's first, checked to be a shard otherwise."""
        if not self.sp:
            return x
        self._check_layout(x, block)
        self._resume(x, block)
        frame = self._frame
        key = (block, tuple(x.shape))
        if len(self._frames) == 1 and frame.first == key and self.active and x.shape[self.dim] != self.shard_length:
            self.abort()  # no module's call bounds this one, and the one before never ended: a new one begins
        if frame.length is not None:
            if x.ndim != frame.ndim or x.shape[self.dim] != self.shard_length:
                raise ValueError(
                    f"{block}: its input has shape {list(x.shape)}, but in the sequence region of {self.name} a shard "
                    f"has {self.shard_length} of {frame.length} positions at dim {self.dim}; something between the "
                    "blocks changes the sequence: leave those blocks out of the plan, or end the region before it"
                )
            self._remember(key, is_shard=True)
            return x
        frame.length, frame.ndim, frame.first = x.shape[self.dim], x.ndim, key
        frame.batch = x.shape[1 - self.dim] if x.ndim == 3 else 1
        self._remember(key, is_shard=False)
        self._mark(begin=True)
        entered = scatter_to_sequence_parallel_region(x, self.dim, self.group)
        self.note_shard(entered, block)
        return entered

    def finish(self, module: str) -> None:
        """A block or a gathering module ended: if it ran as a recompute, so does its frame."""
        if self._frame.resumed_by == module:
            self._frames.pop()

    def leave(self, x: Tensor, module: str = "block") -> Tensor:
        """The region's output, whole again for replicated consumers."""
        if not self.sp:
            return x
        self.check_shard(x, module)
        frame = self._frame
        length, frame.length = frame.length, None
        self._mark(begin=False)
        return gather_replicated_from_sequence_parallel_region(x, self.dim, self.group, length)

    def enter_last(self, x: Tensor, module: str) -> Tensor:
        """The input of the module at which the region ends: scattered where no block ran (layerdrop), else it is a shard."""
        return x if self.active or self._recomputes() else self.enter(x, module)

    def leave_early(self, out: Any) -> Any:
        """What the owner returns where the block at which the region ends did not run (layerdrop): whole again.

        Where nothing but activations of the blocks is returned, that is; else the call ends in an error.
        """
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not self.active or not self.sharded_outputs.has(leaves):
            return None
        if not all(self.sharded_outputs.has([leaf]) for leaf in leaves if leaf.is_floating_point()):
            return None  # nothing tells whether it was made of shards
        self._frame.length = None
        self._mark(begin=False)
        return tree_map_only(Tensor, self.sharded_outputs.whole, out)

    def abort(self) -> None:
        """A block raised: shards no longer flow."""
        frame = self._frame
        frame.length, frame.unwrapped = None, 0
        for opened in (
            frame.gather_scopes,
            frame.rows_left,
            frame.gathered,
            frame.wholes,
            frame.unreduced,
            frame.sum_widths,
            frame.partial_nodes,
        ):
            opened.clear()
        self._mark(begin=False)

    def _mark(self, *, begin: bool) -> None:
        """Note where in the autograd graph the region begins and ends: which nodes are made inside it."""
        if torch.is_inference_mode_enabled() or in_backward():
            return
        now = next_sequence_nr()
        if begin:
            self.intervals.append([now, 2**62])
        elif self.intervals and self.intervals[-1][1] == 2**62:
            self.intervals[-1][1] = now

    def made(self, node: Any) -> bool:
        """Whether an autograd node of this step was made inside the region."""
        return any(begin <= sequence_nr(node) <= end for begin, end in self.intervals)

    # ---- random streams --------------------------------------------------------------------------------------

    def begin_block(self) -> None:
        """A block's forward begins: on shards every rank draws for itself. Between blocks (layerdrop) all draw alike."""
        self._in_block += 1
        self._frame.leave_rows()
        if self.sp:
            self.streams.begin()

    def end_block(self, *, aborted: bool) -> None:
        """It ended; one that raised may have left a row linear undone."""
        self._in_block = max(0, self._in_block - 1)
        self._frame.leave_rows()
        if self.sp or aborted:
            self.streams.end()
        if aborted and self._in_block == 0:
            while self.streams.on:
                self.streams.end()
        self.elementwise_spans.drop()

    def begin_columns(self, module: str, tokens: tuple[int, ...]) -> None:
        """A column linear: its features are this rank's own, and so are the draws on them; ``tokens`` are its other dims."""
        self._frame.leave_rows()
        self._frame.column_tokens = tokens
        if self.sp:
            self.streams.resume(module)
        else:
            self.streams.begin(nests=False)

    def _end_columns(self, local: int, features: int) -> None:
        """A row linear ``[features, local]``: without sequence parallelism its output is whole again."""
        frame = self._frame
        check_alike(self.name, frame.drawn_alike, local, frame.previous_row_width)
        if frame.rows_left:
            frame.rows_left[-1] -= 1
        if not frame.rows_left or frame.rows_left[-1] <= 0:
            frame.leave_rows()
        else:  # other columns' features may be on their way
            frame.previous_row_width = features
        if not self.sp:
            self.streams.end()

    def leave_partial(self, partial: Tensor) -> None:
        """A row linear whose partial sums are reduced later: what is drawn for them must be drawn alike."""
        if partial.grad_fn is not None:
            self._frame.partial_nodes.append(partial.grad_fn)
        self._frame.leave_rows()
        if self.sp:
            self.streams.pause()
        else:
            self.streams.end()

    def abort_columns(self) -> None:
        """What ran between a column and its row raised."""
        while not self.sp and self.streams.on:
            self.streams.end()

    def check_draw(self, drawn: Drawn) -> None:
        """A random draw in a forward must fit the stream that it comes from.

        Raises:
            ValueError: for draws that would not be what one process draws, in distribution.
        """
        frame = self._frame
        shards = None
        if self.active:
            shards = ActivationShards(self.dim, frame.ndim, frame.batch, self.length, self.shard_length)
        place = DrawContext(
            region=self.name,
            sp=self.sp,
            own=self.streams.own,
            unwrapped=frame.unwrapped > 0,
            widths=frame.sum_widths[-1] if frame.sum_widths else None,
            tokens=frame.column_tokens,
            previous_row_width=frame.previous_row_width,
            in_block=self._in_block > 0,
            in_gather=bool(frame.gather_scopes),
            shards=shards,
        )
        if place.check(drawn):
            frame.drawn_alike.append((drawn.name, drawn.shape))

    # ---- tensor-parallel parts -------------------------------------------------------------------------------

    def gather(self, x: Tensor, module: str) -> Tensor:
        """A shard on its way to column linears: gathered (g), or copied (f) where the sequence is not sharded."""
        handle = None
        if not self.sp:
            if self.policy.overlaps(x.nbytes):
                whole, window = copy_over(x, self.group)
            else:
                whole, window = copy_to_tensor_parallel_region(x, self.group), OverlapWindow(None, BackwardExchange())
            if self.policy.remakes_between_blocks(x.nbytes):
                handle = RegatheredInput(x, self.dim, self.group, None)
        else:
            length = self.length_for(x, module)
            folded = self._fold(x, self.shard_length)  # flattened tokens, in the order of [b, s]
            shard = x if folded is None else folded
            if self.policy.overlaps(x.nbytes * self.size):
                whole, window = gather_over(shard, self.dim, self.group, length)
            else:
                whole = gather_from_sequence_parallel_region(shard, self.dim, self.group, length)
                window = OverlapWindow(None, BackwardExchange())
            if folded is not None:
                whole = whole.flatten(0, 1)
            elif self.policy.remakes(x.nbytes):
                handle = RegatheredInput(x, self.dim, self.group, length)
        if torch.is_grad_enabled():
            handle = handle if handle is not None and handle.keeps_less else None
            self._frame.gathered.append(GatheredActivation(weakref.ref(whole), whole._version, handle, window))
        self._note(whole)
        return whole

    def _fold(self, x: Tensor, positions: int, of: Frame | InputRecord | None = None) -> Tensor | None:
        """Tokens that were flattened, ``[b·s, h]`` → ``[b, s, h]`` (or ``[s, b, h]``); none if they were not."""
        of = of or self._frame
        if of.ndim != 3 or x.ndim == 0 or x.shape[0] != of.batch * positions:
            return None
        if x.ndim == 3 and x.shape[self.dim] == positions:
            return None  # an activation
        sizes = (of.batch, positions) if self.dim == 1 else (positions, of.batch)
        return x.reshape(*sizes, *x.shape[1:])

    def stand_in(self, whole: Tensor) -> Tensor:
        """A tensor of this rank's width for a module that reads its input's shape; its columns get ``whole`` for it.

        Every number in it is NaN: whoever computes with it is found out.
        """
        width = whole.shape[-1] // self.size
        stand_in = whole.new_full((), float("nan")).expand(*whole.shape[:-1], width)
        self._frame.stand_ins.append((stand_in, whole))
        return stand_in

    def resolve_stand_in(self, x: Tensor) -> Tensor:
        """What ``x`` stands for, if it is a stand-in; else itself."""
        return next((whole for stand_in, whole in self._frame.stand_ins if stand_in is x), x)

    def copy(self, x: Tensor, module: str) -> Tensor:
        """An activation that is whole already on its way to column linears: copied (f)."""
        copied = copy_to_tensor_parallel_region(x, self.group)
        self._frame.copied.append(x.shape[self.dim])
        if self.active:
            self._remember((module, tuple(x.shape)), is_shard=True)
        self._note(copied)
        return copied

    def suspend(self, x: Tensor, module: str) -> Tensor:
        """A shard on its way to a module that every rank computes whole; the region goes on behind it."""
        if not self.sp:
            return x
        self._resume(x, module)
        self.streams.pause()
        return gather_replicated_from_sequence_parallel_region(x, self.dim, self.group, self.length_for(x, module))

    def resume(self, x: Tensor, module: str) -> Tensor:
        """What such a module made: shards again."""
        if not self.sp:
            return x
        if not self.active or x.ndim <= self.dim or x.shape[self.dim] != self.length:
            raise ValueError(
                f"{module}: its output has shape {list(x.shape)}, which is no activation of {self._frame.length} positions at "
                f"dim {self.dim}; 'whole' takes a module that maps activations to activations"
            )
        self.streams.resume(module)
        return scatter_to_sequence_parallel_region(x, self.dim, self.group)

    def slice(self, x: Tensor, dim: int, what: str) -> Tensor:
        """This rank's part of a whole tensor along a head or feature dim; the parts' gradients are put together again."""
        if x.shape[dim] % self.size:
            raise ValueError(f"{what}: {x.shape[dim]} at dim {dim} do not divide by tp={self.size}")
        return scatter_to_sequence_parallel_region(x, dim % x.ndim, self.group)

    def gather_features(self, x: Tensor) -> Tensor:
        """Every rank's features, in order, for a module over the whole width: ``[..., f/tp]`` → ``[..., f]``."""
        return gather_from_sequence_parallel_region(x, x.ndim - 1, self.group)

    def is_whole(self, x: Tensor) -> bool:
        """Whether ``x`` is what was gathered or copied for an open module, dropout, cast or none: the same on all ranks."""
        wholes = [whole() for whole in self._frame.wholes]
        if any(whole is x for whole in wholes):
            return True
        node, nodes = x.grad_fn, [whole.grad_fn for whole in wholes if whole is not None and whole.grad_fn is not None]
        while node is not None and node.name() in _PASSING:
            node = input_node(node, 0)
        return node is not x.grad_fn and node in nodes

    def note_whole(self, x: Tensor) -> None:
        """What was made of such an activation alone."""
        self._frame.wholes.append(weakref.ref(x))

    def _note(self, whole: Tensor) -> None:
        self.note_whole(whole)
        if self._frame.gather_scopes and whole.grad_fn is not None:
            self._frame.gather_scopes[-1].append(whole.grad_fn)

    def length_for(self, x: Tensor, module: str) -> int:
        """The whole length of the sequence that the shard ``x`` is a part of."""
        self.check_shard(x, module)
        self._remember((module, tuple(x.shape)), is_shard=True)
        return self.length

    def open_gather(self, x: Tensor, module: str, rows: int = 1) -> None:
        """A module whose arguments are gathered begins; ``x`` is the first of them, and so many row linears are in it."""
        if self.sp:
            self._resume(x, module)
            self.streams.pause()  # what it drops out before its columns is whole
        self._frame.leave_rows()
        self._frame.gather_scopes.append([])
        self._frame.rows_left.append(rows)

    def begin_unwrapped(self) -> None:
        """A module that multiplies sharded parameters itself begins: no column says where whole activations end."""
        self._frame.unwrapped += 1

    def begin_sum(self, widths: frozenset[int]) -> None:
        """A module whose output is reduced where it returns begins; its columns have these widths on this rank."""
        self._frame.sum_widths.append(widths)

    def reduce_sum(self, out: Tensor, name: str, rows: list[Parameter], once: list[Parameter]) -> Tensor:
        """The partial sum that a module returns, reduced; what else it may be is refused."""
        frame = self._frame
        sources = [node for scope in frame.gather_scopes for node in scope]
        PartialSumCheck(frame.partial_nodes, rows, once).check(out, sources, name)
        reduced = self.reduce(out, name)
        if self._recomputes():
            return reduced
        self.loss_leaks.note(name, reduced, sources)
        return reduced

    def end_sum(self) -> None:
        """It ended."""
        if self._frame.sum_widths:
            self._frame.sum_widths.pop()
        if not self._frame.sum_widths:
            self._frame.partial_nodes = []

    def end_unwrapped(self) -> None:
        """It ended."""
        self._frame.unwrapped = max(0, self._frame.unwrapped - 1)

    def close_gather(self, out: Tensor | None = None, module: str = "") -> None:
        """It ended, with ``out``: what did not pass a row linear in it must do so in its block."""
        if self.sp:
            self.streams.resume(("behind", module))
        frame = self._frame
        nodes = frame.gather_scopes.pop() if frame.gather_scopes else []
        del frame.rows_left[-1:]
        frame.previous_row_width, frame.drawn_alike = None, []
        if not frame.gather_scopes:
            for read in frame.gathered:
                if read.handle is not None:
                    read.handle.kept = None  # now the graph alone holds it
            frame.gathered, frame.stand_ins, frame.wholes = [], [], []
        if out is not None and out.grad_fn is not None and nodes and passes_by_rows(out.grad_fn, nodes):
            frame.unreduced.append((module, nodes))  # the row may stand behind the module, but in the block

    def check_reduced(self, out: Any, block: str) -> None:
        """A block's output: every path to it from a gathered input must have passed a row linear."""
        pending, self._frame.unreduced = self._frame.unreduced, []
        if not isinstance(out, Tensor) or out.grad_fn is None:
            return
        for module, nodes in pending:
            if passes_by_rows(out.grad_fn, nodes):
                raise ValueError(
                    f"{module}: what it makes of its gathered input reaches the output of {block} past the row linear (a "
                    "residual inside the module?), and the gradient on that path would count tp times; gather at the column "
                    "linears themselves, or at a module that leaves the residual outside"
                )

    def find_regathered(self, x: Tensor) -> RegatheredInput | None:
        """The gather that ``x`` is the result of, if it keeps less, was not changed since and is no checkpoint's input."""
        read = self._find(x)
        if read is None or read.handle is None or x._version != read.version:
            return None
        return read.handle if read.handle.keeper == keeper() else None

    def _find(self, x: Tensor) -> GatheredActivation | None:
        return next((read for read in self._frame.gathered if read.whole() is x), None)

    def defer_column_wgrad(
        self, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, DeferredWgrad | None, BackwardExchange | None]:
        """The weight with which a column multiplies ``x``; its weight-grad product waits for the reduction of its input's, if long.

        And where its input-grad product joins those of the other columns, if ``x`` is what was gathered for them.
        """
        read = self._find(x)
        if read is None:
            return weight, None, None
        number = read.window.overlap_seq_nr if self.policy.overlaps(x.nbytes) else None
        return *defer_wgrad(weight, number), read.window.exchange if x._version == read.version else None

    def defer_row_wgrad(self, weight: Tensor, count: int) -> tuple[Tensor, DeferredWgrad | None]:
        """The weight of a row that makes ``count`` bytes; its weight-grad product waits for the backward's next gather, if long."""
        return defer_wgrad(weight, self._frame.overlap_seq_nr if self.policy.overlaps(count) else None)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        if not self.policy.overlaps(x.nbytes):
            self._frame.overlap_seq_nr = None
            return reduce_scatter_to_sequence_parallel_region(x, self.dim, self.group)
        shard, window = reduce_scatter_over(x, self.dim, self.group)
        self._frame.overlap_seq_nr = window.overlap_seq_nr
        return shard

    def check_column_input(self, x: Tensor, module: str) -> None:
        """A column linear must read a whole sequence, gathered for it."""
        self.begin_columns(module, tuple(x.shape[:-1]))
        frame = self._frame
        if self._recomputes():
            return
        check_ancestry(x, [node for scope in frame.gather_scopes for node in scope], module)
        if not self.sp:
            return
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
        if x.ndim == frame.ndim and frame.length is not None and x.shape[self.dim] not in whole:
            raise ValueError(
                f"{module}: its input has {x.shape[self.dim]} positions at dim {self.dim}, the sequence {frame.length}; "
                "this argument was not gathered: name it in the gather rule's args"
            )

    def _recomputes(self) -> bool:
        """Whether this is a recompute of a part of a gathering module: its checks were made in the forward."""
        task = current_backward()
        return task != NO_BACKWARD and self._frame.task != task

    def reduce(self, x: Tensor, module: str, local: int = 0) -> Tensor:
        """Partial sums of a row linear: reduce-scattered (ḡ), or all-reduced (f̄) where the sequence is not sharded.

        Args:
            x: ``[b, s, h]``.
            module: whose.
            local: in-features of the row on this rank.
        """
        self._end_columns(local, x.shape[-1])
        if not self.sp:
            return reduce_from_tensor_parallel_region(x, self.group)
        frame = self._frame
        known = self._seen.get((module, tuple(x.shape))) if self._recomputes() else None
        if known is not None:
            folded = self._fold(x, known.length, known)
            shard = self._reduce_scatter(x if folded is None else folded)
            return shard if folded is None else shard.flatten(0, 1)
        if frame.length is not None and (folded := self._fold(x, frame.length)) is not None:
            self._remember((module, tuple(x.shape)), is_shard=True)
            return self._reduce_scatter(folded).flatten(0, 1)
        if frame.length is None or x.ndim != frame.ndim or x.shape[self.dim] != frame.length:
            expected = f"{frame.length} positions at dim {self.dim}" if self.active else "an open sequence region"
            raise ValueError(
                f"{module}: the output of this row-parallel linear has shape {list(x.shape)} and can't be scattered along "
                f"the sequence ({expected} expected in {frame.ndim or 'its'} dims); give it the activation in the layout "
                "of the block's input, or set sp=False"
            )
        self._remember((module, tuple(x.shape)), is_shard=True)
        return self._reduce_scatter(x)

    def check_shard(self, x: Tensor, module: str) -> None:
        """``x`` must be a shard of the call's sequence."""
        if not self.active:
            raise ValueError(
                f"{module}: called outside the sequence region of {self.name}, where its input is whole; its gradient "
                "could not be synced by one rule. Call it only between the region's blocks, or leave it out of the plan"
            )
        if self._fold(x, self.shard_length) is not None:
            return
        if x.ndim != self._frame.ndim or x.shape[self.dim] != self.shard_length:
            raise ValueError(
                f"{module}: its input has shape {list(x.shape)}; a shard of {self.name} has {self.shard_length} of "
                f"{self._frame.length} positions at dim {self.dim}. Where a block cuts the sequence itself (feed-forward in "
                "chunks), switch that off or set sp=False"
            )

    # ---- lengths ---------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Positions in the whole sequence of the current call."""
        assert self._frame.length is not None
        return self._frame.length

    @property
    def shard_length(self) -> int:
        """Positions in a shard of the current call."""
        return shard_length(self.length, self.size)

    def _check_layout(self, x: Tensor, block: str) -> None:
        if self.dim >= x.ndim - 1:
            raise ValueError(
                f"{block}: its input has shape {list(x.shape)}, so dim {self.dim} holds features, not the sequence; "
                "batch the input, or set 'dim' in the plan's blocks rule (1 for [b, s, h], 0 for [s, b, h])"
            )

    def _remember(self, key: tuple[str, tuple[int, ...]], *, is_shard: bool) -> None:
        frame = self._frame
        fact = InputRecord(is_shard, self.length, frame.batch, frame.ndim)
        self._seen[key] = fact if self._seen.get(key, fact) == fact else None

    def _resume(self, x: Tensor, module: str) -> None:
        """A recompute during the backward: open a frame with the length of the forward that it repeats."""
        task = current_backward()
        if task == NO_BACKWARD or self._frame.task == task:
            return
        fact = self._seen.get((module, tuple(x.shape)), InputRecord(False, 0, 1, x.ndim))
        if fact is None:
            raise RuntimeError(
                f"{module}: recomputed in the backward, but forwards of different lengths had inputs of shape "
                f"{list(x.shape)}; pad the sequences to a multiple of tp={self.size}"
            )
        length = fact.length if fact.is_shard else None
        self._frames.append(Frame(length, fact.ndim, fact.batch, task=task, resumed_by=module))
