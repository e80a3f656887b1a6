"""``exit``: where the sequence region of a stack ends."""

from __future__ import annotations

from typing import ClassVar, Literal

from lightning_seqpar.layout.module_names import match_pattern
from lightning_seqpar.styles.style import PlannedModel, Rule, Stack


class ExitRule(Rule):
    """The region ends at this module's output (default: at the last block's)."""

    style: Literal["exit"] = "exit"
    blocks: str | None = None
    """Pattern of the blocks whose region ends, where one module runs several stacks."""

    accumulates: ClassVar[bool] = True

    def place(self, name: str, plan: PlannedModel) -> None:
        """The stack that the rule names ends there, or the one that lies nearest. One module may end several stacks."""
        exits = self._stack(name, plan).exits
        if name not in exits:
            exits.append(name)

    def _stack(self, name: str, plan: PlannedModel) -> Stack:
        if self.blocks is None:
            return _nearest_stack(name, plan)
        for stack in plan.stacks:
            if any(match_pattern(self.blocks, block) for block in stack.blocks):
                return stack
        raise ValueError(
            f"plan: the exit {name!r} names blocks={self.blocks!r}, which no 'blocks' rule does; the stacks begin with "
            f"{', '.join(stack.blocks[0] for stack in plan.stacks)}"
        )


def _nearest_stack(name: str, plan: PlannedModel) -> Stack:
    """The stack whose owner shares most of the path with the module of that name."""

    def closeness(stack: Stack) -> int:
        ours, theirs = name.split(".") if name else [], stack.owner.split(".") if stack.owner else []
        common = 0
        while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
            common += 1
        return 2 * common - len(theirs)

    best = max(closeness(stack) for stack in plan.stacks)
    nearest = [stack for stack in plan.stacks if closeness(stack) == best]
    if len(nearest) > 1:
        blocks = [f"{stack.blocks[0].rpartition('.')[0]}.*" for stack in nearest]
        rules = [f"{{pattern: {name}, style: exit, blocks: {pattern}}}" for pattern in blocks]
        raise ValueError(
            f"plan: the exit {name!r} could end the region of {' or '.join(stack.blocks[0] for stack in nearest)}; say "
            f"which by its blocks: {' or '.join(rules)}"
        )
    return nearest[0]
