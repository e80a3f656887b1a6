"""``column``: out-features sharded over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import field_validator
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.adapters import UP
from lightning_seqpar.layout.linear_kind import features
from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.linear import ColumnParallelLinear, shrink
from lightning_seqpar.nn.lowered_layers import LoweredColumnLinear
from lightning_seqpar.styles.cutting import (
    hook_adapter_dropout,
    kind_of_linear,
    segment_lengths,
    unfit_adapter,
    unit_counts,
    unwrapped_dim,
)
from lightning_seqpar.styles.style import LINEAR, Application, PlannedModel, Rule, Target


class ColumnRule(Rule):
    """Out-features sharded, of a linear or of a parameter that its module multiplies itself (einsum, stacked experts)."""

    style: Literal["column"] = "column"
    dim: int | None = None
    """For a parameter: the dim of its out-features; by default the last but one, as in ``[experts, out, in]``."""
    segments: int | tuple[int | str, ...] = 1
    """Parts of a fused projection: how many equal ones, their names, or their sizes. Named parts with units of their own are as
    long as these are many: ``segments: [q, k, v], units: [n_head, n_kv, n_kv]``."""
    units: int | str | tuple[int | str, ...] | None = None
    """Whole units (heads) in each part: a number, or an attribute of the module or the nearest one around it; a list
    gives each part its own. A part with fewer units than ranks is shared: tp must be a multiple of them then."""

    slot: ClassVar[str] = LINEAR
    adapter_half: ClassVar[str | None] = UP

    @field_validator("segments")
    @classmethod
    def segments_are_of_one_kind(cls, value: int | tuple[int | str, ...]) -> int | tuple[int | str, ...]:
        kinds = {type(part) for part in value} if isinstance(value, tuple) else set()
        if value in (0, ()) or (isinstance(value, int) and value < 0) or len(kinds) > 1:
            raise ValueError(
                f"segments={value!r}: write a number of equal parts (3), their names ([q, k, v]) or their sizes"
            )
        return value

    @property
    def targets(self) -> tuple[Target, ...]:
        """A linear, or else a parameter."""
        return Target.MODULES, Target.PARAMETERS

    def check(self, name: str, plan: PlannedModel) -> None:
        """The features divide into whole units for every rank."""
        if name not in plan.modules:
            self._check_unwrapped(name, plan)
            return
        plan.stack_of(name)
        kind = kind_of_linear(name, self.style, plan)
        length, _ = features(plan.modules[name], kind)
        segments = segment_lengths(name, self.segments, self.units, length, plan)
        units = unit_counts(name, self.units, segments, plan)
        if set(units) == {1} and isinstance(self.units, str) and plan.size > 1:
            plan.drop(name, self)  # one kv head for all query heads: every rank has it whole
            return
        for count in units:
            if count % plan.size and plan.size % count:
                plan.refuse_uneven(name, count)
        plan.shards[name] = Shard.by_segments(0 if kind == "out_in" else 1, segments, units, plan.size, name)
        plan.units[name] = units[0]

    def _check_unwrapped(self, name: str, plan: PlannedModel) -> None:
        dim = unwrapped_dim(name, -2 if self.dim is None else self.dim, self.style, plan)
        module = name.rpartition(".")[0]
        if plan.reduced_at(module) is None:
            raise ValueError(
                f"{name}: {module} multiplies this column itself, and no row leads out of it; name the row parameter of "
                f"{module}, or {{pattern: {module}, style: reduce}} where linear rows inside it end in a sum"
            )
        segments = segment_lengths(name, self.segments, self.units, plan.tensor(name).shape[dim], plan)
        units = unit_counts(name, self.units, segments, plan)
        plan.shards[name] = Shard.by_segments(dim, segments, units, plan.size, name)

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Weight and bias are cut along the out-features; ranks that hold the same ones sum their gradients."""
        shard = plan.shards[name]
        shared = shard.has_shared
        if parameter == name:
            return plan.make_layout(parameter, Reason.COLUMN, shard=shard, partial=shared, free=True)
        module, _, leaf = parameter.rpartition(".")
        if module != name:
            return None
        cut = shard if leaf == "weight" else Shard(0, shard.length, shard.ranges)
        reason = Reason.COLUMN_SHARED if shared else Reason.COLUMN
        return plan.make_layout(parameter, reason, shard=cut, partial=shared, free=plan.kind_of(name) == "in_out")

    def apply(self, name: str, application: Application) -> None:
        """The linear becomes a column of this rank's features; of a parameter its part stays."""
        plan, shard = application.plan, application.plan.shards[name]
        if name not in plan.modules:
            shrink(plan.tensor(name), shard, application.rank)
            return
        kind = kind_of_linear(name, self.style, plan)
        column = ColumnParallelLinear.adopt(application.module(name), shard, application.region_of(name), name, kind)
        # On the instance from the start, so that undoing takes it away: training may switch it off.
        column.recomputes_elementwise = True
        column.gathers_input = name in plan.named("gather") and name not in plan.named("copy")

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Of an adapter around it: what is dropped out of its input is the same on all ranks."""
        yield from hook_adapter_dropout(name, application, alike=True)

    def unfit_to_lower(self, name: str, plan: PlannedModel) -> str | None:
        """A linear has a lowered form; a parameter that its module multiplies itself has none, and an active adapter dropout."""
        if name not in plan.modules:
            return "the style 'column' on a parameter that its module multiplies itself has no compiled form"
        return unfit_adapter(name, plan)

    def lower(self, name: str, application: Application) -> None:
        """Its forward becomes a product and the plan's collectives alone."""
        if name in application.plan.modules:
            layer: Any = application.module(name)
            layer.__class__, layer.lowered = LoweredColumnLinear, application.lowered_at(name)
