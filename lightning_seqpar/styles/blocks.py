"""``blocks``: the repeated blocks, whose path is the sequence region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.region.hooks import close_call, enter_at_exit, enter_block, exit_region, leave_block, open_call
from lightning_seqpar.styles.style import Application, PlannedModel, Rule, Stack

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class BlocksRule(Rule):
    """The repeated blocks: their path is the sequence region."""

    style: Literal["blocks"] = "blocks"
    dim: Literal[0, 1] = 1
    """Where the sequence is: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or flattened tokens."""
    sp: bool = True
    """Off, these blocks see whole sequences even where the strategy has ``sp=True``: for a block whose own forward reads
    the sequence length."""

    says_where_blocks_are: ClassVar[bool] = True

    def without_sp(self) -> Rule:
        """The same blocks with whole sequences."""
        return self.model_copy(update={"sp": False})

    def unfit_to_lower(self, name: str, plan: PlannedModel) -> str | None:
        """It has a lowered form: the hooks around a block run eagerly."""
        return None

    def place(self, name: str, plan: PlannedModel) -> None:
        """Blocks under one parent are one stack, run by the nearest module around them that is no container."""
        parent = name.rpartition(".")[0]
        stack = next((one for one in plan.stacks if one.blocks[0].rpartition(".")[0] == parent), None)
        if stack is None:
            owner = parent
            while owner and isinstance(plan.modules[owner], _CONTAINERS):
                owner = owner.rpartition(".")[0]
            stack = Stack(owner, [], self.dim)
            plan.stacks.append(stack)
        stack.blocks.append(name)
        stack.dim, stack.sp = self.dim, plan.sp and self.sp


def hook_stack(stack: Stack, application: Application) -> Iterator[RemovableHandle]:
    """The hooks that carry activations into the region of a stack, from block to block, and out of it."""
    region, modules = application.region_at(stack), application.plan.modules
    owner = modules[stack.owner]
    yield owner.register_forward_pre_hook(open_call(region), prepend=True)
    exits = stack.exits or stack.blocks[-1:]
    for name in exits:  # before the hooks that close what the exit needs
        if name not in stack.blocks and name != stack.owner:
            yield modules[name].register_forward_pre_hook(enter_at_exit(region, name))
        yield modules[name].register_forward_hook(exit_region(region, name, at_owner=name == stack.owner))
    for name in stack.blocks:
        block = modules[name]
        yield block.register_forward_pre_hook(enter_block(region, name, stack.arg), with_kwargs=True)
        yield block.register_forward_hook(leave_block(region, name), always_call=True)
    # The owner's frame closes last, behind an exit at the owner itself.
    yield owner.register_forward_hook(close_call(region, at_block=exits[-1] in stack.blocks), always_call=True)
