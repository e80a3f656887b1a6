"""The autograd pairs of tensor and sequence parallelism, under their public path."""

from lightning_seqpar.distributed.async_ops import all_gather, all_reduce, reduce_scatter, shard_length, split
from lightning_seqpar.distributed.collectives import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_replicated_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_replicated_from_sequence_parallel_region",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "shard_length",
    "split",
]
