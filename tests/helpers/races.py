"""One process plays one rank of several, once with collectives that are done at once and once with late ones.

What is sent must not change, and what comes must not be read, before a collective is waited for: then both come to the same bits.
A gloo rank can't show that reliably, and a second GPU is not needed for it (:mod:`loopback`).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import loopback
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parallel.grad_sync import LossWatch
from tests.helpers import models
from tests.helpers.fit import class_named, quiet_trainer
from tests.helpers.processes import PYTHON, ROOT, run

STEPS = 20
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gathered again": ("GPT", {}, {"tp": 4}),
    "gathered input kept": ("GPT", {}, {"tp": 4, "regather": False}),
    "without sp": ("GPT", {}, {"tp": 4, "sp": False}),
    "without vocabulary": ("GPT", {"tied": False}, {"tp": 4, "vocab": False}),
    "loss in chunks": ("GPT", {"tied": False}, {"tp": 4, "loss_chunk": 8}),
    "norms and MLPs again": ("GPT", {}, {"tp": 4, "recompute": "activations"}),
    "attention again": ("GPT", {}, {"tp": 4, "recompute": "selective"}),
    "blocks again": ("GPT", {}, {"tp": 4, "recompute": "full"}),
    "tiles": ("GPT", {}, {"tp": 4, "tile_mlp": 4}),
    "compiled": ("GPT", {}, {"tp": 4, "compile": True, "compile_options": {"backend": "aot_eager"}}),
    "shared heads": ("Zoo", {"kind": "fused_mqa"}, {"tp": 4}),
    "experts": ("Zoo", {"kind": "dense_moe"}, {"tp": 4}),
    "by hand": ("ManualTwo", {"style": "keep"}, {"tp": 4}),
    "ddp": ("GPT", {}, {"tp": 2, "dp": 2}),
    "fsdp": ("GPT", {}, {"tp": 2, "dp": 2, "data_parallel": "fsdp"}),
    "Ulysses": ("GPT", {}, {"cp": 2, "cp_method": "ulysses"}),
    "ring": ("GPT", {}, {"cp": 4, "cp_method": "ring"}),
    "keys gathered": ("GPT", {}, {"tp": 2, "cp": 2, "cp_method": "all_gather"}),
}
"""Of each form of the data path: the model, its arguments, and the strategy's fields."""
OF_ONE = ("gathered again", "loss in chunks", "norms and MLPs again", "ring")
"""Cases with a batch of one sequence, of which collectives make no copy; others have two, and a length that is padded."""


class _Bits(Callback):
    """Losses and gradients of every step, and the weights behind the last."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor]] = []

    def _note(self, what: str, tensor: Any) -> None:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        self.seen.append((what, local.detach().clone()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                self._note(f"the gradient of {name} in step {trainer.global_step}", parameter.grad)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self._note(f"the loss of step {batch_idx}", outputs["loss"])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self._note(f"{name} at the end", parameter)


def play(case: str, wire: loopback.Wire, accelerator: str = "cpu") -> list[tuple[str, Tensor]]:
    """Train as the first rank, whose collectives travel by ``wire``: what it computed, in order, with what each is."""
    (model, arguments, fields), batch = CASES[case], 1 if case in OF_ONE else 2
    world = math.prod(fields.get(axis, 1) for axis in ("tp", "cp", "dp"))
    torch.manual_seed(0)
    module = class_named(model)(**arguments)
    loopback.play(0, world, wire)  # objects come from the first rank
    bits = _Bits()
    with patch.dict("os.environ", loopback.placed(world)), patch.object(LossWatch, "settle", loopback.asks_nobody):
        trainer = quiet_trainer(
            accelerator=accelerator, devices=1, num_nodes=world, max_steps=STEPS, gradient_clip_val=1.0 if model == "GPT" else None,
            strategy=SeqParallelStrategy(self_check=False, **fields), callbacks=[bits], use_distributed_sampler=False,
        )  # fmt: skip
        # Nobody else has a word: all are of the first rank's part of the vocabulary.
        trainer.fit(module, models.loader(batch, length=13 if batch == 1 else 12, count=batch * STEPS, vocab=7))
    dist.destroy_process_group()
    return bits.seen


def differences(case: str, late: Callable[[], loopback.Wire], accelerator: str = "cpu") -> tuple[int, list[str]]:
    """How many collectives ran late, and what is not the same to the last bit, first things first."""
    at_once = play(case, loopback.Wire(), accelerator)
    wire = late()
    behind = play(case, wire, accelerator)
    assert at_once
    assert [name for name, _ in at_once] == [name for name, _ in behind]
    found = [name for (name, one), (_, other) in zip(at_once, behind, strict=True) if not _same_bits(one, other)]
    return wire.count, found


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are finite and equal."""
    return bool(one.isfinite().all()) and torch.equal(one, other)


def in_a_process(names: list[str], accelerator: str) -> dict[str, tuple[int, list[str], float] | str]:
    """Each race in one process of its own: collectives, differences and seconds; or what was said where it ended."""
    env = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "examples", ROOT / "benchmarks"))),
    }
    status, said = run(PYTHON, "-m", "tests.helpers.races", accelerator, *names, timeout=900, PYTHONFAULTHANDLER="1", **env)
    found: dict[str, Any] = {}
    for line in said.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    ended = " ".join([line for line in said.splitlines() if "Error" in line or "Fatal" in line][-1:]) or f"ended with {status}"
    return {name: found.get(name, ended) for name in names}


def late_wire(accelerator: str) -> loopback.Wire:
    """A thread's; on a GPU a stream's, on which each collective begins a millisecond late."""
    return loopback.ThreadWire() if accelerator == "cpu" else loopback.StreamWire(loopback.Network(1e-3, 1e12))


def main(accelerator: str, names: Sequence[str]) -> None:
    """Run these and print each as a line of JSON."""
    torch.set_num_threads(1)
    if accelerator != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
    for name in names:
        began = time.perf_counter()
        count, apart = differences(name, lambda: late_wire(accelerator), accelerator)
        print(json.dumps({name: (count, apart, time.perf_counter() - began)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
