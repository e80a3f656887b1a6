"""A model whose blocks see a part of the sequence each: what ``cp`` puts in front of the blocks, and takes off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.context.axis import ContextAxis, Method
from lightning_seqpar.context.seq_part import SeqPart
from lightning_seqpar.parallel.apply import whole_model
from lightning_seqpar.parallel.embedded_parts import hook_embeddings
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.hooks import find_argument, put_argument
from lightning_seqpar.styles.registry import STYLES
from lightning_seqpar.styles.style import PlannedModel, Stack
from lightning_seqpar.topology.process_groups import ParallelGroups


def enter_context(name: str, stack: Stack, axis: ContextAxis) -> Callable[..., Any]:
    """A pre-hook of a block: a whole activation becomes this rank's part of a sequence, ``[b, s, h]`` → ``[b, s/cp, h]``.

    The block sees the whole shape (:class:`~lightning_seqpar.context.seq_part.SeqPart`). What is a part already stays one.

    Args:
        name: of the block.
        stack: of which it is one.
        axis: the context-parallel axis.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, x = find_argument(name, stack.arg, args, kwargs)
        if isinstance(x, SeqPart):
            return None
        if not isinstance(x, Tensor) or x.is_nested:
            raise ValueError(
                f"{name}: argument {stack.arg!r} of the block is no (plain) tensor; name the right one by 'scatter'"
            )
        return put_argument(where, axis.part(x, stack.dim), args, kwargs)

    return hook


def _hook_stacks(plan: PlannedModel, axis: ContextAxis) -> Iterator[RemovableHandle]:
    """The hooks in front of all blocks."""
    for stack in plan.stacks:
        for name in stack.blocks:
            block = plan.modules[name]
            yield block.register_forward_pre_hook(enter_context(name, stack, axis), with_kwargs=True)


def split_context(
    model: nn.Module, plans: Sequence[ShardingPlan], groups: ParallelGroups, method: Method
) -> ShardedModel:
    """Let the blocks of a model, of which tp shards nothing, see a part of the sequence each.

    Args:
        model: the model; it keeps its modules and its parameters.
        plans: name its blocks; nothing else is read of them.
        groups: the process groups.
        method: how attention between the ranks is computed.

    Raises:
        ValueError: if the plans name no blocks.
    """
    plan = PlannedModel(model, [match for one in plans for match in one.match(model)], list(STYLES), 1, False)
    record = whole_model(model, groups)
    axis = ContextAxis(groups["cp"], method)
    record.hooks += [*hook_embeddings(plan, axis), *_hook_stacks(plan, axis)]
    record.context_blocks = tuple(name for stack in plan.stacks for name in stack.blocks)
    return record


def average_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average gradients over the context-parallel ranks, as DDP does over them and the replicas. Collective."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()
