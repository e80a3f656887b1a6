"""``gradient``: whether the gradient of a parameter comes in parts, where the modules around it do not tell."""

from __future__ import annotations

from typing import Literal

from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.styles.style import PlannedModel, Rule, Target


class GradientRule(Rule):
    """A parameter that every rank has whole, and with which it computes on whole sequences.

    Whether its gradient is then a term of a sum is read from the modules around it: it is inside one that gathers. That is
    wrong for a temperature of all heads in a module whose columns gather for themselves, and for a norm behind the row of one
    that gathers. On shards of the sequence the rule says nothing, since every gradient is a term there.
    """

    style: Literal["gradient"] = "gradient"
    summed: bool
    """Whether it is a sum over the ranks: true between columns and their row, where each rank has features of its own; false
    behind the row, where all ranks compute the same."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """A parameter."""
        return (Target.PARAMETERS,)

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
