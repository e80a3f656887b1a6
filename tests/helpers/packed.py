"""A model of packed documents: tokens without padding, whose positions begin anew and which see their own document alone."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import flash, models
from tests.helpers.families import HuggingFace

WIDTH, VOCAB = 96, 31
HEADS = 4  # but three of the kind `dropped`; flash-attn takes heads of multiples of 8


class Documents:
    """Lengths and places of the documents of a batch, as packed tokens have them."""

    def __init__(self, lengths: Tensor) -> None:
        self.cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        self.max_seqlen = int(lengths.max())
        self.position_ids = torch.cat([torch.arange(int(n), device=lengths.device) for n in lengths])
        self.ids = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


class Attention(nn.Module):
    """Heads of keys and values are half as many, but where all are one tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head_dim = kind, WIDTH // (3 if kind == "dropped" else HEADS)
        if kind == "one tensor":
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, width, bias=False) for width in self.widths())
        self.out = nn.Linear(WIDTH, WIDTH)

    def widths(self) -> tuple[int, int, int]:
        return (WIDTH,) * 3 if self.kind == "dropped" else (WIDTH, WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        ends, longest = documents.cu_seqlens, documents.max_seqlen
        if self.kind == "one tensor":
            qkv = self.qkv(x).view(*x.shape[:-1], 3, -1, self.head_dim)
            return self.out(flash.flash_attn_varlen_qkvpacked_func(qkv, ends, longest, causal=True).flatten(-2))
        q, k, v = (one(x).unflatten(-1, (-1, self.head_dim)) for one in (self.q, self.k, self.v))
        if self.kind == "mask":
            ids = documents.ids
            mask = (ids[:, None] == ids) & torch.ones(len(ids), len(ids), dtype=torch.bool, device=ids.device).tril()
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
        elif self.kind == "batch":
            y = flash.flash_attn_func(q, k, v, causal=True, window_size=(4, 0))
        else:
            p = 0.3 if self.kind.startswith("drop") and self.training else 0.0
            y = flash.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, p, causal=True)
        return self.out(y.flatten(-2))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(kind)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        x = x + self.attention(self.norm_1(x), documents)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Packed(L.LightningModule):
    """Packed tokens ``[total, h]`` (``drops``: with dropout); the kind ``mask`` is ``[1, total, h]``, ``batch`` ``[b, s, h]``."""

    def __init__(self, kind: str = "documents") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        models.perturb(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (given,) = batch
        inputs, targets, count = given[:, :-1], given[:, 1:], given[:, 1:].numel()
        lengths = 3 + given[:, 0] % (inputs.shape[1] - 3)  # no two replicas have equally many
        documents = Documents(lengths)
        if self.kind == "batch":
            x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        else:
            real = torch.arange(inputs.shape[1], device=inputs.device) < lengths[:, None]
            inputs, targets = inputs[real], targets[real]
            x = self.tokens(inputs) + self.positions(documents.position_ids)
            x = x[None] if self.kind == "mask" else x
        for block in self.blocks:
            x = block(x, documents)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return models.optimizer_of("adamw", self)


class Flash(HuggingFace):
    """``attn_implementation="flash_attention_2"``: padded sequences, or packed ones, whose positions begin anew."""

    def __init__(self, family: str, packed: bool) -> None:
        flash.into_transformers()
        super().__init__(family)
        self.packed = packed
        self.model.config._attn_implementation = "flash_attention_2"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        lengths, count = 3 + ids[:, 0] % (ids.shape[1] - 3), ids.numel()
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        if not self.packed:
            logits = self.model(input_ids=ids, attention_mask=real.long()).logits
            losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
            return (losses * real.flatten()).sum() / count
        tokens, places = ids[real][None], Documents(lengths).position_ids[None]
        logits = self.model(input_ids=tokens, position_ids=places).logits
        return F.cross_entropy(logits[0], tokens[0].roll(1), reduction="sum") / count
