"""The tensor-parallel layers, each built by slicing an existing module."""

from lightning_seqpar.layers.attention import ParallelMultiheadAttention, ParallelTransformerEncoder
from lightning_seqpar.layers.linear import ColumnParallelLinear, RowParallelLinear, set_data, sharded_linear
from lightning_seqpar.layers.shard import Shard
from lightning_seqpar.layers.view import AttributeView

__all__ = [
    "AttributeView",
    "ColumnParallelLinear",
    "ParallelMultiheadAttention",
    "ParallelTransformerEncoder",
    "RowParallelLinear",
    "Shard",
    "set_data",
    "sharded_linear",
]
