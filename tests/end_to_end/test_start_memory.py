"""What proving costs in memory: peaks of each rank through ``fit``, with the self-check and without, from the system's count."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.distributed as dist
from byte_gpt import ByteGPT
from torch.utils.data import DataLoader

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.inference.reduction import is_large
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.helpers.processes import Peak
from tests.helpers.slices import rest
from tests.mutants import sees

ROWS, LENGTH = 50_257, 64


class Wide(models.GPT):
    """The example's GPT with a vocabulary and a width at which copies are reduced: 25 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ByteGPT(dim=320, n_head=4, n_layer=6, context=LENGTH, tied=True, vocab=ROWS)


def grown(checked: bool, plan: str) -> float:
    """By how many MiB this rank grows at most through two steps of ``fit``; a small ``fit`` before it loads what is loaded once."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # what is freed goes back to the system, and is counted when it is taken again

    def fit(module: Any, rows: int, length: int) -> None:
        ids = torch.randint(rows, (4, length + 1), generator=torch.Generator().manual_seed(0))
        strategy = SeqParallelStrategy(tp=2, plan=plan, self_check=checked)
        trainer = quiet_trainer(devices=dist.get_world_size(), strategy=strategy, max_steps=2, precision="32-true")
        trainer.fit(module, DataLoader(torch.utils.data.TensorDataset(ids), batch_size=2))

    small, module = models.GPT(), Wide()
    assert is_large(module)
    fit(small, 31, 16)
    with Peak() as peak:
        fit(module, ROWS, LENGTH)
    return peak.grown


@sees(
    "large models are copied whole",
    "Reduction.variants",
    "        return [one for at, one in enumerate(found) if one not in found[:at]]\n",
    "        return [Reduction()]\n",
    case="auto",
)
@sees(
    "the self-check keeps its copies",
    "release",
    "    for parameter in copied.parameters():\n",
    "    for parameter in ():\n",
    case="auto",
)
@pytest.mark.parametrize("plan", ["auto", rest("infer")])
@pytest.mark.more
def test_the_self_check_takes_no_more_memory_than_training(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # One and the same run differs by several MiB from one time to the next, so that it is the least of three that counts.
    checked, trusted = (min(max(run_distributed(grown, 2, flag, plan)) for _ in range(3)) for flag in (True, False))
    print(f"{plan}: {checked:.0f} MiB with the self-check, {trusted:.0f} MiB without")
    assert checked <= 1.05 * trusted
