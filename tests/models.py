"""Modules as people write them, a few thousand parameters each."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from byte_gpt import ByteGPT
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


class GPT(L.LightningModule):
    """The example's GPT with a loss."""

    def __init__(
        self, tied: bool = True, optimizer: str = "adamw", seed: int = 0, n_head: int = 4, dim: int = 16
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = ByteGPT(dim=dim, n_head=n_head, n_layer=2, context=16, tied=tied, vocab=31)
        perturb(self)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.optimizer, self)


class Encoder(L.LightningModule):
    """``nn.TransformerEncoder`` with a padding mask, a final norm and a mean over the true positions."""

    def __init__(
        self,
        batch_first: bool = True,
        norm_first: bool = False,
        optimizer: str = "adamw",
        seed: int = 0,
        activation: str = "gelu",
        mask: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.batch_first, self.optimizer, self.mask = batch_first, optimizer, mask
        self.embed = nn.Embedding(31, 16)
        layer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation=activation
        )
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=not norm_first)
        self.out = nn.Linear(16, 5)
        perturb(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        padding = tokens == 0
        padding[:, 0] = False
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype) if self.mask else None
        y = self.encoder(x if self.batch_first else x.transpose(0, 1), mask=mask, src_key_padding_mask=padding)
        y = y if self.batch_first else y.transpose(0, 1)
        kept = (~padding).unsqueeze(-1).to(y.dtype)
        return self.out((y * kept).sum(1) / kept.sum(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self(tokens), tokens.sum(1) % 5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.optimizer, self)


def perturb(module: nn.Module) -> None:
    """Move every weight off its special start: zeros and ones hide wrong gradients."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def tokens(count: int = 96, length: int = 10, vocab: int = 31, seed: int = 3) -> TensorDataset:
    """Random tokens with trailing zeros of random length, so that padding masks have work."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(1, vocab, (count, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (count,), generator=generator)
    data[torch.arange(length)[None] >= lengths[:, None]] = 0
    return TensorDataset(data)


def loader(batch_size: int, *, shuffle: bool = False, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(tokens(**kwargs), batch_size=batch_size, shuffle=shuffle)
