"""How a dim is divided over a group: the length of a shard, and the padding that makes all shards equally long."""

from __future__ import annotations

import torch
from torch import Tensor


def shard_length(length: int, size: int) -> int:
    """Positions in one shard of a sequence of ``length`` positions over ``size`` ranks, padding included."""
    return -(-length // size)


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """Append zeros to ``x`` along ``dim`` until it has ``length`` there; returns ``x`` itself if it has."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def with_memory(x: Tensor) -> Tensor:
    """``x``, in memory where it has none: the gradient of a step function is a tensor of zeros that nothing can send."""
    return x.clone() if x._is_zerotensor() else x
