"""No step waits for the device: neither for what the last one found, nor for numbers on their way to it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.fit import class_named, quiet_trainer
from tests.helpers.host_waits import WaitsOfSteps

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clipped by norm": ("GPT", {}, {"gradient_clip_val": 0.1}, {}),
    "no vocabulary, no sp": ("GPT", {"tied": False}, {}, {"vocab": False, "sp": False}),
    "two optimizers by hand": ("ManualTwo", {"style": "keep"}, {}, {}),
    "shared kv heads": ("Zoo", {"kind": "mqa"}, {"gradient_clip_val": 0.1}, {}),
    "gradients exchanged": ("Edits", {}, {"accumulate_grad_batches": 2}, {}),
    "in chunks, recomputed": ("GPT", {}, {}, {"loss_chunk": 16, "recompute": "full"}),
}


def waits(world: int, tp: int, **fields: Any) -> dict[str, list[str]]:
    found = {}
    for name, (model, given, trainer, more) in CASES.items():
        steps = WaitsOfSteps()
        strategy = SeqParallelStrategy(tp=tp, self_check=False, regather=True, **fields, **more)
        quiet_trainer(devices=dist.get_world_size(), strategy=strategy, max_steps=20, callbacks=[steps], **trainer).fit(
            class_named(model)(**given), models.loader(4, count=4 * 48 * world)
        )
        found[name] = sorted(set(steps.waits.found))
    return found


def test_no_step_waits_for_the_device():
    for world, tp, fields in ((2, 2, {}), (4, 2, {}), (4, 2, {"data_parallel": "fsdp"}), (4, 4, {})):
        for found in run_distributed(waits, world, world, tp, **fields):
            assert found == {name: [] for name in CASES}, (world, tp, fields)
