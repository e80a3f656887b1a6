"""What columns and rows share: features cut into segments and units, parameters of modules themselves, adapters' dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.adapters import BASE
from lightning_seqpar.layout.linear_kind import LinearKind
from lightning_seqpar.region.hooks import draw_alike
from lightning_seqpar.styles.style import IMPLIED, Application, PlannedModel

Segments = int | tuple[int | str, ...]
"""Parts of a fused projection: how many equal ones, their names, or their sizes."""
Units = int | str | tuple[int | str, ...] | None
"""Whole units (heads) in each part: a number, or the name of an attribute that holds it; one for all parts, or one for each."""


def kind_of_linear(name: str, style: str, plan: PlannedModel) -> LinearKind:
    """How a planned linear keeps its weight."""
    kind = plan.kind_of(name)
    if kind is None:
        module = plan.modules[name]
        raise ValueError(
            f"{name}: style {style!r} takes an nn.Linear, and this is a {type(module).__module__}."
            f"{type(module).__name__}, which is not known to compute the same (Conv1D is); leave it whole"
        )
    return kind


def unwrapped_dim(name: str, dim: int, style: str, plan: PlannedModel) -> int:
    """The dim along which a parameter is cut that its module multiplies itself, counted from the front."""
    plan.stack_of(name)
    shape, module = list(plan.tensor(name).shape), name.rpartition(".")[0]
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"{name}: it has shape {shape} and no dim {dim}; name the {style}'s dim")
    if plan.kind_of(module) is not None:
        raise ValueError(f"{name}: it is the parameter of a linear; name the linear itself, {module}")
    asked = plan.named("reduce").get(module)
    of_features = asked is not None and asked.source != IMPLIED and plan.sums_features(module)
    if not plan.is_gathered_for(module) and not of_features:
        raise ValueError(
            f"{name}: {module} multiplies this {style} itself, where nothing was gathered for it; add a rule "
            f"{{pattern: {module}, style: gather}}, with all the arguments that hold tokens"
        )
    return dim % len(shape)


def segment_lengths(name: str, segments: Segments, units: Units, features: int, plan: PlannedModel) -> list[int]:
    """The lengths of the segments that ``features`` out-features consist of."""
    if isinstance(segments, tuple) and isinstance(segments[0], int):
        sizes = [int(size) for size in segments]
        if sum(sizes) != features:
            raise ValueError(f"{name}: segments {sizes} sum to {sum(sizes)}, the linear has {features} out-features")
        if min(sizes) < 1:
            raise ValueError(f"{name}: segments {sizes}: give each of them 1 feature or more")
        return sizes
    if isinstance(segments, tuple) and isinstance(units, tuple) and len(units) == len(segments):
        counts = unit_counts(name, units, segments, plan)
        if features % sum(counts):
            raise ValueError(
                f"{name}: {features} out-features do not divide into {sum(counts)} units ({list(units)}: {counts})"
            )
        return [features // sum(counts) * number for number in counts]
    count = segments if isinstance(segments, int) else len(segments)
    if features % count:
        raise ValueError(f"{name}: {features} out-features do not divide into {count} equal segments; give their sizes")
    return [features // count] * count


def unit_counts(name: str, units: Units, segments: Sequence[int | str], plan: PlannedModel) -> list[int]:
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
        raise ValueError(
            f"{name}: units={[*units]}{told}: give 1 or more for each segment, such as the number of heads"
        )
    return counts


def hook_adapter_dropout(name: str, application: Application, *, alike: bool) -> Iterator[RemovableHandle]:
    """What the adapter around a linear drops out of its input: beside a column all ranks alike, beside a row each for itself."""
    around, _, leaf = name.rpartition(".")
    dropout = application.plan.modules.get(f"{around}.lora_dropout")
    if leaf != BASE or dropout is None or application.is_lowered(name):
        return
    region = application.region_of(name)
    if not alike and region.sp:
        return  # inside a block of shards all draws are the rank's own
    for module in dropout.children():
        before, behind = draw_alike(region, always=True, switch="end" if alike else "begin")
        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(behind)


def unfit_adapter(name: str, plan: PlannedModel) -> str | None:
    """Why the linear inside an adapter has no compiled form, in words; None if it has one."""
    around, _, leaf = name.rpartition(".")
    dropout = plan.modules.get(f"{around}.lora_dropout")
    if leaf == BASE and dropout is not None and any(getattr(one, "p", 0) for one in dropout.modules()):
        return "the dropout of the adapter around it would draw from another random stream than the block; set it to 0"
    return None
