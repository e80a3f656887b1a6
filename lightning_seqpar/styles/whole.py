"""``whole``, ``full_width``, ``gradient``: what every rank computes whole, and gradients of what every rank has whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.region.hooks import make_shards, make_whole, narrow, widen
from lightning_seqpar.styles.style import Application, ArgumentsRule, PlannedModel, Rule, Target


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
            raise ValueError(f"{name} is computed whole on every rank, but {planned[0]} inside it is planned; drop one of both")
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
        hook = make_whole(application.region_of(name), name, self.args)
        yield application.module(name).register_forward_pre_hook(hook, with_kwargs=True)

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Its output is sliced again."""
        if application.plan.stack_reaching(name) is None:
            return
        hook = make_shards(application.region_of(name), name)
        yield application.module(name).register_forward_hook(hook)


class GradientRule(Rule):
    """A parameter that every rank has whole, and with which it computes on whole sequences.

    Its gradient is then taken for a term of a sum if a module around it gathers: wrong for a temperature of all heads whose columns
    gather for themselves, and for a norm behind the row. On shards the rule says nothing, since every gradient is a term there.
    """

    style: Literal["gradient"] = "gradient"
    summed: bool
    """Whether it is a sum over the ranks: true between columns and their row, where each rank has features of its own; false
    behind the row, where all ranks compute the same."""

    targets: ClassVar[tuple[Target, ...]] = (Target.PARAMETERS,)

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block, and no linear or other rule shards it."""
        plan.stack_of(name)
        module = name.rpartition(".")[0]
        if module in plan.linears or name in plan.unwrapped_parameters or name in plan.named("local_heads"):
            raise ValueError(f"{name}: 'gradient' takes a parameter that every rank has whole, and this one is sharded")

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Whole; on whole sequences its gradient is partial or not, as the rule says."""
        module = name.rpartition(".")[0]
        if parameter != name or plan.sp_at(module):
            return None
        reason = Reason.COLUMN_TO_ROW if self.summed else Reason.IDENTICAL
        return plan.make_layout(parameter, reason, partial=self.summed)


class FullWidthRule(Rule):
    """A norm over the whole sharded width: features gathered, the norm as it is, this rank's features again."""

    style: Literal["full_width"] = "full_width"

    opens_partial: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block and is a norm: its parameters are vectors, and it holds no linear."""
        plan.stack_of(name)
        wrong = [n for n, p in plan.modules[name].named_parameters() if p.ndim != 1]
        if wrong or any(inside(n, name) for n in plan.linears):
            raise ValueError(f"{name}: 'full_width' takes a norm, whose parameters are vectors over the whole width")

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """It reads all ranks' features."""
        gather = application.region_of(name).path.gather_features
        yield application.module(name).register_forward_pre_hook(widen(gather))

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Of what it makes, this rank's features stay."""
        yield application.module(name).register_forward_hook(narrow(application.rank, application.plan.size, name))
