"""Training loops of a user's, by Fabric: each trains a small GPT, on one process or on many, and records it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from byte_gpt import ByteGPT
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_seqpar.fabric import SeqParallelFabricStrategy
from lightning_seqpar.parity import Trace
from lightning_seqpar.verify.parity import gather_grads, gather_weights
from tests.helpers import models
from tests.helpers.fit import meet_anew

BATCH = 8


class Run:
    """A model, its optimizer and its batches, set up by Fabric; what becomes of them."""

    def __init__(
        self,
        fields: dict[str, Any] | None,
        world: int,
        *,
        tied: bool = False,
        lightning: bool = False,
        steps: int = 4,
        kind: Any = ByteGPT,
        given: bool = True,
    ) -> None:
        torch.set_default_dtype(torch.float64)  # to which Fabric converts what a model returns
        strategy = "auto" if fields is None else SeqParallelFabricStrategy(**fields)
        devices = 1 if fields is None else world
        self.fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision="64-true")
        self.fabric.launch()
        self.dp = 1 if fields is None else strategy.dp_size
        torch.manual_seed(0)
        self.plain = kind(16, n_head=4, n_layer=2, context=16, tied=tied, vocab=31)
        models.perturb(self.plain)
        self.plain = OfTheTrainer(self.plain) if lightning else self.plain
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        self.model = self.fabric.setup(self.plain)
        self.optimizer = self.fabric.setup_optimizers(optimizer) if given else optimizer
        data = models.tokens(count=BATCH * steps, length=10).tensors[0]
        self.batches = self.fabric.setup_dataloaders(DataLoader(data, BATCH // self.dp))
        self.trace = Trace()

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def note(self, loss: Tensor) -> None:
        self.trace.losses.append(float(self.fabric.all_reduce(loss.detach().clone())))

    def update(self, **clip: float) -> None:
        norm = self.fabric.clip_gradients(self.model, self.optimizer, **clip) if clip else None
        if not self.trace.grads:
            self.trace.grads = gather_grads(self.plain)
            self.trace.grad_norm = 0.0 if norm is None else float(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> Trace:
        self.trace.weights = gather_weights(self.plain)
        return self.trace


def steps(run: Run, **clip: float) -> None:
    for tokens in run.batches:
        loss = run.loss(tokens)
        run.fabric.backward(loss)
        run.note(loss)
        run.update(**clip)


def accumulates(run: Run, *, puts_off: bool) -> None:
    """Two batches to an update."""
    for at, tokens in enumerate(run.batches):
        with run.fabric.no_backward_sync(run.model, enabled=puts_off and at % 2 == 0):
            loss = run.loss(tokens)
            run.fabric.backward(loss / 2)
        run.note(loss)
        if at % 2:
            run.update(max_norm=0.3)


def calls_twice(run: Run) -> None:
    """Two calls with gradients and one without, before one backward, and then another backward."""
    for tokens in run.batches:
        first, second = run.loss(tokens), run.loss(tokens.flip(0))
        with torch.no_grad():
            run.note(run.loss(tokens.flip(1)))
        loss = first + 0.5 * second
        run.fabric.backward(loss)
        run.fabric.backward(0.1 * run.loss(tokens.flip(1)))
        run.note(loss)
        run.update()


def evaluates(run: Run) -> None:
    """An evaluation before anything is trained, and one behind each step."""

    @torch.no_grad()
    def evaluate(tokens: Tensor) -> None:
        run.model.eval()
        logits = run.model(tokens[:, :-1])
        right = (logits.argmax(-1) == tokens[:, 1:]).double().mean()
        run.note(right + F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        run.model.train()

    for tokens in run.batches:
        evaluate(tokens)
        loss = run.loss(tokens)
        run.fabric.backward(loss)
        run.update()
        evaluate(tokens)


def interleaves(run: Run) -> None:
    """A call whose backward comes behind that of a later one, in another backward's loss."""
    for tokens in run.batches:
        first, second = run.loss(tokens), run.loss(tokens.flip(0))
        run.fabric.backward(first)
        loss = run.loss(tokens.flip(1)) + second
        run.fabric.backward(loss)
        run.note(loss)
        run.update()


def leaves_a_window(run: Run) -> None:
    """Epochs of one batch and a half: what the last one left is zeroed."""
    for tokens in run.batches:
        for enabled in (True, False, True):
            with run.fabric.no_backward_sync(run.model, enabled=enabled):
                loss = run.loss(tokens)
                run.fabric.backward(loss)
            if not enabled:
                run.note(loss)
                run.update()
        run.optimizer.zero_grad()


class TwoOutputs(ByteGPT):
    """Returns logits and a loss by name, as models of Hugging Face do, and its tables are read by another name."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = super().forward(tokens)
        return {"logits": logits, "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())}


def reads_names(run: Run) -> None:
    """Evaluates in inference mode first; calls by keywords; reads outputs by name; sums over replicas."""
    for tokens in run.batches:
        with torch.inference_mode():
            out = run.model(tokens=tokens[:, :-1])
            run.note(out["loss"] + out["logits"].softmax(-1).square().mean())
        out = run.model(tokens=tokens[:, :-1])
        loss = out["loss"] + F.cross_entropy(out["logits"].flatten(0, 1), tokens[:, 1:].flatten())
        run.fabric.backward(loss)
        run.trace.losses.append(float(run.fabric.all_reduce(loss.detach(), reduce_op="sum")) / run.dp)
        run.update()


class OfTheTrainer(L.LightningModule):
    """A LightningModule, of which Fabric calls the steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, tokens: Tensor, number: int) -> Tensor:
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss


def runs_training_steps(run: Run) -> None:
    for number, tokens in enumerate(run.batches):
        loss = run.model.training_step(tokens, number)
        run.fabric.backward(loss)
        run.note(loss)
        run.update(max_norm=0.3)


LOOPS: dict[str, Callable[[Run], None]] = {
    "steps": functools.partial(steps, max_norm=0.3),
    "by value": functools.partial(steps, clip_val=0.001),
    "puts off": functools.partial(accumulates, puts_off=True),
    "accumulates": functools.partial(accumulates, puts_off=False),
    "calls twice": calls_twice,
    "evaluates": evaluates,
    "tied": steps,
    "training steps": runs_training_steps,
    "interleaves": interleaves,
    "leaves a window": leaves_a_window,
    "reads names": reads_names,
}


def trained(fields: dict[str, Any] | None, world: int) -> dict[str, Trace | str]:
    """What each loop did, or what it was told."""
    found: dict[str, Trace | str] = {}
    for name, loop in LOOPS.items():
        run = Run(
            fields,
            world,
            tied=name == "tied",
            lightning=loop is runs_training_steps,
            kind=TwoOutputs if loop is reads_names else ByteGPT,
        )
        try:
            loop(run)
            found[name] = run.end()
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        if fields is not None:
            meet_anew()
    return found


def goes_on_from_each(fields: dict[str, Any], world: int, begins: list[Path], *, late: bool) -> list[Any]:
    return [goes_on(fields, world, begin, late=late) for begin in begins]


def goes_on(fields: dict[str, Any] | None, world: int, begin: Path, *, late: bool = False) -> tuple[Trace, Any]:
    """Go on from the checkpoint ``begin``, which is loaded before the first call or, ``late``, behind it; or write one there."""
    run = Run(fields, world)
    state = {"model": run.model, "optimizer": run.optimizer, "batches": 0, "note": torch.arange(3)}
    batches = list(run.batches)
    if late:
        run.fabric.backward(run.loss(batches[3]))
        run.update()
        run.trace = Trace()
    if begin.exists():
        run.fabric.load(begin, state)
    for tokens in batches[state["batches"] :]:
        loss = run.loss(tokens)
        run.fabric.backward(loss)
        run.note(loss)
        run.update()
        state["batches"] += 1
        if state["batches"] == 2 and not begin.exists():
            run.fabric.save(begin, state)
            break
    trace = run.end()
    if fields is not None:
        meet_anew()
    return trace, (state["batches"], state["note"].tolist())


def told(what: str, world: int) -> str:
    """What a run is told that does something wrong, or cannot be right."""
    try:
        if what == "stages":
            SeqParallelFabricStrategy(tp=1, pp=2)
        if what == "in the background":
            SeqParallelFabricStrategy(tp=2, checkpoint={"format": "sharded", "async_save": True})
        if what == "unknown":
            SeqParallelFabricStrategy(tp=2, recompte="full")
        run = Run({"tp": 2}, world)
        tokens = next(iter(run.batches))
        if what == "a copy":
            copy.deepcopy(run.model)
        if what == "no model":
            plain = SeqParallelFabricStrategy(tp=2)
            return f"{plain.get_optimizer_state(torch.optim.SGD([nn.Parameter(torch.ones(2))]))}"
        if what == "a strange optimizer beside fsdp":
            run = Run({"data_parallel": "fsdp"}, world, given=False)
        if what == "two models":
            run.fabric.setup(nn.Linear(4, 4))
        if what == "on meta":
            run.fabric.strategy.module = None
            run.fabric.setup(nn.Linear(4, 4, device="meta"))
        if what == "other batches":
            run.loss(tokens + dist.get_rank() % 2)
        loss = run.loss(tokens)
        if what == "plain backward":
            loss.backward()
        run.fabric.backward(loss)
        if what == "plain clipping":
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if what == "not finite":
            run.fabric.backward(run.loss(tokens) * float("inf"))
            run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)
        run.fabric.backward(run.loss(tokens))
        run.optimizer.step()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
