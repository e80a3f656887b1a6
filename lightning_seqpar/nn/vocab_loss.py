"""Cross-entropy over a vocabulary of which every rank has a part, after arXiv 1909.08053."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.collectives import all_gather, passes_none
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.logits_storage import Held, Product

AT_ONCE = 2**22
"""Logits of which a loss makes the softmax at once: 16 MiB in float32."""


def taken(weight: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """The class weight of each target, ``[n]``; zero where it is ignored."""
    return weight[target.masked_fill(~valid, 0)] * valid


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses ``[n]`` from this rank's logits ``[n, v/tp]``, or from ``x [n, h]`` and the head's ``weight [v/tp, h]``.

    Saved is what is given; softmax and gradient are made a few tokens at a time, in float32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor | None,
        bias: Tensor | None,
        part: Held,
        target: Tensor,
        valid: Tensor,
        weight: Tensor | None,
        smoothing: float,
        shard: Shard,
        rank: int,
        group: ProcessGroup,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        if isinstance(part, Product):
            part.check()
        how = (part.dtype, part.compute if isinstance(part, Product) else x.dtype, part.chunk)
        rows = _Rows(x, head, bias, how, shard, rank)
        ((start, stop),) = shard.ranges[rank]
        wide, classes = rows.wide, shard.length
        weights = None if weight is None else weight.to(wide)
        mine = valid & (target >= start) & (target < stop)
        at = (target - start).masked_fill(~mine, 0)
        told = x.new_zeros(4 if smoothing else 3, len(target), dtype=wide)
        told[0].fill_(float("-inf"))
        for some in rows.chunks if stop > start else ():
            z = rows.logits(some)
            largest = z.amax(-1)
            shift = largest.masked_fill(largest == float("-inf"), 0.0)  # all of this rank's are masked out
            z = z.sub_(shift.unsqueeze(-1))
            told[0, some] = largest
            told[2, some] = z.gather(-1, at[some].unsqueeze(-1)).squeeze(-1).masked_fill(~mine[some], 0.0)
            if smoothing:
                told[3, some] = z.sum(-1) if weights is None else z @ weights[start:stop]
            told[1, some] = z.exp_().sum(-1)
        own = valid.to(wide) if weights is None else taken(weights, target, valid)
        # [tp, 3 or 4, n]: every rank puts them together alike.
        parts = all_gather(told.unsqueeze(0), 0, group)
        top = parts[:, 0].amax(0)
        below = (parts[:, 0] - top).masked_fill(parts[:, 0] == float("-inf"), 0.0)
        total = (parts[:, 1] * below.exp()).sum(0)
        owner = _owners(shard, target.masked_fill(~valid, 0))
        score = (parts[:, 2] + below).gather(0, owner.unsqueeze(0)).squeeze(0)
        losses: Tensor = (1 - smoothing) * own * (total.log() - score)
        if smoothing:
            heavy = _sums(shard, weights, parts)
            smooth = (parts[:, 3] + heavy.unsqueeze(-1) * below).sum(0)
            losses = losses + smoothing / classes * (heavy.sum() * total.log() - smooth) * valid
            ctx.heavy = heavy.sum()
        ctx.save_for_backward(x, head, bias, target, valid, own, weights, top, total)
        ctx.rows, ctx.smoothing, ctx.classes = (how, shard, rank), smoothing, classes
        return losses.to(part.dtype)

    @staticmethod
    @passes_none
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, head, bias, target, valid, own, weights, top, total = ctx.saved_tensors
        how, shard, rank = ctx.rows
        rows = _Rows(x, head, bias, how, shard, rank)
        ((start, stop),), smoothing = shard.ranges[rank], ctx.smoothing
        mine = valid & (target >= start) & (target < stop)
        at = (target - start).masked_fill(~mine, 0)
        scale = grad.to(rows.wide).masked_fill(~valid, 0)  # infinite where all targets are ignored
        hard = (1 - smoothing) * own * scale
        soft = smoothing / ctx.classes * scale
        level = (hard + soft * ctx.heavy if smoothing else hard) / total
        out = rows.collect(ctx.needs_input_grad)
        for some in rows.chunks if stop > start else ():
            z = rows.logits(some).sub_(top[some].unsqueeze(-1)).exp_().mul_(level[some].unsqueeze(-1))
            z.scatter_add_(-1, at[some].unsqueeze(-1), -(hard * mine)[some].unsqueeze(-1))
            if smoothing:
                z -= soft[some].unsqueeze(-1) * (1.0 if weights is None else weights[start:stop])
            out.add(some, z)
        return *out.grads, *([None] * 8)


class _Rows:
    """A rank's logits, some tokens at a time, widened."""

    def __init__(
        self,
        x: Tensor,
        head: Tensor | None,
        bias: Tensor | None,
        how: tuple[torch.dtype, torch.dtype, int],
        shard: Shard,
        rank: int,
    ) -> None:
        dtype, self._compute, chunk = how
        ((start, stop),) = shard.ranges[rank]
        self.wide = torch.promote_types(dtype, torch.float32)
        self.count = stop - start
        self._x, self._head, self._bias = x, head, bias
        size = chunk or max(1, AT_ONCE // max(1, self.count))
        self.chunks = [slice(at, at + size) for at in range(0, len(x), size)]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._compute)

    def logits(self, some: slice) -> Tensor:
        """``[c, v/tp]`` without padding, in memory of its own."""
        if self._head is None:
            given = self._x[some, : self.count]
            return given.to(self.wide, copy=True)
        with torch.autocast(self._x.device.type, enabled=False):
            bias = None if self._bias is None else self._cast(self._bias[: self.count])
            made = F.linear(self._cast(self._x[some]), self._cast(self._head[: self.count]), bias)
            return made.to(self.wide)

    def collect(self, needs: tuple[bool, ...]) -> _Grads:
        """Where the gradients are put together."""
        return _Grads(self, needs)


class _Grads:
    """The gradients of what a loss was given: of logits, or of the head's input, weight and bias."""

    def __init__(self, rows: _Rows, needs: tuple[bool, ...]) -> None:
        self._rows = rows
        x, head, bias = rows._x, rows._head, rows._bias
        self.grads: list[Tensor | None] = [torch.zeros_like(x) if needs[0] else None, None, None]
        # Sums over chunks: in float32 at least, whatever the weight is.
        if head is not None and needs[1]:
            self.grads[1] = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32))
        if bias is not None and needs[2]:
            self.grads[2] = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))

    def add(self, some: slice, z: Tensor) -> None:
        """The gradient ``[c, v/tp]`` of some tokens' logits."""
        rows, (of_x, of_head, of_bias) = self._rows, self.grads
        if rows._head is None:
            if of_x is not None:
                of_x[some, : rows.count] = z.to(of_x.dtype)
            return
        with torch.autocast(z.device.type, enabled=False):
            d = rows._cast(z)
            if of_x is not None:
                of_x[some] = (d @ rows._cast(rows._head[: rows.count])).to(of_x.dtype)
            if of_head is not None:
                of_head[: rows.count] += d.t() @ rows._cast(rows._x[some])
            if of_bias is not None:
                of_bias[: rows.count] += d.sum(0)


def _owners(shard: Shard, target: Tensor) -> Tensor:
    """The rank that holds each target's column, ``[n]``."""
    stops = torch.tensor([stop for ((_, stop),) in shard.ranges], device=target.device)
    return torch.searchsorted(stops, target, right=True)


def _sums(shard: Shard, weights: Tensor | None, like: Tensor) -> Tensor:
    """The sum of the class weights in each rank's columns, ``[tp]``."""
    columns = [slice(start, stop) for ((start, stop),) in shard.ranges]
    if weights is None:
        return like.new_tensor([float(one.stop - one.start) for one in columns])
    return torch.stack([weights[one].sum() for one in columns])
