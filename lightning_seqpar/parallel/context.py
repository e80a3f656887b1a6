"""A model whose blocks see a part of the sequence each: what ``cp`` puts in front of the blocks, and takes off again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.context.axis import ContextAxis, Method
from lightning_seqpar.context.seq_part import SeqPart
from lightning_seqpar.parallel.sharded_model import ShardedModel, whole_model
from lightning_seqpar.parallel.unsharded import read_plans
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.hooks import find_argument, put_argument
from lightning_seqpar.styles.style import PlannedModel, Stack
from lightning_seqpar.topology.process_groups import ParallelGroups


def enter_context(name: str, stack: Stack, axis: ContextAxis) -> Callable[..., Any]:
    """A pre-hook of a block: a whole activation becomes this rank's part of a sequence, ``[b, s, h]`` → ``[b, s/cp, h]``."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, x = find_argument(name, stack.arg, args, kwargs)
        if isinstance(x, SeqPart):
            return None
        if not isinstance(x, Tensor) or x.is_nested:
            raise ValueError(f"{name}: argument {stack.arg!r} of the block is no (plain) tensor; name it by 'scatter'")
        return put_argument(where, axis.part(x, stack.dim), args, kwargs)

    return hook


def hook_embeddings(plan: PlannedModel, axis: ContextAxis) -> Iterator[RemovableHandle]:
    """Pre-hooks of the embeddings in front of the blocks: their ids ``[b, s]`` become this rank's, ``[b, s/cp]``.

    Which dim of other ids is the sequence is not known: activations of blocks of ``[s, b, h]`` are cut in front of the blocks.
    """
    if not any(stack.dim == 1 for stack in plan.stacks):
        return
    for name, module in plan.modules.items():
        if plan.canonical[name] != name or not isinstance(module, nn.Embedding):
            continue
        if not any(stack.covers(name) for stack in plan.stacks):
            yield module.register_forward_pre_hook(functools.partial(_enter_ids, axis))


def _enter_ids(axis: ContextAxis, module: nn.Module, args: tuple[Any, ...]) -> Any:
    ids, *rest = args or (None,)
    if not isinstance(ids, Tensor) or isinstance(ids, SeqPart) or ids.ndim != 2 or ids.is_floating_point():
        return None
    return axis.part(ids, 1), *rest


def split_context(model: nn.Module, plans: Sequence[ShardingPlan], groups: ParallelGroups, method: Method) -> ShardedModel:
    """Let the blocks of a model, of which tp shards nothing, see a part of the sequence each."""
    plan = read_plans(model, plans)
    record, axis = whole_model(model, groups), ContextAxis(groups["cp"], method)
    record.hooks += hook_embeddings(plan, axis)
    for stack in plan.stacks:
        for name in stack.blocks:
            hook = enter_context(name, stack, axis)
            record.hooks.append(plan.modules[name].register_forward_pre_hook(hook, with_kwargs=True))
    record.context_blocks = tuple(name for stack in plan.stacks for name in stack.blocks)
    return record


def average_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average gradients over the context-parallel ranks, as DDP does over them and the replicas. Collective."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()
