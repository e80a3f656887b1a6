"""The global gradient norm: sharded parameters from every rank, whole ones counted once."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.layout.param_layout import ModelLayout
from lightning_seqpar.layout.replica_rows import is_split, local_rows
from lightning_seqpar.topology.process_groups import ParallelGroups


def global_grad_norm(
    parameters: Iterable[Tensor], layout: ModelLayout, groups: ParallelGroups, norm_type: float = 2.0
) -> Tensor:
    """The norm of the whole model's gradient: shards from every rank of tp (and of dp, where replicas split them), the rest once.

    Args:
        parameters: those whose gradients count, the same on every rank; one without a gradient counts nothing. What several
            stages hold counts on the first of them.
        layout: where each of them lies.
        groups: the process groups.
        norm_type: 2, another positive number, or infinity.

    Returns:
        The norm as a 0-dim tensor, equal on all ranks. The gradients must be synced before. Collective over tp, over pp,
        and over dp if the replicas split them.
    """
    parameters = list(parameters)
    # Gradients by the axes over whose ranks they are divided.
    divided: dict[tuple[str, ...], list[Tensor]] = {(): [], ("tp",): [], ("dp",): [], ("dp", "tp"): []}
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        if parameter.grad is None:
            continue
        found, grad = layout.of(parameter), local_rows(parameter.grad)
        if found is not None and found.stages and found.stages[0] != groups.rank("pp"):
            continue
        shard = None if found is None else found.shard
        if found is not None and shard is not None and shard.has_shared:  # what several ranks hold counts once
            grad = grad.index_select(shard.dim, layout.first_held(found.name, groups.rank("tp"), parameter.grad))
        divided[("dp",) * is_split(parameter.grad) + ("tp",) * (shard is not None)].append(grad)

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

    powers = {axes: power(grads) for axes, grads in divided.items()}
    wide = functools.reduce(torch.promote_types, (each.dtype for each in powers.values()))
    in_stages = "pp" in groups.topology.axes and groups.size("pp") > 1
    if in_stages:
        wide = torch.float64  # a stage without gradients knows no type
    powers = {axes: each.to(wide) for axes, each in powers.items()}
    # Every rank has the same lists up to shards, so the dtype agrees too.
    highest = norm_type == float("inf")
    op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
    splits = any(is_split(parameter) for parameter in parameters)
    if splits:  # each axis once: first what is divided over dp, alone or over tp too
        both = torch.stack([powers["dp",], powers["dp", "tp"]])
        dist.all_reduce(both, op=op, group=groups[groups.mean_axes])
        powers["dp",], powers["dp", "tp"] = both.unbind()
    part = torch.stack([powers["tp",], powers["dp", "tp"]])
    part = part.max() if highest else part.sum()
    dist.all_reduce(part, op=op, group=groups["tp"])
    rest = torch.stack([powers[()], powers["dp",], part])
    whole = rest.max() if highest else rest.sum()
    if in_stages:
        dist.all_reduce(whole, op=op, group=groups["pp"])
    return whole if highest else whole ** (1.0 / norm_type)
