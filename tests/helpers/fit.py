"""``Trainer.fit`` on one process and on several, recorded for the parity engine."""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.distributed.counters import StepMeter
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.verify.parity import ParityRecorder, Trace
from tests.helpers import models


def quiet_trainer(**kwargs: Any) -> L.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**defaults, **kwargs})


def metered(module: L.LightningModule, strategy: SeqParallelStrategy, loader: Any, precision: str = "32-true") -> Any:
    """Train 17 steps, the last of which no run-time check is due at: its meter, and the trainer."""
    meter = StepMeter()
    trainer = quiet_trainer(
        devices=dist.get_world_size(), strategy=strategy, max_steps=17, precision=precision, callbacks=[meter]
    )
    trainer.fit(module, loader)
    return meter, trainer


def named_in_tests(name: str) -> Any:
    """What a module of tests calls so: ``<folder>.<module>:<name>``."""
    module, _, name = name.partition(":")
    return getattr(importlib.import_module(f"tests.{module}"), name)


def class_named(name: str) -> Any:
    """The class of a helper module; those that import transformers, peft or tests are loaded only if they are needed.

    Args:
        name: its name, or ``<module>:<name>`` for one of a module of tests.
    """
    if ":" in name:
        return named_in_tests(name)
    for place in ("models", "between", "zoo", "families", "adapted", "third_party"):
        found = getattr(importlib.import_module(f"tests.helpers.{place}"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"no module of tests/helpers has a model {name}")


def fit(
    model: str,
    model_args: dict[str, Any],
    *,
    world: int = 1,
    nodes: int = 1,
    strategy: dict[str, Any] | None = None,
    global_batch: int = 8,
    steps: int = 6,
    length: int = 10,
    accumulate: int = 1,
    clip: float | None = None,
    clip_by: str = "norm",
    precision: str = "64-true",
    callbacks: list[Callback] | None = None,
    accelerator: str = "cpu",
) -> Trace:
    """Train the ``<model>`` of these helpers for ``steps`` optimizer steps and return the trace (whole tensors)."""
    torch.manual_seed(0)
    # These models are too small for "auto" to make or gather anything again.
    chosen = SeqParallelStrategy(**{"regather": True, **strategy}) if strategy is not None else "auto"
    dp = world // math.prod((strategy or {}).get(axis, 1) for axis in ("tp", "cp", "pp"))
    dp = 1 if strategy is None else dp
    module = class_named(model)(**model_args)
    recorder = ParityRecorder()
    trainer = quiet_trainer(
        devices=world // nodes,
        num_nodes=nodes,
        strategy=chosen,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        gradient_clip_algorithm=clip_by if clip is not None else None,
        precision=precision,
        callbacks=[recorder, *(callbacks or [])],
        accelerator=accelerator,
    )
    loader = models.loader(global_batch // dp, length=length, count=global_batch * steps * accumulate)
    trainer.fit(module, loader)
    if world > 1 and dist.get_backend() == "gloo":
        meet_anew()
    return recorder.trace


def meet_anew() -> None:
    """Another world of these ranks: gloo's groups keep threads, which wake a hundred times a second, as long as one lives."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)


def fit_or_tell(*args: Any, **kwargs: Any) -> Trace | str:
    """The trace of :func:`fit`, or what is said where the run is refused, which is the same on all ranks."""
    try:
        return fit(*args, **kwargs)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


class Sharded(Callback):
    """How many tensors of the model are sharded."""

    count = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        record = record_of(pl_module)
        self.count = sum(layout.is_sharded for layout in record.layout.values()) if record is not None else 0


def fit_kinds(model: str, kinds: list[str], world: int, tp: int, sp: bool) -> dict[str, tuple[Trace, int] | str]:
    """Train every kind of a model in this process, one after the other: the trace, and how many tensors were sharded."""
    out: dict[str, tuple[Trace, int] | str] = {}
    for kind in kinds:
        sharded = Sharded()
        strategy = {"tp": tp, "sp": sp}
        found = fit_or_tell(model, {"kind": kind}, world=world, strategy=strategy, steps=3, callbacks=[sharded])
        out[kind] = found if isinstance(found, str) else (found, sharded.count)
    return out
