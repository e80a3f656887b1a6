"""flash-attn's operators on sequences of which each rank holds a part: each rank computes all positions of its heads.

flash-attn gives autograd functions of its own, in which it calls these operators; the tensors that they are given there, and keep
for the backward, are parts. Heads stand at dim -2 and positions in front of them: ``[b, s, n, d]``, or packed ``[total, n, d]``.
Documents that are packed keep their ends (``cu_seqlens``), since a rank has all positions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_seqpar.context.chunks import heads_to_positions, positions_to_heads
from lightning_seqpar.context.seq_part import OPERATORS, Handling, Place, SeqPart, whole_of
from lightning_seqpar.distributed.rng import drawn_apart


class _Heads:
    """How the heads of an attention are dealt out to the ranks of cp; where they do not divide every rank computes all of them."""

    def __init__(self, q: SeqPart, k: SeqPart) -> None:
        self.place: Place = q.place
        heads, groups, size = q.shape[-2], k.shape[-2], self.place.chunks.size
        # Fewer heads of keys and values than ranks: each is sent to all that need it.
        fits = (t for t in range(1, heads // groups + 1) if groups * t % size == 0 and heads % (groups * t) == 0)
        self._times = next(fits, 0) if heads % size == 0 else 0
        self._own = slice(self.place.chunks.rank * (heads // size), (self.place.chunks.rank + 1) * (heads // size))

    @property
    def are_dealt_out(self) -> bool:
        """Whether each rank has heads of its own."""
        return self._times > 0

    def all_positions(self, x: Any, *, is_key: bool = False) -> Tensor:
        """``[..., s/cp, n, d]`` → ``[..., s, n/cp, d]``."""
        if not self._times or not isinstance(x, SeqPart):
            whole: Tensor = whole_of(x)
            return whole[..., self._own, :] if self._times and not is_key else whole
        local = x.local.repeat_interleave(self._times, -2) if is_key and self._times > 1 else x.local
        return positions_to_heads(local.transpose(-3, -2), self.place.chunks).transpose(-3, -2).contiguous()

    def own_positions(self, x: Tensor, *, is_key: bool = False) -> Tensor:
        """``[..., s, n/cp, d]`` → ``[..., s/cp, n, d]``; of keys that several ranks have the sum of their gradients."""
        if not self._times:
            return self.place.own(x, x.ndim - 3)
        own = heads_to_positions(x.transpose(-3, -2), self.place.chunks).transpose(-3, -2)
        return own.unflatten(-2, (-1, self._times)).sum(-2) if is_key and self._times > 1 else own

    def slopes(self, given: Tensor | None) -> Tensor | None:
        """Of slopes ``[n]`` or ``[b, n]`` those of this rank's heads."""
        return given if given is None or not self._times else given[..., self._own].contiguous()


def _are_parts(*tensors: Any) -> bool:
    """Whether all are parts of sequences along the dim in front of the heads, dealt out alike over cp."""
    first = tensors[0]
    return all(
        isinstance(x, SeqPart)
        and type(x.local) is Tensor
        and x.place.is_plain
        and x.place.dim == x.ndim - 3
        and x.place.chunks.axis == "cp"
        and x.place.same(first.place)
        for x in tensors
    )


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [one.name for one in getattr(func, "default", func)._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _forward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _named(func, args, kwargs)
    q, k, v = (given[name] for name in "qkv")
    if not _are_parts(q, k, v) or given.get("block_table") is not None:
        return NotImplemented
    heads = _Heads(q, k)
    given |= {"q": heads.all_positions(q), "k": heads.all_positions(k, is_key=True), "v": heads.all_positions(v, is_key=True)}
    if "alibi_slopes" in given:
        given["alibi_slopes"] = heads.slopes(given["alibi_slopes"])
    # Ranks that compute all heads draw alike: each takes its positions' gradients from the rows of all.
    with drawn_apart(q.place.chunks.rank) if given.get("dropout_p") and heads.are_dealt_out else nullcontext():
        out, *others = func(**given)
    return q.like(heads.own_positions(out).contiguous()), *others


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _named(func, args, kwargs)
    q, k, v = (given[name] for name in "qkv")
    if not _are_parts(q, k, v):
        return NotImplemented
    heads = _Heads(q, k)
    targets = {name: given[name] for name in ("dq", "dk", "dv")}
    for name in ("dout", "q", "k", "v", "out"):
        given[name] = heads.all_positions(given[name], is_key=name in "kv")
    given |= {f"d{name}": torch.empty_like(given[name]) for name in "qkv"}
    if "alibi_slopes" in given:
        given["alibi_slopes"] = heads.slopes(given["alibi_slopes"])
    result = func(**given)
    for name, target in targets.items():
        own = heads.own_positions(given[name], is_key=name != "dq")
        if isinstance(target, SeqPart):
            target.local.copy_(own)
        else:  # a view of what the function has made for several of them, whole, of which this rank's positions are read
            _put(own, target.zero_(), q.place)
    return result


def _put(own: Tensor, whole: Tensor, place: Place) -> None:
    """Write a rank's positions into a whole tensor."""
    dim, at = place.dim, 0
    for start, stop in place.chunks.ranges[place.chunks.rank]:
        whole.narrow(dim, start, stop - start).copy_(own.narrow(dim, at, stop - start))
        at += stop - start


_RUNS: dict[str, Callable[..., Any]] = {"forward": _forward, "backward": _backward}
OPERATORS |= {f"flash_attn::_flash_attn_{kind}{way}": Handling(run) for kind in ("", "varlen_") for way, run in _RUNS.items()}
