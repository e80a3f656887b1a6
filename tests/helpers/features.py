"""Which features go together: asked of the configuration and the strategies, and trained on ranks."""

from __future__ import annotations

import itertools
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from pydantic import ValidationError

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from lightning_seqpar.fabric import SeqParallelFabricStrategy
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers.fit import fit

FEATURES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "sp": False},
    "sp": {"tp": 2, "sp": True},
    "dp": {"data_parallel": "ddp"},
    "fsdp": {"data_parallel": "fsdp"},
    "hsdp": {"data_parallel": "hsdp", "fsdp": {"shard_size": 2}},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "virtual_pp": {"pp": 2, "virtual_pp": 2},
    "recompute: activations": {"recompute": "activations"},
    "recompute: selective": {"recompute": "selective"},
    "recompute: full": {"recompute": "full"},
    "offload": {"offload": "activations"},
    "float8": {"float8": "rowwise", "fp8_groups": True},
    "compile": {"compile": True, "compile_options": {"backend": "aot_eager"}},
    "tile_mlp": {"tile_mlp": 4},
    "loss_chunk": {"loss_chunk": 8},
    "checkpoint: sharded": {"checkpoint": {"format": "sharded"}},
    "async_save": {"checkpoint": {"format": "sharded", "async_save": True}},
    "Fabric": {},
}
"""By name: the fields that turn it on."""
REPLICAS = {"dp": 2, "fsdp": 2, "hsdp": 4}
AXES = ("tp", "sp", "cp", "pp", "virtual_pp", *REPLICAS)
PAIRS = [*itertools.combinations(FEATURES, 2)]
ONE_OF = [{"tp", "sp"}, {*REPLICAS}, {"recompute: activations", "recompute: selective", "recompute: full"}]
"""Values of one field."""


def excludes(pair: tuple[str, str]) -> bool:
    """Whether two features are values of one field."""
    return any({*pair} <= group for group in ONE_OF)


def needs_a_trainer(pair: tuple[str, str]) -> bool:
    """Whether :func:`trained` does not train the pair, since it is about a loop of one's own."""
    return "Fabric" in pair


def fields_of(pair: tuple[str, str]) -> dict[str, Any]:
    """The fields of two features; beside no axis of either, ``tp`` 2 with ``sp``."""
    base = {} if {*pair} & {*AXES} else FEATURES["sp"]
    return {**base, **FEATURES[pair[0]], **FEATURES[pair[1]]}


def refusal(pair: tuple[str, str]) -> str | None:
    """What is said of two features that don't go together, before anything runs; None where they are taken."""
    fields = fields_of(pair)
    try:
        config = ParallelConfig(**fields)
        (SeqParallelFabricStrategy if "Fabric" in pair else SeqParallelStrategy)(config=config)
    except ValueError as error:
        return str(error.errors()[0]["msg"] if isinstance(error, ValidationError) else error)
    return None


class Saves(Callback):
    """Saves a checkpoint when the training is over."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(str(Path(self.folder) / "last.ckpt"))


def _train(fields: dict[str, Any], world: int, folder: str, like: Trace) -> str:
    warnings.simplefilter("ignore")
    trace = fit("GPT", {"layers": 4}, world=world, strategy=fields, steps=2, accumulate=2, callbacks=[Saves(folder)])
    report = compare(like, trace)
    saved = (Path(folder) / "last.ckpt").exists()
    return f"{max(row.error for row in report.rows):.0e}" if report.ok and saved else f"wrong\n{report}\nsaved: {saved}"


def one_process(float8: bool) -> Trace:
    """The run that others are compared with; in float8 one that casts by hand as torchao does."""
    if not float8:
        return fit("GPT", {"layers": 4}, steps=2, accumulate=2)
    linears = [f"model.blocks.{block}.{one}" for block in range(4) for one in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")]
    told = {"model": "GPT", "args": {"layers": 4}, "recipe": "rowwise", "names": linears, "parts": 1}
    return fit("helpers.float8:by_hand", told, steps=2, accumulate=2)


def trained(pair: tuple[str, str]) -> str:
    """The largest error of losses, gradients and weights against one process, of two features that are taken."""
    fields = fields_of(pair)
    axes = math.prod(fields.get(axis, 1) for axis in ("tp", "cp", "pp"))
    replicas = max(REPLICAS.get(name, 1) for name in pair)
    world = axes * (replicas // fields.get("cp", 1) if replicas == 4 else replicas)
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(_train, world, fields, world, folder, one_process("float8" in pair), timeout=240.0)[0]
