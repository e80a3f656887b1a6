"""What watches a sequence region: the data path tells of events, and each watcher looks when the schedule says so."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from lightning_seqpar.distributed.autograd import NO_BACKWARD, current_backward
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.graph_span import GraphSpan
from lightning_seqpar.region.partial_sum_check import LossLeakCheck, PartialSumCheck
from lightning_seqpar.region.schedule import WatchSchedule
from lightning_seqpar.region.shard_placement import ShardPlacement, check_ancestry
from lightning_seqpar.region.sharded_outputs import ShardedOutputs


class Observers:
    """The watchers of one region; each method is an event, named by what has happened.

    None of them changes an activation. They note what was made, and raise where the user's code does with shards what would
    give a wrong result.

    Attributes:
        schedule: when each watcher looks; a strategy puts its own here, which counts steps.
        placement: whether activations are shards where they must be.
        span: which graph nodes were made inside the region.
        sharded_outputs: tensors of which this rank has a part.
        loss_leaks: what a loss must not read of modules that return a sum over ranks.
    """

    def __init__(self, region: str, group: ProcessGroup, dim: int, sp: bool, frames: FrameStack) -> None:
        self._size, self._dim, self._sp, self._frames = group.size(), dim, sp, frames
        self.schedule = WatchSchedule()
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
        frames, frame = self._frames, self._frames.current
        if frame.length is None or not isinstance(out, Tensor) or current_backward() != NO_BACKWARD:
            return
        if out.ndim == frame.ndim == 3 and out.shape[self._dim] == frame.part:
            self.sharded_outputs.note(out, module, self._dim, frame.length, None, frame.chunks)
        elif (folded := frames.fold(out, frames.shard_length)) is not None:
            sizes = folded.shape[0], folded.shape[1]
            self.sharded_outputs.note(out, module, self._dim, frames.length, sizes, frames.current.chunks)
        elif out.ndim == frames.current.ndim and out.shape[self._dim] == frames.shard_length:
            self.sharded_outputs.note(out, module, self._dim, frames.length, chunks=frames.current.chunks)

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
        if self._frames.traced or not self.schedule.watches_columns(self._frames):
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
        self,
        out: Tensor,
        module: str,
        gathers: Collection[Any],
        rows: Collection[Parameter],
        once: Collection[Parameter],
    ) -> None:
        """A module returned ``out``, one term of a sum over ranks.

        Args:
            out: ``[b, s, h]``.
        """
        if self.schedule.walks_graphs:
            PartialSumCheck(self._frames.current.partial_nodes, rows, once).check(out, gathers, module)

    def sum_reduced(self, reduced: Tensor, module: str, gathers: Collection[Any]) -> None:
        """Such an output was reduced over the ranks."""
        if self.schedule.walks_graphs and self.schedule.watches_columns(self._frames):
            self.loss_leaks.note(module, reduced, gathers)
