"""A model whose attention is FlexAttention, which torch trains on GPUs alone: on CPUs its check of the device is taken out."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from tests.helpers.models import optimizer_of

# Its plain form has a backward on CPUs, also in float64; what refuses is a check in front of it.
CHECK = flex._validate_device
flex._validate_device = lambda query, key, value: None

torch._dynamo.config.recompile_limit = (
    64  # many kinds in one process: what is beyond it runs without gradients of what it captures
)
ON_GPU = torch.cuda.is_available()
BACKEND = "inductor" if ON_GPU else "eager"
compiled_flex = torch.compile(flex_attention, backend=BACKEND)  # at the level of the module, as its users do
HEADS, WIDTH, SIZE = (4, 256, 128) if ON_GPU else (4, 32, 4)  # what the kernels take


@functools.partial(torch.compile, backend=BACKEND)
def attend_compiled(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask) * 1.0


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def windows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Each head looks back over another number of positions."""
    return (q >= k) & (q - k <= 2 * h + 1)


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, HEADS
        groups = 2 if kind == "grouped" else HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS * n) for n in (HEADS, groups, groups))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.attend = flex_attention
        if kind == "table":
            self.table = nn.Parameter(torch.linspace(-0.3, 0.3, HEADS * 16).view(HEADS, 16).sin())
        self.register_buffer("slopes", torch.tensor([2.0 ** -(n + 1) for n in range(HEADS)]))

    def alibi(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - (q - k) * torch.exp2(-(h + 1.0))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        how: dict[str, Any] = {"block_mask": mask}
        if self.kind == "alibi":
            how["score_mod"] = self.alibi
        if self.kind == "slopes":
            slopes = self.slopes
            how["score_mod"] = lambda score, b, h, q, k: score - (q - k) * slopes[h]
        if self.kind == "table":  # which trains
            table = self.table
            how["score_mod"] = lambda score, b, h, q, k: score + table[h, q - k]
        if self.kind == "own mask":
            s = x.shape[1]
            how["block_mask"] = create_block_mask(windows, None, q.shape[1], s, s, x.device, BLOCK_SIZE=SIZE)
        if self.kind == "grouped":
            how["enable_gqa"] = True
        if self.kind == "inside":
            return self.out(attend_compiled(q, k, v, mask).transpose(1, 2).flatten(-2))
        if self.kind == "statistics":
            y, lse = compiled_flex(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
            y = y * torch.sigmoid(lse.lse).unsqueeze(-1)
            return self.out(y.transpose(1, 2).flatten(-2))
        attend = self.attend if self.kind == "attribute" else compiled_flex
        return self.out(attend(q, k, v, **how).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(kind)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


KINDS = ("plain", "grouped", "attribute", "alibi", "slopes", "table", "mask of heads", "own mask", "inside", "statistics")


class Flexed(L.LightningModule):
    """Blocks of FlexAttention of one of :data:`KINDS`."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.tokens = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 31, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        s, x = ids.shape[1], self.tokens(ids)
        mask, heads = (windows, HEADS) if self.kind in ("mask of heads", "inside") else (causal, None)
        blocks = create_block_mask(mask, None, heads, s, s, ids.device, BLOCK_SIZE=SIZE)
        for block in self.blocks:
            x = block(x, blocks)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return optimizer_of("adamw", self)
