"""The tensor-parallel layers, each built by slicing an existing module."""

from lightning_seqpar.layers.attention import ParallelMultiheadAttention, ParallelTransformerEncoder
from lightning_seqpar.layers.linear import ColumnParallelLinear, RowParallelLinear, set_data, sharded_linear, shrink
from lightning_seqpar.layers.logits import ShardedLogits, cross_entropy
from lightning_seqpar.layers.vocab import VocabParallelEmbedding, VocabParallelHead
from lightning_seqpar.layout.attribute_override import AttributeView, read_attribute, write_attribute
from lightning_seqpar.layout.linear_kind import LinearKind, features, linear_kind
from lightning_seqpar.layout.shard import Shard

__all__ = [
    "AttributeView",
    "ColumnParallelLinear",
    "LinearKind",
    "ParallelMultiheadAttention",
    "ParallelTransformerEncoder",
    "RowParallelLinear",
    "Shard",
    "ShardedLogits",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "cross_entropy",
    "features",
    "linear_kind",
    "read_attribute",
    "set_data",
    "sharded_linear",
    "shrink",
    "write_attribute",
]
