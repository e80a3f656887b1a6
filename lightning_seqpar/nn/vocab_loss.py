"""One rank's part of logits that are sharded by vocabulary, and the cross entropy on it, after arXiv 1909.08053."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.async_ops import all_gather
from lightning_seqpar.distributed.autograd import kind_of_device, once_differentiable
from lightning_seqpar.distributed.collectives import passes_none
from lightning_seqpar.distributed.rendezvous import Meeting
from lightning_seqpar.layout.param_layout import Shard


@dataclass(frozen=True)
class VocabPart:
    """Which part of a vocabulary a layer on this rank has; copies of the layer have the same."""

    shard: Shard
    group: ProcessGroup  # over tp
    rank: int
    loss_chunk: int | None = None  # of a head: tokens of which a loss makes the logits at a time; None for all
    meeting: Meeting | None = None  # of a head: where ranks meet before its logits are gathered

    @property
    def columns(self) -> tuple[int, int]:
        """Start and stop of this rank's part of the vocabulary, without padding."""
        ((start, stop),) = self.shard.ranges[self.rank]
        return start, stop

    def __deepcopy__(self, memo: dict[int, object]) -> VocabPart:
        """Itself: process groups are not copied."""
        return self


class StoredLogits:
    """One rank's part of logits: in memory as the head made it, or its input, weight and bias, of which a reader makes them.

    A cast to a wider type is not carried out before somebody reads the part: the loss casts a few tokens at a time. So ``dtype`` is
    what readers get, and ``compute`` the type of the product, as autocast was when the head was called. ``x`` is the logits,
    ``[..., ceil(v/tp)]``, or the head's input ``[..., h]`` with this rank's ``weight``, ``[ceil(v/tp), h]``, and ``bias``; a loss
    makes the logits of ``chunk`` tokens at a time (0 for as many as fit into its own limit).
    """

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        compute: torch.dtype | None = None,
        chunk: int = 0,
    ) -> None:
        self.tensors = (x, weight, bias)
        self.dtype, self.compute, self.chunk = dtype, compute or x.dtype, chunk
        self._versions = None if weight is None else self._read_versions()

    @property
    def is_deferred(self) -> bool:
        """Whether the logits are not made yet."""
        return self.tensors[1] is not None

    def _read_versions(self) -> list[int]:
        """The versions of the tensors, which in-place changes count up; tensors made in inference mode have none."""
        return [one._version for one in self.tensors if one is not None and not one.is_inference()]

    def check(self) -> None:
        """Refuse to read logits whose inputs were changed in place after the head was called, as an optimizer does."""
        if self._versions is not None and self._read_versions() != self._versions:
            raise RuntimeError(
                "logits that were not made yet (loss_chunk) are read after the head's weight or its input has changed, and would "
                "be other logits; read them before the optimizer steps (logits.whole() keeps all, on all ranks), or leave "
                "loss_chunk out"
            )

    def read(self) -> Tensor:
        """The logits as a tensor of :attr:`dtype`; raises RuntimeError if they are computed now, and the inputs were changed."""
        self.check()
        x, weight, bias = self.tensors
        return (x if weight is None else made_logits(x, weight, bias, self.compute)).to(self.dtype)

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> StoredLogits:
        """The part with other leading dims: ``change`` reshapes the tokens or chooses among them, and leaves the last dim."""
        x, *head = self.tensors
        return self._like(self.dtype, change(x), *head)

    def cast(self, dtype: torch.dtype) -> StoredLogits:
        """The same part, for readers of another type."""
        return self._like(dtype, *self.tensors)

    def detached(self) -> StoredLogits:
        """The same part without a graph."""
        return self._like(self.dtype, *(None if one is None else one.detach() for one in self.tensors))

    def _like(self, dtype: torch.dtype, x: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> StoredLogits:
        self.check()
        assert x is not None
        return StoredLogits(x, dtype, weight, bias, self.compute, self.chunk)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part: ``(..., ceil(v/tp))``."""
        x, weight, _ = self.tensors
        return tuple(x.shape) if weight is None else (*x.shape[:-1], weight.shape[0])


def made_logits(x: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> Tensor:
    """The logits ``x Wᵀ + b`` of a head's inputs, computed in the type ``compute`` whatever autocast says."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute))


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Log-likelihood of targets by logits that are sharded by vocabulary, from the logits or from the head's inputs.

    =================  ==========================  ====================================  ==================
    tensor             global                      local                                 saved for backward
    =================  ==========================  ====================================  ==================
    x                  logits ``[n, v]``           ``[n, ceil(v/tp)]``                   itself
    or x               the head's input ``[n, h]``  ``[n, h]``                           itself
    head               its weight ``[v, h]``       ``[ceil(v/tp), h]``                   itself
    bias               ``[v]``                     ``[ceil(v/tp)]``                      itself
    target             ``[n]``                     ``[n]``                               its column here, and whether it is here
    ``m``, ``Z``       ``[n]``                     ``[n]``, the same on every rank       itself
    result             ``[n]``                     ``[n]``, the same on every rank       —
    =================  ==========================  ====================================  ==================

    Forward, for a token with logits ``z``, target ``t``, class weights ``w`` (1 by default) and smoothing ``ε``:
    ``m = max z`` and ``Z = Σ_c exp(z_c - m)`` over the whole vocabulary, ``p_c = exp(z_c - m) / Z`` and
    ``result = (1 - ε) w_t log p_t + ε/v Σ_c w_c log p_c``, the loss with the sign that ``F.nll_loss`` takes. Each rank makes its
    maximum, target logit and sum; one all-gather of these gives every rank all of them. The result of a target outside the
    vocabulary means nothing.

    Backward, for the result's gradient ``-g``: ``dz_c = g [(1 - ε) w_t (p_c - [c = t]) + ε/v (p_c Σ_k w_k - w_c)]``, made from
    this rank's logits alone. From the head's inputs, ``dx = dz W`` (a term of a sum over tp, which ``copy_to_`` in front of the
    head sums), ``dW = dzᵀ x`` and ``db = Σ dz``.

    Neither the softmax nor ``dz`` is kept: both are made some tokens at a time, in float32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor | None, bias: Tensor | None, target: Tensor, options: tuple[Any, ...]
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        part, weights, own, smoothing, of = options  # weights are those of the classes, [v], and own those of the targets, [n]
        part.check()
        start, stop = of.columns
        how = (stop - start, part.dtype, part.compute, part.chunk)
        rows = _LogitChunks((x, head, bias), how)
        local = target - start
        at = local.clamp(0, max(0, rows.count - 1))
        elsewhere = at != local
        stats = rows.statistics(at, elsewhere, None if weights is None else weights[start:stop], smoothing)
        parts = all_gather(stats.unsqueeze(0), 0, of.group)  # [tp, 3 or 4, n]: every rank combines them alike
        top, score = parts[:, :2].amax(0)  # ranks that don't have a target tell minus infinity of it
        total = (parts[:, 2] * (parts[:, 0] - top).exp()).sum(0)
        log_total = total.log()
        result: Tensor = score.sub_(top).sub_(log_total)
        if own is not None:
            result = result * own
        if smoothing:
            classes = of.shard.length if weights is None else weights.sum()
            mean = parts[:, 3].sum(0) - classes * (top + log_total)
            result = (1 - smoothing) * result + smoothing / of.shard.length * mean
        ctx.save_for_backward(x, head, bias, at, elsewhere, own, weights, top, total.neg_())
        ctx.how, ctx.smoothing, ctx.start, ctx.classes = how, smoothing, start, of.shard.length
        return result

    @staticmethod
    @passes_none
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, head, bias, at, elsewhere, own, weights, top, minus_total = ctx.saved_tensors
        rows = _LogitChunks((x, head, bias), ctx.how)
        smoothing, columns = ctx.smoothing, slice(ctx.start, ctx.start + rows.count)
        # In each chunk g / Z * [exp(z - m) Σ - hard Z [c = t] - soft Z w], where Σ = hard + soft Σ w is 1 without class weights.
        hard = 1 - smoothing if own is None else (1 - smoothing) * own
        soft = smoothing / ctx.classes
        level = (grad / minus_total).unsqueeze(-1)
        hit = minus_total.masked_fill(elsewhere, 0)
        hit = (hit if own is None and not smoothing else hit * hard).unsqueeze(-1)
        at = at.unsqueeze(-1)
        out = _ChunkGrads(rows, ctx.needs_input_grad)
        for some, room in out.rooms():
            z = rows.logits(some)
            z = torch.sub(z, top[some].unsqueeze(-1), out=z if room is None else room).exp_()
            if own is not None:
                z.mul_((hard + soft * weights.sum())[some].unsqueeze(-1))
            z.scatter_add_(-1, at[some], hit[some])
            if smoothing:
                each = soft * minus_total[some].unsqueeze(-1)
                z = z.add_(each) if weights is None else z.addcmul_(each, weights[columns])
            out.add(some, z, level[some])
        return *out.grads, None, None


_FEW = 2**22
"""Logits for whose copy in float32 there is always memory, 16 MiB; so many fit into a CPU's cache."""


class _LogitChunks:
    """One rank's logits, or its head's inputs, some tokens (``chunks``) at a time, in float32 at least."""

    def __init__(self, tensors: tuple[Tensor, Any, Any], how: tuple[int, torch.dtype, torch.dtype, int]) -> None:
        self.x, self.head, self.bias = tensors
        self.count, dtype, self.compute, chunk = how
        self.wide = torch.promote_types(dtype, torch.float32)
        tokens = max(1, len(self.x))
        self.few = min(tokens, max(1, _FEW // max(1, self.count)))
        # On a CPU what fits into its cache is fastest; elsewhere kernels are few, and as large as memory allows.
        self.on_cpu = (self.x.device.type if type(self.x) is Tensor else kind_of_device(self.x)) == "cpu"
        self.size = chunk or (self.few if self.on_cpu else tokens)
        self.chunks = [slice(at, at + self.size) for at in range(0, len(self.x) if self.count else 0, self.size)]

    def logits(self, some: slice) -> Tensor:
        """The logits of a chunk without padding, ``[c, count]``: made of the head's input, or as they are."""
        if self.head is None:
            return self.x[some, : self.count]
        bias = None if self.bias is None else self.bias[: self.count]
        return made_logits(self.x[some], self.head[: self.count], bias, self.compute).to(self.wide)

    def statistics(self, at: Tensor, elsewhere: Tensor, weights: Tensor | None, smoothing: float) -> Tensor:
        """What the loss must know of this rank's logits ``z``, ``[3, n]``, or ``[4, n]`` with smoothing.

        With ``m`` the largest one of a token: ``m`` itself, the target's (minus infinity if it is ``elsewhere``),
        ``Σ exp(z - m)``, and with smoothing ``Σ w z``. ``at`` is the column of each target.
        """
        out = self.x.new_empty(4 if smoothing else 3, len(at), dtype=self.wide)
        if not self.count:
            out.zero_()[0].fill_(torch.finfo(self.wide).min)
        size, room = self.size, None
        if self.head is None:  # as many bytes beside the logits as their gradient takes later, if they are not few
            size = max(self.few, -(-size * self.x.itemsize // self.wide.itemsize))
            room = self.x.new_empty(size, self.count, dtype=self.wide)
        for some in self.chunks:
            z, stats = self.logits(some), out[:, some]
            # Finite, where all of a token is masked out. On the CPU: kernels take such a number by its value.
            least = torch.full((), torch.finfo(z.dtype).min, dtype=z.dtype, device="cpu")
            torch.maximum(z.amax(-1), least, out=stats[0])
            stats[1] = z.gather(-1, at[some].unsqueeze(-1)).squeeze(-1)
            for rows, of_rows in zip(z.split(size), stats.split(size, 1), strict=True):
                less = torch.sub(rows, of_rows[0].unsqueeze(-1), out=rows if room is None else room[: len(rows)])
                if smoothing:
                    of_rows[3] = less.sum(-1) if weights is None else less @ weights
                torch.sum(less.exp_(), -1, out=of_rows[2])
        if smoothing:
            out[3] += (self.count if weights is None else weights.sum()) * out[0]
        out[1].masked_fill_(elsewhere, float("-inf"))
        return out


class _ChunkGrads:
    """The gradients of the logits, or of the head's input, weight and bias, filled in chunk by chunk."""

    def __init__(self, rows: _LogitChunks, needs: tuple[bool, ...]) -> None:
        self._rows = rows
        x, head, bias, few = rows.x, rows.head, rows.bias, rows.few
        # A chunk of a narrow type is made in the wide one, behind what is written: a quarter more lets four chunks be all.
        self._ratio = ratio = rows.wide.itemsize // x.itemsize if head is None else 1
        more = max(rows.size // 4, ratio * few) if ratio > 1 else 0
        self._memory = x.new_empty(len(x) + more + -(len(x) + more) % ratio, x.shape[1]) if needs[0] else None
        of_x = None if self._memory is None else self._memory[: len(x)]  # every chunk writes its rows
        if of_x is not None and head is not None and not rows.count:
            of_x.zero_()
        self.grads: list[Tensor | None] = [of_x, None, None]
        for at, one in ((1, head), (2, bias)):  # they are sums over chunks, so they are kept in float32 at least
            if one is not None and needs[at]:
                self.grads[at] = torch.zeros_like(one, dtype=torch.promote_types(one.dtype, torch.float32))

    def rooms(self) -> Iterator[tuple[slice, Tensor | None]]:
        """The chunks, each with memory for the gradient of its logits, ``[c, count]``; None where logits are made."""
        rows, of_x, memory, ratio = self._rows, self.grads[0], self._memory, self._ratio
        if of_x is None or memory is None or rows.head is not None:
            yield from ((some, None) for some in rows.chunks)
            return
        first, stop = 0, len(of_x) if rows.count else 0
        while first < stop:
            size = min(rows.size, stop - first, (len(memory) - first) // (1 + ratio) if ratio > 1 else stop)
            some = slice(first, first + size)
            behind = memory.view(-1)[-ratio * size * rows.count :]
            yield some, of_x[some, : rows.count] if ratio == 1 else behind.view(rows.wide).view(size, rows.count)
            first += size
        if rows.count < of_x.shape[1]:
            of_x[:, rows.count :].zero_()  # padding, or all where this rank has no column

    def add(self, some: slice, z: Tensor, level: Tensor) -> None:
        """Take the gradient ``level * z`` of a chunk's logits, ``[c, count]``, into account; it may lie where it belongs."""
        rows, (of_x, of_head, of_bias) = self._rows, self.grads
        if rows.head is None:
            if of_x is not None and self._ratio > 1 and rows.on_cpu:  # its kernels cast in copies of their own
                of_x[some, : rows.count] = z.mul_(level)
            elif of_x is not None:
                torch.mul(z, level, out=of_x[some, : rows.count])
            return
        with torch.autocast(z.device.type, enabled=False):
            d = z.mul_(level).to(rows.compute)
            if of_x is not None:
                of_x[some] = (d @ rows.head[: rows.count].to(d.dtype)).to(of_x.dtype)
            if of_head is not None:
                of_head[: rows.count] += d.t() @ rows.x[some].to(d.dtype)
            if of_bias is not None:
                of_bias[: rows.count] += d.sum(0)
