"""Callbacks that are refused at set-up, since they do not fit a model whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def refuse_callbacks(callbacks: Sequence[Any], shards: int) -> None:
    """Refuse callbacks that choose among all elements of a weight: pruning.

    They are recognised by the names of their classes, so that neither of Lightning's packages has to be imported.

    Args:
        callbacks: the trainer's.
        shards: over how many ranks parameters are divided; with one everything is allowed.

    Raises:
        ValueError: naming the callback.
    """
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if shards > 1 and kind.__name__ == "ModelPruning":
                raise ValueError(
                    f"{type(callback).__name__} with parameters in {shards} parts: it copies the model before it is sharded, and "
                    "each rank would choose by its own part of a weight what to prune; prune before or after the training"
                )


def refuse_links(callbacks: Sequence[Any]) -> None:
    """Refuse ``save_last="link"`` where checkpoints are written in the background.

    The link would be made before the checkpoint is whole, and would lead to nothing if the run ended then.

    Args:
        callbacks: the trainer's; asked only if ``checkpoint.async_save`` is on.

    Raises:
        ValueError: naming the callback.
    """
    for callback in callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                f"{type(callback).__name__}(save_last='link') with checkpoint={{'async_save': True}}: the link would lead to a "
                "checkpoint that is not whole yet; use save_last=True, or async_save: false"
            )
