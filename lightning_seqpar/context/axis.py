"""The context-parallel axis as a model sees it: how each length is dealt out, and how parts are entered."""

from __future__ import annotations

import functools
from typing import Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.context.chunks import Chunks, contiguous, zigzag
from lightning_seqpar.context.exchange import enter
from lightning_seqpar.context.seq_part import Place, SeqPart, whole_of

Method = Literal["auto", "ring", "ulysses", "all_gather"]
"""The field ``cp_method`` of the configuration."""

_MANY = 256
"""Lengths whose chunks are remembered; with variable lengths those that were used longest ago are forgotten."""


class ContextAxis:
    """Deals sequences out over the ranks of the axis ``cp``, between which ``method`` computes attention."""

    def __init__(self, group: ProcessGroup, method: Method = "auto") -> None:
        self.group, self.method = group, method
        self.size, self.rank = group.size(), group.rank()
        # The same object for the same length, so that what it holds on the device is made once.
        self.deal_out = functools.lru_cache(_MANY)(self._deal_out)

    def _deal_out(self, length: int) -> Chunks:
        """How a sequence of ``length`` positions is dealt out: in runs, or in zig-zag for the ring, for equally much work."""
        deal = zigzag if self.method == "ring" else contiguous
        return Chunks(self.group, length, deal(length, self.size), self.method)

    def enter(self, x: Tensor, dim: int) -> tuple[Tensor, Chunks]:
        """This rank's positions of an activation, ``[b, s, h]`` → ``[b, s/cp, h]``, and how they are dealt out.

        What is a part along ``dim`` already is one still. Forward: nothing is sent. Backward: all-gather.
        """
        if isinstance(x, SeqPart) and x.place.is_plain and x.place.dim == dim:
            return x.local, x.place.chunks
        whole: Tensor = whole_of(x)
        chunks = self.deal_out(whole.shape[dim])
        return enter(whole, dim, chunks), chunks

    def part(self, x: Tensor, dim: int) -> SeqPart:
        """An activation as a part of a sequence: ``[b, s, h]``, of which this rank holds ``[b, s/cp, h]``."""
        if isinstance(x, SeqPart) and x.place.is_plain and x.place.dim == dim:
            return x
        local, chunks = self.enter(x, dim)
        return SeqPart.wrap(local, Place(chunks, dim))
