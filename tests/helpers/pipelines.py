"""Trainers with stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_seqpar import SeqParallelStrategy
from tests.helpers.fit import quiet_trainer


def strategy_of(sizes: dict[str, Any] | None) -> Any:
    """The strategy of these sizes; for None that of one process."""
    return "auto" if sizes is None else SeqParallelStrategy(**sizes)


def trainer_of(sizes: dict[str, Any] | None, **more: Any) -> Any:
    """A trainer on one process (None), or of a strategy of these sizes."""
    devices = 1 if sizes is None else dist.get_world_size()
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "max_steps": 3, **more}
    return quiet_trainer(devices=devices, strategy=strategy_of(sizes), **options)
