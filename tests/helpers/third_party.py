"""Kinds of code that libraries of models have and textbooks have not, each as small as it gets; they join those of the zoo."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from tests.helpers import zoo
from tests.helpers.zoo import Attention, FeedForward, Net, PreNorm, Projections, attend, heads_of, usual


class InPlace(Projections):
    """fairseq, ESM: queries are scaled in place."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        q *= 0.5
        return self.o(attend(*(heads_of(t, self.heads) for t in (q, self.k(x), self.v(x)))))


class ConvModule(nn.Module):
    """Conformer: a convolution over positions and a batch norm."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm, self.bn = nn.LayerNorm(dim), nn.BatchNorm1d(dim)
        self.depthwise, self.pointwise = nn.Conv1d(dim, dim, 3, padding=1, groups=dim), nn.Conv1d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(F.silu(self.bn(self.depthwise(self.norm(x).transpose(1, 2))))).transpose(1, 2)


class Conformer(PreNorm):
    def __init__(self) -> None:
        super().__init__(16, Attention(16, 4), FeedForward(16, 32))
        self.conv = ConvModule()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return (x + self.conv(x)) + self.mlp(self.ln2(x))


class LinearNorm(nn.Module):
    """LeViT: a linear and the batch norm of its features, before and behind what is between columns and rows."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(dim, out, bias=False), nn.BatchNorm1d(out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.bn(y.flatten(0, 1)).view_as(y)


class NormedAttention(nn.Module):
    """Two numbers and a parameter must follow the heads of its fused projection, and the batch norm behind that."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.key_dim, self.head_dim, self.value_dim = heads, 4, 8, heads * 8
        self.qkv, self.proj = LinearNorm(dim, heads * 16), LinearNorm(heads * 8, dim)
        self.bias = nn.Parameter(torch.randn(heads, 3))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        sizes = [self.key_dim, self.key_dim, self.head_dim]
        q, k, v = self.qkv(x).view(b, s, self.heads, -1).transpose(1, 2).split(sizes, dim=-1)
        near = self.bias[:, (torch.arange(s)[:, None] - torch.arange(s)).abs().clamp(max=2)]
        attn = (q @ k.transpose(-1, -2) * 0.5 + near).softmax(-1)
        return self.proj(F.hardswish((attn @ v).transpose(1, 2).reshape(b, s, self.value_dim)))


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = NormedAttention()
        self.mlp = nn.Sequential(LinearNorm(16, 32), nn.Hardswish(), LinearNorm(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class SharedScale(Projections):
    """vit-pytorch's attention for small data sets: the block is the attention, and one temperature is that of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.temperature = nn.LayerNorm(16), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (heads_of(linear(y), self.heads) for linear in (self.q, self.k, self.v))
        return x + self.o(attend(q * self.temperature.exp(), k, v))


class Parametrized(Projections):
    """Weights that are computed of other parameters: of the queries', and of the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.utils.parametrizations.weight_norm(linear) for linear in (self.q, self.o))


class SpatialGate(nn.Module):
    """gMLP: half of the features gate the others, through a norm over them and a linear over positions."""

    def __init__(self, dim: int = 16, longest: int = 12) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 48), nn.Linear(24, dim)
        self.norm, self.proj = nn.LayerNorm(24), nn.Linear(longest, longest)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.fc1(x)).chunk(2, dim=-1)
        v = F.pad(self.norm(v).transpose(1, 2), (0, self.proj.in_features - v.shape[1]))
        return self.fc2(u * self.proj(v).transpose(1, 2)[:, : u.shape[1]])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.mlp = nn.LayerNorm(16), SpatialGate()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln(x))


class Listed(PreNorm):
    """diffusers: a list of modules that the module around it calls one by one."""

    def __init__(self) -> None:
        super().__init__(16, Attention(16, 4), nn.ModuleList([nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)]))

    def forward(self, x: Tensor) -> Tensor:
        y = x = x + self.attn(self.ln1(x))
        for module in (self.ln2, *self.mlp):
            y = module(y)
        return x + y


class EinopsHeads(nn.Module):
    """x-transformers: the number of heads is in layers of einops."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.split_q, self.split_k, self.split_v = (Rearrange("b n (h d) -> b h n d", h=heads) for _ in range(3))
        self.merge = Rearrange("b h n d -> b n (h d)")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split_q(self.q(x)), self.split_k(self.k(x)), self.split_v(self.v(x))
        return self.o(self.merge(F.scaled_dot_product_attention(q, k, v)))


class OwnLinear(nn.Linear):
    """Falcon's: a subclass of ``nn.Linear`` that writes its product out."""

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


class SettingLinear(nn.Linear):
    """OpenFold's, which Boltz carries: a setting says in which type it computes, if that is another than its input's."""

    def __init__(self, *sizes: int, bias: bool = True, precision: torch.dtype | None = None) -> None:
        super().__init__(*sizes, bias=bias)
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        if self.precision is not None:
            with torch.autocast("cuda", enabled=False):
                bias = None if self.bias is None else self.bias.to(dtype=self.precision)
                out = F.linear(x.to(dtype=self.precision), self.weight.to(dtype=self.precision), bias)
                return out.to(dtype=kind)
        if kind is torch.bfloat16:
            with torch.autocast("cuda", enabled=False):
                bias = None if self.bias is None else self.bias.to(dtype=kind)
                return F.linear(x, self.weight.to(dtype=kind), bias)
        return F.linear(x, self.weight, self.bias)


class OwnLinears(Projections):
    def __init__(self) -> None:
        super().__init__(linear=OwnLinear)
        self.v, self.o = SettingLinear(16, 16), SettingLinear(16, 16)


class WeightOfQKV(nn.Module):
    """BEiT, EVA-02: the fused projection's weight is read, its module is never called; the width is read off the input."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(attend(*qkv.unbind(0)).reshape(b, n, c))


class LowRankLinear(nn.Module):
    """torchtune's LoRA: the frozen weight is the module's own, beside two linears."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(out, dim)), nn.Parameter(torch.zeros(out))
        nn.init.normal_(self.weight, std=0.1)
        self.weight.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(dim, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + 0.5 * self.lora_b(self.lora_a(x))


class MatrixLinear(nn.Module):
    """litgpt's LoRA: a linear, and two matrices that are parameters."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, out)
        self.lora_A, self.lora_B = nn.Parameter(0.1 * torch.randn(2, dim)), nn.Parameter(0.1 * torch.randn(out, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * 0.5


class BentLinear(LowRankLinear):
    """An adapter with a nonlinearity between its halves: no part of its input makes a part of its output."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + 0.5 * self.lora_b(F.gelu(self.lora_a(x)))


class DroppingLinear(MatrixLinear):
    """Drops out of its input, behind a product of it."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__(dim, out)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.dropout(x) @ self.lora_A.T @ self.lora_B.T


class BiasedLinear(nn.Module):
    """A trained linear, an adapter of which both halves have a bias, and scales of its input and of its output."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear, self.down, self.up = nn.Linear(dim, out), nn.Linear(dim, 3), nn.Linear(3, out)
        self.scale_in, self.scale_out = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(out))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale_in
        return (self.linear(x) + self.up(self.down(x))) * self.scale_out


class LowRankProjections(Projections):
    """Attention whose queries and values have an adapter, or other projections."""

    def __init__(self, linear: Any, names: str = "qv") -> None:
        super().__init__()
        for name in names:
            setattr(self, name, linear(16, 16))


class GroupedProjections(nn.Module):
    """Two heads of keys and values for four of queries, all with adapters: of four ranks, two share a head."""

    def __init__(self, dim: int = 16, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        kv = dim // heads * kv_heads
        self.q, self.k, self.v = LowRankLinear(dim, dim), LowRankLinear(dim, kv), MatrixLinear(dim, kv)
        self.k.weight.requires_grad_(True)
        self.k.bias = None
        self.o = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        k, v = heads_of(self.k(x), self.kv_heads), heads_of(self.v(x), self.kv_heads)
        return self.o(attend(heads_of(self.q(x), self.heads), k, v, enable_gqa=True))


class LowRankFeedForward(FeedForward):
    """An MLP of which both linears have an adapter."""

    def __init__(self, linear: Any) -> None:
        super().__init__(16, 32)
        self.fc1, self.fc2 = linear(16, 32), linear(32, 16)


class BareFeedForward(PreNorm):
    """A block that calls the linears of its MLP itself, so that each column gathers for itself."""

    def __init__(self, linear: Any) -> None:
        super().__init__(16, LowRankProjections(linear, "o"), nn.Identity())
        del self.mlp
        self.fc1, self.fc2 = nn.Linear(16, 32), linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Core(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.n_heads = heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, s, f = q.shape
        q, k, v = (t.view(b, s, self.n_heads, f // self.n_heads).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class TwoCounts(Projections):
    """The heads are counted by two modules, and by two numbers in one of them."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__(dim, heads)
        self.all_head_size, self.core = dim, Core(heads)

    def forward(self, x: Tensor) -> Tensor:
        out = self.core(self.q(x), self.k(x), self.v(x))
        assert out.shape[2] == self.heads
        return self.o(out.reshape(*x.shape[:2], self.all_head_size))


class MixFFN(nn.Module):
    """SegFormer, PVT: a depthwise convolution between the two linears."""

    def __init__(self, dim: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dw = nn.Conv1d(hidden, hidden, 3, padding=1, groups=hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.dw(self.fc1(x).transpose(1, 2)).transpose(1, 2)))


class ReAttention(Projections):
    """DeepViT: a matrix mixes the heads' maps."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(4) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(linear(x), self.heads) for linear in (self.q, self.k, self.v))
        maps = torch.einsum("bhij,hg->bgij", (q @ k.transpose(-2, -1)).softmax(-1), self.mix)
        return self.o((maps @ v).transpose(1, 2).flatten(2))


class ParallelScaling(nn.Module):
    """timm's ParallelScalingBlock: several attentions and several MLPs side by side."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.attns = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), Attention(dim, 4), Scale(dim)) for _ in range(2))
        self.ffns = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), FeedForward(dim, 32), Scale(dim)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.stack([attn(x) for attn in self.attns]).sum(dim=0)
        return x + torch.stack([ffn(x) for ffn in self.ffns]).sum(dim=0)


class Scale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


# ---- more than one input -----------------------------------------------------------------------------------------


class ReadsWidth(Projections):
    """BART-like cross attention that reads the width of its input."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        b, t, c = x.size()

        def split(y: Tensor) -> Tensor:
            return y.view(b, -1, self.heads, c // self.heads).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class Positioned(Projections):
    """DETR: positions are added to queries and keys, inside the attention, and not to values."""

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        y = x + pos
        return self.o(attend(*(heads_of(t, self.heads) for t in (self.q(y), self.k(y), self.v(x)))))


class PositionedMemory(Projections):
    """DETR's decoder: positions are added to the memory where keys read it."""

    def forward(self, x: Tensor, memory: Tensor, pos: Tensor) -> Tensor:
        return self.o(attend(*(heads_of(t, self.heads) for t in (self.q(x), self.k(memory + pos), self.v(memory)))))


class WithInputs(Net):
    """Blocks whose attention is given positions, a memory, or both."""

    def __init__(self, attention: Any, given: str) -> None:
        super().__init__(*(PreNorm(16, attention(), FeedForward(16, 32)) for _ in range(2)))
        self.given = given.split()
        self.pos, self.memory = nn.Parameter(torch.zeros(1, 16, 16)), nn.Linear(16, 16)

    def run(self, x: Tensor) -> Tensor:
        x = x + self.pos[:, : x.shape[1]]  # no parameter is idle, whatever the blocks are given
        memory = self.memory(x.flip(1)[:, :7])
        x = x + memory.mean(1, keepdim=True)
        have = {"pos": self.pos[:, : x.shape[1]], "memory": memory, "memory_pos": self.pos[:, 1:8]}
        for block in self.blocks:
            x = block(x, *(have[name] for name in self.given))
        return x


# ---- positions in two dims ---------------------------------------------------------------------------------------


class Windows(Projections):
    """Attention inside windows of two by two, over ``[b, h, w, c]``."""

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        windows = x.view(b, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
        return super().forward(windows).view(b, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(b, h, w, c)


class ShiftedWindows(PreNorm):
    """Swin: every second block rolls the image by half a window."""

    def __init__(self, shift: int, dim: int = 16) -> None:
        super().__init__(dim, Windows(dim), FeedForward(dim, 32))
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        y = torch.roll(self.ln1(x), (-self.shift, -self.shift), (1, 2))
        x = x + torch.roll(self.attn(y), (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.ln2(x))


class ShiftedInside(nn.Module):
    """torchvision's Swin: the attention itself rolls the image, before a projection that is no call of a module."""

    def __init__(self, shift: int, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.shift, self.heads = shift, heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        windows = y.view(b, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
        q, k, v = F.linear(windows, self.qkv.weight, self.qkv.bias).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = self.proj(attend(q, k, v)).view(b, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(b, h, w, c)
        return torch.roll(out, (self.shift, self.shift), (1, 2))


class ChannelsFirst(nn.Module):
    """ConvNeXt: linears over channels that stand first between the blocks."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(dim, dim, 3, padding=1, groups=dim), nn.LayerNorm(dim)
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.pwconv2(F.gelu(self.pwconv1(y))).permute(0, 3, 1, 2)


class Image(nn.Module):
    """An image of four by four, blocks over it, and one vector for all of it."""

    def __init__(self, make: Any, first: bool = False) -> None:
        super().__init__()
        self.first = first
        self.embed = nn.Embedding(31, 16)
        self.stages = nn.ModuleList(nn.ModuleList(make(at) for at in range(2)) for _ in range(2))
        self.merge, self.norm, self.out = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.pad(self.embed(ids), (0, 0, 0, 16 - ids.shape[1])).unflatten(1, (4, 4))
        for stage in self.stages:
            x = self.merge(x)
            x = x.permute(0, 3, 1, 2) if self.first else x
            for block in stage:
                x = block(x)
            x = x.permute(0, 2, 3, 1) if self.first else x
        return self.out(self.norm(x).flatten(1, 2).mean(1))[:, None].expand(-1, ids.shape[1], -1)


# ---- more than one activation ------------------------------------------------------------------------------------


class JointAttention(Projections):
    """SD3, Flux: a picture and a text, each projected by linears of its own, attend to each other."""

    def __init__(self, last: bool, dim: int = 16) -> None:
        super().__init__()
        self.add_q, self.add_k, self.add_v = (nn.Linear(dim, dim) for _ in range(3))
        self.add_o = None if last else nn.Linear(dim, dim)

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor | None]:
        n = x.shape[1]
        own = [linear(x) for linear in (self.q, self.k, self.v)]
        added = [linear(text) for linear in (self.add_q, self.add_k, self.add_v)]
        q, k, v = (heads_of(torch.cat(both, 1), self.heads) for both in zip(own, added, strict=True))
        out = attend(q, k, v)
        return self.o(out[:, :n]), None if self.add_o is None else self.add_o(out[:, n:])


class JointBlock(nn.Module):
    """The text is returned too, except by the last block, where nothing reads it."""

    def __init__(self, last: bool, dim: int = 16) -> None:
        super().__init__()
        self.norm, self.norm_text, self.norm2 = (nn.LayerNorm(dim) for _ in range(3))
        self.attn, self.mlp = JointAttention(last), FeedForward(dim, 32)
        self.mlp_text = None if last else FeedForward(dim, 32)

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor | None, Tensor]:
        made, made_text = self.attn(self.norm(x), text=self.norm_text(text))
        x = x + made
        x = x + self.mlp(self.norm2(x))
        if self.mlp_text is None:
            return None, x
        text = text + made_text
        return text + self.mlp_text(text), x


class Joint(Net):
    def __init__(self) -> None:
        super().__init__(*(JointBlock(last) for last in (False, False, True)))
        self.text = nn.Linear(16, 16)

    def run(self, x: Tensor) -> Tensor:
        text = self.text(x.flip(1)[:, :7])
        for block in self.blocks:
            text, x = block(x, text)
        return x


class OneWayOut(nn.Module):
    """Flux's single blocks, ViT-22B: what attention and MLP make goes out side by side through one linear."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm, self.attn, self.up = nn.LayerNorm(dim), Attending(dim), nn.Linear(dim, 32)
        self.out = nn.Linear(dim + 32, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(torch.cat((self.attn(y), F.gelu(self.up(y))), -1))


class Attending(Projections):
    """An attention without a way out."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        del self.o

    def forward(self, x: Tensor) -> Tensor:
        return attend(*(heads_of(linear(x), self.heads) for linear in (self.q, self.k, self.v)))


class TwiceOut(PreNorm):
    """TimeSformer: behind the attention's way out stands one more linear."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim, Attention(dim, 4), FeedForward(dim, 32))
        self.dense = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(self.attn(self.ln1(x)))
        return x + self.mlp(self.ln2(x))


class SharedQueries(Projections):
    """DeBERTa: one projection makes the queries of the tokens and of the positions, which are whole."""

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v, p = (heads_of(t, self.heads) for t in (self.q(x), self.k(x), self.v(x), self.q(pos)))
        return self.o(attend(q, k, v, attn_mask=q @ p.transpose(-1, -2)))


class HandsOnValues(nn.Module):
    """Value residuals: the first layer's values, a head's each, are mixed into those of the layers behind it."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(self.norm(x)).chunk(3, -1))
        v = v if values is None else 0.5 * (v + values)
        return self.o(attend(q, k, v)), v


class ValueResidual(Net):
    def __init__(self) -> None:
        super().__init__(*(nn.ModuleList([HandsOnValues(), FeedForward(16, 32)]) for _ in range(2)))

    def run(self, x: Tensor) -> Tensor:
        values = None
        for attn, mlp in self.blocks:
            made, new = attn(x, values)
            values = new if values is None else values
            x = x + made
            x = x + mlp(x)
        return x


class NumbersInForward(nn.Module):
    """A block that attends by itself, with its number of heads written into the forward."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t, 4) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.o(attend(q, k, v) * q.shape[1] / 4)


class FirstDiffers(Net):
    """Blocks in one list, of which the first is of a kind that can't be split."""

    def __init__(self) -> None:
        super().__init__(NumbersInForward(), usual(), usual())


# ---- a shipped plan for a part -----------------------------------------------------------------------------------


class Described(Net):
    """LLaVA-like: torch's encoder, which has a shipped plan, feeds blocks that have none."""

    def __init__(self) -> None:
        super().__init__(usual(), usual())
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.tower = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.tower(self.embed(ids.flip(1)))
        return self.out(self.norm(self.run(x)))


zoo.EXTRA |= {
    "in_place": lambda: PreNorm(16, InPlace(), FeedForward(16, 32)),
    "conformer": Conformer,
    "batch_normed": BatchNormed,
    "shared_scale": SharedScale,
    "listed": Listed,
    "parametrized": lambda: PreNorm(16, Parametrized(), FeedForward(16, 32)),
    "spatial_gate": Gated,
    "einops_heads": lambda: PreNorm(16, EinopsHeads(), FeedForward(16, 32)),
    "own_linears": lambda: PreNorm(16, OwnLinears(), FeedForward(16, 32)),
    "weight_of_qkv": lambda: PreNorm(16, WeightOfQKV(), FeedForward(16, 32)),
    "low_rank_linear": lambda: PreNorm(16, LowRankProjections(LowRankLinear), FeedForward(16, 32)),
    "matrix_linear": lambda: PreNorm(16, LowRankProjections(MatrixLinear), FeedForward(16, 32)),
    "low_rank_row": lambda: PreNorm(16, LowRankProjections(LowRankLinear, "qo"), LowRankFeedForward(LowRankLinear)),
    "matrix_row": lambda: PreNorm(16, LowRankProjections(MatrixLinear, "qo"), LowRankFeedForward(MatrixLinear)),
    "biased_row": lambda: BareFeedForward(BiasedLinear),
    "bent_row": lambda: PreNorm(16, LowRankProjections(BentLinear, "o"), FeedForward(16, 32)),
    "two_counts": lambda: PreNorm(16, TwoCounts(), FeedForward(16, 32)),
    "mix_ffn": lambda: PreNorm(16, Attention(16, 4), MixFFN()),
    "re_attention": lambda: PreNorm(16, ReAttention(), FeedForward(16, 32)),
    "parallel_scaling": ParallelScaling,
    "grouped_adapters": lambda: PreNorm(16, GroupedProjections(), FeedForward(16, 32)),
    "one_way_out": OneWayOut,
    "twice_out": TwiceOut,
}
zoo.MODELS |= {
    "reads_width": lambda: WithInputs(ReadsWidth, "memory"),
    "positioned": lambda: WithInputs(Positioned, "pos"),
    "positioned_memory": lambda: WithInputs(PositionedMemory, "memory memory_pos"),
    "windows": lambda: Image(lambda at: ShiftedWindows(at % 2)),
    "channels_first": lambda: Image(lambda at: ChannelsFirst(), first=True),
    "described": Described,
    "shifted_inside": lambda: Image(lambda at: PreNorm(16, ShiftedInside(at % 2), FeedForward(16, 32))),
    "two_activations": Joint,
    "value_residual": ValueResidual,
    "first_differs": FirstDiffers,
    "shared_queries": lambda: WithInputs(SharedQueries, "pos"),
}


class ThirdParty(zoo.Zoo):
    """A model of one of these kinds, or of the zoo's, with a next-token loss."""


SHARDED = {
    "in_place": 22, "conformer": 22, "einops_heads": 22, "own_linears": 22, "weight_of_qkv": 16,
    "low_rank_linear": 26, "matrix_linear": 26, "low_rank_row": 30, "matrix_row": 30, "biased_row": 30, "bent_row": 8,
    "two_counts": 22, "mix_ffn": 26, "re_attention": 8, "parallel_scaling": 42, "reads_width": 23, "positioned": 23,
    "positioned_memory": 23, "windows": 43, "channels_first": 15, "described": 35, "shifted_inside": 27,
    "two_activations": 59, "value_residual": 11, "one_way_out": 20, "twice_out": 22, "shared_queries": 23,
    "batch_normed": 20, "shared_scale": 16, "listed": 22, "spatial_gate": 8, "parametrized": 8,
    "grouped_adapters": 26, "first_differs": 23,
}  # fmt: skip
"""How many tensors of each kind are sharded: in a value residual the first attention is whole, in re-attention and
of parametrized weights each one."""
KINDS = list(SHARDED)
BATCH_NORMS = ("conformer", "batch_normed")
