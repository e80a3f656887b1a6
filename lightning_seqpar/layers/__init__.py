"""The tensor-parallel layers, each built by slicing an existing module."""

from lightning_seqpar.layers.attention import ParallelMultiheadAttention
from lightning_seqpar.layers.linear import ColumnParallelLinear, RowParallelLinear, set_data, sharded_linear
from lightning_seqpar.layers.shard import Shard

__all__ = [
    "ColumnParallelLinear",
    "ParallelMultiheadAttention",
    "RowParallelLinear",
    "Shard",
    "set_data",
    "sharded_linear",
]
