"""A model whose blocks see a part of the sequence each: what ``cp`` puts in front of the blocks, and takes off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# Each of the first two says what torch's functions do with parts of sequences, from its import on.
import lightning_seqpar.context.attention
import lightning_seqpar.context.loss  # noqa: F401
from lightning_seqpar.context.chunks import Chunks, contiguous, zigzag
from lightning_seqpar.context.exchange import enter
from lightning_seqpar.context.seq_part import Place, SeqPart
from lightning_seqpar.parallel.apply import whole_model
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.hooks import find_argument, put_argument
from lightning_seqpar.styles.registry import STYLES
from lightning_seqpar.styles.style import PlannedModel, Stack
from lightning_seqpar.topology.process_groups import ParallelGroups

Method = Literal["auto", "ring", "ulysses", "all_gather"]
"""The field ``cp_method`` of the configuration."""


def deal_out(length: int, group: dist.ProcessGroup, method: Method) -> Chunks:
    """How a sequence is dealt out: in runs, or in zig-zag for the ring, whose ranks then have equally much to do."""
    deal = zigzag if method == "ring" else contiguous
    return Chunks(group, length, deal(length, group.size()), method)


def enter_context(name: str, stack: Stack, group: dist.ProcessGroup, method: Method) -> Callable[..., Any]:
    """A pre-hook of a block: a whole activation becomes this rank's part of a sequence, ``[b, s, h]`` → ``[b, s/cp, h]``.

    The block sees the whole shape (:class:`~lightning_seqpar.context.seq_part.SeqPart`). What is a part already stays one.

    Args:
        name: of the block.
        stack: of which it is one.
        group: the context-parallel group.
        method: how attention between the ranks is computed.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, x = find_argument(name, stack.arg, args, kwargs)
        if isinstance(x, SeqPart):
            return None
        if not isinstance(x, Tensor) or x.is_nested:
            raise ValueError(
                f"{name}: argument {stack.arg!r} of the block is no (plain) tensor; name the right one by 'scatter'"
            )
        chunks = deal_out(x.shape[stack.dim], group, method)
        part = SeqPart.wrap(enter(x, stack.dim, chunks), Place(chunks, stack.dim))
        return put_argument(where, part, args, kwargs)

    return hook


def _hook_stacks(plan: PlannedModel, group: dist.ProcessGroup, method: Method) -> Iterator[RemovableHandle]:
    """The hooks in front of all blocks."""
    for stack in plan.stacks:
        for name in stack.blocks:
            block = plan.modules[name]
            yield block.register_forward_pre_hook(enter_context(name, stack, group, method), with_kwargs=True)


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
    record.hooks += _hook_stacks(plan, groups["cp"], method)
    record.context_blocks = tuple(name for stack in plan.stacks for name in stack.blocks)
    return record


def average_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average gradients over the context-parallel ranks, as DDP does over them and the replicas. Collective."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()
