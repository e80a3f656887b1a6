"""What few people do and few faults need to be seen: the models with which tests/detectors.py tries such faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.fit import named_in_tests


class Uses(L.LightningModule):
    """A backward of test_overlap's, whichever one is asked for, and an optimizer's step behind it."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.use = named_in_tests("distributed.test_overlap:USES")[use]
        self.model = named_in_tests("distributed.test_overlap:Decoder")(3)
        self.example_input_array = torch.zeros(4, 8, dtype=torch.long)
        models.perturb(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.use(self.model, batch[0], batch_idx % 4)
        optimizer.step()
        return torch.zeros(())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def changed_inside(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(2.0) * up


def hidden_change(gate: Tensor, up: Tensor) -> Tensor:
    inner = F.silu(gate.clone()) * up
    with torch.no_grad():
        inner.movedim(0, 1).mul_(2.0)
    return inner


def changed_arguments(gate: Tensor, up: Tensor) -> Tensor:
    order = [1, 0, 2]
    turned = F.silu(gate).permute(order)
    out = torch.tanh(turned).permute(order) * up
    order[:] = [0, 1, 2]
    return out


def cast_inside(gate: Tensor, up: Tensor) -> Tensor:
    bits = F.silu(gate).view(torch.int64).bitwise_and(-(1 << 20))
    return bits.view(torch.float64) * up


def kept_shares(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).unflatten(-1, (-1, 2)).softmax(-1).flatten(-2) * up


BODIES = {one.__name__: one for one in (changed_inside, hidden_change, changed_arguments, cast_inside, kept_shares)}


class GatedMlp(nn.Module):
    """``down(body(gate(x), up(x)))``."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.body = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16), body

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self.gate(x), self.up(x)))


class Changing(models.GPT):
    """Changes tensors in place where most models do not; ``what`` is a body of the MLP, or where a change is."""

    def __init__(self, what: str) -> None:
        super().__init__(tied=False)
        for block in self.model.blocks:
            if what in BODIES:
                block.mlp = GatedMlp(BODIES[what])
            if what == "norm":
                block.norm2.register_forward_hook(lambda module, args, out: out.mul_(2.0))
            if what == "gathered":
                block.mlp.register_forward_pre_hook(lambda module, args: (args[0].mul_(0.5),))
        models.perturb(self)


def read_first(logits: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        logits.argmax(-1)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def squared(logits: Tensor, target: Tensor) -> Tensor:
    return logits.square().mean() + F.cross_entropy(logits.flatten(0, 1), target.flatten())


def ignored(logits: Tensor, target: Tensor) -> Tensor:
    """A second loss with no target at all: no number, and no gradient either."""
    none = F.cross_entropy(logits.flatten(0, 1), torch.full_like(target, -100).flatten())
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + none.nan_to_num()


def masked_in_place(logits: Tensor, target: Tensor) -> Tensor:
    logits[..., 7:9] = -9.0
    return F.cross_entropy(logits.flatten(0, 1), target.flatten().clamp(max=6))


def masked_view(logits: Tensor, target: Tensor) -> Tensor:
    """As samplers are written: a view that cuts the vocabulary is changed."""
    logits[..., 7:].mul_(0.5)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def masked_rows(logits: Tensor, target: Tensor) -> Tensor:
    last = logits[:, -1]
    last.masked_fill_(last > 0, -9.0)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def changed_copy(logits: Tensor, target: Tensor) -> Tensor:
    copied = logits[:, torch.tensor([0, 2])]
    logits.mul_(2.0)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + copied.square().mean()


def distilled(logits: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = logits * 1.0
    return F.kl_div(logits.log_softmax(-1), (2 * teacher).softmax(-1), reduction="batchmean")


READS = {
    one.__name__: one
    for one in (
        read_first, squared, ignored, masked_in_place, masked_view, masked_rows, changed_copy, distilled,
    )
}  # fmt: skip


class Reads(models.GPT):
    """Does something with its logits beside the loss, or before it."""

    def __init__(self, what: str) -> None:
        super().__init__(tied=False)
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return READS[self.what](self.model(tokens[:, :-1]), tokens[:, 1:])


class Teaching(models.GPT):
    """Its own head's logits, made without gradients, are what a student learns from."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        with torch.no_grad():
            teacher = self.model(tokens[:, 1:])
        student = self.model(tokens[:, :-1])
        return (teacher.softmax(-1) * student).sum(-1).mean()


class Listing(nn.Module):
    """Adds what it was given to a list."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return self.block(x)


class Collects(models.GPT):
    """Its blocks put their inputs into a list, of which the loss takes the mean."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.model.blocks = nn.ModuleList(Listing(block) for block in self.model.blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        model, ids = self.model, tokens[:, :-1]
        x, seen = model.tokens(ids) + model.positions(torch.arange(ids.shape[1])), []
        for block in model.blocks:
            x = block(x, seen)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens[:, 1:].flatten()) / len(seen)
