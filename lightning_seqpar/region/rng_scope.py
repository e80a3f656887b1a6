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

    Attributes:
        streams: torch's generators, and the switch between the two streams.
    """

    def __init__(self, rank: int, sp: bool, frames: FrameStack) -> None:
        self.streams = RankStreams(rank)
        self._sp, self._frames = sp, frames

    def begin_block(self) -> None:
        """Switches to the rank's own stream on shards; between blocks (layerdrop) all ranks draw alike."""
        self._frames.current.switched_streams = self._sp and self.streams.begin()

    def end_block(self, *, aborted: bool) -> None:
        """Switches back at the end of a block; of one that raised, a column may have no row."""
        if self._frames.current.switched_streams or (aborted and not self._sp):
            self.streams.end()

    def begin_whole(self) -> None:
        """Switches to the replicated stream where, among shards, something whole begins: ``[b, s, h]``."""
        if self._sp:
            self.streams.end()

    def end_whole(self) -> None:
        """Switches back where that becomes shards again."""
        if self._sp:
            self.streams.begin()

    def begin_features(self) -> None:
        """Switches to the rank's own stream at a column, or another module that makes or reads this rank's features."""
        self.streams.begin()

    def end_features(self) -> None:
        """Switches back where a row's output is whole: reduced without sequence parallelism, or its row raised."""
        if not self._sp:
            self.streams.end()

    def leave_partial(self) -> None:
        """Switches to the replicated stream behind a row whose partial sums a module around it reduces."""
        self.streams.end()


class OneStream(RngScope):
    """The same where blocks are compiled: a graph switches no streams, and draws from the one that its block began with."""

    def begin_whole(self) -> None:
        """Nothing."""

    def end_whole(self) -> None:
        """Nothing."""

    def begin_features(self) -> None:
        """Nothing."""

    def end_features(self) -> None:
        """Nothing."""
