"""The sequence region: where the activations of a stack of blocks are shards, and the path that moves them in, through and out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from lightning_seqpar.context.attention import ContextAxis
from lightning_seqpar.context.chunks import Chunks, padded, share
from lightning_seqpar.context.seq_part import Place, SeqPart, lies_over_tp, local_of, over_tp, whole_of
from lightning_seqpar.distributed.async_ops import pad, shard_length
from lightning_seqpar.distributed.autograd import NO_BACKWARD, current_backward, is_of_checkpoint, saved_tensor_hooks
from lightning_seqpar.distributed.collectives import (
    gather_from_sequence_parallel_region,
    gather_replicated_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from lightning_seqpar.distributed.rng import OneStream, RankStreams
from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.region.frames import Frame, FrameStack
from lightning_seqpar.region.observers import Observers
from lightning_seqpar.region.products import NO_COLUMNS, ColumnGroup, GraphTokens, Hooks, Low, Tokens

_MANY = 256
"""Lengths whose chunks are remembered; with variable lengths those that were used longest ago are forgotten."""


class DataPath:
    """Moves activations between whole and sharded.

    ======================  ==================================  ====================================  ===================
    method                  forward                             ``dim=1``                             backward
    ======================  ==================================  ====================================  ===================
    enter, resume           scatter, or nothing                 ``[b, s, h]`` → ``[b, s/tp, h]``      all-gather
    wrap, unwrap            nothing                             ``[b, s/tp, h]``                      nothing
    gather                  all-gather (g)                      ``[b, s/tp, h]`` → ``[b, s, h]``      reduce-scatter
    reduce                  reduce-scatter (ḡ)                  ``[b, s, h]`` → ``[b, s/tp, h]``      all-gather
    leave, suspend          all-gather                          ``[b, s/tp, h]`` → ``[b, s, h]``      slice
    copy                    identity (f)                        ``[b, t, h]``                         all-reduce
    slice                   scatter                             ``[b, heads, …]`` → a rank's heads    all-gather
    gather_features         all-gather                          ``[b, s, f/tp]`` → ``[b, s, f]``      reduce-scatter
    ======================  ==================================  ====================================  ===================

    Without sequence parallelism ``enter``, ``leave``, ``suspend`` and ``resume`` return what they are given, ``gather`` copies
    (f) and ``reduce`` all-reduces (f̄).

    Between blocks a shard is a part of a sequence (:class:`~lightning_seqpar.context.seq_part.SeqPart`), which ``wrap`` makes and
    ``enter`` takes; code there sees the whole shape. With context parallelism ``s`` counts this rank's positions, and what is whole
    over tp is a part of a sequence too.
    """

    def __init__(self, region: SequenceRegion, regather: bool) -> None:
        self.group, self.dim, self.sp, self.size = region.group, region.dim, region.sp, region.size
        self.regather = regather  # whether columns keep the shard and gather it again in the backward
        self._frames, self._streams, self._context = region.frames, region.inner_streams, region.context
        self._observers, self._placement = region.observers, region.observers.placement
        self._dealt = functools.lru_cache(_MANY)(self._deal)  # the same objects for the same length
        self._whole = (GraphTokens if region.frames.traced else Tokens)(self.group, self.dim, sp=False)

    # ---- in and out ------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, block: str = "block") -> Tensor:
        """The activation that a block is given: of a part of a sequence the shard; what is whole is scattered."""
        if not self.sp:
            return x if self._context is None else self._context.part(x, self.dim)
        frames = self._frames
        if isinstance(x, SeqPart) and (found := self._shard_in(x)) is not None:
            shard, length, chunks, place = found
            shape: Sequence[int] = shard.shape
            if place is not None:  # flattened tokens
                part = shard_length(length, self.size)
                shape = (place.before, part, *shape[1:]) if self.dim else (part, place.behind, *shape[1:])
            frames.begin(length, shape, chunks)
        else:
            x, chunks = self._over_tp(x)
            self._placement.check_layout(x, block)
            frames.begin(x.shape[self.dim], tuple(x.shape), chunks)
            shard = scatter_to_sequence_parallel_region(x, self.dim, self.group)
        if frames.traced:
            self._tokens_of(frames.current)
        self._observers.region_begins()
        self._observers.shard_made(shard, block)
        return shard

    def _over_tp(self, x: Tensor) -> tuple[Tensor, Chunks | None]:
        """An activation that is whole over tp, and how its sequence is dealt out over the context-parallel ranks."""
        if self._context is None:
            return whole_of(x), None
        part = self._context.part(over_tp(x) if isinstance(x, SeqPart) else x, self.dim)
        return part.local, part.place.chunks

    def _shard_in(self, x: SeqPart) -> tuple[Tensor, int, Chunks | None, Place | None] | None:
        """The shard that blocks compute on: with its padding, the length, how that is dealt out over cp, and where tokens lie.

        None if the sequence lies otherwise in it, or is dealt out otherwise.
        """
        inner, chunks = x.settled(), None
        if isinstance(x.local, SeqPart):
            inner, chunks = x.local.settled(), x.place.chunks
        place = inner.place
        length, shard = place.chunks.length, inner.local
        own, plain, part, held = self._dealt(length)
        if place is plain:  # as a block has left it
            return shard if part == held else _resized(shard, place, held, part), length, chunks, None
        in_place = is_plain = place.is_plain and place.dim == self.dim
        if not in_place and x.ndim == 2:  # [b·s, h], or [s·b, h]
            in_place = place.dim == 0 and (place.behind if self.dim else place.before) == 1
        if not in_place or place.chunks.axis != "tp" or not place.chunks.same(own):
            return None
        return _resized(shard, place, held, part), length, chunks, None if is_plain else place

    def _deal(self, length: int) -> tuple[Chunks, Place, int, int]:
        """How ranks of tp hold a sequence, its place in an activation, and a shard's positions with padding and without."""
        chunks = Chunks(self.group, length, padded(length, self.size), axis="tp")
        return chunks, Place(chunks, self.dim), shard_length(length, self.size), chunks.local_length

    def wrap(self, x: Any) -> Any:
        """What a block (or another module on shards) made: a part of a sequence where it is this rank's shard, without padding."""
        frame = self._frames.current
        if not isinstance(x, Tensor) or isinstance(x, SeqPart) or frame.length is None:
            return x
        chunks, place, part, held = self._dealt(frame.length)
        if x.ndim == 2 and frame.ndim == 3 and part > 1 and x.shape[0] == frame.batch * part:
            place = Place(chunks, 0, frame.batch, 1) if self.dim else Place(chunks, 0, 1, frame.batch)
        elif x.ndim != frame.ndim or x.shape[self.dim] != part:
            return x
        wrapped = SeqPart.wrap(x if part == held else _resized(x, place, part, held), place)
        if frame.chunks is not None:
            wrapped = SeqPart.wrap(wrapped, replace(place, chunks=frame.chunks))
        return wrapped

    def unwrap(self, x: Any) -> Any:
        """What else a block is given: of a part of a sequence over tp the shard, or all of it if it has another length."""
        if not lies_over_tp(x):
            return x
        found = self._shard_in(x)
        if found is None or found[1] != self._frames.current.length:
            whole: Tensor = x.for_parts()
            return share(whole, x.local.place.chunks) if isinstance(x.local, SeqPart) else whole
        self._observers.shard_made(found[0], self._frames.current.module)
        return found[0]

    def leave(self, x: Tensor, module: str = "block") -> Tensor:
        """The region's output, whole again for consumers that every rank computes alike."""
        if not self.sp:
            return x
        self._placement.check_shard(x, module)
        chunks, length = self._frames.current.chunks, self._frames.end()
        self._observers.region_ends()
        return as_part(gather_replicated_from_sequence_parallel_region(x, self.dim, self.group, length), self.dim, chunks)

    def suspend(self, x: Tensor, module: str) -> Tensor:
        """A shard on its way to a module that every rank computes whole; the region goes on behind it."""
        if not self.sp:
            return x
        self._frames.open_recompute(x, module)
        self._streams.end()
        length = self.length_for(x, module)
        whole = gather_replicated_from_sequence_parallel_region(x, self.dim, self.group, length)
        return as_part(whole, self.dim, self._frames.current.chunks)

    def resume(self, x: Tensor, module: str) -> Tensor:
        """What such a module made: a shard again."""
        if not self.sp:
            return x if self._context is None else self._context.part(x, self.dim)
        if self._context is not None:
            x = self._context.part(x, self.dim).local
        if self._frames.traced:
            self._graph_tokens(x.ndim)
        else:
            self._placement.check_whole_output(x, module)
            self._streams.begin()
        return scatter_to_sequence_parallel_region(x, self.dim, self.group)

    # ---- columns and rows ------------------------------------------------------------------------------------

    def gather(self, x: Tensor, module: str, columns: ColumnGroup = NO_COLUMNS) -> Tensor:
        """A shard (or tokens of one) on its way to ``columns``, which multiply it in the same function of autograd: whole."""
        place = None
        if isinstance(x, SeqPart):
            place, x = x.place, x.local
        tokens, frame = self._whole, self._frames.current
        hooks = None if self._frames.traced else saved_tensor_hooks()
        if self.sp:
            tokens = self._shard_tokens(x, frame, module, hooks)
        # An activation checkpoint makes all of it again by itself, where x may have no history.
        regather = (self.regather or not self.sp) and (hooks is None or not is_of_checkpoint(hooks))
        whole = columns.gather(tokens, x, hooks, regather=regather)
        self._frames.add_whole(whole)
        if place is not None:
            return SeqPart.wrap(whole, place)
        return whole if frame.chunks is None else as_part(whole, self.dim, frame.chunks, tokens.batch)

    def _shard_tokens(self, x: Tensor, frame: Frame, module: str, hooks: Hooks) -> Tokens:
        """How the positions of a shard, or of flattened tokens of one, lie on the ranks."""
        shape = x.shape
        if self._frames.traced:
            return self._graph_tokens(x.ndim)
        if hooks is not None or not torch.is_grad_enabled():  # a checkpoint may run it again by itself
            self._frames.remember((module, shape))
        if len(shape) == frame.ndim and frame.length is not None and shape[self.dim] == frame.part:
            return frame.tokens or self._tokens_of(frame)
        length = self.length_for(x, module)
        return Tokens(self.group, self.dim, True, length, frame.batch)

    def _tokens_of(self, frame: Frame) -> Tokens:
        length = frame.length or 0
        if self._frames.traced:
            frame.tokens = GraphTokens(self.group, self.dim, True, padding=-length % self.size)
        else:
            frame.tokens = Tokens(self.group, self.dim, True, length)
        return frame.tokens

    def _graph_tokens(self, ndim: int) -> GraphTokens:
        """How the positions of an activation of ``ndim`` dims lie on the ranks, in a graph."""
        frame = self._frames.current
        if ndim != frame.ndim:
            raise ValueError(
                f"a tensor of {ndim} dims is gathered or reduced in a compiled block, where activations have {frame.ndim}: "
                "flattened tokens have no compiled form; use compile=False"
            )
        tokens = frame.tokens
        assert isinstance(tokens, GraphTokens)
        return tokens

    def length_for(self, x: Tensor, module: str) -> int:
        """The length of the whole sequence that ``x``, a module's input, is required to be a shard of."""
        if self._frames.traced:
            return self._graph_tokens(x.ndim).whole_length(x)
        self._placement.check_shard(x, module)
        self._frames.remember((module, tuple(x.shape)))
        return self._frames.length

    def copy(self, x: Tensor, module: str, columns: ColumnGroup = NO_COLUMNS) -> Tensor:
        """An activation that is whole already (an encoder's states) on its way to column linears."""
        place, x = x.place if isinstance(x, SeqPart) else None, local_of(x)
        hooks = None if self._frames.traced else saved_tensor_hooks()
        copied = columns.gather(self._whole, x, hooks, regather=not is_of_checkpoint(hooks))
        if self._frames.traced:
            return copied
        self._frames.current.copied.append(x.shape[self.dim])
        if self._frames.active:
            self._frames.remember((module, tuple(x.shape)))
        self._frames.add_whole(copied)
        return copied if place is None else SeqPart.wrap(copied, place)

    def row_tokens(self, shape: tuple[int, ...], module: str) -> Tokens:
        """How the partial sums of a row linear, of the shape ``[b, s, h]`` or flattened, lie on the ranks."""
        if not self.sp:
            return self._whole
        frames, frame = self._frames, self._frames.current
        if frames.traced:
            return self._graph_tokens(len(shape))
        key = module, shape
        known = frames.remembered(key) if current_backward() != NO_BACKWARD else None
        if known is None:
            if saved_tensor_hooks() is not None or not torch.is_grad_enabled():
                frames.remember(key)
            if len(shape) == frame.ndim and shape[self.dim] == frame.length:
                return frame.tokens or self._tokens_of(frame)
            if not frames.folds(shape, frame.length, frame):
                self._placement.check_row_output(shape, module)
            known = frame.record
        batch = known.batch if frames.folds(shape, known.length, known) else 0
        return Tokens(self.group, self.dim, True, (known.length or 0) if batch else shape[self.dim], batch)

    def reduce(self, x: Tensor, module: str) -> Tensor:
        """The partial sums that a module leaves, summed."""
        if not self.sp:
            self._streams.end()
            reduced = reduce_from_tensor_parallel_region(local_of(x), self.group)
            return x.like(reduced) if isinstance(x, SeqPart) else reduced
        x = local_of(x)
        tokens = self.row_tokens(tuple(x.shape), module)
        folded = tokens.folded(x) if tokens.batch else x
        shard = reduce_scatter_to_sequence_parallel_region(folded, self.dim, self.group)
        return shard.flatten(0, 1) if tokens.batch else shard

    # ---- other dims ------------------------------------------------------------------------------------------

    def slice(self, x: Tensor, dim: int, what: str) -> Tensor:
        """This rank's part of a whole tensor along a head or feature dim; messages call the tensor ``what``."""
        if x.shape[dim] % self.size:
            raise ValueError(f"{what}: {x.shape[dim]} at dim {dim} do not divide by tp={self.size}")
        part = scatter_to_sequence_parallel_region(local_of(x), dim % x.ndim, self.group)
        return x.like(part) if isinstance(x, SeqPart) else part

    def gather_features(self, x: Tensor) -> Tensor:
        """Every rank's features, in order, for a module over the whole width."""
        whole = gather_from_sequence_parallel_region(local_of(x), x.ndim - 1, self.group)
        return x.like(whole) if isinstance(x, SeqPart) else whole


def _resized(x: Tensor, place: Place, have: int, want: int) -> Tensor:
    """A shard with fewer or more positions at its end: ``[b, have, h]`` → ``[b, want, h]``, new ones are zero."""
    if have == want:
        return x
    if not place.is_plain:
        split = x.unflatten(place.dim, (place.before, have, place.behind))
        at = Place(place.chunks, place.dim + 1)
        return _resized(split, at, have, want).flatten(place.dim, place.dim + 2)
    return x.narrow(place.dim, 0, want) if want < have else pad(x, place.dim, want)


def as_part(x: Tensor, dim: int, chunks: Chunks | None, batch: int = 0) -> Tensor:
    """What is whole over tp, ``[b, s, h]`` or tokens of a ``batch``, as a part of a sequence over cp; itself without ``chunks``."""
    if chunks is None:
        return x
    if not batch:
        return SeqPart.wrap(x, Place(chunks, dim))
    return SeqPart.wrap(x, Place(chunks, 0, batch, 1) if dim == 1 else Place(chunks, 0, 1, batch))


class SequenceRegion:
    """The region of one stack of blocks: its parts, and what begins and ends in it.

    Args:
        dim: the tensor dim of the sequence: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or flattened tokens.
        sp: whether activations between blocks are sharded. If not, they stay whole, and the region only stands for the
            conjugate pair f and f̄.
        regather: whether column inputs are gathered again in the backward, instead of being kept whole.
        context: the context-parallel axis, over which the sequence is dealt out first; None where it has one rank.
        traced: whether the blocks are compiled.
        float8: what its columns and rows multiply by; None for products in the activations' own type.
    """

    def __init__(
        self,
        group: ProcessGroup,
        dim: int = 1,
        *,
        sp: bool = True,
        name: str = "",
        regather: bool = True,
        context: ContextAxis | None = None,
        traced: bool = False,
        float8: Low | None = None,
    ) -> None:
        self.group, self.dim, self.sp, self.context, self.float8 = group, dim, sp, context, float8
        self.name = name or "the model"
        self.size, self.rank = group.size(), group.rank()
        self.frames = FrameStack(self.size, dim, traced=traced)
        # Ranks of one tp rank at several places of cp draw apart for their shards.
        place = self.rank if context is None else self.rank + self.size * context.rank
        self.streams = RankStreams(place)
        self.inner_streams = OneStream() if traced else self.streams  # inside the blocks
        self.observers = Observers(self.name, group, dim, sp, self.frames)
        self.path = DataPath(self, regather)
        self.blocks: tuple[str, ...] = ()  # their names
        self.argument: Argument = 0  # of a block, that is the activation

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceRegion:
        copied = SequenceRegion(
            *(self.group, self.dim),
            sp=self.sp,
            name=self.name,
            regather=self.path.regather,
            context=self.context,
            traced=self.frames.traced,
            float8=self.float8,
        )
        memo[id(self)] = copied
        copied.observers.placement.is_copy = True
        return copied

    # ---- steps and calls -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """A step begins: nothing of earlier calls is left."""
        self.frames.reset()
        self.observers.step_begins()

    def end_call(self, module: str) -> None:
        """A block, or another module on shards, for which a frame was opened returned, or raised."""
        if self.frames.active:
            self.observers.region_ends()
        self.frames.close(module)

    # ---- blocks ----------------------------------------------------------------------------------------------

    def begin_shards(self) -> None:
        """Each rank draws for itself from here on, for its shards; between blocks (layerdrop) all draw alike."""
        if self.sp and self.streams.draws:
            self.frames.current.switched_streams = self.streams.begin()

    def end_shards(self, *, aborted: bool) -> None:
        """All draw alike again; in a call that raised, a column may have no row."""
        if self.frames.current.switched_streams or (aborted and not self.sp):
            self.streams.end()

    # ---- modules with gathered inputs ------------------------------------------------------------------------

    def open_gather(self, x: Tensor, module: str) -> None:
        """A module whose arguments are gathered begins; ``x`` is the first of them."""
        if self.frames.traced:
            return
        if self.sp and current_backward() != NO_BACKWARD:
            self.frames.open_recompute(x, module)
        if self.sp and self.streams.draws:
            self.streams.end()
        self.frames.current.gather_scopes.append([])

    def close_gather(self) -> None:
        """It returned, or raised."""
        if self.frames.traced:
            return
        if self.sp and self.streams.draws:
            self.streams.begin()
        frame = self.frames.current
        del frame.gather_scopes[-1:]
        if not frame.gather_scopes:
            frame.wholes = []

    # ---- modules that return a sum over ranks ----------------------------------------------------------------

    def begin_sum(self, features: Sequence[Any] | None = None) -> None:
        """A module begins whose output is reduced where it returns; ``features`` are its arguments, if they are this rank's."""
        nodes = None
        if features is not None:
            nodes = [x.grad_fn for x in map(local_of, features) if isinstance(x, Tensor) and x.grad_fn is not None]
            self.inner_streams.begin()
        self.frames.current.sum_features.append(nodes)

    def leave_partial(self, partial: Tensor) -> None:
        """A row linear in it made partial sums, ``[b, s, h]``."""
        self.observers.partial_left(local_of(partial))
        of_features = self.frames.current.sum_features[-1:] not in ([], [None])
        if not of_features:  # else the module may drop out of this rank's features again, for its next row
            self.inner_streams.end()

    def reduce_sum(self, out: Tensor, module: str, rows: list[Parameter], once: list[Parameter]) -> Tensor:
        """What it returns, reduced over the ranks: ``[b, s, h]`` → ``[b, s/tp, h]``, or all-reduced without sequence parallelism.

        Raises PartialSumError if ``out``, one term of the sum, is made of anything but rows.
        """
        frame = self.frames.current
        if (features := frame.sum_features[-1]) is not None:
            self.observers.sum_returned(local_of(out), module, features, rows, once)
            return self.path.reduce(out, module)
        gathers, (place, frame.dealt_out) = frame.sources, (frame.dealt_out, None)
        self.observers.sum_returned(local_of(out), module, gathers, rows, once)
        reduced = self.path.reduce(out, module)
        self.observers.sum_reduced(local_of(reduced), module, gathers)
        if not self.sp and place is not None and not isinstance(reduced, SeqPart):
            return SeqPart.wrap(reduced, place)
        return reduced

    def end_sum(self) -> None:
        """Ends the sum after the module's forward returned or raised."""
        frame = self.frames.current
        del frame.sum_features[-1:]
        if not frame.sum_features:
            frame.partial_nodes = []
