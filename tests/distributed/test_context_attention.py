"""Attention of parts of sequences, by every method, against torch's own of whole ones: results, gradients, traffic, memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_seqpar.context import attention  # noqa: F401  (fills the handlers)
from lightning_seqpar.context.chunks import Chunks, contiguous, enter, zigzag
from lightning_seqpar.context.seq_part import Place, SeqPart
from lightning_seqpar.distributed.counters import Traffic
from lightning_seqpar.testing import run_distributed
from tests.helpers.slices import rest
from tests.mutants import sees

BATCH, HEADS, WIDTH = 2, 4, 8
METHODS = ("ulysses", "ring", "all_gather")
DEALS = {"contiguous": contiguous, "zigzag": zigzag}
LENGTHS = (1, 3, 13, 16)


class Watch(TorchDispatchMode):
    """Notes the tensors that operations make, with the operations' names, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        found = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, torch.Tensor)]
        self.made += [(name, x.to("meta")) for x in found or [torch.empty(0)]]
        return out


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def part(x: torch.Tensor, method: str, deal: Any) -> SeqPart:
    """A leaf as the sequence of which this rank has its positions; its gradient will be the true one."""
    size, dim = dist.get_world_size(), x.ndim - 2
    chunks = Chunks(dist.group.WORLD, x.shape[dim], deal(x.shape[dim], size), method)
    return SeqPart.wrap(enter(x, dim, chunks), Place(chunks, dim))


def masks(s: int, t: int) -> dict[str, dict[str, Any]]:
    """Arguments beside q, k and v, by name; masks of numbers are those that get a gradient."""
    row, column = torch.arange(s)[:, None], torch.arange(t)
    documents = torch.stack([column // 5, column // 4])[:, None]  # [b, 1, t]
    real = torch.ones(BATCH, 1, 1, t, dtype=torch.bool)
    real[0, ..., t - t // 3 :] = False
    nothing = (row >= column) & (row != s // 2)  # one query that sees no key at all
    alibi = -(row - column).abs() * torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)[:, None, None]
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"is_causal": True},
        "scale": {"is_causal": True, "scale": 0.7},
        "window": {"attn_mask": (row >= column) & (row - column < 3)},
        "padding": {"attn_mask": real},
        "no keys": {"attn_mask": nothing},
        "alibi": {"attn_mask": alibi},
        "bias": {"attn_mask": numbers(8, BATCH, HEADS, s, t)},
        "bias of keys": {"attn_mask": numbers(9, HEADS, 1, t)},
    }
    if s == t:
        found["documents"] = {"attn_mask": (documents[..., None] == documents[..., None, :]) & (row >= column)}
    return found


def compare(
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    given: dict[str, Any],
    method: str,
    deals: tuple[Any, Any],
    *,
    dtype: torch.dtype = torch.float64,
    within: float = 1e-12,
) -> list[str]:
    """Attention of sequences in parts and of whole ones: what differs by more than ``within``, relative to the largest number."""
    mask = given.get("attn_mask")
    learned = mask is not None and mask.is_floating_point()
    weight = numbers(5, *shapes[0][:-1], shapes[2][-1], dtype=dtype)
    results = []
    for split in (False, True):
        leaves = [numbers(seed, *shape, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]
        more = dict(given)
        if learned:
            more["attn_mask"] = mask.to(dtype, copy=True).requires_grad_()
            leaves.append(more["attn_mask"])
        q, k, v = leaves[:3]
        if split:
            q = part(q, method, deals[0])
            k, v = (part(x, method, deals[1]) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, **more)
            assert isinstance(out, SeqPart), name
            out = out.whole()
        else:
            out = F.scaled_dot_product_attention(q, k, v, **more)
        (out * weight).sum().backward()
        grads = [leaf.grad for leaf in leaves]
        if split and learned:  # as of a parameter: the mean over ranks
            dist.all_reduce(grads[3])
            grads[3] /= dist.get_world_size()
        results.append([out.detach(), *grads])
    wrong = []
    largest = max(float(x.abs().max()) for x in results[0]) or 1.0
    for what, whole, parts in zip(("out", "dq", "dk", "dv", "dmask"), *results, strict=False):
        error = float((whole.double() - parts.double()).abs().max()) / largest
        if not error <= within:  # NaN too
            wrong.append(f"{name}, {method}: {what} differs by {error:.1e}")
    return wrong


def sizes(s: int, t: int, groups: int = HEADS, width: int = WIDTH) -> tuple[tuple[int, ...], ...]:
    return (BATCH, HEADS, s, WIDTH), (BATCH, groups, t, WIDTH), (BATCH, groups, t, width)


def check_equal(method: str) -> tuple[int, list[str]]:
    """All kinds of attention with all dealings; the number of them, and what was wrong."""
    wrong, number = [], 0

    def check(*args: Any, **more: Any) -> None:
        nonlocal number
        number += 1
        wrong.extend(compare(*args, **more))

    for (dealt, deal), length in product(DEALS.items(), LENGTHS):
        for kind, given in masks(length, length).items():
            check(f"{kind}, {dealt}, {length}", sizes(length, length), given, method, (deal, deal))
    for (dealt, deal), groups in product(DEALS.items(), (1, 2, 4)):
        for kind, given in masks(13, 13).items():
            more = {**given, "enable_gqa": True}
            check(f"{groups} groups, {kind}, {dealt}", sizes(13, 13, groups), more, method, (deal, deal))
    for dealt, deal in DEALS.items():  # which the ring can't, so that the mask is made
        for kind in ("causal", "scale"):
            check(f"one head for all, {kind}, {dealt}", sizes(13, 13, 1), masks(13, 13)[kind], method, (deal, deal))
    for dealt, (s, t) in product(((contiguous, zigzag), (zigzag, contiguous), (zigzag, zigzag)), ((13, 7), (3, 16), (16, 1))):
        for kind, given in masks(s, t).items():
            check(f"{s} queries of {t} keys, {kind}, {dealt}", sizes(s, t), given, method, dealt)
    for kind, given in masks(13, 13).items():
        check(f"other values, {kind}", sizes(13, 13, width=5), given, method, (zigzag, zigzag))
        if (mask := given.get("attn_mask")) is None or mask.ndim == 3 or mask.shape[:-2] in ((), (1,)):
            flat = tuple((HEADS, 13, x) for x in (WIDTH, WIDTH, WIDTH))
            check(f"three dims, {kind}", flat, given, method, (zigzag, zigzag))
        more = {**given, "attn_mask": mask[None]} if mask is not None and mask.ndim == 4 else given
        five = tuple((3, *shape) for shape in sizes(13, 13))
        check(f"five dims, {kind}", five, more, method, (zigzag, contiguous))
    for dtype, within in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        for kind, given in masks(13, 13).items():
            check(f"{dtype}, {kind}", sizes(13, 13), given, method, (zigzag, zigzag), dtype=dtype, within=within)
    return number, wrong


@sees(
    "cp: the causal mask of the ring by local index",
    "Ring.pieces",
    "queries = self.queries.ranges[self.queries.rank]",
    "queries = ((0, self.queries.counts[self.queries.rank]),)",
    case="2-all_gather",
)
@sees(
    "cp: keys of the wrong neighbour",
    "ring:_travel",
    "source = (ring.rank - step) % size",
    "source = (ring.rank + step) % size",
    case="4-ring",
)
@sees("cp: chunks merged without their sums", "_merge", "one.lse - _finite(lse)", "one.lse - one.lse", case="2-all_gather")
@sees(
    "cp: gradients of keys stay with the last rank",
    "_RingAttention._grads",
    "home = grads if returning is None else returning()",
    "home = grads",
    case="4-ring",
)
@sees(
    "cp: the zig-zag undone twice",
    "_in_order",
    "return x.index_select(-2, chunks.order(x.device))",
    "return x.index_select(-2, chunks.order(x.device)).index_select(-2, chunks.order(x.device))",
    case="2-ulysses",
)
@sees(
    "cp: the causal mask of gathered keys by local index",
    "attention:_all_gather",
    "at = chunks.positions(q.device)",
    "at = torch.arange(chunks.local_length, device=q.device)",
    case="2-all_gather",
)
@pytest.mark.parametrize(
    ("cp", "method"),
    [(2, "ulysses"), (2, "all_gather"), (4, "ring"), rest(2, "ring"), rest(4, "ulysses"), rest(4, "all_gather")],
)
def test_attention_of_parts_equals_that_of_the_whole(cp, method):
    for number, wrong in run_distributed(check_equal, cp, method):
        assert not wrong, "\n".join(wrong)
        assert number > 200


# ---- which method ----------------------------------------------------------------------------------------------


def used(method: str, heads: int, **given: Any) -> str:
    """The method by which attention is computed, told by what is sent."""
    q, k, v = (part(numbers(seed, 2, heads, 12, WIDTH), method, contiguous) for seed in range(3))
    with Traffic() as traffic:
        F.scaled_dot_product_attention(q, k, v, **given)
    names = {"send": "ring", "alltoall": "ulysses", "all_gather": "all_gather"}
    (operation,) = traffic.calls
    return names[operation]


def check_choice() -> None:
    assert used("auto", 4) == "ulysses"
    assert used("auto", 3) == "ring"
    assert used("ring", 4) == "ring"
    assert used("all_gather", 4) == "all_gather"
    assert used("ring", 4, dropout_p=0.1) == "all_gather"
    assert used("auto", 3, dropout_p=0.1) == "all_gather"
    assert used("auto", 3, attn_mask=torch.ones(12, 12).tril().bool()) == "ring"
    assert used("ring", 4, attn_mask=torch.zeros(12, 12)) == "all_gather"
    with pytest.raises(ValueError, match=r"cp_method='ulysses' with cp=2: an attention has 3 heads .* use cp_method='auto' or"):
        used("ulysses", 3)
    for method in METHODS:
        with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
            used(method, 4, is_causal=True, attn_mask=torch.ones(12, 12).bool())
    # Keys that every rank has whole: nothing is sent.
    q, k = numbers(0, 2, 4, 12, WIDTH), numbers(1, 2, 4, 5, WIDTH)
    for method, is_causal in product((*METHODS, "auto"), (False, True)):
        with Traffic() as traffic:
            out = F.scaled_dot_product_attention(part(q, method, zigzag), k, k, is_causal=is_causal)
        assert not traffic.backend_calls
        torch.testing.assert_close(out.whole(), F.scaled_dot_product_attention(q, k, k, is_causal=is_causal))


def check_masks_in_parts() -> None:
    """A bias that was itself computed of a sequence in parts, along the queries or along the keys."""
    leaves = [numbers(seed, *shape) for seed, shape in enumerate((*sizes(13, 13), (BATCH, HEADS, 13, 13)))]
    weight = numbers(5, *sizes(13, 13)[0])
    for method, along_keys in product(METHODS, (False, True)):
        grads = []
        for split in (False, True):
            q, k, v, bias = tensors = [x.clone().requires_grad_() for x in leaves]
            if split:
                q, k, v = (part(x, method, zigzag) for x in (q, k, v))
                bias = part(bias.mT, method, zigzag).mT if along_keys else part(bias, method, zigzag)
                assert bias.place.dim == (3 if along_keys else 2)
            out = F.scaled_dot_product_attention(q, k, v, bias)
            ((out.whole() if split else out) * weight).sum().backward()
            grads.append([x.grad for x in tensors])
        for whole, parts in zip(*grads, strict=True):
            torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def check_dropout() -> None:
    """Every weight is dropped by itself, and the ranks draw alike again behind the attention."""
    s, p = 48, 0.25
    zeros, ones = torch.zeros(BATCH, HEADS, s, WIDTH), torch.ones(BATCH, HEADS, s, WIDTH)
    for method in (*METHODS, "auto"):
        outs = []
        for _ in range(2):
            torch.manual_seed(3)
            out = F.scaled_dot_product_attention(*(part(x, method, zigzag) for x in (zeros, zeros, ones)), dropout_p=p)
            outs.append(out.whole())
        assert torch.equal(*outs)  # a recompute draws the same
        rows = outs[0][..., 0]  # of each query the share of keys that are kept, over 1 - p
        assert len(rows.unique()) > 10
        assert abs(float(rows.mean()) - 1) < 5 * (p / (1 - p) / s / rows.numel()) ** 0.5
        # Zig-zag: rank 0 has the first and the last quarter of the queries; Ulysses: it has the first half of the heads.
        theirs = rows[:, :2], rows[:, 2:]
        if method in ("ring", "all_gather"):
            theirs = torch.cat([rows[..., :12], rows[..., 36:]], -1), rows[..., 12:36]
        assert not torch.equal(*theirs)
        drawn = torch.rand(1)
        everyone = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, drawn)
        assert torch.equal(*everyone)


def check_second_derivative() -> None:
    q, k, v = (numbers(seed, 2, 3, 12, WIDTH).requires_grad_() for seed in range(3))
    out = F.scaled_dot_product_attention(*(part(x, "ring", zigzag) for x in (q, k, v))).whole()
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.pow(2).sum().backward()


def check_autocast() -> None:
    """Under autocast torch's function gets 16-bit numbers, whatever it is called with."""
    for method, last in product(METHODS, (torch.float32, torch.bfloat16)):
        q, k, v = (numbers(i, *shape).float().requires_grad_() for i, shape in enumerate(sizes(12, 12)))
        with torch.autocast("cpu", torch.bfloat16):
            want = F.scaled_dot_product_attention(q, k, v)
            with Traffic() as traffic:
                got = F.scaled_dot_product_attention(*(part(x, method, zigzag) for x in (q, k, v.to(last))))
            got.local.float().sum().backward()
        assert (traffic.calls["send"] > 0) == (method == "ring")
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got.whole(), want, rtol=1e-2, atol=1e-2)


def check_layout() -> None:
    """Heads that a model took apart by a view can be joined by one, as behind torch's function."""
    kinds = [masks(13, 13)[kind] for kind in ("plain", "causal", "window", "padding")]  # those of torch's kernels
    for method, deal, given in product(METHODS, DEALS.values(), kinds):
        wide = numbers(0, BATCH, 13, HEADS * WIDTH)
        chunks = Chunks(dist.group.WORLD, 13, deal(13, dist.get_world_size()), method)
        parts = SeqPart.wrap(enter(wide, 1, chunks), Place(chunks, 1))
        results = []
        for x in (wide, parts):
            q = x.view(BATCH, 13, HEADS, WIDTH).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, q, q, **given)
            rows = out.local if isinstance(out, SeqPart) else out
            assert rows.transpose(1, 2).is_contiguous()  # no copy is made
            results.append(out.transpose(1, 2).view(BATCH, 13, HEADS * WIDTH))
        assert isinstance(results[1], SeqPart)
        torch.testing.assert_close(results[1].whole(), results[0], rtol=1e-12, atol=1e-12)


# ---- what is sent, and what is kept ----------------------------------------------------------------------------


def step(
    method: str, length: int, groups: int = HEADS, width: int = WIDTH, **given: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """What the forward and the backward of attention give to the backend, in numbers by operation; nothing else is counted."""
    leaves = [numbers(seed, *shape) for seed, shape in enumerate(sizes(length, length, groups, width))]
    parts = [part(x, method, zigzag) for x in leaves]
    local = [x.local.detach().requires_grad_() for x in parts]
    q, k, v = (x.like(y) for x, y in zip(parts, local, strict=True))
    with Traffic() as forward:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=groups != HEADS, **given)
    with Traffic() as backward:
        out.local.backward(torch.ones_like(out.local))
    told = []
    for traffic in (forward, backward):
        told.append({name: size // 8 for name, size in traffic.backend_bytes.items() if size})
    return told[0], told[1]


def check_traffic() -> None:
    cp = dist.get_world_size()
    length = 8 * cp
    own = BATCH * length * HEADS * WIDTH // cp  # numbers of [b, s/cp, h]
    # Ulysses: q, k, v and the result, of N·h/P numbers each, of which a P-th goes to each rank.
    forward, backward = step("ulysses", length)
    assert forward == backward == {"alltoall_base": 4 * own}
    # Two groups of keys: where there are as many ranks or fewer, keys and values are half as much.
    forward, backward = step("ulysses", length, groups=2)
    expected = 3 * own if cp == 2 else 4 * own
    assert forward == backward == {"alltoall_base": expected}
    # Ring: k and v cp - 1 times; in the backward their gradients too, which go home.
    forward, backward = step("ring", length, is_causal=True)
    assert forward == {"send": (cp - 1) * 2 * own}
    assert backward == {"send": (cp - 1) * 2 * own + cp * 2 * own}
    forward, backward = step("ring", length, groups=1)
    assert forward == {"send": (cp - 1) * 2 * own // HEADS}
    assert backward == {"send": (2 * cp - 1) * 2 * own // HEADS}


def check_memory() -> None:
    """No tensor that the ring makes or keeps is as long as the sequence, or as large as all keys."""
    cp, length = dist.get_world_size(), 13 * dist.get_world_size()
    parts = [part(numbers(i, *shape), "ring", zigzag) for i, shape in enumerate(sizes(length, length))]
    local = [x.local.detach().requires_grad_() for x in parts]
    q, k, v = (x.like(y) for x, y in zip(parts, local, strict=True))
    kept: list[tuple[int, ...]] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(x.shape))
        return x

    with Watch() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with Watch() as backward:
        out.local.backward(torch.ones_like(out.local))
    assert all(x.grad is not None for x in local)
    all_keys = BATCH * HEADS * length * WIDTH
    assert len(kept) == 5
    assert max(max(shape, default=0) for shape in kept) == length // cp
    for watch, operation in (
        (forward, "_scaled_dot_product_flash_attention_for_cpu"),
        (backward, "_scaled_dot_product_flash_attention_for_cpu_backward"),
    ):
        names = [name for name, _ in watch.made]
        for name, made in watch.made:
            if made.ndim > 1:  # a row of numbers has all dims in one
                assert max(made.shape) < length, (name, made.shape)
            assert made.numel() < all_keys, (name, made.shape)
        # The next chunk is under way before the present one is computed with.
        assert names.index("send") < names.index(operation)


def check_gathered() -> None:
    """Keys and values are whole, and no mask of this rank's queries by all keys is made or kept."""
    length = 64 * dist.get_world_size()
    parts = [part(numbers(i, *shape), "all_gather", zigzag) for i, shape in enumerate(sizes(length, length))]
    q, k, v = (x.like(x.local.detach().requires_grad_()) for x in parts)
    kept: list[tuple[int, ...]] = []
    with Watch() as made, torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(tuple(x.shape)), x)[1], lambda x: x):
        F.scaled_dot_product_attention(q, k, v, is_causal=True).local.sum().backward()
    assert max(shape[-2] for shape in kept if len(shape) > 1) >= length * 3 // 4  # as far as the last query sees
    every = [*kept, *(tuple(x.shape) for _, x in made.made)]
    assert not [shape for shape in every if len(shape) > 1 and min(shape[-2:]) >= 64]


def check_on_two() -> None:
    for check in (
        check_choice, check_masks_in_parts, check_dropout, check_second_derivative, check_autocast, check_layout, check_gathered,
        check_traffic,
    ):  # fmt: skip
        check()


def test_methods_masks_draws_types_and_memory():
    run_distributed(check_on_two, 2)


def check_on_four() -> None:
    check_traffic()
    check_memory()


@pytest.mark.more
def test_traffic_and_memory_on_four_ranks():
    run_distributed(check_on_four, 4)
