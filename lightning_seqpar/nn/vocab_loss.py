"""Cross-entropy over a vocabulary of which every rank has a part, after arXiv 1909.08053."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.autograd import once_differentiable
from lightning_seqpar.distributed.collectives import all_gather, passes_none
from lightning_seqpar.distributed.host import send_numbers
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.logits_storage import StoredLogits

AT_ONCE = 2**22
"""How many logits of a rank are widened and exponentiated at a time: 16 MiB in float32."""


def target_weights(weight: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """The class weight of each target, ``[n]``; zero where it is ignored."""
    return weight[target.masked_fill(~valid, 0)] * valid


class LossOptions(NamedTuple):
    """What a cross entropy is told beside logits and targets: ``valid`` says which of these count, ``weight`` is ``[v]``."""

    part: StoredLogits
    valid: Tensor
    weight: Tensor | None
    smoothing: float
    shard: Shard
    rank: int
    group: ProcessGroup


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits that are sharded by vocabulary, from the logits or from the head's inputs.

    =================  ==========================  ====================================  ==================
    tensor             global                      local                                 saved for backward
    =================  ==========================  ====================================  ==================
    x                  logits ``[n, v]``           ``[n, ceil(v/tp)]``                   itself
    or x               the head's input ``[n, h]``  ``[n, h]``                           itself
    head               its weight ``[v, h]``       ``[ceil(v/tp), h]``                   itself
    bias               ``[v]``                     ``[ceil(v/tp)]``                      itself
    target, valid      ``[n]``                     ``[n]``                               itself
    ``m``, ``Z``       ``[n]``                     ``[n]``, the same on every rank       itself
    losses             ``[n]``                     ``[n]``, the same on every rank       —
    =================  ==========================  ====================================  ==================

    Forward, for a token with logits ``z``, target ``t``, class weights ``w`` (1 by default) and smoothing ``ε``:
    ``m = max z`` and ``Z = Σ_c exp(z_c - m)`` over the whole vocabulary, ``p_c = exp(z_c - m) / Z`` and
    ``loss = (1 - ε) w_t (-log p_t) + ε/v Σ_c w_c (-log p_c)``. Each rank makes its maximum, sum and target logit; one
    all-gather of these gives every rank all of them.

    Backward, for the losses' gradient ``g``: ``dz_c = g [(1 - ε) w_t (p_c - [c = t]) + ε/v (p_c Σ_k w_k - w_c)]``, made from
    this rank's logits alone. From the head's inputs, ``dx = dz W`` (a term of a sum over tp, which ``copy_to_`` in front of the
    head sums), ``dW = dzᵀ x`` and ``db = Σ dz``.

    Neither the softmax nor ``dz`` is kept: both are made some tokens at a time, in float32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        options: LossOptions,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        part, valid, weight, smoothing, shard, rank, group = options
        part.check()
        how = (part.dtype, part.compute, part.chunk)
        rows = _LogitChunks(x, head, bias, how, shard, rank)
        ((start, stop),) = shard.ranges[rank]
        wide, classes = rows.wide, shard.length
        weights = None if weight is None else weight.to(wide)
        mine = valid & (target >= start) & (target < stop)
        at = (target - start).masked_fill(~mine, 0)
        stats = rows.statistics(at, mine, None if weights is None else weights[start:stop], smoothing)
        own = valid.to(wide) if weights is None else target_weights(weights, target, valid)
        parts = all_gather(stats.unsqueeze(0), 0, group)  # [tp, 3 or 4, n]: every rank combines them alike
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
        rows = _LogitChunks(x, head, bias, how, shard, rank)
        ((start, stop),), smoothing = shard.ranges[rank], ctx.smoothing
        mine = valid & (target >= start) & (target < stop)
        at = (target - start).masked_fill(~mine, 0)
        scale = grad.to(rows.wide).masked_fill(~valid, 0)  # a mean over no targets has an infinite gradient
        hard = (1 - smoothing) * own * scale
        soft = smoothing / ctx.classes * scale
        level = (hard + soft * ctx.heavy if smoothing else hard) / total
        out = _ChunkGrads(rows, ctx.needs_input_grad)
        for some in rows.chunks if stop > start else ():
            z = rows.shifted(rows.logits(some), top[some], out.room(some)).exp_().mul_(level[some].unsqueeze(-1))
            z.scatter_add_(-1, at[some].unsqueeze(-1), -(hard * mine)[some].unsqueeze(-1))
            if smoothing:
                z -= soft[some].unsqueeze(-1) * (1.0 if weights is None else weights[start:stop])
            out.add(some, z)
        return *out.grads, None, None


class _LogitChunks:
    """One rank's logits, or its head's inputs, some tokens (``chunks``) at a time, in float32 at least."""

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
        self.chunks = [slice(at, at + size) for at in range(0, x.shape[0], size)]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._compute)

    def logits(self, some: slice) -> Tensor:
        """The logits of a chunk without padding, ``[c, count]``: made of the head's input, or as they are."""
        if self._head is None:
            return self._x[some, : self.count]
        with torch.autocast(self._x.device.type, enabled=False):
            bias = None if self._bias is None else self._cast(self._bias[: self.count])
            made = F.linear(self._cast(self._x[some]), self._cast(self._head[: self.count]), bias)
            return made.to(self.wide)

    def shifted(self, z: Tensor, by: Tensor, out: Tensor | None = None) -> Tensor:
        """What :meth:`logits` returned less ``by``, ``[c]``; overwrites logits that were made, and puts others into ``out``."""
        if self._head is None:
            return torch.sub(z, by.unsqueeze(-1), out=out)
        return z.sub_(by.unsqueeze(-1))

    def statistics(self, at: Tensor, mine: Tensor, weights: Tensor | None, smoothing: float) -> Tensor:
        """What the loss must know of this rank's logits ``z``, ``[3, n]``, or ``[4, n]`` with smoothing.

        With ``m`` the largest one of a token: ``m`` itself, ``Σ exp(z - m)``, ``z - m`` of the target (0 if another rank has
        it), and with smoothing ``Σ w (z - m)``. ``at`` is the column of each target, and ``mine`` whether this rank has it.
        """
        out = self._x.new_zeros(4 if smoothing else 3, len(at), dtype=self.wide)
        out[0].fill_(float("-inf"))
        for some in self.chunks if self.count else ():
            z = self.logits(some)
            largest = z.amax(-1).to(self.wide)
            shift = largest.masked_fill(largest == float("-inf"), 0.0)  # where all of this rank's logits are masked out
            z = self.shifted(z, shift)
            out[0, some] = largest
            out[2, some] = z.gather(-1, at[some].unsqueeze(-1)).squeeze(-1).masked_fill(~mine[some], 0.0)
            if smoothing:
                out[3, some] = z.sum(-1) if weights is None else z @ weights
            out[1, some] = z.exp_().sum(-1)
        return out


class _ChunkGrads:
    """The gradients of the logits, or of the head's input, weight and bias, filled in chunk by chunk."""

    def __init__(self, rows: _LogitChunks, needs: tuple[bool, ...]) -> None:
        self._rows = rows
        x, head, bias = rows._x, rows._head, rows._bias
        of_x = torch.empty_like(x) if needs[0] else None  # every chunk writes its rows
        if of_x is not None and (head is None or not rows.count):
            of_x[:, rows.count :].zero_()  # padding, or all where this rank has no column
        self._in_place = head is None and of_x is not None and of_x.dtype == rows.wide
        self.grads: list[Tensor | None] = [of_x, None, None]
        # They are sums over chunks, so they are kept in float32 at least.
        if head is not None and needs[1]:
            self.grads[1] = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32))
        if bias is not None and needs[2]:
            self.grads[2] = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))

    def room(self, some: slice) -> Tensor | None:
        """Where the gradient of a chunk's logits, ``[c, count]``, can be made; None if it has another type than they."""
        of_x = self.grads[0]
        return of_x[some, : self._rows.count] if self._in_place and of_x is not None else None

    def add(self, some: slice, z: Tensor) -> None:
        """Take the gradient ``dz`` of a chunk's logits, ``[c, count]``, into account; it may lie in :meth:`room` already."""
        rows, (of_x, of_head, of_bias) = self._rows, self.grads
        if rows._head is None:
            if of_x is not None and not self._in_place:
                of_x[some, : rows.count] = z
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
    """The rank that has each target's column, ``[n]``."""
    stops = send_numbers([stop for ((_, stop),) in shard.ranges], torch.int64, target.device)
    return torch.searchsorted(stops, target, right=True)


def _sums(shard: Shard, weights: Tensor | None, like: Tensor) -> Tensor:
    """The sum of the class weights of each rank's columns, ``[tp]``."""
    columns = [slice(start, stop) for ((start, stop),) in shard.ranges]
    if weights is None:
        return send_numbers([float(one.stop - one.start) for one in columns], like.dtype, like.device)
    return torch.stack([weights[one].sum() for one in columns])
