"""Refused while running: parameters that were added or replaced, and buffers that came to differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.parallel.apply import ShardedModel
from lightning_seqpar.topology.process_groups import ParallelGroups


def check_parameters(record: ShardedModel) -> None:
    """The model must hold the parameters that were laid out.

    Raises:
        RuntimeError: naming one that was replaced.
    """
    if replaced := record.layout.replaced(record.model):
        refuse_added([*record.model.parameters()], record)  # an adapter around a linear, which has another name now
        raise RuntimeError(
            f"{replaced[0]}: the model holds another parameter than the one that was laid out; do not replace parameters "
            "while training (change their data in place)"
        )


def refuse_added(parameters: Sequence[Tensor], record: ShardedModel) -> None:
    """A parameter that came after the model was sharded has no layout: nobody would sum its gradient.

    Args:
        parameters: those that may be new.
        record: of the sharded model.

    Raises:
        RuntimeError: naming the parameter.
    """
    if any(record.layout.of(parameter) is None for parameter in parameters):
        ids = {id(parameter) for parameter in parameters}
        names = [name for name in record.layout.added(record.model) if id(record.model.get_parameter(name)) in ids]
        if names:
            raise RuntimeError(
                f"{names[0]}: this parameter came after the model was sharded (an adapter that was added while training?); add "
                "it before trainer.fit, frozen or switched off if it is for later"
            )


def check_buffers(record: ShardedModel, groups: ParallelGroups, device: torch.device) -> None:
    """Buffers outside the tensor-parallel parts must be the same on all ranks of a replica; collective over tp.

    A forward that counts or averages what it sees there sees this rank's part of the sequence.

    Raises:
        RuntimeError: naming the buffer, on every rank.
    """
    held = record.equal_buffers()
    if not held:
        return
    sums = torch.stack([buffer.detach().double().nan_to_num(0.0, 0.0, 0.0).sum().to(device) for _, buffer in held])
    spread = torch.stack([sums, -sums])
    dist.all_reduce(spread, op=dist.ReduceOp.MAX, group=groups["tp"])
    largest, smallest = spread[0], -spread[1]
    apart = largest - smallest > 1e-5 * torch.maximum(largest.abs(), smallest.abs()).clamp_min(1e-30)
    if bool(apart.any()):
        name = held[int(apart.nonzero()[0])][0]
        raise RuntimeError(
            f"{name}: this buffer is no longer the same on the ranks of a replica: the forward changes it where each rank sees "
            "its part of the sequence. Have its module computed whole, "
            f"{{pattern: {name.rpartition('.')[0]}, style: whole}}, or set sp=False"
        )
