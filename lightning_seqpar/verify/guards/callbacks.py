"""Callbacks that are refused, since they do not fit a model whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_seqpar.checkpoint.folder import walk
from lightning_seqpar.layout.param_layout import local_rows
from lightning_seqpar.parallel.sharded_model import ShardedModel


def refuse_callbacks(callbacks: Sequence[Any], shards: int) -> None:
    """Refuse callbacks that choose among all elements of a weight (pruning), recognised by the names of their classes."""
    for callback in callbacks:
        if shards > 1 and any(kind.__name__ == "ModelPruning" for kind in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} with parameters in {shards} parts: it copies the model before it is sharded, and each "
                "rank would choose by its own part of a weight what to prune; prune before or after the training"
            )


def refuse_links(callbacks: Sequence[Any]) -> None:
    """Refuse ``save_last="link"`` where checkpoints are written in the background: the link would lead to what is not whole yet."""
    for callback in callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                f"{type(callback).__name__}(save_last='link') with checkpoint={{'async_save': True}}: the link would lead to a "
                "checkpoint that is not whole yet; use save_last=True, or async_save: false"
            )


def refuse_saved_shards(checkpoint: Mapping[str, Any], record: ShardedModel) -> None:
    """Refuse a checkpoint in which code of the user's saves this rank's part of a parameter under its name, as if it were whole."""
    by_leaf: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {}
    for name, layout in record.layout.items():
        held = tuple(local_rows(record.layout.parameter(name)).shape)
        elsewhere = record.stage is not None and not record.stage.holds(name)
        if elsewhere or held != tuple(layout.global_shape):
            by_leaf.setdefault(name.rpartition(".")[2], []).append((name, held, tuple(layout.global_shape)))

    def check(path: str, leaf: Any) -> Any:
        key = path.rpartition("/")[2]
        for name, held, shape in by_leaf.get(key.rpartition(".")[2], ()) if isinstance(leaf, Tensor) else ():
            is_named = name == key or ("." in key and name.endswith(f".{key}"))
            # What other stages of a pipeline hold has the whole shape here, and no numbers.
            is_part = held != shape or (not leaf.is_meta and bool(leaf.isnan().all()))
            if is_named and is_part and tuple(local_rows(leaf).shape) == held:
                where = "".join(f"[{part!r}]" for part in path.split("/"))
                what = f"this rank's part of {name}, {list(held)} of {list(shape)}"
                if held == shape:
                    what = f"{name}, which another stage of the pipeline holds, so that there are no numbers in it"
                raise ValueError(
                    f"checkpoint{where}: code of yours saves {what}, which would pass for the whole (a callback's state_dict, or "
                    "on_save_checkpoint). Keep it out of the checkpoint; for an average of weights use Lightning's "
                    "EMAWeightAveraging, or make it in __init__ as a module of the model: both are saved whole"
                )
        return leaf

    walk({key: value for key, value in checkpoint.items() if key != "optimizer_states"}, check)
