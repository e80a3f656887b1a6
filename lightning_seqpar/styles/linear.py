"""``column``, ``row``, ``local_heads``: features or heads sharded over the tensor-parallel ranks, of linears and others.

The products of a row are parts of a sum. All take a parameter, too, that its module multiplies itself (einsum, experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import field_validator
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.linear_kind import BASE, DOWN, UP, LinearKind
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.param_layout import ParamLayout, Reason, Shard
from lightning_seqpar.nn.linear import ColumnParallelLinear, RowParallelLinear, shrink
from lightning_seqpar.region.float8 import SharedFeatures
from lightning_seqpar.region.hooks import draw_alike, slice_arguments
from lightning_seqpar.region.products import Low
from lightning_seqpar.styles.gather import ReduceRule
from lightning_seqpar.styles.style import IMPLIED, LINEAR, Application, Arguments, Match, PlannedModel, Rule, Target

Segments = int | tuple[int | str, ...]
"""Parts of a fused projection: how many equal ones, their names, or their sizes."""
Units = int | str | tuple[int | str, ...] | None
"""Whole units (heads) in each part: a number, or the name of an attribute that holds it; one for all parts, or one for each."""


class _LinearRule(Rule):
    """Base of the two: a dim of features, cut by segments and units."""

    dim: int | None = None
    """For a parameter: the dim of its features; by default the last but one (column) or the last (row), as in
    ``[experts, out, in]``."""
    segments: Segments = 1
    """Parts of a fused projection: how many equal ones, their names, or their sizes. Named parts with units of their own are as
    long as these are many: ``segments: [q, k, v], units: [n_head, n_kv, n_kv]``."""
    units: Units = None
    """Whole units (heads) in each part: a number, or an attribute of the module or the nearest one around it; a list
    gives each part its own. A column's part with fewer units than ranks is shared: tp must be a multiple of them then."""

    targets: ClassVar[tuple[Target, ...]] = (Target.MODULES, Target.PARAMETERS)
    slot: ClassVar[str] = LINEAR
    cuts_out: ClassVar[bool]
    """Whether the out-features are cut, and not the in-features."""

    @field_validator("segments")
    @classmethod
    def segments_are_of_one_kind(cls, value: Segments) -> Segments:
        kinds = {type(part) for part in value} if isinstance(value, tuple) else set()
        if value in (0, ()) or (isinstance(value, int) and value < 0) or len(kinds) > 1:
            raise ValueError(f"segments={value!r}: write a number of equal parts (3), their names ([q, k, v]) or their sizes")
        return value

    def _cut(self, name: str, plan: PlannedModel) -> tuple[int, list[int], list[int]]:
        """The dim that is cut, the lengths of its segments, and their units."""
        plan.stack_of(name)
        if name in plan.modules:
            dim = int((self._kind(name, plan) == "out_in") != self.cuts_out)
            length = plan.tensor(f"{name}.weight").shape[dim]
        else:
            dim = self._unwrapped_dim(name, plan)
            length = plan.tensor(name).shape[dim]
        return dim, *segments_and_units(name, self.segments, self.units, length, plan)

    def _kind(self, name: str, plan: PlannedModel) -> LinearKind:
        """How a planned linear keeps its weight."""
        kind = plan.kind_of(name)
        if kind is None:
            module = plan.modules[name]
            raise ValueError(
                f"{name}: style {self.style!r} takes an nn.Linear, and this is a {type(module).__module__}."
                f"{type(module).__name__}, which is not known to compute the same (Conv1D is); leave it whole"
            )
        return kind

    def _unwrapped_dim(self, name: str, plan: PlannedModel) -> int:
        """The dim along which a parameter is cut that its module multiplies itself, counted from the front."""
        shape, module = list(plan.tensor(name).shape), name.rpartition(".")[0]
        dim = self.dim if self.dim is not None else -2 if self.cuts_out else -1
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"{name}: it has shape {shape} and no dim {dim}; name the {self.style}'s dim")
        if plan.kind_of(module) is not None:
            raise ValueError(f"{name}: it is the parameter of a linear; name the linear itself, {module}")
        asked = plan.named("reduce").get(module)
        of_features = asked is not None and asked.source != IMPLIED and plan.sums_features(module)
        is_gathered = any(inside(module, around) for around in plan.named("gather", "copy"))
        if not is_gathered and not of_features:
            raise ValueError(
                f"{name}: {module} multiplies this {self.style} itself, where nothing was gathered for it; add a rule "
                f"{{pattern: {module}, style: gather}}, with all the arguments that hold tokens"
            )
        return dim % len(shape)

    def apply(self, name: str, application: Application) -> None:
        """The linear becomes the parallel class with this rank's features; of a parameter its part stays."""
        plan, shard = application.plan, application.plan.shards[name]
        if name in plan.modules:
            self._adopt(name, shard, application)
        else:
            shrink(plan.tensor(name), shard, application.rank)

    def _adopt(self, name: str, shard: Shard, application: Application) -> None:
        raise NotImplementedError

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """What an adapter around it drops out of its input: beside a column the same on all ranks, beside a row each its own."""
        dropout = _adapter_dropout(name, application.plan)
        if dropout is None or application.is_compiled(name):
            return
        region = application.region_of(name)
        if not self.cuts_out and region.sp:
            return  # inside a block of shards all draws are the rank's own
        for module in dropout.children():
            before, behind = draw_alike(region, always=True, switch="end" if self.cuts_out else "begin")
            yield module.register_forward_pre_hook(before)
            yield module.register_forward_hook(behind)

    def unfit_to_trace(self, name: str, plan: PlannedModel) -> str | None:
        """A linear can be; a parameter that its module multiplies itself can't, nor an active adapter dropout."""
        if name not in plan.modules:
            return f"the style {self.style!r} on a parameter that its module multiplies itself has no compiled form"
        dropout = _adapter_dropout(name, plan)
        if dropout is not None and any(getattr(one, "p", 0) for one in dropout.modules()):
            return "the dropout of the adapter around it would draw from another random stream than the block; set it to 0"
        return None


def computes_in_float8(name: str) -> bool:
    """Whether a linear does where others do: not a half of an adapter, of whose few features nothing would be gained."""
    return f".{UP}." not in name and f".{DOWN}." not in name


def linears_in_float8(plan: PlannedModel, float8: Low) -> list[str]:
    """The columns and rows that compute in float8; raises ValueError if there are none, or replicas would wait for each other."""
    named = [name for name in plan.named("column", "row") if name in plan.modules and computes_in_float8(name)]
    names = [name for name in named if plan.kind_of(name) is not None]
    if not names:
        raise ValueError(
            "float8: the plan names no linear as a column or a row, so nothing would compute in it; leave float8 out"
        )
    experts = [around for around in plan.named("reduce") if not plan.sums_features(around)]
    dealt = [name for name in names if any(inside(name, around) for around in experts)]
    if dealt and float8.over_data:
        raise ValueError(
            f"fp8_groups=True: {dealt[0]} is an expert's, which runs where tokens are dealt to it, and replicas would wait for "
            "each other's largest number; leave fp8_groups out, so that each replica scales by its own"
        )
    return names


class ColumnRule(_LinearRule):
    """Out-features sharded, of a linear or of a parameter that its module multiplies itself (einsum, stacked experts)."""

    style: Literal["column"] = "column"

    adapter_half: ClassVar[str | None] = UP
    cuts_out: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """The features divide into whole units for every rank; of a parameter, a row leads out of its module."""
        dim, segments, units = self._cut(name, plan)
        module = name.rpartition(".")[0]
        if name not in plan.modules and plan.reduced_at(module) is None:
            raise ValueError(
                f"{name}: {module} multiplies this column itself, and no row leads out of it; name the row parameter of "
                f"{module}, or {{pattern: {module}, style: reduce}} where linear rows inside it end in a sum"
            )
        if name in plan.modules:
            if set(units) == {1} and isinstance(self.units, str) and plan.size > 1:
                plan.drop(name, self)  # one kv head for all query heads: every rank has it whole
                return
            for count in units:
                if count % plan.size and plan.size % count:
                    plan.refuse_uneven(name, count)
            plan.units[name] = units[0]
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

    def _adopt(self, name: str, shard: Shard, application: Application) -> None:
        plan, region = application.plan, application.region_of(name)
        column = ColumnParallelLinear.adopt(application.module(name), shard, region, name, self._kind(name, plan))
        column.float8 = region.float8 if computes_in_float8(name) else None
        if column.float8 is not None and shard.has_shared:
            column.shared = SharedFeatures(shard, region.group)
        column.gathers_input = name in plan.named("gather") and name not in plan.named("copy")


class RowRule(_LinearRule):
    """In-features sharded. A parameter's partial sums are reduced where its module returns."""

    style: Literal["row"] = "row"

    adapter_half: ClassVar[str | None] = DOWN
    cuts_out: ClassVar[bool] = False

    def place(self, name: str, plan: PlannedModel) -> None:
        """A module that multiplies a row parameter itself returns a partial sum."""
        if name not in plan.modules:
            owner = name.rpartition(".")[0]
            plan.imply(Match(owner, ReduceRule(pattern=owner), IMPLIED))

    def check(self, name: str, plan: PlannedModel) -> None:
        """The features divide into whole units for every rank."""
        dim, segments, units = self._cut(name, plan)
        if name in plan.modules and (uneven := [count for count in units if count % plan.size]):
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

    def _adopt(self, name: str, shard: Shard, application: Application) -> None:
        plan, region = application.plan, application.region_of(name)
        row = RowParallelLinear.adopt(application.module(name), shard, region, name, self._kind(name, plan))
        row.float8 = region.float8 if computes_in_float8(name) else None
        row.leaves_partial = plan.reduced_at(name) is not None

    def unfit_to_trace(self, name: str, plan: PlannedModel) -> str | None:
        """As for a column; what leaves partial sums for another module to reduce can't be traced either."""
        if name in plan.modules and (owner := plan.reduced_at(name)) is not None:
            return f"its partial sums are reduced in {owner}, by the style 'reduce', which has no compiled form"
        return super().unfit_to_trace(name, plan)


def _adapter_dropout(name: str, plan: PlannedModel) -> nn.Module | None:
    """The dropouts of the adapter in which a linear is; None if it is in none."""
    around, _, leaf = name.rpartition(".")
    dropout: nn.Module | None = plan.modules.get(f"{around}.lora_dropout")
    return dropout if leaf == BASE else None


def segments_and_units(
    name: str, segments: Segments, units: Units, features: int, plan: PlannedModel
) -> tuple[list[int], list[int]]:
    """The lengths of the segments that ``features`` features consist of, and of how many units each consists."""
    lengths = _segment_lengths(name, segments, units, features, plan)
    return lengths, _unit_counts(name, units, lengths, plan)


def _segment_lengths(name: str, segments: Segments, units: Units, features: int, plan: PlannedModel) -> list[int]:
    if isinstance(segments, tuple) and isinstance(segments[0], int):
        sizes = [int(size) for size in segments]
        if sum(sizes) != features:
            raise ValueError(f"{name}: segments {sizes} sum to {sum(sizes)}, the linear has {features} out-features")
        if min(sizes) < 1:
            raise ValueError(f"{name}: segments {sizes}: give each of them 1 feature or more")
        return sizes
    if isinstance(segments, tuple) and isinstance(units, tuple) and len(units) == len(segments):
        counts = _unit_counts(name, units, segments, plan)
        if features % sum(counts):
            raise ValueError(
                f"{name}: {features} out-features do not divide into {sum(counts)} units ({list(units)}: {counts})"
            )
        return [features // sum(counts) * number for number in counts]
    count = segments if isinstance(segments, int) else len(segments)
    if features % count:
        raise ValueError(f"{name}: {features} out-features do not divide into {count} equal segments; give their sizes")
    return [features // count] * count


def _unit_counts(name: str, units: Units, segments: Sequence[int | str], plan: PlannedModel) -> list[int]:
    """Of how many units each segment consists; without units, each feature is one."""
    if units is None:
        return [int(size) for size in segments]
    if not isinstance(units, tuple):
        units = (units,) * len(segments)
    if len(units) != len(segments):
        raise ValueError(f"{name}: {len(units)} units for {len(segments)} segments; give one for all, or one for each")
    counts = [unit if isinstance(unit, int) else plan.number_at(name, unit) for unit in units]
    if min(counts) < 1:
        told = f" ({counts})" if counts != [*units] else ""
        raise ValueError(f"{name}: units={[*units]}{told}: give 1 or more for each segment, such as the number of heads")
    return counts


class LocalHeadsRule(Rule):
    """A parameter, a buffer or a module's arguments with a head or feature dim: each rank takes its part of it."""

    style: Literal["local_heads"] = "local_heads"
    dim: int = 0
    """The tensor dim of the heads; negative counts from the last."""
    segments: Segments = 1
    """Parts of a fused tensor, as in a column's rule."""
    units: Units = None
    """Whole units (heads) in each part, as in a column's rule."""
    args: Arguments | None = None
    """Arguments of the module that the pattern names; none if it names a parameter or a buffer."""

    @property
    def targets(self) -> tuple[Target, ...]:  # type: ignore[override]
        """A module whose arguments are sliced, or a tensor."""
        return (Target.TENSORS if self.args is None else Target.MODULES,)

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block; a tensor's heads divide by tp, and no linear shards it already."""
        plan.stack_of(name)
        if self.args is not None:
            return
        tensor, module = plan.tensor(name), name.rpartition(".")[0]
        if module in plan.linears:
            raise ValueError(f"{name}: it belongs to a linear that is a {plan.linears[module].rule.style} already")
        if not -tensor.ndim <= self.dim < tensor.ndim:
            raise ValueError(f"{name}: it has shape {list(tensor.shape)} and no dim {self.dim}")
        length = tensor.shape[self.dim]
        if length % plan.size:
            raise ValueError(f"{name}: {length} heads or features at dim {self.dim} do not divide by tp={plan.size}")
        segments, units = segments_and_units(name, self.segments, self.units, length, plan)
        plan.shards[name] = Shard.by_segments(self.dim % tensor.ndim, segments, units, plan.size, name)

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Cut along its heads; ranks that hold the same ones sum their gradients."""
        if parameter != name:
            return None
        shard = plan.shards[name]
        return plan.make_layout(parameter, Reason.LOCAL_HEADS, shard=shard, partial=shard.has_shared, free=True)

    def apply(self, name: str, application: Application) -> None:
        """Of a parameter or a buffer this rank's part stays."""
        if self.args is not None:
            return
        tensor, shard = application.plan.tensor(name), application.plan.shards[name]
        if isinstance(tensor, nn.Parameter):
            shrink(tensor, shard, application.rank)
            return
        module, _, leaf = name.rpartition(".")
        application.buffers[name] = ParamLayout(name, tuple(tensor.shape), shard, reason=Reason.LOCAL_HEADS)
        setattr(application.module(module), leaf, shard.take(tensor, application.rank))

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Of the arguments the module sees this rank's part."""
        if self.args is not None:
            hook = slice_arguments(application.region_of(name).path.slice, name, self.args, self.dim)
            yield application.module(name).register_forward_pre_hook(hook, with_kwargs=True)
