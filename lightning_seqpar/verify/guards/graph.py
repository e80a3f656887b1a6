"""Refused in a training step: a loss that reads part of a parameter or of a sum, found in its autograd graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_seqpar.activations.wgrad_overlap import READERS
from lightning_seqpar.distributed.autograd import children, reach
from lightning_seqpar.nn.linear import GatherLinear, ShardedLinear
from lightning_seqpar.parallel.apply import ShardedModel


def check_readers(loss: Tensor, record: ShardedModel, *, inside: bool = True) -> None:
    """Who reads the parameters whose data or gradient come in parts.

    Only the parallel layers may read a sharded parameter, and one with a partial gradient may be read between the
    region's first and last block alone: a loss that reads them (an L2 term) sees a part, or is counted tp times.

    Args:
        inside: whether to look at what is read between the region's first and last block too, which is most of the graph.

    Raises:
        RuntimeError: naming the parameter and the operation that reads it.
    """
    check_sums(loss, record)
    allowed = {f"{kind.__name__}Backward" for kind in (ShardedLinear, GatherLinear, *READERS)}

    def made_inside(node: Any) -> bool:
        return any(region.made(node) for region in record.regions)

    def follow(node: Any) -> list[Any]:
        return children(node) if inside or not made_inside(node) else []

    for node in reach(loss.grad_fn, follow):
        for child in children(node):
            variable = getattr(child, "variable", None)
            found = record.layout.of(variable) if variable is not None else None
            if found is None:
                continue
            if found.is_sharded and not found.free and node.name() not in allowed:
                raise RuntimeError(
                    f"{found.name}: it is sharded, and {node.name()} in the loss reads it past its layer, so it would see "
                    "a part of it; keep parameters out of the loss (weight decay belongs into the optimizer), or leave the "
                    "module out of the plan"
                )
            if found.is_sharded and found.free and record.on_shard(found.name) and not made_inside(node):
                raise RuntimeError(
                    f"{found.name}: it is sharded, and {node.name()} reads it outside the sequence region, where it sees a part "
                    "of it; keep parameters out of the loss (weight decay belongs into the optimizer), or leave the module out "
                    "of the plan"
                )
            if found.name in record.on_shards and not made_inside(node):
                raise RuntimeError(
                    f"{found.name}: {node.name()} reads it outside the sequence region, where its gradient is whole, but "
                    f"inside it is partial ({found.reason}): no one rule can sync both. Keep parameters out of the loss "
                    "(weight decay belongs into the optimizer), or use a parameter of its own outside"
                )


def check_sums(loss: Tensor, record: ShardedModel) -> None:
    """The loss must read of a module whose output is summed over tp nothing but that output.

    Raises:
        PartialSumError: naming the module.
    """
    for region in record.regions:
        region.loss_leaks.check(loss)
