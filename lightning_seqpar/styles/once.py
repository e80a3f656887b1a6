"""``once``: a parameter that a module adds to partial sums counts on the first rank alone."""

from __future__ import annotations

from typing import Literal

from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.styles.style import PlannedModel, Rule, Target


class OnceRule(Rule):
    """A parameter that its module adds to partial sums, such as an output bias: the first rank alone adds it.

    The hooks are those of the module whose sums are reduced (``reduce``).
    """

    style: Literal["once"] = "once"

    @property
    def targets(self) -> tuple[Target, ...]:
        """A parameter."""
        return (Target.TENSORS,)

    def check(self, name: str, plan: PlannedModel) -> None:
        """It is a parameter, and its module leaves partial sums."""
        module, _, leaf = name.rpartition(".")
        if leaf not in plan.modules[module]._parameters:
            raise ValueError(f"{name}: 'once' takes a parameter, and this is a buffer")
        if module in plan.linears or name in plan.unwrapped_parameters or plan.reduced_at(module) is None:
            raise ValueError(
                f"{name}: 'once' takes a parameter of its own that a module adds to partial sums; around this one none are "
                "left (a row linear adds its bias behind the sum by itself)"
            )

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Whole, with a gradient on the first rank alone: partial."""
        return plan.make_layout(parameter, Reason.ONCE, partial=True)
