"""Transformers as people write them, none with a shipped plan: a few thousand parameters each."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models import optimizer_of, perturb


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotary(s: int, d: int, like: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.arange(s, dtype=like.dtype)[:, None] / 100 ** (torch.arange(0, d, 2, dtype=like.dtype) / d)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def heads_of(x: Tensor, heads: int) -> Tensor:
    """``[b, s, f]`` → ``[b, heads, s, f/heads]``."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention over heads, ``[b, s, f]`` again."""
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


class Projections(nn.Module):
    """Attention with queries, keys, values and the way out."""

    def __init__(self, dim: int = 16, heads: int = 4, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(attend(*(heads_of(linear(x), self.heads) for linear in (self.q, self.k, self.v))))


class Fused(nn.Module):
    """One projection for queries, keys and values, and the way out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [heads_of(part, self.n_head) for part in self.qkv(x).chunk(3, -1)]


class Net(nn.Module):
    """An embedding, blocks, a final norm and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(31, 16), nn.ModuleList(blocks)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 31)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.run(self.embed(ids))))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * up)


class Attention(nn.Module):
    """Separate projections, grouped kv heads, causal; norms on q and k per head or over the full width."""

    def __init__(self, dim: int, heads: int, kv_heads: int | None = None, norm: str = "", rope: bool = False) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.n_rep, self.rope = heads // kv_heads, rope
        self.wq = nn.Linear(dim, dim)
        self.wk, self.wv = nn.Linear(dim, kv_heads * self.head_dim), nn.Linear(dim, kv_heads * self.head_dim)
        self.wo = nn.Linear(dim, dim)
        self.norm = norm
        if norm == "head":
            self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        elif norm == "full":
            self.q_norm, self.k_norm = RMSNorm(dim), RMSNorm(kv_heads * self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = k.view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = v.view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if self.norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            cos, sin = rotary(s, self.head_dim, x)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(self.n_rep, 1), v.repeat_interleave(self.n_rep, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class PreNorm(nn.Module):
    """A block; what its attention is given beside the activation comes behind that."""

    def __init__(self, dim: int, attn: nn.Module, mlp: nn.Module, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = norm(dim), attn, norm(dim), mlp

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x), *more)
        return x + self.mlp(self.ln2(x))


def usual() -> PreNorm:
    return PreNorm(16, Attention(16, 4), FeedForward(16, 32))


class FusedQKV(nn.Module):
    """One projection for all; ``layout`` is how people order it."""

    def __init__(self, dim: int, heads: int, layout: str, kv_heads: int | None = None) -> None:
        super().__init__()
        self.h, self.hd, self.layout, self.kv = heads, dim // heads, layout, kv_heads or heads
        self.c_attn = nn.Linear(dim, (heads + 2 * self.kv) * self.hd)
        self.c_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.size()
        qkv = self.c_attn(x)
        if self.layout == "per_head":
            q, k, v = qkv.view(b, s, self.h, 3 * self.hd).transpose(1, 2).chunk(3, -1)
        elif self.layout == "grouped":
            n = self.h // self.kv
            q, k, v = qkv.view(b, s, self.kv, n + 2, self.hd).split([n, 1, 1], dim=3)
            q = q.reshape(b, s, self.h, self.hd).transpose(1, 2)
            k, v = (t.expand(-1, -1, -1, n, -1).reshape(b, s, self.h, self.hd).transpose(1, 2) for t in (k, v))
        else:
            q, k, v = qkv.split([self.h * self.hd, self.kv * self.hd, self.kv * self.hd], dim=-1)
            q = q.view(b, s, self.h, self.hd).transpose(1, 2)
            k, v = (t.view(b, s, self.kv, self.hd).transpose(1, 2) for t in (k, v))
            k, v = (t.repeat_interleave(self.h // self.kv, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, s, self.h * self.hd))


class EinsumAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(dim, dim * 3, bias=False), nn.Linear(dim, dim)
        self.scale = (dim // heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1) for t in self.to_qkv(x).chunk(3, dim=-1))
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) * self.scale).softmax(-1)
        out = torch.einsum("bhij,bjhd->bihd", weights, v)
        return self.to_out(out.reshape(b, n, -1))


class AlibiAttention(Fused):
    """A slope per head as a buffer, and a learned scale per head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1).float())
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, self.n_head, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        position = torch.arange(s)
        bias = -(position[:, None] - position[None]).abs() * self.slopes[:, None, None]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) * self.temperature + bias
        y = scores.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))


class BiasTableAttention(Projections):
    """A learned bias per distance and head: a table ``[distances, heads]``."""

    def __init__(self, dim: int, heads: int, far: int = 8) -> None:
        super().__init__(dim, heads)
        self.far, self.table = far, nn.Embedding(2 * far + 1, heads)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        at = torch.arange(s)
        bias = self.table((at[:, None] - at[None]).clamp(-self.far, self.far) + self.far).permute(2, 0, 1)
        return self.o(attend(q, k, v, attn_mask=bias[None].expand(b, -1, -1, -1)))


class NormInside(nn.Module):
    """The norm and the residual live inside attention and MLP."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.LayerNorm(dim), EinsumAttention(dim, heads))
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x) + x
        return self.ff(x) + x


class AllInline(nn.Module):
    """Everything stands in the block's own forward."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.n1(x)
        q, k, v = (p(h).view(b, s, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(attend(q, k, v))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class HardCodedHeads(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = (t.view(b, s, 4, c // 4).transpose(1, 2) for t in self.qkv(x).split(c, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, c))


class NanoAttention(nn.Module):
    """Takes the head size from its input's width, as nanoGPT does."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.n_head, self.n_embd = heads, dim

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class HeadList(Fused):
    """A norm for each head in a ModuleList, zipped with the heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(dim // heads) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k = torch.stack([norm(head) for norm, head in zip(self.norms, k.unbind(1), strict=False)], 1)
        return self.proj(attend(q, k, v))


class Latent(nn.Module):
    """k and v through a narrow latent with a norm, as in DeepSeek; a part of the narrow projection is one key for all heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.q_proj = nn.Linear(dim, dim + 2 * heads, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(dim, 6 + 2), RMSNorm(6)
        self.kv_up, self.o_proj = nn.Linear(6, 2 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim + 2).transpose(1, 2)
        latent, shared = self.kv_down(x).split((6, 2), -1)
        kv = self.kv_up(self.kv_norm(latent)).view(b, s, self.num_heads, 2 * self.head_dim).transpose(1, 2)
        k, v = kv.split(self.head_dim, -1)
        k = torch.cat([k, shared[:, None].expand(b, self.num_heads, s, 2)], -1)
        return self.o_proj(attend(q, k, v, is_causal=True))


class SequenceFirstAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.nh = heads
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        s, b, _ = x.shape
        q, k, v = (t.reshape(s, b * self.nh, -1).transpose(0, 1) for t in self.in_proj(x).chunk(3, -1))
        y = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1]), -1), v)
        return self.out_proj(y.transpose(0, 1).reshape(s, b, -1))


class FlatAttention(Fused):
    """Tokens of all sequences in one dim: ``[t, h]``; a mask keeps the sequences apart."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.view(x.shape[0], self.n_head, -1).transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return self.proj(y.transpose(0, 1).reshape(x.shape[0], -1))


class Conv1D(nn.Module):
    """A linear that keeps its weight as ``[in, out]``."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(into, out) * 0.1), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Settings:
    """A config that all modules share."""

    def __init__(self, dim: int, n_head: int) -> None:
        self.dim, self.n_head = dim, n_head


class ConfiguredAttention(nn.Module):
    """Reads its head count from the config in its forward."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.c_attn, self.c_proj = Conv1D(config.dim, 3 * config.dim), Conv1D(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, self.config.n_head, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, s, -1))


class Configured(Net):
    def __init__(self) -> None:
        config = Settings(16, 4)
        super().__init__(*(PreNorm(16, ConfiguredAttention(config), FeedForward(16, 32)) for _ in range(2)))
        self.config = config

    def forward(self, ids: Tensor) -> Tensor:
        out = super().forward(ids)
        assert self.config.n_head == 4  # shared with everybody else
        return out


class TorchDecoder(nn.Module):
    """``nn.TransformerDecoder`` over an ``nn.TransformerEncoder``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.net = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 31)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=self.out.weight.dtype)
        padding = ids[:, :7].flip(1) == 0
        y = self.net(
            self.embed(ids[:, :7].flip(1)),
            self.embed(ids),
            tgt_mask=mask,
            memory_key_padding_mask=padding & ~padding.all(1, keepdim=True),
        )
        return self.out(y)


class RawAttention(nn.Module):
    """Weights are parameters with head dims, multiplied by einsum; biases too."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        width = dim // heads
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(heads, dim, width) * 0.2) for _ in range(3))
        self.w_o = nn.Parameter(torch.randn(heads, width, dim) * 0.2)
        self.b_q, self.b_v = (nn.Parameter(torch.zeros(heads, width)) for _ in range(2))
        self.b_o = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("bsh,nhd->bsnd", x, self.w_q) + self.b_q
        k = torch.einsum("bsh,nhd->bsnd", x, self.w_k)
        v = torch.einsum("bsh,nhd->bsnd", x, self.w_v) + self.b_v
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("bnqk,bknd,ndh->bqh", weights, v, self.w_o) + self.b_o


class StackedExperts(nn.Module):
    """Experts in 3-D parameters, tokens flattened, chosen ones one expert after the other."""

    def __init__(self, dim: int, hidden: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.gate_up = nn.Parameter(torch.randn(count, 2 * hidden, dim) * 0.2)
        self.down = nn.Parameter(torch.randn(count, dim, hidden) * 0.2)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.count):
            token, slot = torch.where(index == expert)
            if not len(token):
                continue
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, token, made * weights[token, slot, None])
        return out


class RoutedMoE(nn.Module):
    """A router on flattened tokens in front of stacked experts, and a shared expert beside them."""

    def __init__(self, dim: int, hidden: int, count: int = 4, top: int = 2) -> None:
        super().__init__()
        self.router, self.top = nn.Linear(dim, count, bias=False), top
        self.experts = StackedExperts(dim, hidden, count)
        self.shared = SwiGLU(dim, hidden)
        self.shared_gate = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, index = self.router(flat).softmax(-1, dtype=torch.float32).topk(self.top, dim=-1)
        routed = self.experts(flat, index, weights / weights.sum(-1, keepdim=True))
        shared = self.shared(flat) * torch.sigmoid(self.shared_gate(flat))
        return (routed + shared).view(x.shape)


class ListMoE(nn.Module):
    """Experts as a list of modules, each given the tokens that chose it."""

    def __init__(self, dim: int, hidden: int, count: int = 4, top: int = 2) -> None:
        super().__init__()
        self.gate, self.top = nn.Linear(dim, count, bias=False), top
        self.experts = nn.ModuleList(FeedForward(dim, hidden) for _ in range(count))
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat)
        self.balance = logits.softmax(-1).mean(0).square().sum()
        weights, chosen = torch.topk(logits, self.top)
        weights = F.softmax(weights, dim=1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, nth = torch.where(chosen == i)
            out[row] += weights[row, nth, None] * expert(flat[row])
        return out.view_as(x)


class DenseMoE(nn.Module):
    """Every expert sees every token: einsum over parameters ``[e, h, f]`` and ``[e, f, h]``."""

    def __init__(self, dim: int, hidden: int, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, count)
        self.w1 = nn.Parameter(torch.randn(count, dim, hidden) * 0.2)
        self.b1 = nn.Parameter(torch.zeros(count, hidden))
        self.w2 = nn.Parameter(torch.randn(count, hidden, dim) * 0.2)
        self.b2 = nn.Parameter(torch.zeros(count, dim))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        hidden = F.gelu(torch.einsum("bsh,ehf->bsef", x, self.w1) + self.b1)
        made = torch.einsum("bsef,efh->bseh", hidden, self.w2) + self.b2
        return torch.einsum("bseh,bse->bsh", made, scores)


# ---- whole models ----------------------------------------------------------------------------------------------


BLOCKS: dict[str, Any] = {
    "gqa": lambda: PreNorm(32, Attention(32, 8, 4, rope=True), SwiGLU(32, 24), RMSNorm),
    "gqa_shared": lambda: PreNorm(32, Attention(32, 8, 2, rope=True), SwiGLU(32, 24), RMSNorm),
    "mqa": lambda: PreNorm(16, Attention(16, 4, 1), FeedForward(16, 32)),
    "head_norm": lambda: PreNorm(16, Attention(16, 4, norm="head"), FeedForward(16, 32)),
    "full_norm": lambda: PreNorm(16, Attention(16, 4, norm="full"), FeedForward(16, 32)),
    "fused": lambda: PreNorm(16, FusedQKV(16, 4, "parts"), FusedGLU(16, 24)),
    "fused_per_head": lambda: PreNorm(16, FusedQKV(16, 4, "per_head"), FusedGLU(16, 24)),
    "fused_grouped": lambda: PreNorm(32, FusedQKV(32, 8, "grouped", 4), FusedGLU(32, 24)),
    "fused_gqa": lambda: PreNorm(32, FusedQKV(32, 8, "parts", 4), FusedGLU(32, 24)),
    "fused_mqa": lambda: PreNorm(16, FusedQKV(16, 4, "parts", 1), FusedGLU(16, 24)),
    "einsum": lambda: PreNorm(16, EinsumAttention(16, 4), FeedForward(16, 32)),
    "alibi": lambda: PreNorm(16, AlibiAttention(16, 4), FeedForward(16, 32)),
    "bias_table": lambda: PreNorm(16, BiasTableAttention(16, 4), FeedForward(16, 32)),
    "norm_inside": lambda: NormInside(),
    "all_inline": lambda: AllInline(),
    "hard_coded": lambda: PreNorm(16, HardCodedHeads(), FeedForward(16, 32)),
    "nano": lambda: PreNorm(16, NanoAttention(16, 4), FeedForward(16, 32)),
    "head_list": lambda: PreNorm(16, HeadList(16, 4), FeedForward(16, 32)),
    "latent": lambda: PreNorm(16, Latent(16, 4), FeedForward(16, 32)),
    "raw_attention": lambda: PreNorm(16, RawAttention(16, 4), FeedForward(16, 32)),
    "routed_moe": lambda: PreNorm(16, Attention(16, 4), RoutedMoE(16, 24)),
    "list_moe": lambda: PreNorm(16, Attention(16, 4), ListMoE(16, 24)),
    "dense_moe": lambda: PreNorm(16, Attention(16, 4), DenseMoE(16, 24)),
}


class ConvBlock(PreNorm):
    """A convolution over the sequence beside attention."""

    def __init__(self) -> None:
        super().__init__(16, EinsumAttention(16, 4), FeedForward(16, 32))
        self.conv = nn.Conv1d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.conv(x.transpose(1, 2)).transpose(1, 2))


class Shifted(PreNorm):
    """Half of the features come from the position before, with no module to show it."""

    def forward(self, x: Tensor) -> Tensor:
        back = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return super().forward(torch.cat([x[..., :8], back[..., 8:]], -1))


# Kinds that no test runs through with the others; a test module adds its own, for itself and for the ranks it starts.
EXTRA: dict[str, Any] = {"conv": ConvBlock, "shifted": lambda: Shifted(16, EinsumAttention(16, 4), FeedForward(16, 32))}


class Decoder(nn.Module):
    """Learned positions, blocks, a final norm, a head that is tied or not."""

    def __init__(self, kind: str, depth: int = 2, vocab: int = 31, tied: bool = False) -> None:
        super().__init__()
        blocks = [(BLOCKS | EXTRA)[kind]() for _ in range(depth)]
        dim = next(m for m in blocks[0].modules() if isinstance(m, nn.Linear)).in_features
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(32, dim)
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Reused(Net):
    """One block's weights in every layer."""

    def __init__(self) -> None:
        super().__init__(usual())

    def run(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return x


class Named(nn.Module):
    """Blocks as attributes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second, self.out = nn.Embedding(31, 16), usual(), usual(), nn.Linear(16, 31)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.embed(ids))))


class Sequence(Net):
    """``[s, b, h]`` from the embedding to the head."""

    def __init__(self) -> None:
        super().__init__(*(PreNorm(16, SequenceFirstAttention(16, 4), FeedForward(16, 32)) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.t()).transpose(0, 1)


class Flat(Net):
    def __init__(self) -> None:
        super().__init__(*(PreNorm(16, FlatAttention(16, 4), FeedForward(16, 32)) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        b, s = ids.shape
        own = torch.arange(b).repeat_interleave(s)
        mask = own[:, None] == own[None]
        x = self.embed(ids).flatten(0, 1)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(self.norm(x)).view(b, s, -1)


class Vision(Net):
    """Patches by a convolution, a CLS token, learned positions, odd lengths; the head reads the CLS token."""

    def __init__(self) -> None:
        super().__init__(NormInside(), NormInside())
        self.embed = nn.Conv2d(1, 16, 1)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 64, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed((ids.to(self.pos.dtype) / 31)[:, None, :, None]).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.run(x + self.pos[:, : x.shape[1]]))
        return self.out(x[:, 0])[:, None].expand(-1, ids.shape[1], -1)


class CrossBlock(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(dim) for _ in range(3))
        self.attn, self.cross, self.mlp = Attention(dim, heads), CrossAttention(dim, heads), FeedForward(dim, 32)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        x = x + self.cross(self.n2(x), memory)
        return x + self.mlp(self.n3(x))


class CrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.o(attend(*(heads_of(t, self.heads) for t in (self.q(x), *self.kv(memory).chunk(2, -1)))))


class EncoderDecoder(nn.Module):
    """Both stacks in one module; every decoder block reads the encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.encoder = nn.ModuleList(PreNorm(16, EinsumAttention(16, 4), FeedForward(16, 32)) for _ in range(2))
        self.enc_norm = nn.LayerNorm(16)
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(2))
        self.dec_norm, self.out = nn.LayerNorm(16), nn.Linear(16, 31)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.embed(ids.flip(1)[:, :7])
        for layer in self.encoder:
            memory = layer(memory)
        memory, x = self.enc_norm(memory), self.embed(ids)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.out(self.dec_norm(x))


class Distilled(nn.Module):
    """A frozen teacher beside the student: two towers of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Decoder("einsum"), Decoder("gqa")
        self.teacher.requires_grad_(False).eval()

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(ids)
        return self.student(ids) + 0.1 * target


MODELS: dict[str, Any] = {
    "reused": Reused,
    "named": Named,
    "sequence_first": Sequence,
    "flat": Flat,
    "vision": Vision,
    "encoder_decoder": EncoderDecoder,
    "distilled": Distilled,
    "configured": Configured,
    "torch_decoder": TorchDecoder,
    "tied": lambda: Decoder("fused", tied=True),
}


def build(kind: str) -> nn.Module:
    return MODELS[kind]() if kind in MODELS else Decoder(kind)


class Zoo(L.LightningModule):
    """A model of the zoo with a next-token loss."""

    def __init__(self, kind: str, optimizer: str = "adamw", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = self.build(kind)
        perturb(self)
        self.optimizer = optimizer

    def build(self, kind: str) -> nn.Module:
        return build(kind)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        logits = self.net(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.optimizer, self)
