"""A decoder whose code between the blocks works on the sequence as a whole, from some step on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import byte_gpt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import models


class Doubled(torch.autograd.Function):
    """A function of somebody's of each number by itself, with an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _placed(self: Between, x: Tensor) -> Tensor:
    """As vision-language models put the features of an image among those of the text."""
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask[:, 1:4] = True
    x = x.clone()
    x[mask, :] = x[mask, :] + self.features.expand(x.shape[0], 3, -1).flatten(0, 1)
    return x


def _attended(self: Between, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def _shorter(self: Between, x: Tensor) -> Tensor:
    """The blocks behind see other positions than those in front."""
    self.left_out = x[:, :3]
    return x[:, 3:]


def _registers(self: Between, x: Tensor) -> Tensor:
    return torch.cat([self.features.expand(x.shape[0], -1, -1), x], 1)


def _kept(self: Between, x: Tensor) -> Tensor:
    self.aside = x.square().mean() + self.head(x)[..., :3].square().mean() + x[:, 0].sum() * 0.01
    return x


def _convolved(self: Between, x: Tensor) -> Tensor:
    return x + self.mix(x.transpose(1, 2)).transpose(1, 2)


def _reentrant(self: Between, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda y: y + self.extra(y).cumsum(1) * 0.1, x, use_reentrant=True)
    return out


def _bias_and_product(self: Between, x: Tensor) -> Tensor:
    mixed = self.features.mT @ self.features.expand(x.shape[0], -1, -1)
    return torch.baddbmm(self.features[0], x, mixed)


def _through_buffer(self: Between, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return x + 0.5 * y


KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda self, x: x + 0.2 * x.mean(1, keepdim=True),
    "first": lambda self, x: x + 0.3 * x[:, :1],
    "rolled": lambda self, x: x + 0.5 * x.roll(1, 1),
    "summed up": lambda self, x: x + 0.1 * x.cumsum(1),
    "normalised": lambda self, x: x + F.normalize(x, dim=1),
    "scores": lambda self, x: x + (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "scaled": lambda self, x: x * self.scale + self.features.mean(),
    "outer norm": lambda self, x: self.extra(x),
    "norm of a block": lambda self, x: x + self.model.blocks[0].norm1(x),
    "MLP of a block": lambda self, x: x + self.model.blocks[0].mlp(x),
    "outer linear": lambda self, x: x + self.wide(torch.cat([x, x * 0.5], -1)),
    "positions": lambda self, x: x + torch.linspace(-1, 1, x.shape[1]).unsqueeze(-1) * self.scale,
    "placed": _placed,
    "attended": _attended,
    "shorter": _shorter,
    "registers": _registers,
    "kept": _kept,
    "convolved": _convolved,
    "reentrant": _reentrant,
    "buffer": _through_buffer,
    "function": lambda self, x: Doubled.apply(x, 1.5),
    "in place": lambda self, x: x.clone().add_(self.features.mean()).mul_(1.1),
    "flattened": lambda self, x: self.extra(x.flatten(0, 1)).view(x.shape),
    "hook": lambda self, x: x,
    "pooled": lambda self, x: x + self.model.norm(x.mean(1)).unsqueeze(1) * self.model.norm(x[:, 0]).unsqueeze(1),
    "attention": lambda self, x: x + self.attend(x, x, x, need_weights=False)[0],
    "encoder layer": lambda self, x: self.layer(x),
    "recurrent": lambda self, x: x + self.recurrent(x)[0],
    "bias and product": _bias_and_product,
}


class Between(models.GPT):
    """Runs code of that kind between its blocks (or in evaluation alone).

    Args:
        kind: of :data:`KINDS`.
        since: the first step in which it runs.
    """

    def __init__(self, kind: str, since: int = 1, tied: bool = True) -> None:
        super().__init__(tied=tied, layers=3)
        torch.manual_seed(1)
        self.kind, self.since, self.aside = kind, since, None
        self.extra, self.scale = nn.LayerNorm(16), nn.Parameter(torch.rand(16))
        self.features, self.mix = nn.Parameter(torch.randn(3, 16)), nn.Conv1d(16, 16, 3, padding=1)
        self.wide, self.recurrent = nn.Linear(32, 16), nn.GRU(16, 16, batch_first=True)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        if kind == "hook":
            self.model.blocks[0].register_forward_hook(self._notes)
        models.perturb(self)

    def _notes(self, module: Any, args: Any, out: Tensor) -> None:
        self.aside = out.square().mean() * 0.1 + out.amax()

    def head(self, x: Tensor) -> Tensor:
        """The logits of intermediate activations."""
        out: Tensor = self.model.head(x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        model, late = self.model, self.trainer.global_step >= self.since or not self.training
        x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1]))
        for at, block in enumerate(model.blocks):
            x = block(x)
            if at < 2 and late and not (self.kind in ("shorter", "registers") and at):
                x = KINDS[self.kind](self, x)
        if late and self.kind == "registers":
            x = x[:, 3:]
        out: Tensor = model.head(model.norm(x))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1 + tokens.shape[1] - 1 - logits.shape[1] :].flatten())
        if self.aside is not None:
            loss = loss + self.aside * (self.trainer.global_step >= self.since)
        self.aside = None
        held = [p for name, p in self.named_parameters() if not name.startswith("model.")]
        return loss + sum(one.sum() for one in held) * 0.01

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        self.log("val", F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


class ScoredBlock(byte_gpt.Block):
    """Returns scores of each token beside its activation, with the tokens flattened, as routers do."""

    def __init__(self, dim: int, n_head: int) -> None:
        super().__init__(dim, n_head)
        self.gate = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, self.gate(y).flatten(0, 1)


class Scored(models.GPT):
    """Its loss reads the scores of every block, the last one's too, from its second step on."""

    def __init__(self, since: int = 1) -> None:
        super().__init__(tied=False)
        self.since = since
        self.model.blocks = nn.ModuleList(ScoredBlock(16, 4) for _ in range(2))
        models.perturb(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        model, scores = self.model, []
        x = model.tokens(tokens[:, :-1]) + model.positions(torch.arange(tokens.shape[1] - 1))
        for block in model.blocks:
            x, score = block(x)
            scores.append(score)
        loss = F.cross_entropy(model.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        shares = [score.softmax(-1).mean(0).square().sum() for score in scores]
        return loss + sum(shares) * (self.trainer.global_step >= self.since)
