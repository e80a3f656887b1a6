"""A model that drops out wherever models do, and keeps its masks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

P = 0.25


class Recorder(nn.Dropout):
    """Keeps its masks."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            self.masks = [*getattr(self, "masks", []), (out != 0).detach()]
        return out


class DropAttention(nn.Module):
    def __init__(self, dim: int, heads: int, recompute: str = "") -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.before, self.probs, self.behind, self.recompute = Recorder(P), Recorder(P), Recorder(P), recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = checkpoint(self._columns, x, use_reentrant=False) if self.recompute == "columns" else self._columns(x)
        return self.behind(self.proj(y))

    def _columns(self, x: Tensor) -> Tensor:
        return self._heads(self.qkv(x))

    def _heads(self, qkv: Tensor) -> Tensor:
        b, s, _ = qkv.shape
        qkv = [t.view(b, s, self.heads, -1).transpose(1, 2) for t in qkv.chunk(3, -1)]
        y = checkpoint(self._mix, *qkv, use_reentrant=False) if self.recompute == "between" else self._mix(*qkv)
        return y.transpose(1, 2).reshape(b, s, -1)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.probs((q @ k.transpose(-1, -2)).softmax(-1))
        return (F.dropout(weights, P) if self.recompute in ("between", "called") else weights) @ v


class LateDropAttention(DropAttention):
    """What another column reads drops out behind the first: alike on all ranks, as what an adapter drops out of its input."""

    def __init__(self, dim: int, heads: int, recompute: str = "") -> None:
        super().__init__(dim, heads, recompute)
        self.adapter, self.whole = nn.Linear(dim, dim), Recorder(P)

    def _columns(self, x: Tensor) -> Tensor:
        return super()._columns(x) + self.adapter(self.whole(x.double()).to(x.dtype))


class CallingDropAttention(DropAttention):
    """Drops out its input by a function, which no module's hook sees."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, P, self.training)
        self.masks = [*getattr(self, "masks", []), (x != 0).detach()]
        return super().forward(x)


KINDS = {"": DropAttention, "late": LateDropAttention, "calling": CallingDropAttention}


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - P)
        self.masks = [*getattr(self, "masks", []), kept.bool()]
        return x * kept / (1 - P)


class Block(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4, recompute: str = "", kind: str = "") -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(dim), nn.LayerNorm(dim), KINDS[kind](dim, heads, recompute)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)
        self.inner, self.path, self.recompute = Recorder(P), DropPath(), recompute

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        x = x + (checkpoint(self.attn, h, use_reentrant=False) if self.recompute == "attn" else self.attn(h))
        return x + self.path(self.down(self.inner(F.gelu(self.up(self.n2(x))))))


class Dropping(L.LightningModule):
    def __init__(self, recompute: str = "", depth: int = 2, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop = nn.Embedding(31, 16), Recorder(P)
        self.blocks = nn.ModuleList(Block(recompute=recompute, kind=kind) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 31)
        self.recompute, self.losses = recompute, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            again, reentrant = self.recompute.startswith("block"), self.recompute.endswith("reentrant")
            x = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
        loss = F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), ids.flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)
