"""Attention of queries of which each rank holds a part, and the axis that deals sequences out to the ranks as its method asks.

============  ========================================================  ===========================================
method        what a rank computes                                      what it sends, in numbers of ``[b, s/cp, h]``
============  ========================================================  ===========================================
ulysses       all positions of ``heads / cp`` heads (arXiv 2309.14509)  q, k, v and the result, all-to-all
ring          its own positions, keys and values a chunk at a time      k and v, ``cp - 1`` times, to its neighbour
all_gather    its own positions, of all keys and values                 k and v, to all
============  ========================================================  ===========================================

``auto`` takes the first of them that can compute the attention: ulysses where the heads divide by cp, ring for shapes that
:func:`~lightning_seqpar.context.ring.can_ring` knows. Attention that drops out weights (``dropout_p``) does not go round: torch's
kernels draw by the position of a weight in the block that they are given, and can't draw the same for a chunk in the backward; it
gathers. Keys and values that every rank has whole (of a prefix, a memory) need nothing sent at all.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.context.chunks import Chunks, contiguous, enter, heads_to_positions, positions_to_heads, zigzag
from lightning_seqpar.context.operations import handles
from lightning_seqpar.context.ring import can_ring, ring_attention
from lightning_seqpar.context.seq_part import Place, SeqPart, lies_over_tp, over_tp, whole_of
from lightning_seqpar.distributed.rng import drawn_apart

Method = Literal["auto", "ring", "ulysses", "all_gather"]
"""The field ``cp_method`` of the configuration."""

_MANY = 256
"""Lengths whose chunks are remembered; with variable lengths those that were used longest ago are forgotten."""


class ContextAxis:
    """Deals sequences out over the ranks of the axis ``cp``, between which ``method`` computes attention."""

    def __init__(self, group: ProcessGroup, method: Method = "auto") -> None:
        self.group, self.method = group, method
        self.size, self.rank = group.size(), group.rank()
        # The same object for the same length, so that what it holds on the device is made once.
        self.deal_out = functools.lru_cache(_MANY)(self._deal_out)

    def _deal_out(self, length: int) -> Chunks:
        """How a sequence of ``length`` positions is dealt out: in runs, or in zig-zag for the ring, for equally much work."""
        deal = zigzag if self.method == "ring" else contiguous
        return Chunks(self.group, length, deal(length, self.size), self.method)

    def part(self, x: Tensor, dim: int) -> SeqPart:
        """An activation as a part of a sequence: ``[b, s, h]``, of which this rank holds ``[b, s/cp, h]``.

        What is a part along ``dim`` already is one still. Forward: nothing is sent. Backward: all-gather.
        """
        if isinstance(x, SeqPart) and x.place.is_plain and x.place.dim == dim:
            return x
        whole: Tensor = whole_of(x)
        chunks = self.deal_out(whole.shape[dim])
        local = enter(whole, dim, chunks)
        return SeqPart.wrap(local, Place(chunks, dim))


Options = dict[str, Any]
"""Of the arguments of ``F.scaled_dot_product_attention`` ``dropout_p``, ``scale`` and ``enable_gqa``, where they are given."""


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options, chunks: Chunks, *, is_causal: bool) -> Tensor:
    """torch's own, on plain tensors; each rank drops out for itself."""
    with drawn_apart(chunks.rank) if options.get("dropout_p") else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **options)


@handles("scaled_dot_product_attention")
def scaled_dot_product_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.scaled_dot_product_attention`` of queries ``[..., heads, s, d]`` of which each rank holds ``[..., heads, s/cp, d]``."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if not isinstance(q, SeqPart):
        return NotImplemented
    place = q._place
    if place.chunks.axis == "tp":
        return NotImplemented  # between blocks: whole
    if any(map(lies_over_tp, given.values())):  # whole over tp alone
        return func(**{name: over_tp(x) if isinstance(x, SeqPart) else x for name, x in given.items()})
    if place.dim != q.ndim - 2 or not place.is_plain:
        return NotImplemented
    options: Options = {name: given[name] for name in ("dropout_p", "scale", "enable_gqa") if name in given}
    is_causal = given.get("is_causal", False)
    if is_causal and mask is not None:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    method = place.chunks.method
    if method == "all_gather" or not are_parts(q, k, v):
        return _all_gather(q, k, v, mask, is_causal, options)
    heads, divides = (q.shape[-3], q.shape[-3] % place.chunks.size == 0) if q.ndim > 2 else (1, False)
    if method != "ring" and divides and _served(q, k, v, options):
        return _ulysses(q, k, v, mask, is_causal, options)
    if method == "ulysses" and not divides:
        raise ValueError(
            f"cp_method='ulysses' with cp={place.chunks.size}: an attention has {heads} heads (on a rank), which must divide by "
            "cp; use cp_method='auto' or 'ring', or a cp that divides them"
        )
    if _rings(q, k, v, mask, options, k._place.chunks):
        rows, keys, scale = _own_rows(mask, place, q.shape[-2]), k._place.chunks, options.get("scale")
        out = ring_attention(q._local, k._local, v._local, rows, place.chunks, keys, is_causal=is_causal, scale=scale)
        return q.like(out)
    return _all_gather(q, k, v, mask, is_causal, options)


def are_parts(q: Any, *others: Any) -> bool:
    """Whether keys and values are parts too, dealt out alike, over the ranks of the queries ``[..., heads, s/cp, d]``."""
    for x in others:
        if not isinstance(x, SeqPart) or x.ndim != q.ndim or x._place.dim != x.ndim - 2:
            return False
        if not x._place.same(others[0]._place):
            return False
    return others[0]._place.is_plain and others[0]._place.chunks.group is q._place.chunks.group


def _own_rows(mask: Any, place: Place, queries: int) -> Tensor | None:
    """Of a mask ``[..., s, t]`` the rows of this rank's queries."""
    if mask is None:
        return None
    if isinstance(mask, SeqPart):
        if mask._place.dim == mask.ndim - 2 and mask._place.same(place):
            return mask._local
        mask = mask.whole()
    found: Tensor = mask
    return place.own(found, found.ndim - 2) if found.ndim > 1 and found.shape[-2] == queries else found


def _all_gather(q: SeqPart, k: Any, v: Any, mask: Any, is_causal: bool, options: Options) -> SeqPart:
    """Own positions of the queries with all keys and values."""
    place, chunks = q._place, q._place.chunks
    keys, values = whole_of(k), whole_of(v)
    rows = _own_rows(mask, place, q.shape[-2])
    if is_causal:
        reach = max((stop for _, stop in chunks.ranges[chunks.rank]), default=0)
        reach = min(max(reach, 1), keys.shape[-2])
        keys, values = keys[..., :reach, :], values[..., :reach, :]
        seen = chunks.sliced(0, reach)
        if _rings(q, keys, values, None, options, seen):  # pieces need no mask of s/cp × s
            scale = options.get("scale")
            out = ring_attention(q._local, keys, values, None, chunks, seen, is_causal=True, scale=scale, gathered=True)
            return q.like(out)
        at = chunks.positions(q.device)
        rows = at[:, None] >= torch.arange(reach, device=q.device)
    out = _run(q._local, keys, values, rows, options, chunks, is_causal=False)
    if rows is not None and rows.requires_grad and not chunks.local_length:
        out = out + rows.sum()  # without queries torch leaves out the mask's gradient, which is 0 here and not None
    return q.like(out)


def _served(q: SeqPart, k: SeqPart, v: SeqPart, options: Options) -> bool:
    """Whether torch's function takes so many heads of keys and values for those of queries."""
    heads, groups = q.shape[-3], k.shape[-3]
    return v.shape[-3] == groups and (groups in (1, heads) or (bool(options.get("enable_gqa")) and heads % groups == 0))


def _rings(q: SeqPart, k: Tensor, v: Tensor, mask: Any, options: Options, keys: Chunks) -> bool:
    """Whether ring attention can be used with keys that are dealt out like this."""
    grouped = q.ndim > 2 and k.shape[-3] != q.shape[-3]
    if options.get("dropout_p") or (grouped and not options.get("enable_gqa")):
        return False
    return can_ring(q, k, v, mask, q._place.chunks, keys)


def dealt_heads(q: SeqPart, k: SeqPart, v: SeqPart) -> tuple[Tensor, Tensor, Tensor]:
    """All positions of this rank's heads: ``[..., heads, s/cp, d]`` → ``[..., heads/cp, s, d]`` each."""
    size, heads, groups = q._place.chunks.size, q.shape[-3], k.shape[-3]
    sides = []
    for x in (k, v):
        local = x._local
        if groups % size:  # fewer heads of keys than ranks: each is sent to all that need it
            some = range(1, heads // groups + 1)
            times = next(t for t in some if groups * t % size == 0 and heads % (groups * t) == 0)
            local = local.repeat_interleave(times, -3)
        sides.append(positions_to_heads(local, x._place.chunks))
    return positions_to_heads(q._local, q._place.chunks), sides[0], sides[1]


def _ulysses(q: SeqPart, k: SeqPart, v: SeqPart, mask: Any, is_causal: bool, options: Options) -> SeqPart:
    """All positions of this rank's heads."""
    chunks = q._place.chunks
    size, rank, heads = chunks.size, chunks.rank, q.shape[-3]
    of_rank, whole = dealt_heads(q, k, v), whole_of(mask)
    if whole is not None and whole.ndim > 2 and whole.shape[-3] == heads and heads > 1:
        whole = whole.narrow(-3, rank * (heads // size), heads // size)
    out = _run(*of_rank, whole, options, chunks, is_causal=is_causal)
    is_flat = v.shape[-1] == q.shape[-1] and q.ndim == 4
    joined = is_flat and q._local.transpose(1, 2).is_contiguous()  # as torch's kernels
    return q.like(heads_to_positions(out, chunks, joined=joined))
