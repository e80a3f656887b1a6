"""``whole``: a module that every rank computes whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.region import lowered
from lightning_seqpar.region.hooks import make_shards, make_whole
from lightning_seqpar.styles.style import Application, ArgumentsRule, PlannedModel


class WholeRule(ArgumentsRule):
    """A module inside the blocks that every rank computes whole: inputs gathered, output sliced again.

    For what mixes positions and can't be dealt out: attention with head counts written into it, a convolution. Outside the
    blocks it undoes what earlier rules say: an embedding or a head that would be sharded by vocabulary.
    """

    style: Literal["whole"] = "whole"

    undoes_inside: ClassVar[bool] = True
    enters_whole: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block, and no rule shards anything in it."""
        for stack in plan.stacks:
            if name in stack.blocks:
                raise ValueError(
                    f"{name}: 'whole' names a module inside a block, and this is a block; leave it out of 'blocks'"
                )
        planned = [n for n in (*plan.linears, *plan.named("gather"), *plan.named("copy")) if inside(n, name)]
        if planned:
            raise ValueError(
                f"{name} is computed whole on every rank, but {planned[0]} inside it is planned; drop one of both"
            )
        attentions = [n for n in plan.named("replace") if inside(name, n) and not plan.stack_owned_by(n)]
        if attentions:
            raise ValueError(
                f"{name} is computed whole on every rank, but {attentions[0]} around it is replaced with all that is in it; have "
                f"{attentions[0]} computed whole, or drop this rule"
            )
        holds_blocks = any(inside(block, name) for stack in plan.stacks for block in stack.blocks)
        if holds_blocks or plan.stack_reaching(name) is not None:
            plan.stack_of(name)

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Every rank computes the same: gradients are identical."""
        return plan.make_layout(parameter, Reason.COMPUTED_WHOLE)

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Its arguments are gathered."""
        if application.plan.stack_reaching(name) is None:
            return
        if application.is_lowered(name):
            hook = lowered.make_whole(application.lowered_at(name), name, self.args)
        else:
            hook = make_whole(application.region_of(name), name, self.args)
        yield application.module(name).register_forward_pre_hook(hook, with_kwargs=True)

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Its output is sliced again."""
        if application.plan.stack_reaching(name) is None:
            return
        if application.is_lowered(name):
            hook = lowered.make_shards(application.lowered_at(name))
        else:
            hook = make_shards(application.region_of(name), name)
        yield application.module(name).register_forward_hook(hook)
