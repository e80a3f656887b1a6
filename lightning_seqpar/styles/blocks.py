"""``blocks``, ``scatter``, ``exit``: where activations are shards, how they come there, and where that ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import Argument, match_pattern
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
        ours, theirs = name.split("."), stack.owner.split(".") if stack.owner else []
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
        return 2 * len([*common]) - len(theirs)

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
