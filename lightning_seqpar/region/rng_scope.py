"""Which random stream the draws of a forward come from: the replicated one, alike on all ranks, or this rank's own."""

from __future__ import annotations

from lightning_seqpar.distributed.rng import RankStreams
from lightning_seqpar.region.frames import FrameStack


class RngScope:
    """Switches between the two streams as blocks, columns and rows begin and end.

    With sequence parallelism a block computes on shards ``[b, s/tp, h]``, so each rank draws for itself; where something
    whole is computed in it (``[b, s, h]`` in front of the columns, or a module that every rank computes whole), all ranks
    draw alike. Without, activations are whole and all ranks draw alike, but for the features ``[b, s, f/tp]`` between a
    column and its row, which are a rank's own.

    Args:
        rank: this rank in the tensor-parallel group.
        sp: whether activations between the blocks are shards along the sequence.
        frames: the calls of the region's blocks.

    Attributes:
        streams: torch's generators, and the switch between the two streams.
    """

    def __init__(self, rank: int, sp: bool, frames: FrameStack) -> None:
        self.streams = RankStreams(rank)
        self._sp, self._frames = sp, frames
        self._blocks = 0  # that are running, one in another

    def reset(self) -> None:
        """Begin a step on the replicated stream, and forget what was noted for recomputes."""
        self._blocks = 0
        self.streams.forget()

    @property
    def in_block(self) -> bool:
        """Whether a block is running."""
        return self._blocks > 0

    def begin_block(self) -> None:
        """A block begins: on shards each rank draws for itself. Between blocks (layerdrop) all ranks draw alike."""
        self._blocks += 1
        self._frames.current.leave_rows()
        if self._sp:
            self.streams.begin()

    def end_block(self, *, aborted: bool) -> None:
        """A block ended.

        Args:
            aborted: whether it raised. Then a column in it may have no row, and what the column began is ended here.
        """
        self._blocks = max(0, self._blocks - 1)
        self._frames.current.leave_rows()
        if self._sp or aborted:
            self.streams.end()
        if aborted and self._blocks == 0:
            while self.streams.on:
                self.streams.end()

    def begin_gathering(self, rows: int) -> None:
        """A module with gathered inputs begins: what it draws in front of its columns is for whole activations.

        Args:
            rows: the number of row linears in it.
        """
        if self._sp:
            self.streams.pause()
        frame = self._frames.current
        frame.leave_rows()
        frame.rows_left.append(rows)

    def end_gathering(self, module: str) -> None:
        """The module of that name ended: behind it, in its block, activations are what they were before."""
        if self._sp:
            self.streams.resume(("behind", module))
        del self._frames.current.rows_left[-1:]

    def begin_whole(self) -> None:
        """A module that every rank computes whole begins, among shards: all ranks draw alike in it."""
        self.streams.pause()

    def end_whole(self, module: str) -> None:
        """The module of that name ended, and what it made becomes shards again."""
        self.streams.resume(module)

    def begin_columns(self, module: str, tokens: tuple[int, ...]) -> None:
        """A column linear runs: its features, and the draws for them, are this rank's own.

        Args:
            module: the column's name.
            tokens: the dims of its input in front of the features: ``(b, s)`` for ``[b, s, h]``.
        """
        frame = self._frames.current
        frame.leave_rows()
        frame.column_tokens = tokens
        self.begin_features(module)

    def begin_features(self, module: str) -> None:
        """A module of that name runs which makes this rank's features, or is given them: draws for them are its own."""
        if self._sp:
            self.streams.resume(module)
        else:
            self.streams.begin(nests=False)

    def end_row(self) -> None:
        """A row linear ran and its partial sums are reduced: without sequence parallelism its output is whole again."""
        frame = self._frames.current
        if frame.rows_left:
            frame.rows_left[-1] -= 1
        if not frame.rows_left or frame.rows_left[-1] <= 0:
            frame.leave_rows()
        if not self._sp:
            self.streams.end()

    def leave_partial(self) -> None:
        """A row linear ran whose partial sums a module around it reduces: what is drawn for them must be drawn alike."""
        self._frames.current.leave_rows()
        if self._sp:
            self.streams.pause()
        else:
            self.streams.end()

    def abort_columns(self) -> None:
        """Something between a column and its row raised: end what the column began."""
        while not self._sp and self.streams.on:
            self.streams.end()
