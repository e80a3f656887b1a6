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
    """The norm of the whole model's gradient (0-dim, equal on all ranks), which must be synced before.

    Shards count from every rank of tp (and of dp, where replicas split them), the rest once; what several stages hold on the first
    of them. ``parameters`` are the same on every rank; ``norm_type`` is 2, another positive number, or infinity. Collective over
    tp, over pp, and over dp if the replicas split parameters.
    """
    parameters = list(parameters)
    highest = norm_type == float("inf")
    op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
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

    def join(powers: Tensor) -> Tensor:
        return powers.max() if highest else powers.sum()

    def power(grads: list[Tensor]) -> Tensor:
        """``Σ |g|^p`` of some gradients (the largest ``|g|`` for the infinite norm), in float32 at least."""
        # Of shared heads a rank may hold none first, and nothing has no largest element.
        grads = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
        if not grads:
            return torch.zeros((), device=device, dtype=torch.float32)
        norms = torch.stack([n.to(torch.promote_types(n.dtype, torch.float32)) for n in torch._foreach_norm(grads, norm_type)])
        return join(norms if highest else norms**norm_type)

    powers = [power(grads) for grads in divided.values()]
    in_stages = "pp" in groups.topology.axes and groups.size("pp") > 1
    # Every rank has the same lists up to shards, so the dtype agrees too; but a stage without gradients knows no type.
    wide = torch.float64 if in_stages else functools.reduce(torch.promote_types, (each.dtype for each in powers))
    whole, over_tp, over_dp, over_both = (each.to(wide) for each in powers)
    if any(is_split(parameter) for parameter in parameters):  # each axis once: first dp, alone or with tp
        both = torch.stack([over_dp, over_both])
        dist.all_reduce(both, op=op, group=groups[groups.mean_axes])
        over_dp, over_both = both.unbind()
    part = join(torch.stack([over_tp, over_both]))
    dist.all_reduce(part, op=op, group=groups["tp"])
    total = join(torch.stack([whole, over_dp, part]))
    if in_stages:
        dist.all_reduce(total, op=op, group=groups["pp"])
    return total if highest else total ** (1.0 / norm_type)
