"""Optimizers that are refused because they update an element from other elements, which may lie on other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.core.optimizer import _MockOptimizer
from torch import optim
from torch.optim import Optimizer

ELEMENTWISE_OPTIMIZERS: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
"""Optimizers that update each element from its own value, gradient and state alone: they do the same on a shard."""


def refuse_optimizers(optimizers: Sequence[Optimizer], tp: int) -> None:
    """Refuse optimizers that are not known to be element-wise.

    Args:
        optimizers: the plain ones, without Lightning's wrappers.
        tp: number of tensor-parallel ranks; with one there are no shards, and everything is allowed.

    Raises:
        ValueError: naming the optimizer, and those that are allowed.
    """
    for optimizer in optimizers:
        if tp > 1 and type(optimizer) not in (*ELEMENTWISE_OPTIMIZERS, _MockOptimizer):
            allowed = ", ".join(one.__name__ for one in ELEMENTWISE_OPTIMIZERS)
            raise ValueError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} with tp={tp}: it is not known to update each "
                f"element by itself, and shards would change its result; use one of torch.optim's {allowed}"
            )


def refuse_optimizers_in_stages(optimizers: Sequence[Optimizer], pp: int) -> None:
    """Refuse optimizers that are not known to update each parameter by itself.

    Args:
        optimizers: the plain ones, without Lightning's wrappers.
        pp: over how many stages parameters are dealt out; with one everything is allowed.

    Raises:
        ValueError: naming the optimizer, and those that are allowed.
    """
    known = (*ELEMENTWISE_OPTIMIZERS, optim.Adafactor, optim.Muon, optim.SparseAdam, _MockOptimizer)
    for optimizer in optimizers:
        if pp > 1 and type(optimizer) not in known:
            allowed = ", ".join(one.__name__ for one in known[:-1])
            raise ValueError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} with pp={pp}: it is not known to update each parameter "
                f"by itself, and each stage has its own; use one of torch.optim's {allowed}"
            )


def refuse_fused_on_rows(optimizers: Sequence[Optimizer]) -> None:
    """Refuse fused kernels that torch does not have for parameters that the replicas split (``data_parallel='fsdp'``).

    Raises:
        ValueError: naming the optimizer and the kernel to use instead.
    """
    for optimizer in optimizers:
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        if is_fused and isinstance(optimizer, optim.SGD | optim.Adagrad):
            raise ValueError(
                f"{type(optimizer).__name__}(fused=True) with data_parallel='fsdp': torch has no such kernel for parameters "
                "that are split over the replicas; use foreach=True (Adam and AdamW have fused ones)"
            )
