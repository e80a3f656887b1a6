"""The sequence region: where the activations of a stack of blocks are shards along the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from lightning_seqpar.context.attention import ContextAxis
from lightning_seqpar.context.seq_part import SeqPart, local_of
from lightning_seqpar.distributed.autograd import NO_BACKWARD, current_backward
from lightning_seqpar.distributed.rng import OneStream, RankStreams
from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.region.data_path import DataPath
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.observers import Observers


class SequenceRegion:
    """The region of one stack of blocks: its parts, and what begins and ends in it.

    Args:
        dim: the tensor dim of the sequence: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or flattened tokens.
        sp: whether activations between blocks are sharded. If not, they stay whole, and the region only stands for the
            conjugate pair f and f̄.
        regather: whether column inputs are gathered again in the backward, instead of being kept whole.
        context: the context-parallel axis, over which the sequence is dealt out first; None where it has one rank.
        traced: whether the blocks are compiled.
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
    ) -> None:
        self.group, self.dim, self.sp, self.context = group, dim, sp, context
        self.name = name or "the model"
        self.size, self.rank = group.size(), group.rank()
        self.frames = FrameStack(self.size, dim, traced=traced)
        # Ranks of one tp rank at several places of cp draw apart for their shards.
        place = self.rank if context is None else self.rank + self.size * context.rank
        self.streams = RankStreams(place)
        self.inner_streams = OneStream() if traced else self.streams  # inside the blocks
        self.observers = Observers(self.name, group, dim, sp, self.frames)
        self.path = DataPath(group, dim, sp, regather, self.frames, self.inner_streams, self.observers, context)
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
        )
        memo[id(self)] = copied
        copied.observers.placement.is_copy = True
        return copied

    # ---- steps and calls -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """A step begins: nothing of earlier calls is left."""
        self.frames.reset()
        self.observers.step_begins()

    def begin_call(self, module: str) -> None:
        """A block is called, or another module on shards."""
        self.frames.open(module)

    def end_call(self, module: str) -> None:
        """It returned, or raised."""
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
