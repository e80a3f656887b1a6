"""The products of columns and rows in float8, by torchao's recipes: what is gathered for them is sent in 8 bits.

A tensor is cast with a scale that brings its largest number to the end of float8's range: one for all of it (``tensorwise``), or
one for each row of a product (``rowwise``). Where ranks hold parts of what a scale is of, they agree on the largest number
first, so that every rank casts as one process would. In float64, which no kernel of float8 knows, what was cast is multiplied
in float64: the sharding is proved by that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.async_ops import all_reduce, all_reduce_max
from lightning_seqpar.distributed.autograd import Function, once_differentiable
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.layout.stand_in import gathered_later
from lightning_seqpar.region.products import Kept, Tokens, autocast_dtype, owned
from lightning_seqpar.topology.process_groups import ParallelGroups

Over: TypeAlias = Literal["", "tp", "data", "both"]
"""The ranks that hold parts of what a scale is of: tensor-parallel ones, replicas (of a batch), both, or no others."""

What: TypeAlias = Literal["x", "w", "g"]
"""Activations, weights, or gradients of activations."""


class Scaled(NamedTuple):
    """A matrix in float8, ``[rows, k]``, and the float32 by which it was multiplied: one number, or ``[rows, 1]``."""

    data: Tensor
    scale: Tensor

    def turned(self) -> Scaled:
        """The same as ``[k, rows]``, in memory, as the kernels need it."""
        return Scaled(self.data.t().contiguous(), self.scale.t() if self.scale.ndim else self.scale)

    def padded(self, *, rows: bool) -> Scaled:
        """With zeros behind ``k``, and behind ``rows``, until 16 divides them, as the kernels need it."""
        more, behind = -self.data.shape[1] % 16, -self.data.shape[0] % 16 if rows else 0
        if not (more or behind):
            return self
        data = F.pad(self.data.view(torch.uint8), (0, more, 0, behind)).view(self.data.dtype)
        return Scaled(data, F.pad(self.scale, (0, 0, 0, behind), value=1.0) if self.scale.ndim else self.scale)


class Float8:
    """A recipe, and the ranks that agree on scales.

    Args:
        recipe: ``tensorwise`` or ``rowwise``, names of torchao's.
        tp: the tensor-parallel ranks; None for one.
        data: the replicas whose batches have scales in common; None where each has its own.
        both: the ranks of both.

    Raises:
        ValueError: torchao is not installed.
    """

    def __init__(
        self, recipe: str, tp: ProcessGroup | None = None, data: ProcessGroup | None = None, both: ProcessGroup | None = None
    ) -> None:
        try:
            from torchao.float8 import Float8LinearConfig, float8_ops, float8_utils  # type: ignore[import-untyped]
        except ImportError as error:
            raise ValueError(
                f"float8={recipe!r} needs torchao ({error}): pip install 'lightning-seqpar[float8]', or leave float8 out"
            ) from None
        config = Float8LinearConfig.from_recipe_name(recipe)
        casts = config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output
        self.types: dict[What, torch.dtype] = dict(zip(("x", "w", "g"), (one.target_dtype for one in casts), strict=True))
        self.by_rows, self._rounds = recipe == "rowwise", config.round_scales_to_power_of_2
        self._fast = config.gemm_config_output.use_fast_accum
        self.over_data = data is not None
        self._groups: dict[Over, ProcessGroup | None] = {"tp": tp, "data": data, "both": both}
        self._torchao, self._multiply = float8_utils, float8_ops.addmm_float8_unwrapped

    @classmethod
    def of(cls, config: ParallelConfig, groups: ParallelGroups) -> Float8 | None:
        """What a configuration asks for; None for products in the activations' own type."""
        if config.float8 == "none":
            return None
        data = tuple(axis for axis in ("dp", "cp") if config.fp8_groups and groups.size(axis) > 1)
        tp = ("tp",) * (groups.size("tp") > 1)
        return cls(config.float8, *(groups[axes] if axes else None for axes in (tp, data, (*data, *tp))))

    def __deepcopy__(self, memo: dict[int, object]) -> Float8:
        return self  # it holds nothing of a model

    def columns(self, how: Any, *tensors: Tensor | None, traced: bool = False, cuts_in: bool = False) -> Any:
        """As :class:`~lightning_seqpar.region.products.Products`; ``cuts_in`` where ranks hold parts of what is summed over."""
        return Float8Products.applied(_How(self, *how, cuts_in), *tensors, traced=traced)  # type: ignore[call-arg]

    def row(self, how: Any, x: Tensor, weight: Tensor, traced: bool = False) -> Any:
        """As :class:`~lightning_seqpar.region.products.Row`."""
        tokens, flip, held = how
        return Float8Row.applied(
            _How(self, tokens, None, (flip,), autocast_dtype(x), True, held), x, weight, None, traced=traced
        )

    def scales(self, *asked: tuple[Tensor, What, int, Over]) -> list[Tensor]:
        """The scale of each matrix: of all of it, or ``by_rows`` along the dim that is given, which is reduced.

        Ranks that hold parts of what a scale is of are asked for their largest number, once for each group of ranks.
        """
        largest: list[Tensor] = []
        of_group: dict[Over, list[int]] = {}
        for at, (x, _, dim, over) in enumerate(asked):
            x = x if len(x) or (self.by_rows and dim == 1) else x.new_zeros(1, x.shape[1])
            largest.append(torch.linalg.vector_norm(x, torch.inf, dim if self.by_rows else None, keepdim=self.by_rows))
            of_group.setdefault(over if self.by_rows else "both", []).append(at)
        for over, those in of_group.items():
            if (group := self._groups.get(over)) is not None:
                sent = torch.cat([largest[at].reshape(-1) for at in those])
                sent = all_reduce_max(sent, group)
                for at, one in zip(those, sent.split([largest[at].numel() for at in those]), strict=True):
                    largest[at] = one.view(largest[at].shape)
        to_scale = self._torchao.amax_to_scale
        return [to_scale(one, self.types[what], self._rounds) for one, (_, what, _, _) in zip(largest, asked, strict=True)]

    def cast(self, x: Tensor, what: What, scale: Tensor) -> Scaled:
        """A matrix in float8; one scale for all, one for each row, or one for each column."""
        return Scaled(self._torchao.to_fp8_saturated(x.float() * scale, self.types[what]), scale)

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """``a bᵀ``: ``[m, k]``, ``[n, k]`` → ``[m, n]``."""
        if 0 in a.data.shape:
            return a.data.new_zeros(a.data.shape[0], b.data.shape[0], dtype=dtype)
        if dtype == torch.float64:
            return (a.data.to(dtype) / a.scale) @ (b.data.to(dtype) / b.scale).t()
        rows, a, b = b.data.shape[0], a.padded(rows=False), b.padded(rows=True)
        scale = b.scale.t() if b.scale.ndim else b.scale
        out: Tensor = self._multiply(a.data, a.scale, b.data.t(), scale, dtype, use_fast_accum=fast and self._fast)
        return out if out.shape[1] == rows else out[:, :rows].contiguous()


@dataclass(frozen=True, slots=True)
class _How:
    """How activations, weights and what is made of them lie on the ranks, and what is kept."""

    float8: Float8
    tokens: Tokens | None
    kept: Kept | None
    transposed: Sequence[bool]
    dtype: torch.dtype | None  # of autocast
    cuts_in: bool  # ranks hold parts of the features that are summed over, and not of those that are made
    held: Any = None  # the node that keeps what a row reads, in its place

    @property
    def gathers(self) -> bool:
        """Whether the input is a shard that is gathered."""
        return self.tokens is not None and self.tokens.sp and not self.cuts_in

    @property
    def sums(self) -> bool:
        """Whether the output is summed over the ranks."""
        return self.tokens is not None and self.cuts_in

    def features(self, *, cut: bool) -> Over:
        """Over which ranks a scale of features is, which are cut, or not."""
        return "tp" if cut else ""

    def tokens_of(self, *, cut: bool) -> Over:
        """The same of one feature's tokens."""
        return "data" if cut else "both"

    def matrices(self, weights: Sequence[Tensor | None]) -> list[Tensor]:
        """The weights as ``[out, in]``."""
        return [w.t() if flip else w for w, flip in zip(weights, self.transposed, strict=True) if w is not None]


def _own_rows(tokens: Tokens, shard: Tensor) -> Tensor:
    """The positions of a shard as rows, without those behind the end of the sequence, which hold anything and are cut off."""
    x = tokens.folded(shard) if tokens.batch else shard
    if (more := (tokens.group.rank() + 1) * x.shape[tokens.dim] - tokens.length) > 0:
        x = x.narrow(tokens.dim, 0, max(0, x.shape[tokens.dim] - more))
    return x.flatten(0, -2)


def _gathered(tokens: Tokens, rows: Tensor, shape: torch.Size) -> Tensor:
    """Rows of a shard of that shape, gathered, ``[b·s/tp, n]`` → ``[b, s, n]``; bytes of float8, which backends do not know."""
    sent = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    return tokens.start_gather(sent.view(*shape, rows.shape[-1]), async_op=False).wait()


class Float8Products(Function):
    """:class:`~lightning_seqpar.region.products.Products` in float8: of a shard 8 bits are kept and gathered.

    ============  ====================  ======================  ==========================================
    tensor        global                local                   saved for backward
    ============  ====================  ======================  ==========================================
    x             ``[b, s, h]``         ``[b, s/tp, h]``        itself in float8, or what ``kept`` says
    weights       ``[f, h]`` each       ``[f/tp, h]``           themselves
    x_full        ``[b, s, h]``         ``[b, s, h]``           —
    outputs       ``[b, s, f]``         ``[b, s, f/tp]``        —
    ============  ====================  ======================  ==========================================

    ``x_full`` is gathered, in the type of ``x``, when somebody reads it.
    """

    @staticmethod
    def forward(ctx: Any, how: _How, *tensors: Tensor | None) -> Any:
        given, *parameters = tensors
        assert given is not None
        ctx.set_materialize_grads(False)
        float8, tokens, weights, cut = how.float8, how.tokens, parameters[::2], how.cuts_in
        x = given if how.dtype is None else given.to(how.dtype)
        rows, own_shape, matrices = x.reshape(-1, x.shape[-1]), x.shape[:-1], how.matrices(weights)
        over, own_rows = how.features(cut=cut), rows
        if tokens is not None and how.gathers:
            own_rows = _own_rows(tokens, x)
        measured = rows if float8.by_rows else own_rows
        scale, *w_scales = float8.scales((measured, "x", 1, over), *((one, "w", 1, over) for one in matrices))
        own = float8.cast(rows, "x", scale)
        shape, read = own_shape, own
        if how.gathers:
            assert tokens is not None
            sent = _gathered(tokens, own.data, own_shape)
            shape, data = sent.shape[:-1], sent.flatten(0, -2).view(own.data.dtype)
            read = Scaled(data, _gathered(tokens, scale, own_shape).flatten(0, -2) if float8.by_rows else scale)
        made: list[Tensor] = []
        for one, w_scale, bias in zip(matrices, w_scales, parameters[1::2], strict=True):
            out = float8.product(read, float8.cast(one, "w", w_scale), x.dtype, fast=True)
            out = out if bias is None else out + bias.to(out.dtype)
            made.append(owned(out.view(*shape, out.shape[1])))
        ctx.scale, saved = scale, None
        if True in ctx.needs_input_grad[2::2]:
            # What gradients of weights are made of, sums over tokens: where there are scales by rows, one for each feature.
            if float8.by_rows:
                (ctx.scale,) = float8.scales((own_rows, "x", 0, how.tokens_of(cut=cut)))
            if how.kept is not None and how.kept[1] is not None:
                saved = how.kept[0]
            elif how.held is None:
                saved = own.data
                if float8.by_rows:
                    saved = float8.cast(rows, "x", ctx.scale).data
                if tokens is not None and how.gathers and how.kept is None:
                    saved = (
                        _gathered(tokens, saved, own_shape).flatten(0, -2).view(saved.dtype) if float8.by_rows else read.data
                    )
        ctx.save_for_backward(saved, *weights)
        ctx.norm, ctx.regathers = None if how.kept is None else how.kept[1], how.gathers and how.kept is not None
        ctx.how = replace(how, kept=None)  # of the activation itself nothing stays
        ctx.own_shape, ctx.shape, ctx.dtype, ctx.given = own_shape, shape, x.dtype, given.dtype
        if tokens is None:
            return made[0]
        if how.sums:
            out = tokens.start_sum(made[0], async_op=False).wait()
            return owned(out) if out._is_view() else out
        whole = given.view_as(given)
        if how.gathers:
            make = functools.partial(_gathered, tokens, given.detach().flatten(0, -2), own_shape)
            whole = gathered_later(given, (*shape, given.shape[-1]), make)
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(whole)
        return (whole, *made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        how, needs = ctx.how, ctx.needs_input_grad
        outer: list[Any] = [*grads]
        float8, tokens, cut, total = how.float8, how.tokens, how.cuts_in, None
        if tokens is not None and not how.sums:
            total, *outer = outer
        read = [at for at, grad in enumerate(outer) if grad is not None]
        out: list[Tensor | None] = [None] * len(needs)
        if not read:
            if total is not None and needs[1]:
                out[1] = tokens.start_sum(total).wait()
            return tuple(out)
        kept, *weights = ctx.saved_tensors
        again = None
        if True in needs[2::2]:
            again = _remade(ctx, kept)
            if ctx.regathers:
                again = tokens.start_gather(again.view(torch.uint8).view(*ctx.own_shape, again.shape[-1]))
        matrices, rows = how.matrices(weights), [outer[at].reshape(-1, outer[at].shape[-1]) for at in read]
        if how.sums and float8.by_rows:  # it would be sent twice in 8 bits, with the scales of tokens and those of features
            rows = [tokens.start_gather(outer[0], async_op=False).wait().flatten(0, -2)]
        over = how.features(cut=not cut)
        asked = [(one, "g", 1, over) for one in rows] + [(matrices[at], "w", 0, over) for at in read]
        if float8.by_rows:
            asked += [(one, "g", 0, how.tokens_of(cut=not cut)) for one in rows]
        scales = float8.scales(*asked)
        by_token = [float8.cast(one, "g", scale) for one, scale in zip(rows, scales, strict=False)]
        if how.sums and not float8.by_rows:
            sent = _gathered(tokens, by_token[0].data, outer[0].shape[:-1])
            by_token = [Scaled(sent.flatten(0, -2).view(by_token[0].data.dtype), scales[0])]
        pending: Any = None
        if needs[1]:
            total = None if total is None else total.reshape(-1, total.shape[-1])
            for grad, at, scale in zip(by_token, read, scales[len(read) :], strict=False):
                made = float8.product(grad, float8.cast(matrices[at], "w", scale).turned(), ctx.dtype).to(ctx.given)
                total = made if total is None else total + made
            assert total is not None
            pending = total.view(*ctx.shape, total.shape[-1])
            pending = pending if tokens is None or how.sums else tokens.start_sum(pending)
        if again is not None:
            data = again if isinstance(again, Tensor) else again.wait().flatten(0, -2).view(float8.types["x"])
            x = Scaled(data, ctx.scale).turned()
        for number, at in enumerate(read):
            if needs[2 + 2 * at]:
                grad = by_token[number]
                if float8.by_rows:
                    grad = float8.cast(rows[number], "g", scales[2 * len(read) + number])
                dw = float8.product(grad.turned(), x, ctx.dtype)
                out[2 + 2 * at] = (dw.t() if how.transposed[at] else dw).to(weights[at].dtype)
            if needs[3 + 2 * at]:
                out[3 + 2 * at] = rows[number].sum(0).to(weights[at].dtype)
        if pending is not None:
            out[1] = pending if tokens is None or how.sums else pending.wait()
        return tuple(out)


def _remade(ctx: Any, kept: Tensor | None) -> Tensor:
    """What was kept in float8 of the activation, or is made again and cast now: ``[b·s/tp, h]``."""
    how = ctx.how
    if how.held is not None:
        (kept,) = how.held.saved_tensors
    elif ctx.norm is None:
        assert kept is not None
        return kept
    else:
        kept = ctx.norm.run(kept)
    assert kept is not None
    out: Tensor = how.float8.cast(kept.to(ctx.dtype).reshape(-1, kept.shape[-1]), "x", ctx.scale).data
    return out


class Float8Row(Float8Products):
    """:class:`~lightning_seqpar.region.products.Row` in float8; with one scale its output's gradient is gathered in 8 bits.

    ============  ====================  ======================  ==================
    tensor        global                local                   saved for backward
    ============  ====================  ======================  ==================
    x             ``[b, s, f]``         ``[b, s, f/tp]``        itself in float8
    weight        ``[h, f]``            ``[h, f/tp]``           itself
    y             ``[b, s, h]``         ``[b, s/tp, h]``        —
    ============  ====================  ======================  ==================
    """


class SharedFeatures:
    """Features of a column that several ranks have: each rank's gradient of them is a term of a sum, of which float8 is taken.

    ``[b, s, f/tp]``: what a rank has of them is the sum on the first of those ranks, and zero on the others.
    """

    def __init__(self, shard: Shard, group: ProcessGroup) -> None:
        holders: dict[tuple[int, int], list[int]] = {}
        for rank, own in enumerate(shard.ranges):
            for pair in own:
                holders.setdefault(pair, []).append(rank)
        places, self.group, self.count = dict[tuple[int, int], int](), group, 0
        for (start, stop), ranks in holders.items():
            if len(ranks) > 1:
                places[start, stop], self.count = self.count, self.count + stop - start
        self._held: list[
            tuple[int, int, int, bool]
        ] = []  # of each range: where it is here, and in the sum; its length; is it the first
        at = 0
        for start, stop in shard.ranges[group.rank()]:
            if (start, stop) in places:
                is_first = holders[start, stop][0] == group.rank()
                self._held.append((at, places[start, stop], stop - start, is_first))
            at += stop - start

    def __deepcopy__(self, memo: dict[int, object]) -> SharedFeatures:
        return self  # it holds nothing of a model

    def gradient(self, grad: Tensor) -> Tensor:
        """That gradient. Collective."""
        terms = grad.new_zeros(*grad.shape[:-1], self.count)
        for at, place, length, _ in self._held:
            terms.narrow(-1, place, length).copy_(grad.narrow(-1, at, length))
        summed, out = all_reduce(terms, self.group), grad.clone()
        for at, place, length, is_first in self._held:
            own = out.narrow(-1, at, length)
            own.copy_(summed.narrow(-1, place, length)) if is_first else own.zero_()
        return out

    def applied(self, out: Tensor) -> Tensor:
        """The output of the column, as it is."""
        made: Tensor = _Shared.applied(out, self)
        return made


class _Shared(Function):
    """Forward: identity. Backward: :meth:`SharedFeatures.gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, features: SharedFeatures) -> Tensor:
        ctx.features = features
        return owned(x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.features.gradient(grad), None


READERS = (Float8Products, Float8Row)
"""Autograd functions that read the weights of parallel linears."""

REDUCTIONS = (Float8Row,)
"""Autograd functions behind which every rank has its shard of a sum over ranks."""
