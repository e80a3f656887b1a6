"""Column- and row-parallel linears, after arXiv 2205.05198.

They are made in place from the user's ``nn.Linear``: the module and its parameters stay the same objects, so
that other references to them (lists, ties, hooks) stay good; only the data shrinks and the class changes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.context.seq_part import SeqPart, local_of
from lightning_seqpar.layout.linear_kind import LinearKind, LinearSettings, features, settings_of
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.layout.stand_in import resolve
from lightning_seqpar.region.activations import hold
from lightning_seqpar.region.float8 import SharedFeatures
from lightning_seqpar.region.products import ColumnGroup, Low, Products, Row, autocast_dtype, take_made
from lightning_seqpar.region.sequence_region import SequenceRegion, as_part


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
    """What column and row linears share: how they are made from the user's module."""

    region: SequenceRegion  # that the layer is in
    shard: Shard  # how its weight is split over the ranks
    full_name: str  # in the model
    transposed: bool = False  # whether its weight is [in, out], as Conv1D keeps it
    float8: Low | None = None  # what multiplies by it; None for torch's own product
    settings: LinearSettings | None = None  # what the forward of the user's class reads, which must stay as it is

    @classmethod
    def adopt(
        cls, linear: nn.Module, shard: Shard, region: SequenceRegion, name: str = "linear", kind: LinearKind = "out_in"
    ) -> Any:
        """Turn ``linear``, which keeps its weight as ``kind`` says, into this class in place and cut its parameters."""
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
        raise NotImplementedError

    def check_settings(self) -> None:
        """Raise RuntimeError if a setting that the user's class reads is another one than it was."""
        if self.settings is not None:
            self.settings.check(self, self.full_name)

    def extra_repr(self) -> str:
        """Local shape, and which part of the whole it is."""
        return f"{super().extra_repr()}, rank {self.region.rank} of tp={self.region.size}"


class Float8Linear(nn.Linear):
    """A linear of a model that tp does not shard, computed in float8; made in place from the user's."""

    float8: Low
    transposed: bool = False  # whether its weight is [in, out]
    full_name: str
    settings: LinearSettings | None

    @classmethod
    def adopt(cls, linear: nn.Module, name: str, kind: LinearKind | None, float8: Low | None) -> None:
        """Turn ``linear``, which keeps its weight as ``kind`` says, into this class in place."""
        assert kind is not None
        assert float8 is not None
        settings, (out_features, in_features) = settings_of(linear), features(linear, kind)
        linear.__class__ = cls
        layer: Any = linear
        layer.float8, layer.transposed, layer.full_name, layer.settings = float8, kind == "in_out", name, settings
        layer.out_features, layer.in_features = out_features, in_features

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h]`` → ``[..., f]``."""
        if self.settings is not None:
            self.settings.check(self, self.full_name)
        place, x = (x.place, x.local) if isinstance(x, SeqPart) else (None, x)
        out: Tensor = self.float8.columns((None, None, (self.transposed,), autocast_dtype(x)), x, self.weight, self.bias)
        return out if place is None else SeqPart.wrap(out, place)


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
    shared: SharedFeatures | None = None  # those that other ranks have too, where float8 is taken of their gradient

    def _cut(self, rank: int) -> None:
        shrink(self.weight, self.shard, rank)
        if self.bias is not None:
            shrink(self.bias, Shard(0, self.shard.length, self.shard.ranges), rank)
        self.out_features = self.shard.local_length(rank)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, h]`` (or its shard, if this layer gathers) → ``[b, s, f/tp]``."""
        if self.settings is not None:
            self.check_settings()
        region, place = self.region, None
        if type(x) is not Tensor:
            if isinstance(x, SeqPart):
                place, x = x.place, x.local
            x = resolve(x)
        if self.gathers_input:
            out = self._gathered(x)
            if region.sp and place is None:
                out = out if self.shared is None else self.shared.applied(out)
                return as_part(out, region.dim, region.frames.current.chunks)
        else:
            if region.inner_streams.draws:
                region.inner_streams.begin()
            made = take_made(self, x)
            if made is None:
                region.observers.column_begins(x, self.full_name)
            out = self._multiplied(x) if made is None else made
        out = out if self.shared is None else self.shared.applied(out)
        return out if place is None else SeqPart.wrap(out, place)

    def _gathered(self, x: Tensor) -> Tensor:
        """The same where this layer gathers by itself."""
        region = self.region
        region.open_gather(x, self.full_name)
        try:
            whole = local_of(region.path.gather(x, self.full_name, ColumnGroup([self])))
            made = take_made(self, whole)
            return self._multiplied(whole) if made is None else made
        finally:
            region.close_gather()
            region.frames.finish(self.full_name)
            if region.inner_streams.draws:
                region.inner_streams.begin()

    def _multiplied(self, x: Tensor) -> Tensor:
        how = None, None, (self.transposed,), autocast_dtype(x)
        apply = Products.applied if self.float8 is None else self.float8.columns
        out: Tensor = apply(how, x, self.weight, self.bias, traced=self.region.frames.traced)
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
        if self.settings is not None:
            self.check_settings()
        if isinstance(x, SeqPart):
            out = self._reduced(x.local)
            return out if self.region.sp and not self.leaves_partial else SeqPart.wrap(out, x.place)
        return self._reduced(x)

    def _reduced(self, x: Tensor) -> Tensor:
        """:meth:`forward` on this rank's positions."""
        region = self.region
        try:
            if self.leaves_partial:
                alone = None, None, (self.transposed,), autocast_dtype(x)
                apply = Products.applied if self.float8 is None else functools.partial(self.float8.columns, cuts_in=True)
                partial: Tensor = apply(alone, x, self.weight, None, traced=region.frames.traced)
            else:
                tokens = region.path.row_tokens((*x.shape[:-1], self.out_features), self.full_name)
                weight, frame, held = self._parameters.get("weight"), region.frames.current, None
                if frame.span is not None:
                    x, held = hold(x, frame)
                how, sums = (tokens, self.transposed, held), Row.applied if self.float8 is None else self.float8.row
                out: Tensor = sums(how, x, self.weight if weight is None else weight, traced=tokens.traced)
        except BaseException:  # also what stops an activation checkpoint's recomputation, once it has all tensors
            if not region.sp:
                region.inner_streams.end()
            raise
        if not self.leaves_partial:
            if not region.sp:
                region.inner_streams.end()
            bias = self._parameters.get("bias")
            bias = self.bias if bias is None else bias
            return out if bias is None else out + bias.to(out.dtype)
        if self.bias is not None:
            # On the other ranks it is added times zero, so that they have a gradient too: DDP waits for one.
            partial = partial + (self.bias * float(region.rank == 0)).to(partial.dtype)
        region.leave_partial(partial)
        return partial
