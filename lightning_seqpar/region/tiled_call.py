"""A module that computes on each position by itself, run on some positions at a time (arXiv 2506.13996, section 3.3).

What an MLP makes in between (``[b, s, f]``, several times as wide as the activation) and what is gathered for it exist for the
positions of one tile alone. Each tile is an activation checkpoint, so the backward makes them once more, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_seqpar.context.seq_part import SeqPart, local_of
from lightning_seqpar.distributed.autograd import saved_tensor_hooks_allowed
from lightning_seqpar.distributed.rng import drawn_apart
from lightning_seqpar.layout.attributes import ModelAttributes
from lightning_seqpar.region.recompute import RecomputedCall
from lightning_seqpar.region.sequence_region import SequenceRegion


class TiledCall:
    """Takes the place of a module's call, hooks and collectives of the region included.

    ==========================  ======================  =================================
    tensor                      shape                   kept for the backward
    ==========================  ======================  =================================
    x                           ``[b, s/(cp·tp), h]``   itself
    a tile of it                ``[b, tile/tp, h]``     itself, a view of ``x``
    between columns and rows    ``[b, tile, f/tp]``     nothing
    the result                  as ``x``                by whoever reads it
    ==========================  ======================  =================================

    A tile is given to the module as if there were no more positions, on this rank and on those of cp. That is right for a
    module of each position by itself, which the self-check proves, in tiles of its own.

    Args:
        module: the module: one tensor goes in, another of the same positions comes out.
        tokens: of a tile, over all tensor-parallel ranks; a whole position of each sequence at least.
        dim: the tensor dim of the sequence in ``[b, s, h]``.
        least: the least number of tiles, however few tokens there are.
    """

    def __init__(
        self, module: nn.Module, name: str, tokens: int, region: SequenceRegion | None, dim: int, least: int = 1
    ) -> None:
        self.module, self.name, self.tokens, self.region = module, name, tokens, region
        self._dim, self._least = dim, least

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on each tile.

        Raises:
            ValueError: if it takes several tensors, or returns something else than one activation.
        """
        x = self._only_tensor(args, kwargs)
        local = local_of(x)
        if local.ndim not in (2, 3) or not self._is_tiled(local):
            return self.module._call_impl(*args, **kwargs)
        dim = self._dim if local.ndim == 3 else 0
        tiles = [self._run_tile(tile, x, args, kwargs) for tile in local.split(self._positions(local, dim), dim)]
        out = torch.cat(tiles, dim)
        return x.like(out) if isinstance(x, SeqPart) else out

    def _is_tiled(self, local: Tensor) -> bool:
        """Whether there is more than one tile here; outside of the blocks the region's own message is due."""
        if self.region is not None and self.region.sp:
            frames = self.region.frames
            if not (frames.active or frames.recomputes):
                return False
        dim = self._dim if local.ndim == 3 else 0
        return self._positions(local, dim) < local.shape[dim]

    def _positions(self, local: Tensor, dim: int) -> int:
        """How many of this rank's positions are in a tile."""
        ranks = self.region.size if self.region is not None and self.region.sp else 1
        others = local.shape[1 - dim] if local.ndim == 3 else 1
        least = -(-local.shape[dim] // self._least)
        return max(1, min(self.tokens // (ranks * others), least))

    def _only_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        found = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(found) != 1:
            raise ValueError(
                f"tile_mlp={self.tokens}: {self.name} is called with {len(found)} tensors, and which of them is to be cut is not "
                "known; leave tile_mlp out"
            )
        return found[0]

    def _run_tile(self, tile: Tensor, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The module's result for a tile, ``[b, tile/tp, h]``."""
        args = tuple(tile if value is x else value for value in args)
        kwargs = {key: tile if value is x else value for key, value in kwargs.items()}
        if torch.is_grad_enabled() and saved_tensor_hooks_allowed():
            call = RecomputedCall(self._call(tile, x), args, kwargs, self.region, ModelAttributes(self.module, tensors=True))
            out = checkpoint(call, *call.take_kept(), use_reentrant=False)
        else:
            out = self._call(tile, x)(*args, **kwargs)
        if not isinstance(out, Tensor) or out.shape[:-1] != tile.shape[:-1]:
            what = f"a tensor of {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(
                f"tile_mlp={self.tokens}: {self.name} returns {what} for an input of {list(tile.shape)}, and such tiles can't be "
                "put together; leave tile_mlp out"
            )
        return out

    def _call(self, tile: Tensor, x: Tensor) -> Callable[..., Any]:
        """The module's own call, for which the tile's positions are all there are; ranks of cp draw apart for theirs."""
        shape, region, place = tile.shape, self.region, x.place.chunks.rank if isinstance(x, SeqPart) else None

        def run(*args: Any, **kwargs: Any) -> Any:
            args = tuple(map(_contiguous, args))
            kwargs = {key: _contiguous(value) for key, value in kwargs.items()}
            alone = nullcontext() if region is None else region.frames.alone(shape, is_shard=region.sp)
            with alone, nullcontext() if place is None else drawn_apart(place):
                return self.module._call_impl(*args, **kwargs)

        return run


def _contiguous(value: Any) -> Any:
    """An argument laid out as the module knows it; a tile of several sequences is a view with gaps."""
    return value.contiguous() if isinstance(value, Tensor) else value
