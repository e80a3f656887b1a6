"""Checkpoints in parts, and any topology to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from fit import quiet_trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from test_checkpoint import same

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.folder import Opened
from lightning_seqpar.parity import ParityRecorder, Trace
from lightning_seqpar.testing import run_distributed

STEPS = 6  # two epochs of three; Lightning goes on from an epoch's end where the data began


class Two(models.GPT):
    """Two param groups, a scheduler, a frozen part; on request two optimizers."""

    def configure_optimizers(self) -> Any:
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[self.optimizer]
        more = {"momentum": 0.9} if self.optimizer == "sgd" else {"weight_decay": 0.1}
        named = list(self.named_parameters())
        self.model.norm.weight.requires_grad_(False)
        groups = [
            {"params": [p for _, p in named if p.ndim > 1 and p.requires_grad], **more},
            {"params": [p for _, p in named if p.ndim < 2 and p.requires_grad]},
        ]
        optimizer = kind(groups, lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Counting(Callback):
    """A callback with a state of its own, a tensor among it."""

    def __init__(self) -> None:
        self.seen = torch.zeros(3)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen += torch.arange(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def run(
    tp: int, form: str, steps: int, ckpt: str | None = None, save: str | None = None, optimizer: str = "adamw"
) -> tuple[Trace, Any]:
    """Train in float64 from the start or from ``ckpt``; save behind the third step, or where nothing is trained at the end."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    strategy = SeqParallelStrategy(tp=tp, checkpoint={"format": form})
    recorder, counting = ParityRecorder(), Counting()
    callbacks: list[Callback] = [recorder, counting]
    if save is not None and ckpt is None:  # Lightning goes on from where a callback of it saves
        place = Path(save)
        callbacks.append(ModelCheckpoint(place.parent, filename=place.stem, every_n_train_steps=3, save_top_k=-1))
    trainer = quiet_trainer(
        devices=world, strategy=strategy, max_steps=steps, callbacks=callbacks, enable_checkpointing=len(callbacks) > 2
    )
    module = Two(optimizer=optimizer).double()
    trainer.fit(module, models.loader(8 // (world // tp), count=8 * 3), ckpt_path=ckpt)
    if save is not None and ckpt is not None:
        trainer.save_checkpoint(save)
    return recorder.trace, counting.seen


def whole(path: str | Path) -> dict[str, Any]:
    """A checkpoint of either form, whole."""
    if Path(path).is_file():
        return dict(torch.load(path, weights_only=True))
    opened = Opened(path, weights_only=True)
    state = dict(opened.checkpoint)
    state["state_dict"] = opened.take(state["state_dict"], {}, 0)
    state["optimizer_states"] = [
        {**one, "state": {key: opened.take(entry, {}, 0) for key, entry in one["state"].items()}}
        for one in state["optimizer_states"]
    ]
    return state


PLACES = [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1)]
FORMS = ["single", "sharded"]
SOURCES = [(world, tp, form) for world, tp in PLACES for form in FORMS]
SLICE = [
    ((4, 2, "sharded"), (4, 4, "sharded"), "adamw"),
    ((4, 4, "sharded"), (2, 1, "single"), "adamw"),
    ((2, 2, "sharded"), (4, 2, "sharded"), "sgd"),
    ((1, 1, "single"), (4, 4, "sharded"), "adamw"),
    ((4, 2, "single"), (2, 2, "sharded"), "sgd"),
]


def start(world: int, *args: Any) -> tuple[Trace, Any]:
    return run(*args) if world == 1 else run_distributed(run, world, *args)[0]


@pytest.mark.parametrize(("source", "target", "optimizer"), SLICE)
def test_any_to_any(tmp_path, source, target, optimizer):
    """Bitwise after a round trip; and training goes on as if nothing had happened."""
    (world, tp, form), (other, its_tp, its_form) = source, target
    uninterrupted, seen = start(1, 1, "single", STEPS, None, None, optimizer)
    start(world, tp, form, 3, None, str(tmp_path / "a.ckpt"), optimizer)
    start(other, its_tp, its_form, 3, str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt"), optimizer)
    a, b = whole(tmp_path / "a.ckpt"), whole(tmp_path / "b.ckpt")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(a[part], b[part]), part
    assert same(a["callbacks"]["Counting"], b["callbacks"]["Counting"])
    assert list(a["state_dict"]) == list(b["state_dict"])
    resumed, counted = start(other, its_tp, its_form, STEPS, str(tmp_path / "a.ckpt"), None, optimizer)
    assert resumed.losses == pytest.approx(uninterrupted.losses[3:], rel=1e-9)
    for name, weight in uninterrupted.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=0, atol=1e-9)
    assert torch.equal(seen, counted)
