"""Logits that stay sharded by vocabulary: the loss in every form, what keeps them sharded, and what gathers."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.distributed.counters import SavedBytes
from lightning_seqpar.distributed.rendezvous import Meeting
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.nn.sharded_logits import ShardedLogits
from lightning_seqpar.nn.vocab_loss import StoredLogits, VocabPart
from lightning_seqpar.testing import run_distributed
from tests.mutants import sees

VOCAB, TOKENS = 11, 7  # the vocabulary divides by no number of ranks


def make(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (TOKENS,)) -> tuple[Tensor, Tensor]:
    """Whole logits, and class targets of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64) * 3
    target = torch.randint(VOCAB, shape, generator=generator)
    target.view(-1)[2] = -100
    return whole.to(dtype), target


def where(vocab: int = VOCAB) -> VocabPart:
    """How the vocabulary is split, over which group, and which rank this is."""
    return VocabPart(Shard.by_vocabulary(vocab, dist.get_world_size()), dist.group.WORLD, dist.get_rank())


def part_of(whole: Tensor, dim: int = -1) -> Tensor:
    of = where()
    return Shard(dim % whole.ndim, VOCAB, of.shard.ranges, of.shard.padded).take(whole, of.rank)


def sharded(whole: Tensor) -> tuple[ShardedLogits, Tensor]:
    """This rank's part as a leaf, and the logits made of it."""
    leaf = part_of(whole.detach()).clone().requires_grad_()
    return ShardedLogits.wrap(leaf * 1, where()), leaf


def not_made(whole: Tensor, chunk: int) -> tuple[ShardedLogits, Tensor]:
    """The same logits, not made yet: the product of the whole ones with a head that changes nothing."""
    head = part_of(torch.eye(VOCAB, dtype=whole.dtype), 0)
    leaf = whole.detach().clone().requires_grad_()
    return ShardedLogits.product(leaf * 1, head, None, chunk, where()), leaf


def check_alike(
    use: Callable[[Tensor], Tensor], whole: Tensor, limit: float = 1e-12, chunks: tuple[int, ...] = (3,), what: str = ""
) -> None:
    """Of sharded logits, and of such that are not made yet, ``use`` gives what it gives of whole ones, and their gradient."""
    whole = whole.detach().requires_grad_()
    wanted = use(whole)
    scale = torch.linspace(1, 2, wanted.numel(), dtype=wanted.dtype).view(wanted.shape)
    (grad,) = torch.autograd.grad((wanted * scale).sum(), whole)
    for chunk in (None, *chunks):
        logits, leaf = sharded(whole) if chunk is None else not_made(whole, chunk)
        got = use(logits)
        assert type(got) is Tensor
        assert got.dtype == wanted.dtype
        assert torch.allclose(got, wanted, rtol=limit, atol=limit, equal_nan=True), what
        (got * scale).sum().backward()
        if chunk is not None:
            dist.all_reduce(leaf.grad)  # each rank's columns give a part
        assert torch.allclose(leaf.grad, part_of(grad) if chunk is None else grad, rtol=limit, atol=limit), what


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
        options = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in options.items()}
        if name == "ignored":
            target = target.clamp_min(0)
        if name.startswith("all ignored"):
            target = torch.full_like(target, -100)

        def loss(x: Tensor, target: Tensor = target, options: dict[str, Any] = options) -> Tensor:
            return F.cross_entropy(x, target, **options)

        check_alike(loss, whole, limit, (1, 3, 100), name)


@sees(
    "targets that are ignored counted in a weighted mean",
    "_cross_entropy",
    "loss / (own * (beyond == 0)).sum()",
    "loss / own.sum()",
)
@sees("a class that is ignored counted in the loss", "_cross_entropy", "if 0 <= ignore_index < classes:", "if False:")
@sees(
    "padding of the vocabulary counted in the loss",
    "_LogitChunks.logits",
    "return self.x[some, : self.count]",
    "return self.x[some]",
)
@sees(
    "padding of the vocabulary given a gradient",
    "_ChunkGrads.rooms",
    "of_x[:, rows.count :].zero_()",
    "of_x[:, rows.count :].fill_(1)",
)
@sees(
    "each rank's own largest logit taken for all",
    "VocabParallelCrossEntropy.forward",
    "total = (parts[:, 2] * (parts[:, 0] - top).exp()).sum(0)",
    "total = parts[:, 2].sum(0)",
)
@sees(
    "a target outside its rank's part of the vocabulary",
    "_LogitChunks.statistics",
    '        out[1].masked_fill_(elsewhere, float("-inf"))\n',
    "",
)
@pytest.mark.parametrize(
    ("world", "dtype", "limit"), [(2, torch.float64, 1e-12), (4, torch.float64, 1e-12), (3, torch.float32, 1e-5)]
)
def test_the_loss_in_every_form(world, dtype, limit):
    run_distributed(losses, world, dtype, limit)


def shapes() -> None:
    """The ways in which people flatten and shift."""
    whole, target = make(shape=(2, 5))
    for at, flatten in enumerate((
        lambda x, y: (x.float().double().reshape(-1, x.size(-1)), y.reshape(-1)),
        lambda x, y: (x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
        lambda x, y: (x[..., :-1, :].contiguous().view(-1, VOCAB), y[..., 1:].contiguous().view(-1)),
        lambda x, y: (x.view(-1, x.shape[-1]), y.view(-1)),
        lambda x, y: (x[y != -100], y[y != -100]),
        lambda x, y: (x[:, -1], y[:, -1]),
        lambda x, y: (torch.tanh(x / 5.0).mul(5.0).view(-1, VOCAB), y.view(-1)),
        lambda x, y: (x.to(torch.float64)[0].squeeze(0), y[0]),
    )):  # fmt: skip

        def loss(x: Tensor, flatten: Any = flatten) -> Tensor:
            flat, kept = flatten(x, target)
            assert type(flat) is type(x)
            return F.cross_entropy(flat, kept)

        check_alike(loss, whole, 1e-12 if at else 1e-8, what=str(at))


def masked() -> None:
    """Logits that are minus infinity: on one rank all of them, for some tokens."""
    whole, target = make()
    for columns in (slice(0, 6), slice(6, 11)):
        some = whole.clone()
        some[::2, columns] = float("-inf")
        kept = target.masked_fill((target >= columns.start) & (target < columns.stop), -100)
        check_alike(lambda x, kept=kept: F.cross_entropy(x, kept), some, chunks=())


def anything_else() -> None:
    """What is no loss reads the whole, and gives each rank its part of the gradient."""
    whole, target = make(shape=(2, 5))
    probabilities = whole.detach().softmax(-1)
    for use in (
        lambda x: x.softmax(-1).square().sum(),
        lambda x: x.logsumexp(-1).square().mean(),
        lambda x: (x / 2.0 + 1).log_softmax(-1).sum(),
        lambda x: (
            F.softmax(x, dim=2, dtype=torch.float64)[..., 3].sum() + torch.log_softmax(x[:, 1:], -1)[..., 4].square().sum()
        ),
        lambda x: x.log_softmax(1).square().sum(),
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
        lambda x: torch.mul(input=x, other=2.0).sum() + torch.reshape(input=x, shape=(-1, VOCAB)).square().sum(),
        _after_a_look,
    ):
        check_alike(use, whole)
    whole.requires_grad_()
    logits, _ = sharded(whole)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(logits.argmax(-1), whole.argmax(-1))
        assert torch.equal(torch.argmax(logits.clamp(max=2.0), 1), whole.clamp(max=2.0).argmax(1))
        assert torch.equal(torch.argmax(logits[:, 1:] * 0, dim=-1, keepdim=True), torch.zeros(2, 4, 1, dtype=torch.long))
        assert isinstance(logits.softmax(-1).mul(2), ShardedLogits)
        assert torch.equal(logits.topk(3).indices, whole.topk(3).indices)
    gathered = [str(one.message).partition("()")[0] for one in told if "needs all of the vocabulary" in str(one.message)]
    assert gathered == (["clamp", "topk"] if dist.get_rank() == 0 else [])
    assert (logits == whole).all()
    held = torch.empty(2, 5, dtype=torch.long)
    torch.argmax(logits, -1, out=held)
    assert torch.equal(held, whole.argmax(-1))
    assert type(logits.to("meta")) is Tensor  # no group is there
    assert type(logits.double()) is ShardedLogits
    assert logits.shape == whole.shape
    assert logits.requires_grad
    assert not logits.detach().requires_grad
    assert logits.tolist() == whole.tolist()
    assert torch.equal(torch.as_tensor(logits.detach().cpu().numpy()), whole.detach())


def _after_a_look(x: Tensor) -> Tensor:
    """A metric reads the logits before the loss does."""
    for watching in (torch.no_grad, torch.inference_mode):
        with watching():
            x.argmax(-1)
    return F.cross_entropy(x.view(-1, VOCAB), torch.arange(10)) + x.square().mean()


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


class _Twice(torch.autograd.Function):
    """Somebody's own function, of a function that keeps logits sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def refusals() -> None:
    whole, target = make()
    logits, _ = sharded(whole)
    assert "ShardedLogits(shape=[7, 11]" in repr(logits)
    with pytest.raises(RuntimeError, match=r"register_hook of logits that are sharded .* logits.whole\(\) first"):
        logits.register_hook(print)
    for change in (
        lambda x: x.unsqueeze_(0),
        lambda x: x.detach_(),
        lambda x: setattr(x, "data", whole),
        lambda x: torch.add(whole, whole, out=x),
    ):
        with pytest.raises(RuntimeError, match="would change a copy"):
            change(logits.detach())
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        F.cross_entropy(logits, target.masked_fill(target == -100, 11))
    with pytest.raises(ValueError, match="to match target batch_size"):
        F.cross_entropy(logits, target[:-1])
    with pytest.raises(ValueError, match="average is not a valid value"):
        F.cross_entropy(logits, target, reduction="average")
    assert torch.isnan(F.cross_entropy(logits, torch.full_like(target, -100)))
    x, head = torch.randn(TOKENS, 8, requires_grad=True), torch.nn.Parameter(torch.randn(6, 8))
    for made in (
        lambda x: ShardedLogits.wrap(F.linear(x, head), where()),
        lambda x: ShardedLogits.product(x, head, None, 7, where()),
    ):
        with pytest.raises(RuntimeError, match="out of a reentrant activation checkpoint"):
            F.cross_entropy(checkpoint(made, x, use_reentrant=True), target)
        with pytest.raises(RuntimeError, match="out of _Twice, an autograd"):
            F.cross_entropy(_Twice.apply(made(x)), target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, _ = sharded(whole.bfloat16())
        assert F.cross_entropy(half, target).dtype == F.cross_entropy(whole.bfloat16(), target).dtype == torch.float32


def _of_a_slice(x: Tensor) -> list[Tensor]:
    last, copied = x[-1], x[:-1].clone()
    last.masked_fill_(last > 0, -9.0)
    last.view(1, VOCAB).div_(3)
    return [last, copied]


def _top_k(x: Tensor) -> list[Tensor]:
    """As samplers are written."""
    x = x[-2:] / 0.8
    values, _ = torch.topk(x, 3)
    x[x < values[:, [-1]]] = -float("inf")
    return [F.softmax(x, -1)]


def _copies_stay(x: Tensor) -> list[Tensor]:
    picked, cast = x[torch.tensor([0, 2])], x.float()
    x[..., 2:5].sum(), x.transpose(0, 1).sum()  # plain views that nobody holds
    x += 1.0
    x[0, 0] = 5.0
    F.relu(x, inplace=True)
    picked.mul_(2.0)
    return [x, picked, cast.double(), x.view(-1), F.cross_entropy(x, torch.arange(TOKENS)), x + picked[0]]


CHANGES: dict[str, Callable[[Tensor], list[Tensor]]] = {"a slice": _of_a_slice, "top k": _top_k, "copies stay": _copies_stay}


def changed_in_place() -> None:
    """As plain tensors, views and copies and gradients included."""
    for chunk in (None, 3):
        for name, change in CHANGES.items():
            for learns in (True, False):
                whole, _ = make()
                plain = whole.detach().clone().requires_grad_()
                with torch.set_grad_enabled(learns):
                    logits, local = sharded(whole) if chunk is None else not_made(whole, chunk)
                    wanted, got = change(plain * 1.0), change(logits)
                for one, other in zip(wanted, got, strict=True):
                    assert torch.allclose(one, other + 0.0), (name, chunk, learns)
                if learns:
                    loss = [sum(x.masked_fill(x == -float("inf"), 0).square().sum() for x in some) for some in (wanted, got)]
                    (grad,) = torch.autograd.grad(loss[0], plain)
                    (mine,) = torch.autograd.grad(loss[1], local)
                    if chunk is not None:  # each rank has a term of the gradient of the head's input
                        dist.all_reduce(mine)
                    assert torch.allclose(part_of(grad) if chunk is None else grad, mine), (name, chunk)


def changed_in_part() -> None:
    """Views of one another, of which one was changed in place: the others would not show it."""
    whole, _ = make()
    for change in (
        lambda x: (x, x[1:].mul_(2.0)),
        lambda x: (x[1:], x.mul_(2.0)),
        lambda x: (x.view(1, *x.shape).detach(), x[1:].data.clamp_(max=1.0)),
        lambda x: (x, x[..., 3:6].mul_(2.0)),
        lambda x: (x[1:], x.transpose(0, 1).mul_(2.0)),
    ):
        read, _ = change(sharded(whole)[0])
        for use in (torch.argmax, ShardedLogits.whole, torch.tanh):
            with pytest.raises(RuntimeError, match="shares their memory was changed in place"):
                use(read)
    logits, _ = sharded(whole)
    held = logits[..., 3:6]
    with pytest.raises(RuntimeError, match="changed in place while a view of them is held"):
        logits.mul_(held.sum())
    logits, _ = sharded(whole)
    logits.mul_(2.0)
    with pytest.raises(RuntimeError, match="were changed in place, and an autograd"):
        _Square.apply(logits).sum().backward()


def kept() -> None:
    """A loss keeps the logits of the compute type, and no other copy of them; or not even those."""
    x, head = torch.randn(64, 8, dtype=torch.bfloat16), torch.nn.Parameter(torch.randn(6, 8, dtype=torch.bfloat16))
    x.requires_grad_()
    target = torch.randint(VOCAB, (64,))
    small = 64 * (8 + 8 + 1 + 4 + 4 + 4)  # the target's column, whether it counts and is here, the largest, the sum, the loss
    for make_logits, wanted in (
        (lambda: ShardedLogits.wrap(F.linear(x, head), where()), 64 * 6 * 2),
        (lambda: ShardedLogits.product(x, head, None, 7, where()), 0),
    ):
        with SavedBytes(exclude=[x, head]) as saved:
            F.cross_entropy(make_logits().float(), target)  # the cast makes nothing
        assert saved.total - wanted <= small + 16, saved.total


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor of floats has that any operation makes, parameters aside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.is_meta:
                self.count = max(self.count, leaf.numel())
        return out


def made_for_a_loss() -> None:
    """The largest tensor of a loss's forward and backward is this rank's part of the logits, or that of a few tokens."""
    x, head = torch.randn(64, 2, requires_grad=True), torch.nn.Parameter(torch.randn(500, 2))
    for make_logits, tokens in (
        (lambda: ShardedLogits.wrap(F.linear(x, head), where(999)), 64),
        (lambda: ShardedLogits.product(x, head, None, 30, where(999)), 30),
    ):
        with Largest() as watch:
            F.cross_entropy(make_logits().float().view(-1, 999), torch.zeros(64, dtype=torch.long)).backward()
        assert (tokens - 1) * 500 < watch.count <= tokens * 500  # the last rank has one column less


def kept_across_a_step() -> None:
    """Logits that nobody read before the weights changed would be those of other weights."""
    x, head = torch.randn(4, 8), torch.nn.Parameter(torch.randn(6, 8))
    made, read = (ShardedLogits.product(x, head, None, 2, where()) for _ in range(2))
    before = read.whole()
    with torch.no_grad():
        head.add_(1.0)
    assert torch.equal(read.whole(), before)
    for use in (lambda: made.whole(), lambda: F.cross_entropy(made, torch.zeros(4, dtype=torch.long)), lambda: made[1:]):
        with pytest.raises(RuntimeError, match="read after the head's weight or its input has changed"):
            use()


def looked_at() -> None:
    """Where nothing learns, what was made once is kept; but not what only an inference could use."""
    whole, _ = make()
    logits, _ = not_made(whole, 3)
    for held, watching in ((logits, torch.no_grad), (logits.detach(), torch.no_grad), (logits.detach(), torch.inference_mode)):
        with watching():
            held.argmax(-1)
        kept = held.local is held.local and not held.local.is_inference()
        assert kept
    with torch.inference_mode():  # Lightning's evaluation, but over gloo
        target = torch.zeros(TOKENS, dtype=torch.long)
        assert torch.allclose(F.cross_entropy(not_made(whole, 3)[0].float(), target), F.cross_entropy(whole.float(), target))
    teacher, student = logits.detach(), whole.clone().requires_grad_()
    with torch.inference_mode():
        teacher.argmax(-1)
    (teacher * student).sum().backward()
    assert torch.allclose(student.grad, whole)


def of_a_teacher() -> None:
    """What was made, or changed, without gradients gives none, whenever it is read."""
    x, head = torch.randn(4, 8, requires_grad=True), torch.nn.Parameter(torch.randn(6, 8))
    bias, student = torch.nn.Parameter(torch.randn(6)), torch.randn(4, VOCAB, requires_grad=True)
    changes = (lambda x: x * 1.0, lambda x: x.double().float(), lambda x: x.view(2, 2, VOCAB).flatten(0, 1), lambda x: x[:])
    for make_logits in (
        lambda: ShardedLogits.product(x, head, bias, 2, where()),
        lambda: ShardedLogits.wrap(F.linear(x, head, bias), where()),
    ):
        for change in changes:
            outer = make_logits()
            with torch.no_grad():
                made, changed = make_logits(), change(outer)
            for logits in (made, change(made), changed):
                assert not logits.requires_grad
                assert not F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).requires_grad
                assert not logits.softmax(-1).requires_grad
                (logits.softmax(-1) * student).sum().backward()
            assert outer.softmax(-1).requires_grad
    assert x.grad is head.grad is bias.grad is None


def all_that_people_do() -> None:
    for check in (
        shapes, anything_else, refusals, changed_in_place, changed_in_part, masked, kept, made_for_a_loss,
        kept_across_a_step, looked_at,
        of_a_teacher,
    ):  # fmt: skip
        check()


@sees("logits gathered for the loss", "_KEEPING", "    F.cross_entropy: _cross_entropy,\n", "")
@sees(
    "a change through a plain view of sharded logits is lost",
    "ShardedLogits.__torch_function__",
    "if memory_of(whole) in made:",
    "if False:",
)
@sees(
    "a metric that reads logits first cuts the loss off",
    "ShardedLogits.local",
    "if made.requires_grad or not (graph or made.is_inference())",
    "if made is not None",
)
@sees(
    "logits made without gradients teach the head",
    "ShardedLogits._wrap",
    "            part = part.detached()\n",
    "            pass\n",
)
@sees(
    "padding of the vocabulary not cut off",
    "ShardedLogits.whole",
    "local.ndim - 1, self._of.group, self._of.shard.length)",
    "local.ndim - 1, self._of.group)",
)
@sees(
    "logits made of weights that have changed",
    "StoredLogits.check",
    "if self._versions is not None and self._read_versions() != self._versions:",
    "if False:",
)
@sees(
    "logits changed in place in a copy", "ShardedLogits.__torch_function__", "if logits is not None and is_write:", "if False:"
)
@sees(
    "the gradient of gathered logits not dealt out",
    "_Wrap.backward",
    "own = F.pad(grad[..., start:stop], (0, ctx.width - (stop - start)))",
    "own = F.pad(grad[..., : stop - start], (0, ctx.width - (stop - start)))",
)
@sees("a change of a view of logits stays in the view", "sharded_logits:_Memory.check", "self.changed() is not logits", "False")
@sees(
    "a copy of logits taken for a view",
    "sharded_logits:_copies",
    "return any(isinstance(item, Tensor | list)",
    "return False and any(isinstance(item, Tensor | list)",
)
@sees("a change of logits in place is left out of a gradient", "_refuse_gradient", "raise RuntimeError(", "print(")
def test_what_people_do_with_logits():
    run_distributed(all_that_people_do, 2)


def read_on_the_first_rank(together: int) -> str:
    """What rank 0 is told when it reads logits alone, after ``together`` times with the others."""
    whole, _ = make()
    meeting = Meeting(dist.group.WORLD, timedelta(seconds=2), times=together + 1)
    logits = ShardedLogits.wrap(part_of(whole), replace(where(), meeting=meeting))
    for _ in range(together):
        assert torch.equal((logits * 2).argmax(-1), whole.argmax(-1))
    said = ""
    if dist.get_rank() == 0:
        try:
            logits[1:].argmax(-1)
        except RuntimeError as error:
            said = str(error)
    dist.barrier()
    for _ in range(2):  # nobody waits any more
        assert torch.equal(logits.whole(), whole)
    return said


@sees(
    "who reads logits alone waits for ever",
    "ShardedLogits._meet",
    "        if self._of.meeting is not None:\n",
    "        if False:\n",
)
def test_logits_that_one_rank_reads_alone_are_told():
    said, nothing = run_distributed(read_on_the_first_rank, 2, 1)
    assert nothing == ""
    assert said.startswith("logits that are sharded by vocabulary are read whole")
    assert "on rank 0, and rank 1 did not do the same within 2 s" in said
    assert "@rank_zero_only" in said


class Kernels(TorchDispatchMode):
    """Counts operations that compute, collectives among them: views and allocations are none; and the most bytes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = self.peak = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        on_host = isinstance(out, Tensor) and out.is_cpu and out.ndim == 0  # a number that a kernel is given
        self.count += not (is_view or on_host or "empty" in name or name == "promote_types")
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        return out

    def hold(self, x: Tensor) -> None:
        """Count a tensor's memory until it is free."""
        storage = x.untyped_storage()
        number, size = storage_id(storage), storage.nbytes()
        if number in self._held:
            return
        self._held.add(number)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._free, number, size)

    def _free(self, number: int, size: int) -> None:
        self._held.discard(number)
        self.bytes -= size


@sees("a GPU's logits in chunks of a CPU's cache", "_LogitChunks.__init__", "self.few if self.on_cpu else tokens", "self.few")
@pytest.mark.parametrize(
    ("dtype", "loss", "kernels", "peak"),
    [
        (torch.float32, torch.float32, 31, 2.01),
        (torch.bfloat16, torch.float32, 46, 2.26),
        (torch.bfloat16, torch.bfloat16, 48, 2.26),
    ],
)
def test_a_loss_is_few_kernels_where_there_is_no_cache_to_fill(dtype, loss, kernels, peak):
    """One rank of tp 8 of 128,256 words on the meta device, forward and backward; the peak is told in sizes of the logits."""
    groups = ParallelGroups.silent(ProcessTopology(["dp", "tp"], [1, 8]), 0)
    x = torch.empty(8192, 16032, dtype=dtype, device="meta", requires_grad=True)
    target = torch.empty(8192, dtype=torch.long, device="meta")
    logits = ShardedLogits.wrap(x.view_as(x), VocabPart(Shard.by_vocabulary(128256, 8), groups["tp"], 0)).to(loss)
    one = torch.empty((), dtype=loss, device="meta")
    with Kernels() as watch:
        watch.hold(x)
        F.cross_entropy(logits, target).backward(one)
    assert watch.count <= kernels
    assert watch.peak <= peak * x.nbytes


@sees("a chunk of the gradient made over the one before", "_ChunkGrads.rooms", "// (1 + ratio)", "// ratio")
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_a_gradient_that_is_made_behind_itself(options):
    """Of a narrow type, in chunks as large as memory allows rather than a cache: float32 for float64, to its last bit."""
    groups = ParallelGroups.silent(ProcessTopology(["dp", "tp"], [1, 1]), 0)
    tokens, words = 96, 2**17
    x = torch.randn(tokens, words, generator=torch.Generator().manual_seed(0)).mul_(3).requires_grad_()
    target = torch.arange(0, words, words // tokens)[:tokens]
    target[5] = -100
    logits = ShardedLogits.wrap(x.view_as(x), VocabPart(Shard.by_vocabulary(words, 1), groups["tp"], 0))
    got = F.cross_entropy(logits.with_part(StoredLogits(logits.local, torch.float64, chunk=tokens)), target, **options)
    wanted = F.cross_entropy(x.double(), target, **options)
    assert got.item() == pytest.approx(wanted.item(), rel=1e-12)
    (mine,), (grad,) = torch.autograd.grad(got, x), torch.autograd.grad(wanted, x)
    assert torch.allclose(mine, grad, rtol=2**-23, atol=1e-12)
