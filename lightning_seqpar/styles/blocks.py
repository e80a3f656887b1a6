"""``blocks``: the repeated blocks, whose path is the sequence region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.region.hooks import begin_on_shards, end_on_shards, enter_block, leave_block
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
    """The hooks by which activations enter the blocks of a stack, and the modules at which its region ends."""
    region, modules = application.region_at(stack), application.plan.modules
    for name in stack.blocks:
        yield modules[name].register_forward_pre_hook(enter_block(region, name, stack.arg), with_kwargs=True)
    for name in _exits_behind(stack):
        hook = begin_on_shards(region, name, is_exit=True)
        yield modules[name].register_forward_pre_hook(hook, with_kwargs=True)


def close_stack(stack: Stack, application: Application) -> Iterator[RemovableHandle]:
    """The hooks behind those modules, registered behind all that close what was opened in them."""
    region, modules = application.region_at(stack), application.plan.modules
    exits = stack.exits or stack.blocks[-1:]
    for name in stack.blocks:
        hook = leave_block(region, name, is_exit=name in exits)
        yield modules[name].register_forward_hook(hook, always_call=True)
    for name in _exits_behind(stack):
        hook = end_on_shards(region, name, is_exit=True)
        yield modules[name].register_forward_hook(hook, always_call=True)


def _exits_behind(stack: Stack) -> list[str]:
    """The modules behind the blocks at which the region ends; what the owner returns is made whole in any case."""
    return [name for name in stack.exits if name not in stack.blocks and name != stack.owner]
