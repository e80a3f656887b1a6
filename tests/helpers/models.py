"""Modules as people write them, a few thousand parameters each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from byte_gpt import Block, ByteGPT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


class NoGradient(torch.autograd.Function):
    """Gives its input none, so that no optimizer touches what is in front of it; zeros would let weights decay."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class GPT(L.LightningModule):
    """The example's GPT with a loss."""

    def __init__(
        self, tied: bool = True, optimizer: str = "adamw", seed: int = 0, n_head: int = 4, dim: int = 16, layers: int = 2
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = ByteGPT(dim=dim, n_head=n_head, n_layer=layers, context=16, tied=tied, vocab=31)
        perturb(self)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def loss_by(self, run: Callable[[nn.Module, Tensor], Tensor], batch: Any) -> Tensor:
        """The loss where ``run`` calls each block."""
        (tokens,) = batch
        model, inputs = self.model, tokens[:, :-1]
        x = model.tokens(inputs) + model.positions(torch.arange(inputs.shape[1]))
        for block in model.blocks:
            x = run(block, x)
        logits = model.head(model.norm(x))
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
        if mask:  # as Whisper has one; DDP takes none
            self.register_buffer("alignment_heads", torch.eye(2).to_sparse(), persistent=False)
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


class Blocks(L.LightningModule):
    """An embedding, blocks and a head, which tells the tokens that it is given."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 2, dim: int = 16, vocab: int = 31) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        perturb(self)

    def run(self, x: Tensor) -> Tensor:
        """What the blocks make of the embedded tokens."""
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self.head(self.run(self.embed(tokens))).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


class ManualTwo(L.LightningModule):
    """Two GPTs, two optimizers, manual optimization; ``style`` picks what people do in between."""

    def __init__(self, style: str = "toggle") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.style = style
        self.first = ByteGPT(dim=16, n_head=4, n_layer=1, context=16, tied=True, vocab=31)
        self.second = ByteGPT(dim=16, n_head=4, n_layer=1, context=16, tied=False, vocab=31)
        perturb(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        one, two = self.optimizers()
        target = tokens[:, 1:].flatten()

        def losses() -> tuple[Tensor, Tensor]:
            a, b = self.first(tokens[:, :-1]), self.second(tokens[:, :-1])
            return F.cross_entropy(a.flatten(0, 1), target), F.cross_entropy((a + b).flatten(0, 1), target)

        if self.style == "toggle":
            for optimizer, which in ((one, 0), (two, 1)):
                self.toggle_optimizer(optimizer)
                loss = losses()[which]
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.1, "norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)
        elif self.style == "leak":  # the second loss also fills the first model's gradients, which are used later
            first, loss = losses()
            two.zero_grad(set_to_none=False)
            self.manual_backward(loss, retain_graph=True)
            two.step()
            self.manual_backward(first)
            one.step()
            one.zero_grad(set_to_none=False)
        else:  # "keep": gradients are zeroed every third batch only, steps go on
            loss = losses()[1]
            self.manual_backward(loss)
            self.clip_gradients(one, 0.5, "norm")
            one.step()
            two.optimizer.step()  # past Lightning
            if batch_idx % 3 == 2:
                one.zero_grad()
                two.zero_grad(set_to_none=False)
        return loss.detach()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.first.parameters(), 0.05), torch.optim.AdamW(self.second.parameters(), 1e-2)]


class FollowsShapes(GPT):
    """Learning rates and decay that follow from the model's shapes and classes, as muP has them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        widths = {id(module.weight): module.in_features for module in self.modules() if type(module) is nn.Linear}
        linears = set(widths)
        norms = {id(module.weight) for module in self.modules() if type(module) is nn.LayerNorm}
        assert linears
        assert norms
        small = 1 / sum(p.numel() for p in self.parameters()) ** 0.5
        groups = [
            {
                "params": [p],
                "lr": small
                if id(p) in norms
                else 1 / widths.get(id(p), p.shape[-1])
                if p.ndim > 1
                else 1 / (p.size(0) + len(p)),
                "weight_decay": 0.1 if id(p) in linears else 0.0,
            }
            for p in self.parameters()
        ]
        return torch.optim.SGD(groups, lr=0.1)


class Frozen(GPT):
    """Half of the model is frozen and thaws at the fifth batch; at the eighth the last block freezes."""

    def __init__(self, thaw: bool = False, at: tuple[int, int] = (4, 7), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.thaw, self.at = thaw, at
        self._freeze(False)

    def _freeze(self, on: bool) -> None:
        block = self.model.blocks[0]
        for part in (block.norm1, block.attn, block.mlp.up):
            part.requires_grad_(on)
        block.mlp.down.weight.requires_grad_(on)
        self.model.tokens.requires_grad_(on)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.thaw and batch_idx == self.at[0]:
            self._freeze(True)
        if self.thaw and batch_idx == self.at[1]:
            self.model.blocks[1].requires_grad_(False)


class Edits(GPT):
    """Puts other gradients in the place of those that it is given."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.9


class EditsLate(GPT):
    """Has a hook on gradients only from the start of training on."""

    def on_train_start(self) -> None:
        self.on_after_backward = self.normalise  # type: ignore[method-assign]

    def normalise(self) -> None:
        for parameter in self.model.blocks[0].norm1.parameters():
            parameter.grad /= parameter.grad.norm()


class Recomputed(GPT):
    """Whole blocks under activation checkpointing."""

    def __init__(self, reentrant: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reentrant = reentrant

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_by(lambda block, x: checkpoint(block, x, use_reentrant=self.reentrant), batch)


class UnderHooks(GPT):
    """Under saved-tensor hooks of somebody else: around the step or around a block, with a checkpoint inside or around it."""

    def __init__(self, who: str, where: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.who, self.where, self.seen = who, where, 0

    def hooks(self) -> Any:
        if self.who == "offloads":
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(self._count, lambda x: x)

    def _count(self, x: Tensor) -> Tensor:
        self.seen += x.nbytes
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def watched(block: nn.Module, x: Tensor) -> Tensor:
            with self.hooks():
                return block(x)

        def run(block: nn.Module, x: Tensor) -> Tensor:
            if block is not self.model.blocks[0]:
                return watched(block, x) if self.where == "block" else block(x)
            if self.where == "checkpoint":
                return checkpoint(watched, block, x, use_reentrant=False)
            return checkpoint(block, x, use_reentrant=False)

        with self.hooks() if self.where == "step" else nullcontext():
            return self.loss_by(run, batch)


class CheckpointedBlock(nn.Module):
    """A block whose halves recompute themselves."""

    def __init__(self, dim: int, n_head: int, reentrant: bool) -> None:
        super().__init__()
        inner = Block(dim, n_head)
        self.norm1, self.attn, self.norm2, self.mlp = inner.norm1, inner.attn, inner.norm2, inner.mlp
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.attn, self.norm1(x), use_reentrant=self.reentrant)
        return x + checkpoint(self.mlp, self.norm2(x), use_reentrant=self.reentrant)


class InnerRecompute(GPT):
    def __init__(self, reentrant: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model.blocks = nn.ModuleList(CheckpointedBlock(16, 4, reentrant) for _ in range(2))
        perturb(self)


BLOCK_RULES: list[dict[str, Any]] = [
    {"pattern": "{p}blocks.*", "style": "blocks"},
    {"pattern": "{p}blocks.*.attn.qkv", "style": "column", "segments": ["q", "k", "v"], "units": "n_head"},
    {"pattern": "{p}blocks.*.attn.proj", "style": "row", "units": "n_head"},
    {"pattern": "{p}blocks.*.attn", "style": "set", "divide": ["n_head"]},
    {"pattern": "{p}blocks.*.{attn,mlp}", "style": "gather"},
    {"pattern": "{p}blocks.*.mlp.up", "style": "column"},
    {"pattern": "{p}blocks.*.mlp.down", "style": "row"},
]


def rules(prefix: str = "model.", exit_at: str | None = "norm") -> list[dict[str, Any]]:
    """The example's plan written by hand."""
    out = [{**rule, "pattern": rule["pattern"].replace("{p}", prefix)} for rule in BLOCK_RULES]
    return [*out, {"pattern": prefix + exit_at, "style": "exit"}] if exit_at else out


def plan(prefix: str = "model.", exit_at: str | None = "norm", extra: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"base": "none", "rules": [*rules(prefix, exit_at), *(extra or [])]}


class Direct(L.LightningModule):
    """The LightningModule itself runs the blocks, twice, with an aborted forward before: no module owns them."""

    def __init__(self, twice: bool = True, abort: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 31)
        self.twice, self.abort = twice, abort
        perturb(self)

    def run(self, tokens: Tensor, stop: bool = False) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if stop:
                raise KeyError("a user's exception between blocks")
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        if self.abort:
            try:
                self.blocks[0](torch.zeros(2, 3))
            except (ValueError, RuntimeError, IndexError):
                self.aborted = True
        loss = F.cross_entropy(self.run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        if self.twice:
            short = tokens[:, :6]
            loss = loss + F.cross_entropy(self.run(short[:, :-1]).flatten(0, 1), short[:, 1:].flatten())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of("adamw", self)


class SharedBlock(GPT):
    """One block runs several times: its parameters collect several parts per backward."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        first = self.model.blocks[0]
        self.model.forward = lambda tokens: self._forward(tokens, first)

    def _forward(self, tokens: Tensor, first: nn.Module) -> Tensor:
        model = self.model
        x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1]))
        for _ in range(3):
            x = first(x)
        return model.head(model.norm(model.blocks[1](x)))


class HeadNormAttention(nn.Module):
    """A norm per head between qkv and proj (partial in both modes), and one behind proj."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.n_head, self.qkv, self.proj = 4, nn.Linear(16, 48), nn.Linear(16, 16)
        self.head_norm = nn.LayerNorm(4)
        self.out_norm = nn.LayerNorm(16) if behind else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, self.n_head, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v, is_causal=True)
        return self.out_norm(self.proj(y.transpose(1, 2).reshape(b, s, -1)))


class AttentionNorm(GPT):
    def __init__(self, behind: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.model.blocks:
            block.attn = HeadNormAttention(behind)
        perturb(self)


class Watched(GPT):
    """With steps for every loop."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", GPT.training_step(self, batch, batch_idx), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", GPT.training_step(self, batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)


class Cropped(GPT):
    """Sequences of other lengths from step to step, odd and even, down to fewer positions than tp ranks may share."""

    LENGTHS = (10, 9, 6, 7, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return super().training_step((tokens[:, : self.LENGTHS[batch_idx % len(self.LENGTHS)]],), batch_idx)


class PaddedEncoder(Encoder):
    """Returns every position, padded ones too: stock torch zeroes them when it packs the batch."""

    def __init__(self, norm: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not norm:
            self.encoder.norm = None

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        x = self.embed(tokens)
        y = self.encoder(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=tokens == 0)
        return y if self.batch_first else y.transpose(0, 1)


class GivesShards(GPT):
    def predict_step(self, batch: Any, batch_idx: int) -> list[Tensor]:
        model, x = self.model, self.model.tokens(batch[0])
        hidden = []
        for block in model.blocks:
            x = block(x)
            hidden.append(x)
        return [model.norm(x), *hidden]


class Stack(nn.Module):
    """Blocks, of which some are left out, and nothing behind them."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks
        self.skip: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            x = x if at in self.skip else block(x)
        return x


class SkippingGPT(ByteGPT):
    """Its blocks stand in a stack of their own, the norm in front of the head in it or behind it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.stack(x)))


class LayerDrop(GPT):
    """Leaves blocks out by turns, as layerdrop does by chance: the last one, all, the first one; then the norm."""

    SKIPPED = ((), (1,), (0, 1), (0,), (1,))
    behind = False

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.model.__class__ = SkippingGPT
        self.model.stack = Stack(self.model.blocks)
        del self.model.blocks
        if not self.behind:
            self.model.stack.norm, self.model.norm = self.model.norm, nn.Identity()
            self.model.stack.__class__ = NormedStack
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.model.stack.skip = self.SKIPPED[self.count % len(self.SKIPPED)]
        self.count += 1
        return super().training_step(batch, batch_idx)


class LayerDropBehind(LayerDrop):
    """The region ends at the last block, in front of the norm."""

    behind = True


class NormedStack(Stack):
    """Its last word is a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Contrastive(L.LightningModule):
    """Two views of each sequence, told apart from those of all other samples of the whole batch (InfoNCE).

    Args:
        own: "sync": gradients flow to every replica; "slot": only through this replica's own entry.
    """

    def __init__(self, own: str = "sync", optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.optimizer = own, optimizer
        self.model = ByteGPT(dim=16, n_head=4, n_layer=2, context=16, tied=False, vocab=31)
        self.project = nn.Linear(31, 8)
        self.outputs: list[Tensor] = []
        perturb(self)

    def features(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.project(self.model(tokens)).mean(1), dim=-1)

    def gathered(self, own: Tensor) -> Tensor:
        """The features of the whole batch, ``[global batch, 8]``."""
        whole = self.all_gather(own, sync_grads=self.own == "sync")
        if whole.ndim == own.ndim:
            return whole
        if self.own == "slot":
            whole[self.trainer.strategy.dp_rank] = own
        return whole.flatten(0, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        first, second = self.gathered(self.features(tokens)), self.gathered(self.features(tokens.flip(1)))
        logits = first @ second.T / 0.5
        loss = F.cross_entropy(logits, torch.arange(len(logits)))
        self.outputs.append(loss.detach())
        self.log("loss", loss, sync_dist=True)
        if self.own == "slot":  # each replica gives the part of the gradient that its own features have
            loss = loss * logits.shape[0] / len(tokens)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.optimizer, self)


class Late(GPT):
    """The example's GPT, made in ``configure_model`` in the way that ``how`` says."""

    def __init__(self, how: str) -> None:
        L.LightningModule.__init__(self)
        self.how, self.model, self.optimizer = how, None, "adamw"

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.how != "unseeded":
            torch.manual_seed(7)
        if self.how == "real":
            self.model = self.make()
        elif self.how in ("meta", "unseeded"):
            with torch.device("meta"):
                self.model = self.make()
        else:
            with self.trainer.init_module(empty_init=True):
                self.model = self.make()

    @staticmethod
    def make() -> nn.Module:
        return ByteGPT(dim=16, n_head=4, n_layer=2, context=16, tied=True, vocab=31)
