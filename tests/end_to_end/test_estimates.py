"""What ``describe`` says before a launch is what a run then holds, keeps and sends."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_seqpar import ParallelConfig, SeqParallelStrategy, describe
from lightning_seqpar.layout.param_layout import local_rows
from lightning_seqpar.testing import run_distributed
from tests.helpers.families import HuggingFace
from tests.helpers.fit import metered
from tests.helpers.models import GPT, loader
from tests.mutants import sees

BATCH, LENGTH = 4, 10


def module_of(kind: str) -> L.LightningModule:
    return GPT() if kind == "gpt" else HuggingFace(kind)


def measure(kinds: list[str], strategy: dict[str, Any]) -> list[dict[str, Any]]:
    """Train 17 steps in float32 and say what this rank held, kept and sent in the last one."""
    found = []
    for kind in kinds:
        module = module_of(kind)
        batches = loader(BATCH, length=LENGTH, count=BATCH * 40)
        meter, trainer = metered(module, SeqParallelStrategy(**strategy), batches)
        (optimizer,) = trainer.optimizers
        kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        found.append(
            {
                "parameters": sum(local_rows(p).nbytes for p in module.parameters()),
                "optimizer": sum(local_rows(x).nbytes for x in kept),
                "activations": meter.saved_bytes,
                "sent": meter.bytes,
                "calls": meter.calls,
            }
        )
    return found


OPTIMIZER = {"gpt": "adamw"}


@sees(
    "16-bit sums counted at their own size", "step_traffic", "count * max(4, parameter.element_size())", "count * 2", case="tp2"
)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {"tp": 2, "regather": True}),
        pytest.param(2, {"tp": 2, "sp": False, "regather": True}, marks=pytest.mark.matrix),
        pytest.param(2, {"tp": 2, "regather": False}, marks=pytest.mark.matrix),
        pytest.param(2, {"tp": 2, "loss_chunk": 7}, marks=pytest.mark.matrix),
        pytest.param(4, {"tp": 2}, marks=pytest.mark.matrix),
        pytest.param(4, {"tp": 4}, marks=pytest.mark.matrix),
        (4, {"tp": 2, "data_parallel": "fsdp"}),
    ],
    ids=["tp2", "tp2-no-sp", "tp2-no-regather", "tp2-chunks", "dp2-tp2", "tp4", "fsdp2-tp2"],
)
@pytest.mark.more
def test_estimates_are_what_a_run_measures(world, strategy):
    kinds = ["gpt", "llama", "bert", "gpt2"] if world == 2 else ["gpt", "llama"]
    (batch,) = [next(iter(loader(BATCH, length=LENGTH, count=BATCH)))]
    for kind, measured in zip(kinds, run_distributed(measure, world, kinds, strategy)[0], strict=True):
        module = module_of(kind).float()
        said = describe(module, ParallelConfig(**strategy), world_size=world, batch=batch, optimizer=OPTIMIZER.get(kind, "sgd"))
        split = strategy.get("data_parallel") == "fsdp"
        assert len(said.notes) == split, kind
        assert said.parameter_bytes == measured["parameters"], kind
        assert said.optimizer_bytes == pytest.approx(measured["optimizer"], rel=0.03), kind
        assert said.activation_bytes == pytest.approx(measured["activations"], rel=0.03), kind
        sent = dict(said.sent_bytes)
        ddp = sent.pop("all_reduce (dp)", 0)
        assert bool(ddp) == (strategy["tp"] < world and not split)
        measured["sent"]["all_reduce"] -= ddp
        for name in ("all_gather", "reduce_scatter"):
            if over_dp := sent.pop(f"{name} (dp)", 0):
                measured["sent"][name] -= over_dp
                measured["calls"][name] -= said.sent_calls[f"{name} (dp)"]
        assert sent.keys() == {"all_gather", "reduce_scatter", "all_reduce"} & measured["sent"].keys(), kind
        for name, count in sent.items():
            assert count == pytest.approx(measured["sent"][name], rel=0.03), (kind, name)
            if not ddp or name != "all_reduce":  # DDP reduces in buckets
                assert said.sent_calls[name] == measured["calls"][name], (kind, name)
