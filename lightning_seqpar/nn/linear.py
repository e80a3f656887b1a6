"""Column- and row-parallel linears, after arXiv 2205.05198.

They are made in place from the user's ``nn.Linear``: the module and its parameters stay the same objects, so
that other references to them (lists, ties, hooks) stay good; only the data shrinks and the class changes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar.activations.norm_recompute import saved_by
from lightning_seqpar.activations.regather import RegatheredInput
from lightning_seqpar.activations.wgrad_overlap import (
    BackwardExchange,
    DeferredWgrad,
    WgradProduct,
    cast,
    is_wanted,
    once,
    rows_of,
)
from lightning_seqpar.context.seq_part import SeqPart, local_of
from lightning_seqpar.layout.linear_kind import LinearKind, LinearSettings, features, settings_of
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.layout.stand_in import resolve
from lightning_seqpar.region.data_path import as_part
from lightning_seqpar.region.sequence_region import SequenceRegion


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type in which autocast would compute a product on the device of ``x``; None if it is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """``F.linear`` in ``dtype``, the type that autocast asks for; None for the inputs' own type. No view is returned."""
    if dtype is None:
        out = F.linear(x, weight, bias)
    else:
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    # Of three dims torch makes a view of the rows, and a view made inside a function of autograd may not be changed in place.
    return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out


class ShardedLinear(torch.autograd.Function):
    """The product of a column or row linear; keeps the *shard* of a gathered input and gathers it again (arXiv 2205.05198).

    As a column, where ``x`` was gathered and ``W`` is this rank's part of the out-features:

    ============  ======================  ======================  =============================================
    tensor        global                  local                   saved for backward
    ============  ======================  ======================  =============================================
    x             ``[b, s, h]``           ``[b, s, h]``           its shard ``[b, s/tp, h]``, or that of the
                                                                  input of the norm that made it; or itself
    weight        ``[f, h]``              ``[f/tp, h]``           itself
    bias          ``[f]``                 ``[f/tp]``              —
    y             ``[b, s, f]``           ``[b, s, f/tp]``        —
    ============  ======================  ======================  =============================================

    As a row, ``x`` is ``[b, s, f/tp]`` and saved, ``W`` is ``[h, f/tp]``, and ``y``, ``[b, s, h]``, is a term of a sum over tp.

    - Forward: ``y = x Wᵀ + b``.
    - Input gradient: ``dx = dy W``; of a column it is a term of a sum over tp, which the gather's backward reduces.
    - Weight gradient: ``dW = dyᵀ x``, with ``x`` gathered again while ``dx`` is computed; ``db = Σ dy``.

    What is frozen costs no work. The arguments of ``forward`` beyond ``x``, ``weight`` and ``bias``:

    - gathered: the handle by which ``x`` is gathered again; None if ``x`` itself is saved.
    - late: where ``dW`` is left as a product still to run, under a collective that comes later in the backward; or None.
    - transposed: whether ``weight`` is the transpose of a parameter ``[h, f/tp]``.
    - slot: where the columns that read one ``x`` sum their ``dx`` in one tensor; or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gathered: RegatheredInput | None,
        late: DeferredWgrad | None,
        transposed: bool,
        slot: BackwardExchange | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        dtype = _autocast_dtype(x)
        ctx.late, ctx.transposed, ctx.slot = late, transposed, slot
        if slot is not None and ctx.needs_input_grad[0]:
            slot.add_column(ctx)
        needs_x = weight.requires_grad
        keep = x if needs_x else None
        if needs_x and gathered is not None:
            gathered.add_user()
            keep = gathered.kept
        ctx.save_for_backward(keep, weight)
        ctx.gathered, ctx.x_dtype, ctx.x_shape = gathered if needs_x else None, x.dtype, x.shape
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return _product(x, weight, bias, dtype)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return ShardedLinear._skip(ctx)
        kept: Tensor | None
        kept, weight = saved_by(ctx, ctx.gathered.call if ctx.gathered is not None else None)
        if kept is not None and not is_wanted(ctx, 1):
            kept = None
            if ctx.gathered is not None:
                ctx.gathered.skip()
        if kept is not None and ctx.gathered is not None:
            ctx.gathered.start(kept)  # runs under the input-grad product
        grad_x, rows = None, rows_of(grad)
        if ctx.needs_input_grad[0]:
            if ctx.slot is not None and ctx.is_plain:
                grad_x = ctx.slot.add_product(rows, weight, ctx.x_dtype)
            else:
                grad_x = cast(torch.mm(rows, cast(weight, grad.dtype)), ctx.x_dtype)
        if grad_x is not None:
            grad_x = grad_x.view(ctx.x_shape)
        grad_w = None
        if kept is not None:
            read = functools.partial(ctx.gathered.take, kept) if ctx.gathered is not None else lambda: kept
            if ctx.late is not None and ctx.is_plain:
                ctx.late.put(WgradProduct(rows, read, weight.dtype, ctx.transposed))
            else:
                grad_w = WgradProduct(rows, read, weight.dtype).make()
        grad_b = rows.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_w, grad_b, None, None, None, None

    @staticmethod
    def _skip(ctx: Any) -> tuple[Tensor | None, ...]:
        """The backward without a gradient for ``y``: no product, but other columns that read ``x`` must not wait for this one.

        It may be the last of them, and then returns the sum of their input gradients.
        """
        if ctx.gathered is not None:
            ctx.gathered.skip()
        total = None
        if ctx.slot is not None and ctx.is_plain and ctx.needs_input_grad[0]:
            total = ctx.slot.skip_product()
        return None if total is None else total.view(ctx.x_shape), None, None, None, None, None, None


def sharded_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, region: SequenceRegion, *, transposed: bool = False
) -> Tensor:
    """``F.linear`` with this rank's part of a weight; saves the input's shard if the region gathered the input.

    Args:
        x: a whole activation, ``[b, s, h]``.
        weight: ``[f/tp, h]``.
        bias: ``[f/tp]``, or None.
        region: where ``x`` was gathered.
        transposed: whether the weight is ``[h, f/tp]``.
    """
    handle, late, slot = None, None, None
    if torch.is_grad_enabled():
        handle = region.columns.find_regathered(x)
        weight, late, slot = region.columns.defer_wgrad(x, weight, region.path.policy)
    matrix = weight.t() if transposed else weight
    return ShardedLinear.apply(x, matrix, bias, handle, late, transposed, slot)  # type: ignore[no-untyped-call, no-any-return]


def shrink(parameter: Tensor, shard: Shard, rank: int) -> None:
    """Cut a parameter down to the part of ``rank``, in place: the object stays the same, and has no gradient."""
    set_data(parameter, shard.take(parameter.data, rank))


def set_data(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other data, of another shape, and no gradient; the object stays the same."""
    parameter.grad = None
    # A graph of an earlier forward may still hold the gradient accumulator, which remembers the old shape; a change
    # of type makes autograd drop it.
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=data.device)
    parameter.data = data


class _ParallelLinear(nn.Linear):
    """What column and row linears share: how they are made from the user's module.

    Attributes:
        region: the sequence region that the layer is in.
        shard: how its weight is split over the ranks.
        full_name: its name in the model.
        transposed: whether its weight is ``[in, out]``, as Conv1D keeps it.
        settings: what the forward of the user's class reads, which must stay as it is; None for nothing.
    """

    region: SequenceRegion
    shard: Shard
    full_name: str
    transposed: bool = False
    settings: LinearSettings | None = None

    @classmethod
    def adopt(
        cls, linear: nn.Module, shard: Shard, region: SequenceRegion, name: str = "linear", kind: LinearKind = "out_in"
    ) -> Any:
        """Turn ``linear`` into this class in place and cut its parameters.

        Args:
            kind: whether its weight is ``[out, in]`` or ``[in, out]``.
        """
        out_features, in_features = features(linear, kind)
        settings = settings_of(linear)
        linear.__class__ = cls
        layer: Any = linear
        layer.settings = settings if settings is not None and settings.values else None
        layer.region, layer.shard, layer.full_name = region, shard, name
        if kind == "in_out":
            layer.transposed, layer.out_features, layer.in_features = True, out_features, in_features
        layer._cut(region.rank)
        return layer

    @property
    def matrix(self) -> Tensor:
        """This rank's part of the weight as ``[out, in]``."""
        return self.weight.t() if self.transposed else self.weight

    def _cut(self, rank: int) -> None:
        """Cut the parameters down to the part of ``rank``, and set the local number of features."""
        raise NotImplementedError

    def check_settings(self) -> None:
        """Raise RuntimeError if a setting that the user's class reads is another one than it was."""
        if self.settings is not None:
            self.settings.check(self, self.full_name)

    def extra_repr(self) -> str:
        """Local shape, and which part of the whole it is."""
        return f"{super().extra_repr()}, rank {self.region.rank} of tp={self.region.size}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear whose out-features are sharded over the tensor-parallel ranks.

    ============  ====================  ======================  ======================
    tensor        global                local                   saved for backward
    ============  ====================  ======================  ======================
    input         ``[b, s, h]``         ``[b, s, h]``           ``[b, s/tp, h]``
    weight        ``[f, h]``            ``[f/tp, h]``           itself
    bias          ``[f]``               ``[f/tp]``              —
    output        ``[b, s, f]``         ``[b, s, f/tp]``        —
    ============  ====================  ======================  ======================

    The input is gathered around this layer, once for all that share it; with :attr:`gathers_input` this layer is
    its own gather point and reads ``[b, s/tp, h]``. Sequence on ``region.dim``.
    """

    gathers_input: bool = False
    recomputes_elementwise: bool = True

    def _cut(self, rank: int) -> None:
        shrink(self.weight, self.shard, rank)
        if self.bias is not None:
            shrink(self.bias, Shard(0, self.shard.length, self.shard.ranges), rank)
        self.out_features = self.shard.local_length(rank)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, h]`` (or its shard, if this layer gathers) → ``[b, s, f/tp]``."""
        self.check_settings()
        region = self.region
        if isinstance(x, SeqPart):
            part, out = x, self._product(x.local)
            return SeqPart.wrap(out, part.place)
        if self.gathers_input and region.sp:
            return as_part(self._product(x), region.dim, region.frames.current.chunks)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        """:meth:`forward` on this rank's positions."""
        region = self.region
        if not self.gathers_input:
            x = resolve(x)
            region.rng.begin_features()
            region.observers.column_begins(x, self.full_name)
            return self._note_output(sharded_linear(x, self.weight, self.bias, region, transposed=self.transposed))
        region.open_gather(x, self.full_name)
        try:
            whole = local_of(region.path.gather(x, self.full_name))
            out = sharded_linear(whole, self.weight, self.bias, region, transposed=self.transposed)
        finally:
            region.close_gather()
            region.frames.finish(self.full_name)
            region.rng.begin_features()
        return self._note_output(out)

    def _note_output(self, out: Tensor) -> Tensor:
        """Let the element-wise functions on this output be recorded, so that they can be recomputed."""
        self.region.elementwise_spans.after_column(out, self)
        return out


class RowParallelLinear(_ParallelLinear):
    """A linear whose in-features are sharded over the tensor-parallel ranks.

    ============  ====================  ======================  ======================
    tensor        global                local                   saved for backward
    ============  ====================  ======================  ======================
    input         ``[b, s, f]``         ``[b, s, f/tp]``        itself
    weight        ``[h, f]``            ``[h, f/tp]``           itself
    bias          ``[h]``               ``[h]``                 —
    output        ``[b, s, h]``         ``[b, s/tp, h]``        —
    ============  ====================  ======================  ======================

    The bias is added after the reduce-scatter, to shards: its gradient is partial and is summed over tp. Without
    sequence parallelism the output is whole (all-reduced) and the bias gradient is too. With :attr:`leaves_partial` a
    module around this layer reduces: the output is a partial sum, to which the first rank alone adds the bias.
    """

    leaves_partial: bool = False

    def _cut(self, rank: int) -> None:
        shrink(self.weight, self.shard, rank)
        self.in_features = self.shard.local_length(rank)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, f/tp]`` → ``[b, s/tp, h]``."""
        self.check_settings()
        if isinstance(x, SeqPart):
            out = self._reduced(x.local)
            return out if self.region.sp and not self.leaves_partial else SeqPart.wrap(out, x.place)
        return self._reduced(x)

    def _reduced(self, x: Tensor) -> Tensor:
        """:meth:`forward` on this rank's positions."""
        try:
            with self.region.elementwise_spans.row():
                partial = self._product(x)
        except BaseException:  # also what stops an activation checkpoint's recomputation, once it has all tensors
            self.region.rng.end_features()
            raise
        if self.leaves_partial:
            if self.bias is not None:
                # On the other ranks it is added times zero, so that they have a gradient too: DDP waits for one.
                partial = partial + (self.bias * float(self.region.rank == 0)).to(partial.dtype)
            self.region.leave_partial(partial)
            return partial
        out = self.region.path.reduce(partial, self.full_name)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _product(self, x: Tensor) -> Tensor:
        weight, late = self.weight, None
        if torch.is_grad_enabled() and not self.leaves_partial:
            weight, late = self.region.path.defer_row_wgrad(weight, x.nbytes // x.shape[-1] * self.out_features)
        matrix = weight.t() if self.transposed else weight
        return ShardedLinear.apply(x, matrix, None, None, late, self.transposed, None)  # type: ignore[no-untyped-call, no-any-return]
