"""How a dim is divided over a group: lengths of shards, and the padding that makes them equal."""

from __future__ import annotations

import torch
from torch import Tensor


def shard_length(length: int, size: int) -> int:
    """Positions in one shard of a sequence of ``length`` positions over ``size`` ranks, padding included."""
    return -(-length // size)


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """``x`` with zeros behind it along ``dim``, up to ``length``; ``x`` itself where nothing is missing."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
