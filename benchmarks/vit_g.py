"""A vision transformer of ViT-g's shapes (dim 1,408, 40 blocks, 16 heads, 256 patches of 14 × 14), for docs/choosing.md."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.head_dim = dim // heads

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, h]`` → ``[b, s, h]``."""
        samples, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(samples, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, -1))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class ViT(L.LightningModule):
    """Classifies images, given as patches ``[b, 256, 588]``."""

    def __init__(self, dim: int = 1408, heads: int = 16, blocks: int = 40, classes: int = 1000) -> None:
        super().__init__()
        self.patches, self.head = nn.Linear(588, dim), nn.Linear(dim, classes)
        self.positions = nn.Parameter(torch.zeros(1, 256, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[b, classes]``."""
        x = self.patches(x) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of images and their classes."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def batch() -> tuple[Tensor, Tensor]:
    """A batch of eight, without contents."""
    return torch.zeros(8, 256, 588), torch.zeros(8, dtype=torch.int64)
