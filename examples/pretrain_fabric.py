"""Pretrain the byte-level GPT in a loop of your own, by Fabric, in the form of litgpt's pretraining.

python examples/pretrain_fabric.py                              # two processes, tp=2
python examples/pretrain_fabric.py --devices 4 --tp 2           # two replicas
python examples/pretrain_fabric.py --devices 1                  # one process, plain Fabric
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from byte_gpt import ByteGPT
from lightning.fabric import Fabric
from text_data import ByteWindows, read_text
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_seqpar.fabric import SeqParallelFabricStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--data", help="a file or folder to train on (default: the standard library's sources)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"))
    parser.add_argument("--resume", type=Path, help="a checkpoint of this script, of any number of processes")
    args = parser.parse_args()

    # The one line: everything else here is plain Fabric.
    strategy = SeqParallelFabricStrategy(tp=args.tp) if args.devices > 1 else "auto"
    fabric = Fabric(devices=args.devices, strategy=strategy, accelerator="auto" if torch.cuda.is_available() else "cpu")
    fabric.launch()
    fabric.seed_everything(1, verbose=False)

    with fabric.init_module():
        model: Any = ByteGPT(dim=128, n_head=4, n_layer=4, context=128, tied=False)
    model = fabric.setup(model)
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))

    windows = ByteWindows(read_text(args.data, 400_000), 128)
    held_out = len(windows) // 20
    parts = torch.utils.data.random_split(windows, [len(windows) - held_out, held_out], torch.Generator().manual_seed(1))
    train, validation = fabric.setup_dataloaders(
        DataLoader(parts[0], args.micro_batch, shuffle=True, drop_last=True), DataLoader(parts[1], args.micro_batch)
    )

    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume is not None:
        fabric.load(args.resume, state)
    replicas = 1 if args.devices == 1 else strategy.dp_size
    fit(fabric, state, train, args.steps, accumulate=args.global_batch // (args.micro_batch * replicas))
    fabric.print(f"validation loss {validate(fabric, model, validation):.4f}")
    fabric.save(args.out / "last.ckpt", state)


def fit(fabric: Fabric, state: dict[str, Any], train: Any, steps: int, accumulate: int) -> None:
    model, optimizer, losses = state["model"], state["optimizer"], []
    batches, started = iter(train), time.perf_counter()
    last = state["step"] + steps
    while state["step"] < last:
        for micro in range(accumulate):
            tokens = next(batches, None)
            if tokens is None:
                batches = iter(train)
                tokens = next(batches)
            with fabric.no_backward_sync(model, enabled=micro < accumulate - 1):
                loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
                fabric.backward(loss / accumulate)
            losses.append(loss.detach())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % 10 == 0:
            mean = fabric.all_reduce(torch.stack(losses).mean())
            fabric.print(f"step {state['step']}: loss {float(mean):.4f}, {time.perf_counter() - started:.1f} s")
            losses = []


@torch.no_grad()
def validate(fabric: Fabric, model: nn.Module, batches: Any) -> float:
    model.eval()
    losses = [next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:]) for tokens in batches]
    model.train()
    return float(fabric.all_reduce(torch.stack(losses).mean()))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
