"""``scatter``: which argument of the blocks carries the activation into the region."""

from __future__ import annotations

from typing import ClassVar, Literal

from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.styles.style import PlannedModel, Rule


class ScatterRule(Rule):
    """Which argument of the blocks carries the activation into the region (default: the first)."""

    style: Literal["scatter"] = "scatter"
    arg: Argument = 0

    accumulates: ClassVar[bool] = True
    says_where_blocks_are: ClassVar[bool] = True

    def place(self, name: str, plan: PlannedModel) -> None:
        """The stack of the block takes its activations from there; of several rules the last says so for the whole stack."""
        for stack in plan.stacks:
            if name in stack.blocks:
                stack.arg = self.arg
                return
        raise ValueError(f"plan rule for {name!r}: 'scatter' names a block, and this is none")
