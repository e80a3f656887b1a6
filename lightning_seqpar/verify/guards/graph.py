"""Losses that are refused because their autograd graph reads a part where the user's code means the whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_seqpar.distributed.autograd import backward_classes, children, reach
from lightning_seqpar.nn import vocab
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.region import products


def check_readers(loss: Tensor, record: ShardedModel) -> None:
    """Refuse a loss that reads a sharded parameter or one with a partial gradient past its layer (an L2 term), or a partial sum."""
    for region in record.regions:
        region.observers.loss_leaks.check(loss)
    compiled = record.graphs.node_types if record.graphs is not None else set()  # of our own blocks, each a node
    allowed = {*backward_classes((*products.READERS, *vocab.READERS)), *compiled}

    def made_inside(node: Any) -> bool:
        return any(region.observers.span.holds(node) for region in record.regions)

    for node in reach(loss.grad_fn, children):
        for child in children(node):
            variable = getattr(child, "variable", None)
            layout = record.layout.of(variable) if variable is not None else None
            if layout is None:
                if variable is not None and record.replicas is not None:
                    record.replicas.check_leaf(variable)
                continue
            how = ""
            if layout.is_sharded and not layout.free and type(node) not in allowed:
                how = "in the loss reads it past its layer, so it would see"
            if layout.is_sharded and layout.free and record.on_shard(layout.name) and not made_inside(node):
                how = "reads it outside the sequence region, where it sees"
            if how:
                raise RuntimeError(
                    f"{layout.name}: it is sharded, and {node.name()} {how} a part of it; keep parameters out of the loss (weight "
                    "decay belongs into the optimizer), or leave the module out of the plan"
                )
            if layout.name in record.on_shards and not made_inside(node):
                if "BackwardBackward" in node.name():
                    raise RuntimeError(_NO_SECOND_DERIVATIVE)
                raise RuntimeError(
                    f"{layout.name}: {node.name()} reads it outside the sequence region, where its gradient is whole, but "
                    f"inside it is partial ({layout.reason}): no one rule can sync both. Keep parameters out of the loss "
                    "(weight decay belongs into the optimizer), or use a parameter of its own outside"
                )


_NO_SECOND_DERIVATIVE = (
    "a gradient is differentiated again (create_graph=True, a gradient penalty), and the sharded layers have no second "
    "derivative. Leave what it goes through out of the plan (vocab=False for the head), take the penalty as a difference "
    "of two losses (loss(x + eps * direction) - loss(x), each with a first derivative alone), or train with tp=1"
)


def refuse_second_derivative(error: RuntimeError) -> None:
    """Say what to do instead, if ``error`` is torch's of a gradient that is differentiated through a sharded layer."""
    if "once_differentiable" in str(error):
        raise RuntimeError(_NO_SECOND_DERIVATIVE) from error
