"""A program that uses Lightning by the name that it is given, and cannot import the other: ``NAME PROCESSES HOW``."""

from __future__ import annotations

import importlib
import os
import sys

OTHERS = {"lightning.pytorch": ("pytorch_lightning", "lightning_fabric"), "pytorch_lightning": ("lightning",)}
name, processes, how, *rest = sys.argv[1:]
sys.modules.update(dict.fromkeys(OTHERS[name]))  # what is None there can't be imported

pl = importlib.import_module(name)

import torch
from torch import nn

import lightning_seqpar
from lightning_seqpar.parity import ParityRecorder


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(y.transpose(1, 2).flatten(2))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 16)
        self.double()

    def training_step(self, batch, index):
        x = batch
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, *_):
        if os.environ.get("RANK", "0") == os.environ.get("LOCAL_RANK", "0") == "0":
            print("loss", repr(float(outputs["loss"])), flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        torch.manual_seed(1)
        return torch.utils.data.DataLoader(torch.randn(6, 8, 16, dtype=torch.float64), batch_size=2)


OPTIONS = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def main() -> None:
    strategy = lightning_seqpar.SeqParallelStrategy(tp=2)
    if how == "cli":
        cli = importlib.import_module(f"{name}.cli")
        cli.LightningCLI(Model, trainer_defaults=OPTIONS, save_config_callback=None, args=rest)
        return
    by = {"plain": "auto", "registry": "seqpar_tp2"}.get(how, strategy)
    trainer = pl.Trainer(devices=int(processes), strategy=by, callbacks=[ParityRecorder()], **OPTIONS)
    trainer.fit(Model())
    lightning_seqpar.unshard(trainer.lightning_module)
    kinds = {kind.__module__.partition(".")[0] for one in (trainer.strategy, *trainer.callbacks) for kind in type(one).__mro__}
    if trainer.is_global_zero:
        print("packages", *sorted(kinds & {"lightning", "pytorch_lightning"}), flush=True)


if __name__ == "__main__":
    main()
