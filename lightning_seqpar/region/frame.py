"""What one call of a region's owner knows: the length of its sequence, and what has been gathered and not yet reduced."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from lightning_seqpar.activations.regather import RegatheredInput
from lightning_seqpar.activations.wgrad_overlap import OverlapWindow
from lightning_seqpar.distributed.autograd import NO_BACKWARD


class GatheredActivation(NamedTuple):
    """An activation that was gathered (or copied) for column linears.

    Attributes:
        whole: the activation, as the columns read it.
        version: its version when it was gathered: one that was changed in place since is another.
        handle: what columns keep for it; none if they keep the activation itself.
        window: what may run under the backward of its gather.
    """

    whole: weakref.ref[Tensor]
    version: int
    handle: RegatheredInput | None
    window: OverlapWindow


class InputRecord(NamedTuple):
    """What a module's input was in the forward, for a recompute in the backward that runs outside of any call.

    Attributes:
        is_shard: whether it was a shard of the sequence.
        length: positions of the whole sequence.
        batch: size of an activation's other dim.
        ndim: dims of an activation.
    """

    is_shard: bool
    length: int
    batch: int
    ndim: int


@dataclass
class Frame:
    """The state of one call: nested, repeated and aborted calls of an owner each have their own.

    Attributes:
        length: positions of the whole sequence while shards flow; none outside of the blocks.
        ndim: dims of an activation.
        batch: size of an activation's other dim, by which flattened tokens are folded.
        sum_widths: for each open module whose output is reduced where it returns, the widths of its columns on this rank.
        partial_nodes: graph nodes of the partial sums that rows left to such a module.
        unwrapped: number of open modules that multiply sharded parameters themselves.
        first: the block at which the call entered the region, and the shape of its whole input.
        gather_scopes: for each open module with gathered inputs, the graph nodes of what was gathered for it.
        rows_left: for each of them, the row linears in it that have not run yet.
        task: the backward in which the call began.
        resumed_by: the module whose recompute opened this frame.
        stand_ins: tensors of this rank's width, and the gathered activations that columns read in their place.
        copied: sequence lengths of activations that were whole already where columns read them.
        unreduced: gathering modules that returned before their row ran, and the graph nodes of what was gathered for them.
        gathered: activations that were gathered for open modules.
        wholes: activations that are the same on all ranks.
        overlap_seq_nr: the autograd sequence number at which weight-gradient products run under the backward of the last
            row's reduce-scatter; none for no overlap.
        column_tokens: between a column and its row, the dims of the column's input in front of its features.
        previous_row_width: behind a row of a module that has more, until its next column: that row's out-features.
        drawn_alike: the random draws that all ranks made alike there, by operation and shape.
    """

    length: int | None = None
    ndim: int = 0
    batch: int = 1
    sum_widths: list[frozenset[int]] = field(default_factory=list)
    partial_nodes: list[Any] = field(default_factory=list)
    unwrapped: int = 0
    first: tuple[str, tuple[int, ...]] | None = None
    gather_scopes: list[list[Any]] = field(default_factory=list)
    rows_left: list[int] = field(default_factory=list)
    task: int = NO_BACKWARD
    resumed_by: str | None = None
    stand_ins: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    unreduced: list[tuple[str, list[Any]]] = field(default_factory=list)
    gathered: list[GatheredActivation] = field(default_factory=list)
    wholes: list[weakref.ref[Tensor]] = field(default_factory=list)
    overlap_seq_nr: int | None = None
    column_tokens: tuple[int, ...] | None = None
    previous_row_width: int | None = None
    drawn_alike: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def leave_rows(self) -> None:
        """No column's features are on their way any more."""
        self.column_tokens, self.previous_row_width, self.drawn_alike = None, None, []
