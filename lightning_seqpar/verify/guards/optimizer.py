"""Refused when an optimizer is set: one whose update of an element reads others, which lie on other ranks."""

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
"""Optimizers whose update of an element depends on that element's gradient and state alone."""


def refuse_optimizers(optimizers: Sequence[Optimizer], tp: int) -> None:
    """Only elementwise optimizers are right on shards.

    Raises:
        ValueError: naming the optimizer.
    """
    for optimizer in optimizers:
        if tp > 1 and type(optimizer) not in (*ELEMENTWISE_OPTIMIZERS, _MockOptimizer):
            allowed = ", ".join(kind.__name__ for kind in ELEMENTWISE_OPTIMIZERS)
            raise ValueError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} with tp={tp}: it is not known to update each "
                f"element by itself, and shards would change its result; use one of torch.optim's {allowed}"
            )
