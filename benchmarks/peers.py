"""A decoder, and the ways to train it that people choose between: ours, and what they would pick instead."""

from __future__ import annotations

from typing import Any

import hf_models
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from lightning_seqpar import SeqParallelStrategy

HEAD = 64  # features of a head, of decoders that are wide enough


def head_size(dim: int) -> int:
    """Features of a head; narrow decoders have four heads at least."""
    return HEAD if dim >= 128 else min(HEAD, dim // 4)


class Norm(nn.Module):
    """RMSNorm as model code writes it."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim // parts, bias=False) for _ in range(3))
        self.o = nn.Linear(dim // parts, dim, bias=False)
        self.head = head_size(dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (part(x).view(b, s, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        hidden = 128 * round(8 * dim / 3 / 128) // parts
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = Norm(dim), Attention(dim, parts)
        self.mlp_norm, self.mlp = Norm(dim), Mlp(dim, parts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Llama-like; with ``parts``, of the widths that one of so many ranks holds."""

    def __init__(self, dim: int, layers: int, vocab: int, recompute: bool = False, parts: int = 1) -> None:
        super().__init__()
        self.recompute = recompute
        vocab //= parts
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, parts) for _ in range(layers))
        self.norm, self.head = Norm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute and self.training else layer(x)
        return self.head(self.norm(x))


class Module(L.LightningModule):
    """The module that every way trains; its own lines do not change."""

    def __init__(self, dim: int, layers: int, vocab: int, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.vocab = Decoder(dim, layers, vocab, recompute), vocab

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class PartModule(Module):
    """What one of ``parts`` ranks multiplies, with nothing sent: no step of tensor parallelism is much faster."""

    def __init__(self, dim: int, layers: int, vocab: int, parts: int) -> None:
        super().__init__(dim, 0, vocab)
        self.model, self.vocab = Decoder(dim, layers, vocab, parts=parts), vocab // parts


class DTensorModule(Module):
    """The same with a hand-written plan of torch's: what ``ModelParallelStrategy`` asks its users for."""

    sp = True

    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        whole, parts = Replicate(), Shard(1)
        if self.sp:
            outer = {
                "tokens": RowwiseParallel(input_layouts=whole, output_layouts=parts),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=parts, output_layouts=Shard(-1), use_local_output=False),
            }
            inner = {
                "attn_norm": SequenceParallel(),
                "attn": PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,)),
                **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
                "attn.o": RowwiseParallel(output_layouts=parts),
                "mlp_norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,)),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=parts),
            }
        else:
            outer = {
                "tokens": RowwiseParallel(input_layouts=whole),
                "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            }
            inner = {
                **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
                "attn.o": RowwiseParallel(),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(),
            }
        parallelize_module(self.model, mesh, outer)
        for layer in self.model.layers:
            parallelize_module(layer, mesh, inner)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        with loss_parallel():
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(loss, *args, **kwargs)


class DTensorNoSP(DTensorModule):
    sp = False


OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, unchecked": {"self_check": False},
    "ours, gathered kept": {"regather": False},
    "ours, activations": {"recompute": "activations"},
    "ours, no sp": {"sp": False},
    "ours, compiled": {"compile": True},
    "ours, loss in chunks": {"loss_chunk": 256},
}
"""Our ways, and what they set; the first sets nothing."""
METHODS = ("ulysses", "ring", "all_gather")
"""Ways that deal the sequence out over all ranks (``cp``), by how attention is computed."""
_ALL: dict[str, Any] = {"recompute": "full", "tile_mlp": 256, "loss_chunk": 256}
LONG: dict[str, dict[str, Any]] = {
    "ours, tp 4": {"tp": 4},
    "ours, tp 4, recompute": {"tp": 4, "recompute": "full"},
    "ours, cp 4": {"cp": 4},
    "ours, tp 2 × cp 2, recompute, tiles, chunks": {"tp": 2, "cp": 2, **_ALL},
    "ours, cp 4, recompute, tiles, chunks": {"cp": 4, **_ALL},
}
"""Ways on four ranks for long sequences, and what they set."""
ALONE = "a rank's part, alone"


class NoPlanError(ValueError):
    """The way has no plan for the model."""


def make(
    way: str, tp: int, model: str | tuple[int, int, int], *, recompute: bool = False
) -> tuple[Module | hf_models.CausalModule, Any]:
    """A module and the strategy of one way.

    Args:
        way: a key of :data:`OURS` or :data:`LONG`, one of :data:`METHODS`,
            ``dtensor``, ``dtensor, no sp``, ``ddp``, ``plain`` or :data:`ALONE`.
        tp: ranks that share the model.
        model: a model of ``hf_models``, or dim, layers and vocabulary of the decoder.
        recompute: recompute the decoder's blocks, by its own code.

    Raises:
        NoPlanError: for a model that torch's styles can't cut.
    """
    if way == ALONE:
        assert not isinstance(model, str)
        return PartModule(*model, tp), "auto"
    if way.startswith("dtensor"):
        sp = way == "dtensor"
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=tp)
        if not isinstance(model, str):
            return (DTensorModule if sp else DTensorNoSP)(*model, recompute), strategy
        if (why := hf_models.NO_PLAN.get(hf_models.MODELS[model][0])) is not None:
            raise NoPlanError(why)
        return (hf_models.DTensorLlama if sp else hf_models.DTensorLlamaNoSP)(model), strategy
    module = hf_models.CausalModule(model) if isinstance(model, str) else Module(*model, recompute)
    if way == "ddp":
        return module, DDPStrategy(gradient_as_bucket_view=True, static_graph=True)
    if way in METHODS:
        return module, SeqParallelStrategy(cp=tp, cp_method=way)
    if way in LONG:
        return module, SeqParallelStrategy(**LONG[way])
    return module, "auto" if way == "plain" else SeqParallelStrategy(tp=tp, **OURS[way])
