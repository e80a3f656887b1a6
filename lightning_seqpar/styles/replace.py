"""``replace``: a module whose forward bypasses its submodules, replaced by an equal one."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.attention import ParallelMultiheadAttention, ParallelTransformerEncoder
from lightning_seqpar.styles.style import LINEAR, Application, PlannedModel, Rule


class ReplaceRule(Rule):
    """A module whose forward bypasses its submodules (torch's attention and encoder), replaced by an equal one."""

    style: Literal["replace"] = "replace"

    slot: ClassVar[str] = LINEAR
    holds_local_features: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """It is one of the two classes, and its heads divide by tp."""
        module = plan.modules[name]
        if type(module) is nn.TransformerEncoder:
            if plan.stack_owned_by(name) is None:
                raise ValueError(f"{name or 'the model'}: 'replace' takes an nn.TransformerEncoder whose layers are blocks")
            return
        stack = plan.stack_of(name)
        if type(module) is not nn.MultiheadAttention:
            raise ValueError(
                f"{name}: 'replace' knows nn.MultiheadAttention, and this is a {type(module).__name__}; use column and row"
            )
        ParallelMultiheadAttention.check(module, name, sp=stack.sp, dim=stack.dim)
        if module.num_heads % plan.size:
            plan.refuse_uneven(name, module.num_heads)

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Of an attention: projections by heads, the bias of its row as that of any row. An encoder has no layout of its own."""
        module = plan.modules[name]
        if not isinstance(module, nn.MultiheadAttention):
            return None
        width, heads = module.embed_dim, module.num_heads
        if parameter.rpartition(".")[2].startswith("in_proj"):
            shard = Shard.by_segments(0, [width] * 3, [heads] * 3, plan.size, name)
            return plan.make_layout(parameter, Reason.COLUMN_HEADS, shard=shard, free=True)
        if parameter.endswith("out_proj.weight"):
            shard = Shard.by_segments(1, [width], [heads], plan.size, name)
            return plan.make_layout(parameter, Reason.ROW_HEADS, shard=shard)
        sp = plan.sp_at(name)
        return plan.make_layout(parameter, Reason.ROW_BIAS_ON_SHARDS if sp else Reason.IDENTICAL, partial=sp)

    def apply(self, name: str, application: Application) -> None:
        """The module becomes the parallel class, with the same parameter names."""
        module = application.module(name)
        if isinstance(module, nn.TransformerEncoder):
            stack = application.plan.stack_owned_by(name)
            assert stack is not None
            ParallelTransformerEncoder.adopt(module, application.region_at(stack))
        else:
            assert isinstance(module, nn.MultiheadAttention)
            ParallelMultiheadAttention.adopt(module, application.region_of(name), name)
