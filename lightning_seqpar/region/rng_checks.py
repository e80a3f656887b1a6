"""Checks that random numbers come from the stream that they must come from.

For what is the same on all ranks, all ranks must draw the same numbers; for what is a rank's own (its positions, its heads, its
features), each rank must draw its own. The region knows where in a forward a draw is made; the checks compare the shape of
what is drawn with what may be drawn there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning_seqpar.distributed.rng import Drawn
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.rng_scope import RngScope

Shape = tuple[int, ...]


class ActivationShards(NamedTuple):
    """The sizes of the activations between blocks, where those are shards along the sequence.

    Attributes:
        dim: the tensor dim of the sequence.
        ndim: number of dims of an activation.
        batch: size of its dim that is neither sequence nor features; flattened tokens are folded by it.
        length: positions of the whole sequence.
        part: positions of a shard.
    """

    dim: int
    ndim: int
    batch: int
    length: int
    part: int

    def has_positions(self, shape: Shape) -> bool:
        """Whether what was drawn is for a shard's positions, or for all of them (between a column that gathers and its row)."""
        return shape[self.dim : self.dim + 1] == (self.length,) or self.is_part(shape)

    def is_part(self, shape: Shape) -> bool:
        """Whether what was drawn is for a shard's positions."""
        if shape[self.dim : self.dim + 1] == (self.part,):
            return True
        return self.ndim == 3 and len(shape) == 2 and shape[0] == self.batch * self.part


class DrawContext(NamedTuple):
    """Where in a forward random numbers are drawn.

    Attributes:
        region: what messages call the region.
        sp: whether activations between its blocks are shards.
        own: whether the numbers come from this rank's own stream; else all ranks draw alike.
        unwrapped: whether a module is running that multiplies sharded parameters itself.
        widths: in a module that returns a sum over ranks, the widths of its columns on this rank; else None.
        tokens: between a column and its row, the dims of the column's input in front of its features; else None.
        in_block: whether a block is running.
        in_gather: whether a module with gathered arguments is running.
        shards: sizes of the activations; None where they are not shards.
    """

    region: str
    sp: bool
    own: bool
    unwrapped: bool
    widths: frozenset[int] | None
    tokens: Shape | None
    in_block: bool
    in_gather: bool
    shards: ActivationShards | None

    @classmethod
    def now(cls, region: str, sp: bool, dim: int, frames: FrameStack, rng: RngScope) -> DrawContext:
        """Where a draw is made that is made now.

        Args:
            region: what messages call the region.
            sp: whether activations between its blocks are shards.
            dim: the tensor dim of the sequence.
            frames: the calls of the region's blocks.
            rng: which stream draws come from.
        """
        frame, shards = frames.current, None
        if frames.active:
            shards = ActivationShards(dim, frame.ndim, frame.batch, frames.length, frames.shard_length)
        return cls(
            region=region,
            sp=sp,
            own=rng.streams.own,
            unwrapped=frame.unwrapped > 0,
            widths=frame.sum_widths[-1] if frame.sum_widths else None,
            tokens=frame.column_tokens,
            in_block=rng.in_block,
            in_gather=bool(frame.gather_scopes),
            shards=shards,
        )

    def check(self, draw: Drawn) -> None:
        """Require that a random draw comes from the stream that it must come from.

        Raises:
            ValueError: for draws that would not be what one process draws, in distribution.
        """
        shape = draw.shape
        drawn = f"random numbers ({draw.name}) of shape {list(shape)}"
        if self.unwrapped:
            raise ValueError(
                f"a module of {self.region} that multiplies sharded parameters itself draws {drawn}, and nothing tells whether "
                "they are for whole activations or for this rank's features; give it linears of their own, draw outside it, or "
                "set its dropout to 0"
            )
        if draw.seeded:
            return  # from a generator of the user's own, which gives every rank the same
        if self.widths is not None and self.own and shape[-1] not in self.widths:
            raise ValueError(
                f"a module of {self.region} that returns a sum over ranks draws {drawn} behind its first column linear, which "
                "are not for the features of a column: each rank would draw its own. Draw them before the experts, outside the "
                "module, or not at all"
            )
        if self.tokens is not None and self.own:
            self._check_features(self.tokens, drawn, shape)
        elif self.shards is not None:
            self._check_positions(self.shards, drawn, shape)

    def _check_features(self, tokens: Shape, drawn: str, shape: Shape) -> None:
        """Check a draw between a column and its row, where each rank draws its own."""
        if _is_of_tokens(shape, tokens):
            raise ValueError(
                f"between a column linear of {self.region} and its row {drawn} are drawn, which are not for the features or heads "
                "that are this rank's: each rank would draw its own, and one process draws one for all of them (stochastic "
                "depth?). Draw them in a module whose class is called ...DropPath or ...StochasticDepth, before the module or "
                "behind it, or not at all"
            )

    def _check_positions(self, shards: ActivationShards, drawn: str, shape: Shape) -> None:
        """Check a draw anywhere else where activations are shards."""
        if self.in_block and self.own and not shards.has_positions(shape):
            raise ValueError(
                f"a block of {self.region} draws {drawn}, which has no sequence dim of {shards.part}: each rank would draw its own "
                "for its part of the sequence, and one process draws one for all of it (stochastic depth?). Draw them in a module "
                "whose class is called ...DropPath or ...StochasticDepth, between the blocks, or set sp=False"
            )
        size = shape[shards.dim : shards.dim + 1]
        alike = not self.in_block or not (self.own or self.in_gather or size == (1,))
        if alike and size == (shards.part,) and len(shape) == shards.ndim:
            raise ValueError(
                f"between the blocks of {self.region} (or in a DropPath) {drawn} are drawn for shards of the sequence, and every "
                "rank would draw the same for other positions; drop out inside the blocks or behind the region's end"
            )


def _is_of_tokens(shape: Shape, tokens: Shape) -> bool:
    """Whether what was drawn has no dim of features or heads: it is one number for all, for each sample or for each token."""
    apart = [tokens, (tokens[0], 1, *tokens[1:])] if tokens else [tokens]  # [b, s, ...], [b, heads, s, ...]
    return any(
        all(size in (1, *like[at : at + 1]) for at, size in enumerate(shape)) for like in (*apart, (math.prod(tokens),))
    )
