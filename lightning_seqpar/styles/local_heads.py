"""``local_heads``: a parameter, a buffer or an argument with a head or feature dim, of which each rank takes its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.linear import shrink
from lightning_seqpar.region.hooks import slice_arguments
from lightning_seqpar.styles.linear import Segments, Units, segments_and_units
from lightning_seqpar.styles.style import Application, Arguments, PlannedModel, Rule, Target


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
    def targets(self) -> tuple[Target, ...]:
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
