"""Whether activations are shards where they must be, and whole where they must be: by their shape, and by what made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_seqpar.distributed.autograd import children, leaf_of, reach, sequence_nr
from lightning_seqpar.region.frames import FrameStack


class ShardPlacement:
    """Refuses activations by their shape, for the region that messages call ``region``.

    Attributes:
        is_copy: whether the region belongs to a copy of a sharded model, for which nothing is gathered.
    """

    def __init__(self, region: str, dim: int, frames: FrameStack) -> None:
        self._region, self._dim, self._frames = region, dim, frames
        self.is_copy = False

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
        frame, part = self._frames.current, self._frames.shard_length
        if self._frames.fold(x, part) is not None:
            return
        if x.ndim != frame.ndim or x.shape[self._dim] != part:
            raise ValueError(
                f"{module}: its input has shape {list(x.shape)}; a shard of {self._region} has {part} of "
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
