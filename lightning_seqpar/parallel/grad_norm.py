"""The global gradient norm: sharded parameters from every rank, whole ones counted once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.layout.param_layout import ModelLayout
from lightning_seqpar.topology.process_groups import ParallelGroups


def global_grad_norm(
    parameters: Iterable[Tensor], layout: ModelLayout, groups: ParallelGroups, norm_type: float = 2.0
) -> Tensor:
    """The norm of the whole model's gradient: shards from every tp rank, whole parameters once.

    Args:
        parameters: those whose gradients count; one without a gradient counts nothing.
        layout: where each of them lies.
        groups: the process groups.
        norm_type: 2, another positive number, or infinity.

    Returns:
        The norm as a 0-dim tensor, equal on all ranks of tp. The gradients must be synced before; collective over tp.
    """
    sharded: list[Tensor] = []
    whole: list[Tensor] = []
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        if parameter.grad is None:
            continue
        found = layout.of(parameter)
        if found is None or found.shard is None:
            whole.append(parameter.grad)
        elif found.shard.has_shared:  # what several ranks hold counts once
            first = found.shard.is_first_holder(groups.rank("tp")).nonzero().flatten().to(parameter.device)
            sharded.append(parameter.grad.index_select(found.shard.dim, first))
        else:
            sharded.append(parameter.grad)

    def power(grads: list[Tensor]) -> Tensor:
        """``Σ |g|^p`` of some gradients (the largest ``|g|`` for the infinite norm), in float32 at least."""
        # Of shared heads a rank may hold none first, and nothing has no largest element.
        grads = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
        if not grads:
            return torch.zeros((), device=device, dtype=torch.float32)
        norms = torch.stack(
            [n.to(torch.promote_types(n.dtype, torch.float32)) for n in torch._foreach_norm(grads, norm_type)]
        )
        return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()

    part, rest = power(sharded), power(whole)
    total_dtype = torch.promote_types(part.dtype, rest.dtype)
    part, rest = part.to(total_dtype), rest.to(total_dtype)
    # Every rank has the same lists up to shards, so the dtype agrees too.
    op = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
    dist.all_reduce(part, op=op, group=groups["tp"])
    if norm_type == float("inf"):
        return torch.maximum(part, rest)
    return (part + rest) ** (1.0 / norm_type)
