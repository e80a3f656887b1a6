"""Ring attention: each rank keeps its queries, and keys and values travel past them a chunk at a time (arXiv 2310.01889).

A rank's result over some of the keys is a part of a softmax, known with the logarithm of its sum; parts are merged as in the
blocks of flash attention (arXiv 2205.14135). The next chunk is under way while the present one is computed with. In the backward
keys and values travel again and their gradients with them, one rank behind, until they are back where they belong.

No rank ever has more of the keys and values than its own chunk and two others, and what is kept for the backward is as long as
its own chunk. Within a chunk torch's own fused kernel computes (:func:`_kernel`); what it can't compute does not go round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_seqpar.context.chunks import Chunks, Ranges, pass_on
from lightning_seqpar.distributed.autograd import once_differentiable
from lightning_seqpar.distributed.collectives import passes_none


class Piece(NamedTuple):
    """Queries and keys that are multiplied in one go, as (start, stop) of what the rank has of each."""

    rows: tuple[int, int]  # among this rank's queries
    keys: tuple[int, int]  # among the keys of the chunk that is here
    diagonal: bool  # whether query i of the piece reads its keys 0 to i alone; else each query reads all of them
    columns: tuple[int, int]  # of the keys in the whole sequence where they are one run of it, as masks need them


def pieces(queries: Ranges, keys: Ranges, causal: bool) -> Iterator[Piece]:
    """What there is to compute of the queries and the keys that lie at these positions of their sequences.

    Causal attention of two runs of positions is at most three rectangles and one square on the diagonal; what lies in the future
    is in none of them.

    >>> [(piece.rows, piece.keys, piece.diagonal) for piece in pieces(((0, 2), (6, 8)), ((2, 4), (4, 7)), True)]
    [((2, 4), (0, 2), False), ((2, 4), (2, 4), False), ((2, 3), (4, 5), True), ((3, 4), (4, 5), False)]
    """
    total = sum(stop - start for start, stop in queries)
    at_key = 0
    for first, last in keys:
        shift = at_key - first  # from a position of the whole to an index into the chunk
        at_key += last - first
        if not causal:
            if total and first < last:
                yield Piece((0, total), (first + shift, last + shift), False, (first, last))
            continue
        at_row = 0
        for start, stop in queries:
            move = at_row - start
            at_row += stop - start
            # Queries before low see none of the keys, nor any those from high on.
            low, high = max(start, first), min(stop, last)
            for rows, columns, diagonal in (
                ((low, stop), (first, min(high, low)), False),
                ((low, high), (low, high), True),
                ((max(high, low), stop), (low, high), False),
            ):
                if rows[0] < rows[1] and columns[0] < columns[1]:
                    keys_here = columns[0] + shift, columns[1] + shift
                    yield Piece((rows[0] + move, rows[1] + move), keys_here, diagonal, columns)


@dataclass(frozen=True)
class Ring:
    """What a ring attention needs to know beside its tensors, as :func:`ring_attention` is given it."""

    queries: Chunks
    keys: Chunks
    is_causal: bool
    scale: float
    gathered: bool = False  # keys and values are whole on this rank: a ring of one

    @property
    def size(self) -> int:
        """Ranks in the ring."""
        return 1 if self.gathered else self.keys.size

    @property
    def rank(self) -> int:
        """This rank in the ring."""
        return 0 if self.gathered else self.keys.rank

    def count(self, source: int) -> int:
        """How many keys the rank ``source`` has."""
        return self.keys.length if self.gathered else self.keys.counts[source]

    def pieces(self, source: int, masked: bool) -> list[Piece]:
        """What this rank computes with the chunk of the rank ``source``."""
        runs = ((0, self.keys.length),) if self.gathered else self.keys.ranges[source]
        queries = self.queries.ranges[self.queries.rank]
        if self.is_causal or masked:
            return list(pieces(queries, runs, self.is_causal))
        # Positions do not matter: all runs in one go.
        return list(pieces(queries, ((0, self.count(source)),), False))


class _Block(NamedTuple):
    """One piece's tensors: queries ``[b, heads, rows, d]``, keys and values ``[b, heads, n, d]``, mask ``[.., .., rows, n]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # of bool
    diagonal: bool
    scale: float

    @property
    def added(self) -> Tensor | None:
        """The mask as what is added to the scores."""
        if self.mask is None:
            return None
        return torch.zeros_like(self.mask, dtype=self.q.dtype).masked_fill_(~self.mask, float("-inf"))


class _Part(NamedTuple):
    """The result over some of the keys, and ``[b, heads, rows]`` the logarithm of its softmax's sum; ``-inf`` without a key.

    The logarithms of parts are float64: what they lose when parts are merged, all weights of a row would have lost.
    """

    out: Tensor
    lse: Tensor


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32 for 16-bit tensors."""
    return torch.promote_types(dtype, torch.float32)


# ---- torch's kernels -------------------------------------------------------------------------------------------


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """The kind of device whose fused kernel computes such attention; None for none.

    A mask of numbers is for none: where it is large and negative in all of a row, kernels lose the sum over the row in the
    logarithm that they return.
    """
    dtypes = {_dtype(x) for x in (q, k, v)}
    if q.shape[-1] != v.shape[-1] or (mask is not None and mask.dtype != torch.bool) or len(dtypes) > 1:
        return None
    (dtype,) = dtypes
    if q.device.type == "cpu" and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return "cpu"
    if q.is_cuda and torch.version.hip is None and mask is None and dtype in (torch.bfloat16, torch.float16):
        fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)
        return "cuda" if fits and torch.backends.cuda.flash_sdp_enabled() else None
    return None


def _last_dim_close(*tensors: Tensor) -> list[Tensor]:
    """The tensors with the numbers of a head next to each other, which kernels ask for."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _forward(block: _Block) -> _Part:
    """Attention of one piece."""
    q, k, v = _last_dim_close(block.q, block.k, block.v)
    mask, diagonal, scale = block.mask, block.diagonal, block.scale
    if q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, diagonal, False, scale=scale)[:2]
        lse = lse[..., : q.shape[-2]]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, diagonal, attn_mask=block.added, scale=scale
        )
    lse = lse.double()
    if mask is not None:  # the kernel gives 0 for the logarithm of no numbers
        lse = lse.masked_fill(~mask.any(-1).expand_as(lse), float("-inf"))
    return _Part(out.to(_sum_dtype(q.dtype)), lse)


def _backward(block: _Block, grad: Tensor, whole: _Part) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a piece's q, k and v, given the result over all keys and its gradient."""
    q, k, v, grad, out = _last_dim_close(block.q, block.k, block.v, grad, whole.out)
    lse = whole.lse.contiguous()
    if q.is_cuda:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, block.diagonal, seed, unused,
            scale=block.scale,
        )  # fmt: skip
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.diagonal, attn_mask=block.added, scale=block.scale
        )
    return grads[0], grads[1], grads[2]


# ---- parts of a softmax ----------------------------------------------------------------------------------------


def _finite(lse: Tensor) -> Tensor:
    """The logarithms of sums, and 0 for rows that see no key, where ``-inf - -inf`` would be no number."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _merge(into: _Part, part: _Part) -> None:
    """Add to the result over some keys, in place, that over others."""
    lse = torch.logaddexp(into.lse, part.lse)
    old, new = ((one.lse - _finite(lse)).exp() for one in (into, part))
    into.out.mul_(old[..., None]).add_(part.out * new[..., None].to(part.out.dtype))
    into.lse.copy_(lse)


class _Heads:
    """Keys and values of one chunk as one row of numbers, which travels, and as tensors ``[b, heads, n, d]``."""

    def __init__(self, k: Tensor, repeats: int) -> None:
        self._lead, self._width, self._repeats = k.shape[:2], k.shape[-1], repeats

    def numbers(self, length: int) -> int:
        """How many numbers the keys and values of ``length`` positions are."""
        return 2 * prod(self._lead) * length * self._width

    def split(self, row: Tensor, length: int) -> Tensor:
        """Keys and values, as views of the row: ``[2, b, heads, n, d]``."""
        return row.view(2, *self._lead, length, self._width)

    def repeated(self, x: Tensor) -> Tensor:
        """One head for each of the queries' heads."""
        return x if self._repeats == 1 else x.repeat_interleave(self._repeats, 1)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the heads that one was repeated to."""
        return x if self._repeats == 1 else x.unflatten(1, (-1, self._repeats)).sum(2)


def _joined(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.detach().reshape(-1), v.detach().reshape(-1)])


def _cut(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """A stretch along a dim, which may have the size 1 for any."""
    return x if x.shape[dim] == 1 else x.narrow(dim, start, stop - start)


def _block(ring: Ring, piece: Piece, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> _Block:
    """The tensors of a piece."""
    if mask is not None:
        mask = _cut(_cut(mask, -2, *piece.rows), -1, *piece.columns)
    rows, keys = slice(*piece.rows), slice(*piece.keys)
    return _Block(q[..., rows, :], k[..., keys, :], v[..., keys, :], mask, piece.diagonal, ring.scale)


def _travel(ring: Ring, heads: _Heads, k: Tensor, v: Tensor, masked: bool) -> Iterator[tuple[int, list[Piece], Tensor, Tensor]]:
    """Each rank's keys and values, one head for each of the queries', as they pass by, with its number and what is computed."""
    here, size = _joined(k, v), ring.size
    for step in range(size):
        source = (ring.rank - step) % size
        coming = None
        if step < size - 1:
            coming = pass_on(here, heads.numbers(ring.count((source - 1) % size)), ring.keys)
        plan, both = ring.pieces(source, masked), heads.split(here, ring.count(source))
        some_k, some_v = map(heads.repeated, both) if plan else both
        yield source, plan, some_k, some_v
        if coming is not None:
            here = coming()


class _RingAttention(torch.autograd.Function):
    """Forward: q ``[b, heads, s/cp, d]``, k and v ``[b, groups, t/cp, d]`` → ``[b, heads, s/cp, d]``; k and v go round.

    Backward: k and v go round again, and their gradients with them until each is where it came from:
    ``dk_r = sum over q of what rank q made of the keys of r``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        ctx.set_materialize_grads(False)
        heads = _Heads(k, q.shape[1] // k.shape[1])
        dtype = _sum_dtype(q.dtype)
        # Heads and positions lie in memory as those of q do, as torch's kernels have it: models join heads by a view.
        found = _Part(torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float64))
        for _, plan, some_k, some_v in _travel(ring, heads, k, v, mask is not None):
            for piece in plan:
                part = _forward(_block(ring, piece, q, some_k, some_v, mask))
                rows = slice(*piece.rows)
                _merge(_Part(found.out[:, :, rows], found.lse[..., rows]), part)
        result = found.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, result, _finite(found.lse).to(dtype))
        ctx.ring, ctx.heads = ring, heads
        return result

    @staticmethod
    @once_differentiable
    @passes_none
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            return _RingAttention._grads(ctx, grad)

    @staticmethod
    def _grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        ring, heads, size = ctx.ring, ctx.heads, ctx.ring.size
        dtype = _sum_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        returning = None  # the gradients of the keys that are here, of the ranks where these were before
        for source, plan, some_k, some_v in _travel(ring, heads, k, v, mask is not None):
            length = ring.count(source)
            grads = q.new_zeros(heads.numbers(length), dtype=dtype)
            sums = heads.split(grads, length)
            for piece in plan:
                rows, columns = slice(*piece.rows), slice(*piece.keys)
                whole = _Part(out[..., rows, :], lse[..., rows])
                found = _backward(_block(ring, piece, q, some_k, some_v, mask), grad[..., rows, :], whole)
                dq[..., rows, :] += found[0]
                for total, one in zip(sums, found[1:], strict=True):
                    total[..., columns, :] += heads.summed(one.to(dtype))
            if returning is not None:
                grads += returning()
            if size > 1:
                returning = pass_on(grads, heads.numbers(ring.count((source - 1) % size)), ring.keys)
        home = grads if returning is None else returning()
        dk, dv = heads.split(home, ring.count(ring.rank))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype in which torch's function would get a tensor: under autocast that of autocast."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def can_ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Chunks, keys: Chunks) -> bool:
    """Whether :func:`ring_attention` can compute attention of whole sequences of these shapes: torch must have a fused kernel.

    Batch dims must be equal, heads of q a multiple of those of k and v, and a mask of bool, ``[..., s, t]`` up to dims of size 1.
    """
    if queries.group is not keys.group or _kernel(q, k, v, mask) is None:
        return False
    if not q.ndim == k.ndim == v.ndim >= 2 or not q.numel() or not k.numel() or not v.numel():
        return False
    if q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        return False
    if q.ndim > 2 and q.shape[-3] % k.shape[-3]:
        return False
    whole = (*q.shape[:-1], k.shape[-2])
    return mask is None or (
        2 <= mask.ndim <= q.ndim
        and all(size in (1, full) for size, full in zip(reversed(mask.shape), reversed(whole), strict=False))
    )


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    queries: Chunks,
    keys: Chunks,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    gathered: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of this rank's queries with the keys and values of all ranks.

    q ``[..., heads, s/cp, d]``, k and v ``[..., groups, t/cp, d]`` → ``[..., heads, s/cp, d]``, in which each group of keys serves
    ``heads / groups`` heads. Forward: k and v are sent on ``cp - 1`` times. Backward: likewise, and their gradients ``cp`` times,
    in float32 where they have 16 bits, so that they are rounded once. It has no second derivative.

    ``mask``, of bool, has the rows of this rank's queries and the columns of all keys, ``[..., s/cp, t]``; a ``scale`` of None is
    one over the root of ``d``. With ``gathered`` k and v are those of all ranks, ``[..., groups, t, d]``, and nothing is sent.
    """
    ring = Ring(queries, keys, is_causal, 1 / sqrt(q.shape[-1]) if scale is None else scale, gathered)
    lead, shape = q.shape[:-3], q.shape

    def flat(x: Tensor) -> Tensor:
        return x.reshape(prod(lead), x.shape[-3] if x.ndim > 2 else 1, *x.shape[-2:])

    if mask is not None:
        mask = mask[(None,) * (max(q.ndim, 4) - mask.ndim)]
        if mask.ndim > 4:
            batch = mask.shape[:-3]
            mask = mask.expand(*lead, *mask.shape[-3:]) if any(size > 1 for size in batch) else mask
            mask = mask.flatten(0, -4)
    q, k, v = (x.to(_dtype(x)) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _RingAttention.apply(flat(q), flat(k), flat(v), mask, ring)  # type: ignore[no-untyped-call]
    return out.reshape(shape)
