"""Training that writes checkpoints, checkpoints read whole, and when two of them are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.checkpoint.folder import Opened, find_folder
from lightning_seqpar.strategy.saving import WholeFileIO
from tests.helpers import models
from tests.helpers.fit import quiet_trainer

FORMS: dict[str, dict[str, Any]] = {
    "single": {"format": "single"},
    "sharded": {"format": "sharded"},
    "async": {"format": "sharded", "async_save": True},
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


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
    """A callback with a state of its own: a tensor, and a parameter, as callbacks with averaged weights have it."""

    def __init__(self) -> None:
        self.seen = torch.zeros(3)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen += torch.arange(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "kept": torch.nn.Parameter(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        assert type(state["kept"]) is torch.nn.Parameter
        assert torch.equal(state["kept"], self.seen)


def save_in_parts(path: str) -> None:
    """Train in float64 at tp 2 for three steps, and save a folder."""
    strategy = SeqParallelStrategy(tp=2, checkpoint=FORMS["sharded"])
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=3, callbacks=[Counting()])
    trainer.fit(Two().double(), models.loader(8, count=8 * 3))
    trainer.save_checkpoint(path)


def whole(path: str | Path) -> dict[str, Any]:
    """A checkpoint of either form, whole."""
    if not find_folder(Path(path)).is_dir():
        return dict(WholeFileIO().load_checkpoint(path, weights_only=True))
    opened = Opened(path, weights_only=True)
    state = dict(opened.tree)
    state["state_dict"] = opened.take(state["state_dict"], {}, 0)
    if "optimizer_states" not in state:
        return state
    state["optimizer_states"] = [
        {**one, "state": {key: opened.take(entry, {}, 0) for key, entry in one["state"].items()}}
        for one in state["optimizer_states"]
    ]
    return state
