"""Logits that stay sharded by vocabulary: the loss in every form, what keeps them sharded, and what gathers."""

from __future__ import annotations

from typing import Any

import models
import pytest
import test_families  # noqa: F401  (puts its module where fit finds it)
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from fit import fit, quiet_trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.layers import Shard, ShardedLogits, cross_entropy
from lightning_seqpar.parity import Trace, compare
from lightning_seqpar.testing import run_distributed

VOCAB, TOKENS = 11, 7  # the vocabulary divides by no number of ranks


def make(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (TOKENS,)) -> tuple[Tensor, Tensor]:
    """Whole logits, and class targets of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64) * 3
    target = torch.randint(VOCAB, shape, generator=generator)
    target.view(-1)[2] = -100
    return whole.to(dtype), target


def sharded(whole: Tensor) -> tuple[ShardedLogits, Tensor]:
    """This rank's part as a leaf, and the logits made of it."""
    shard = Shard.by_vocabulary(VOCAB, dist.get_world_size())
    rank = dist.get_rank()
    part = Shard(whole.ndim - 1, VOCAB, shard.ranges, shard.padded).take(whole.detach(), rank)
    leaf = part.clone().requires_grad_()
    return ShardedLogits.wrap(leaf * 1, shard, dist.group.WORLD, rank), leaf


def part_of(whole: Tensor) -> Tensor:
    shard = Shard.by_vocabulary(VOCAB, dist.get_world_size())
    return Shard(whole.ndim - 1, VOCAB, shard.ranges, shard.padded).take(whole, dist.get_rank())


WEIGHT = torch.linspace(0.5, 2.0, VOCAB, dtype=torch.float64)
LOSSES: dict[str, Any] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "all ignored": {},
    "all ignored, smoothed": {"label_smoothing": 0.1},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": WEIGHT},
    "smoothed and weighted": {"label_smoothing": 0.2, "weight": WEIGHT, "reduction": "mean"},
    "smoothed and weighted, each": {"label_smoothing": 0.2, "weight": WEIGHT, "reduction": "none"},
}


def losses(dtype: torch.dtype, limit: float) -> None:
    for name, options in LOSSES.items():
        whole, target = make(dtype)
        whole.requires_grad_()
        options = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in options.items()}
        if name == "ignored":
            target = target.clamp_min(0)
        if name.startswith("all ignored"):
            target = torch.full_like(target, -100)
        wanted = F.cross_entropy(whole, target, **options)
        logits, leaf = sharded(whole)
        got = F.cross_entropy(logits, target, **options)
        assert type(got) is Tensor
        assert got.dtype == wanted.dtype
        assert torch.allclose(got, wanted, rtol=limit, atol=limit, equal_nan=True), name
        scale = torch.linspace(1, 2, wanted.numel(), dtype=dtype).view(wanted.shape)
        (wanted * scale).sum().backward()
        (got * scale).sum().backward()
        assert torch.allclose(leaf.grad, part_of(whole.grad), rtol=limit, atol=limit), name


def test_the_loss_in_every_form():
    for world in (2, 4):
        run_distributed(losses, world, torch.float64, 1e-12)
    run_distributed(losses, 3, torch.float32, 1e-5)


def shapes() -> None:
    """The ways in which people flatten and shift."""
    whole, target = make(shape=(2, 5))
    whole.requires_grad_()
    for flatten in (
        lambda x, y: (x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
        lambda x, y: (x[..., :-1, :].contiguous().view(-1, VOCAB), y[..., 1:].contiguous().view(-1)),
        lambda x, y: (x.float().double().reshape(-1, x.size(-1)), y.reshape(-1)),
        lambda x, y: (x.view(-1, x.shape[-1]), y.view(-1)),
        lambda x, y: (x[y != -100], y[y != -100]),
        lambda x, y: (x[:, -1], y[:, -1]),
        lambda x, y: (torch.tanh(x / 5.0).mul(5.0).view(-1, VOCAB), y.view(-1)),
        lambda x, y: (x.to(torch.float64)[0].squeeze(0), y[0]),
    ):
        logits, leaf = sharded(whole)
        flat, kept = flatten(logits, target)
        assert isinstance(flat, ShardedLogits)
        got = F.cross_entropy(flat, kept)
        rows, kept = flatten(whole, target)
        wanted = F.cross_entropy(rows, kept)
        assert torch.allclose(got, wanted, rtol=1e-6)
        whole.grad = None
        wanted.backward()
        got.backward()
        assert torch.allclose(leaf.grad, part_of(whole.grad), rtol=1e-5, atol=1e-8)


def anything_else() -> None:
    """What is no loss reads the whole, and gives each rank its part of the gradient."""
    whole, target = make(shape=(2, 5))
    probabilities = whole.detach().softmax(-1)
    for use in (
        lambda x: x.softmax(-1).square().sum(),
        lambda x: x.logsumexp(-1).square().mean(),
        lambda x: (x / 2.0 + 1).log_softmax(-1).sum(),
        lambda x: F.cross_entropy(x.transpose(1, 2), target),
        lambda x: F.cross_entropy(x.view(-1, VOCAB), probabilities.view(-1, VOCAB)),
        lambda x: F.kl_div(F.log_softmax(x, -1), probabilities, reduction="batchmean"),
        lambda x: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), target.flatten()),
        lambda x: x[..., 3].sum() + x[0, 1, 2],
        lambda x: x.unsqueeze(-1).sum(),
        lambda x: x.log_softmax(-1).gather(-1, target.clamp_min(0).unsqueeze(-1)).sum(),
        lambda x: x.gather(-1, target.clamp_min(0).unsqueeze(-1)).square().sum(),
        lambda x: torch.stack([x, x]).sum(),
        lambda x: torch.cat([x[:, 1:], x[:, :1]], 1).square().sum(),
        lambda x: x.permute(2, 0, 1).reshape(VOCAB, -1).square().sum(),
        lambda x: torch.einsum("bsv,v->bs", x, WEIGHT).square().sum(),
        lambda x: _Square.apply(x).sum(),
        lambda x: (x * x.detach()).sum(),
    ):
        whole.requires_grad_()
        whole.grad = None
        logits, leaf = sharded(whole)
        wanted, got = use(whole), use(logits)
        assert type(got) is Tensor
        assert torch.allclose(got, wanted, rtol=1e-12)
        wanted.backward()
        got.backward()
        assert torch.allclose(leaf.grad, part_of(whole.grad), rtol=1e-12, atol=1e-12)
    logits, _ = sharded(whole)
    assert torch.equal(logits.argmax(-1), whole.argmax(-1))
    assert torch.equal(logits.topk(3).indices, whole.topk(3).indices)
    assert (logits == whole).all()
    assert logits.shape == whole.shape
    assert logits.requires_grad
    assert not logits.detach().requires_grad
    assert logits.tolist() == whole.tolist()
    assert torch.equal(torch.as_tensor(logits.detach().cpu().numpy()), whole.detach())


class _Square(torch.autograd.Function):
    """Somebody's own function: no function of torch's stands before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def refusals() -> None:
    whole, target = make()
    logits, _ = sharded(whole)
    assert "ShardedLogits(shape=[7, 11]" in repr(logits)
    with pytest.raises(RuntimeError, match=r"register_hook of logits that are sharded .* logits.whole\(\) first"):
        logits.register_hook(print)
    for change in (
        lambda x: x.div_(2),
        lambda x: x.masked_fill_(whole > 0, 0.0),
        lambda x: x.__setitem__((0, 0), 1.0),
        lambda x: x.__itruediv__(2),
        lambda x: F.relu(x, inplace=True),
        lambda x: torch.add(whole, whole, out=x),
    ):
        with pytest.raises(RuntimeError, match="would change a copy"):
            change(logits.detach())
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        F.cross_entropy(logits, target.masked_fill(target == -100, 11))
    with pytest.raises(ValueError, match="to match target batch_size"):
        F.cross_entropy(logits, target[:-1])
    with pytest.raises(ValueError, match="average is not a valid value"):
        cross_entropy(logits, target, reduction="average")
    assert torch.isnan(F.cross_entropy(logits, torch.full_like(target, -100)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, _ = sharded(whole.bfloat16())
        assert F.cross_entropy(half, target).dtype == F.cross_entropy(whole.bfloat16(), target).dtype == torch.float32


@pytest.mark.parametrize("check", [shapes, anything_else, refusals])
def test_what_people_do_with_logits(check):
    run_distributed(check, 2)


# ---- through a trainer -----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor of floats has that any operation makes, parameters aside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.is_meta:
                self.count = max(self.count, leaf.numel())
        return out


class Wide(zoo.Zoo):
    """Nothing in it is as large as its logits."""

    def __init__(self, loss: str) -> None:
        super().__init__("einsum")
        self.net = zoo.Decoder("einsum", depth=1, vocab=999, tied=True)
        self.line, self.largest = loss, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        with Largest() as watch:
            logits = self.net(ids[:, :-1])
            if self.line == "whole":
                logits = logits.clone() + 0.0 * logits.amax()
            loss = F.cross_entropy(logits.float().view(-1, 999), ids[:, 1:].flatten())
            torch.autograd.grad(loss, [p for p in self.parameters() if p.requires_grad], retain_graph=True)
        self.largest = watch.count
        return loss


def measure(loss: str, vocab: bool) -> int:
    rules = [
        {"pattern": "net.h.*", "style": "blocks"},
        {"pattern": "net.h.*.attn", "style": "whole"},
        {"pattern": "net.h.*.mlp", "style": "gather"},
        {"pattern": "net.h.*.mlp.fc1", "style": "column"},
        {"pattern": "net.h.*.mlp.fc2", "style": "row"},
        {"pattern": "net.ln_f", "style": "exit"},
        *([{"pattern": "net.{wte,lm_head}", "style": "vocab"}] if vocab else []),
    ]
    strategy = SeqParallelStrategy(tp=2, plan={"base": "none", "rules": rules}, self_check=False)
    module = Wide(loss)
    quiet_trainer(devices=2, strategy=strategy, max_steps=1, precision="32-true").fit(module, models.loader(16))
    return module.largest


def test_peak_memory_of_logits_is_a_ranks_part():
    tokens = 16 * 9
    assert run_distributed(measure, 2, "own", True) == [tokens * 500] * 2
    assert run_distributed(measure, 2, "own", False) == [tokens * 999] * 2
    assert run_distributed(measure, 2, "whole", True) == [tokens * 1000] * 2


def fit_hugging_face() -> list[Trace]:
    return [
        fit(
            "HuggingFace",
            {"family": family, "loss": "user"},
            world=2,
            strategy={"tp": 2, "plan": {"rules": [rule]}},
            steps=3,
        )
        for family, rule in HUGGING.items()
    ]


HUGGING = {
    "llama": {"pattern": "model.{model.embed_tokens,lm_head}", "style": "vocab"},
    "gpt2": {"pattern": "model.{transformer.wte,lm_head}", "style": "vocab"},
    "t5": {"pattern": "model.{shared,encoder.embed_tokens,decoder.embed_tokens,lm_head}", "style": "vocab"},
}


def test_hugging_face_heads():
    for family, got in zip(HUGGING, run_distributed(fit_hugging_face, 2)[0], strict=True):
        compare(fit("HuggingFace", {"family": family, "loss": "user"}, steps=3), got).raise_if_failed()
