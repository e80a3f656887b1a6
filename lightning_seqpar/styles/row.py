"""``row``: in-features sharded over the tensor-parallel ranks; the products are parts of a sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.adapters import DOWN
from lightning_seqpar.layout.linear_kind import features
from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.linear import RowParallelLinear, shrink
from lightning_seqpar.nn.lowered_layers import LoweredRowLinear
from lightning_seqpar.styles.cutting import (
    Segments,
    Units,
    hook_adapter_dropout,
    kind_of_linear,
    segment_lengths,
    unfit_adapter,
    unit_counts,
    unwrapped_dim,
)
from lightning_seqpar.styles.reduce import ReduceRule
from lightning_seqpar.styles.style import IMPLIED, LINEAR, Application, Match, PlannedModel, Rule, Target


class RowRule(Rule):
    """In-features sharded. A parameter's partial sums are reduced where its module returns."""

    style: Literal["row"] = "row"
    dim: int | None = None
    """For a parameter: the dim of its in-features; by default the last, as in ``[experts, out, in]``."""
    segments: Segments = 1
    """Parts of a fused input, each of which is dealt out by itself, as for a column: ``[attention|mlp]``."""
    units: Units = None
    """As for a column."""

    slot: ClassVar[str] = LINEAR
    adapter_half: ClassVar[str | None] = DOWN

    @property
    def targets(self) -> tuple[Target, ...]:
        """A linear, or else a parameter."""
        return Target.MODULES, Target.PARAMETERS

    def place(self, name: str, plan: PlannedModel) -> None:
        """A module that multiplies a row parameter itself returns a partial sum."""
        if name not in plan.modules:
            owner = name.rpartition(".")[0]
            plan.imply(Match(owner, ReduceRule(pattern=owner), IMPLIED))

    def check(self, name: str, plan: PlannedModel) -> None:
        """The features divide into whole units for every rank."""
        if name not in plan.modules:
            dim = unwrapped_dim(name, -1 if self.dim is None else self.dim, self.style, plan)
            length = plan.tensor(name).shape[dim]
            segments = segment_lengths(name, self.segments, self.units, length, plan)
            units = unit_counts(name, self.units, segments, plan)
        else:
            plan.stack_of(name)
            kind = kind_of_linear(name, self.style, plan)
            _, length = features(plan.modules[name], kind)
            dim = 1 if kind == "out_in" else 0
            segments = segment_lengths(name, self.segments, self.units, length, plan)
            units = unit_counts(name, self.units, segments, plan)
            if uneven := [count for count in units if count % plan.size]:
                plan.refuse_uneven(name, uneven[0])
        plan.shards[name] = Shard.by_segments(dim, segments, units, plan.size, name)

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """The weight is cut along the in-features. The bias is whole; added to shards, or on one rank, it is partial."""
        shard = plan.shards[name]
        if parameter == name:
            return plan.make_layout(parameter, Reason.ROW, shard=shard, partial=shard.has_shared, free=True)
        module, _, leaf = parameter.rpartition(".")
        if module != name:
            return None
        if leaf == "weight":
            return plan.make_layout(parameter, Reason.ROW, shard=shard, free=plan.kind_of(name) == "in_out")
        if plan.reduced_at(name) is not None:
            return plan.make_layout(parameter, Reason.ROW_BIAS_ONCE, partial=True)
        sp = plan.sp_at(name)
        return plan.make_layout(parameter, Reason.ROW_BIAS_ON_SHARDS if sp else Reason.IDENTICAL, partial=sp)

    def apply(self, name: str, application: Application) -> None:
        """The linear becomes a row of this rank's features; of a parameter its part stays."""
        plan, shard = application.plan, application.plan.shards[name]
        if name not in plan.modules:
            shrink(plan.tensor(name), shard, application.rank)
            return
        kind = kind_of_linear(name, self.style, plan)
        row = RowParallelLinear.adopt(application.module(name), shard, application.region_of(name), name, kind)
        row.leaves_partial = plan.reduced_at(name) is not None

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Of an adapter around it: what is dropped out of its input is each rank's own features."""
        yield from hook_adapter_dropout(name, application, alike=False)

    def unfit_to_lower(self, name: str, plan: PlannedModel) -> str | None:
        """A linear has a lowered form; a parameter that its module multiplies itself has none, and an active adapter dropout."""
        if name not in plan.modules:
            return "the style 'row' on a parameter that its module multiplies itself has no compiled form"
        if (owner := plan.reduced_at(name)) is not None:
            return f"its partial sums are reduced in {owner}, by the style 'reduce', which has no compiled form"
        return unfit_adapter(name, plan)

    def lower(self, name: str, application: Application) -> None:
        """Its forward becomes a product and the plan's collectives alone."""
        if name in application.plan.modules:
            layer: Any = application.module(name)
            layer.__class__, layer.lowered = LoweredRowLinear, application.lowered_at(name)
