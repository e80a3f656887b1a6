"""Trainers with stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import compare
from tests.helpers.fit import fit, quiet_trainer

Case = tuple[str, dict[str, Any], dict[str, Any]]
"""A model, how it is made, and the fields of the strategy."""


def trainer_of(sizes: dict[str, Any] | None, **more: Any) -> Any:
    """A trainer on one process (None), or of a strategy of these sizes."""
    devices = 1 if sizes is None else dist.get_world_size()
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "max_steps": 3, **more}
    return quiet_trainer(devices=devices, strategy="auto" if sizes is None else SeqParallelStrategy(**sizes), **options)


def fit_all(cases: list[Case], world: int, how: dict[str, Any]) -> list[Any]:
    return [fit(model, args, world=world, strategy=strategy, **how) for model, args, strategy in cases]


def check_cases(world: int, cases: list[Case], how: dict[str, Any]) -> None:
    """Every rank of some runs trains as one process does."""
    everywhere = run_distributed(fit_all, world, cases, world, how, timeout=300)
    for at, (model, args, strategy) in enumerate(cases):
        expected = fit(model, args, **how)
        for rank in everywhere:
            report = compare(expected, rank[at])
            assert report.ok, f"{model} {args} {strategy}\n{report}"
