"""Refused at set-up: callbacks that do not fit a model of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def refuse_callbacks(callbacks: Sequence[Any], tp: int) -> None:
    """Callbacks that keep whole copies of the weights do not fit shards.

    Raises:
        ValueError: naming the callback.
    """
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if tp > 1 and kind.__name__ in ("StochasticWeightAveraging", "WeightAveraging"):
                raise ValueError(
                    f"{type(callback).__name__} with tp={tp}: it copies the model before it is sharded; leave it out, or "
                    "average checkpoints afterwards"
                )
            if tp > 1 and kind.__name__ == "ModelPruning":
                raise ValueError(
                    f"{type(callback).__name__} with tp={tp}: it copies the model before it is sharded, and each rank would choose "
                    "by its own part of a weight what to prune; prune before or after the training"
                )


def refuse_links(callbacks: Sequence[Any]) -> None:
    """A link to a checkpoint that is still being written would lead nowhere if the run ended now.

    Raises:
        ValueError: naming the callback.
    """
    for callback in callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                f"{type(callback).__name__}(save_last='link') with checkpoint={{'async_save': True}}: the link would lead to a "
                "checkpoint that is not whole yet; use save_last=True, or async_save: false"
            )
