"""Canonical state dicts ↔ shards: a checkpoint has the original names, shapes and order, at any topology."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_seqpar.groups import ParallelGroups
from lightning_seqpar.layout import ModelLayout, ParamLayout
from lightning_seqpar.parallelize import ShardedModel, refuse_copies


def _assemble(local: Tensor, layout: ParamLayout, groups: ParallelGroups, device: torch.device) -> Tensor:
    """The whole tensor on the writer (tp rank 0 of replica 0), in its own place; a meta tensor elsewhere.

    Collective over tp. No rank but the writer holds more than its own part.
    """
    local = local.detach()
    if layout.shard is None:
        return local if _is_writer(groups) else local.to("meta")
    whole = torch.empty(layout.global_shape, dtype=local.dtype, device="meta")
    if groups.rank("dp") != 0:
        return whole
    sent = local.to(device).contiguous()
    parts = [torch.empty_like(sent) for _ in range(groups.size("tp"))] if groups.rank("tp") == 0 else None
    dist.gather(sent, parts, dst=groups.ranks("tp")[0], group=groups["tp"])
    return whole if parts is None else layout.shard.assemble([part.to(local.device) for part in parts])


def _is_writer(groups: ParallelGroups) -> bool:
    return groups.rank("dp") == 0 and groups.rank("tp") == 0


def full_state_dict(record: ShardedModel, device: torch.device) -> dict[str, Any]:
    """``state_dict()`` of the model as it was before parallelisation; collective.

    Args:
        record: the parallelised model's record.
        device: where collectives of the groups' backend run.

    Returns:
        The whole tensors on the writer (the first rank); meta tensors of the same names and shapes elsewhere.

    Raises:
        RuntimeError: on every rank, for a copy of a sharded module.
    """
    refuse_copies(record)
    with record.allow_state_dict():
        local = record.model.state_dict(keep_vars=True)
    return {
        name: _assemble(value, layout, record.groups, device)
        if isinstance(value, Tensor) and (layout := record.layout.of(value) or record.buffers.get(name)) is not None
        else (value.detach() if isinstance(value, Tensor) else value)
        for name, value in local.items()
    }


def load_full_state_dict(record: ShardedModel, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Load a whole model's state dict into a parallelised one; each rank takes its part.

    Raises:
        ValueError: for a tensor of another shape than the model's, naming it.
    """
    with record.allow_state_dict():
        local = record.model.state_dict(keep_vars=True)
    rank = record.groups.rank("tp")
    sliced = dict(state)
    for name, value in local.items():
        layout = (record.layout.of(value) or record.buffers.get(name)) if isinstance(value, Tensor) else None
        if layout is not None and name in sliced:
            sliced[name] = layout.take(sliced[name], rank)
    return record.model.load_state_dict(sliced, strict=strict)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def full_optimizer_state(
    optimizer: Optimizer, layout: ModelLayout, groups: ParallelGroups, device: torch.device
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole moments; collective. Whole tensors on the writer, meta elsewhere."""
    state: dict[str, Any] = optimizer.state_dict()
    parameters = _parameters(optimizer)
    whole: dict[Any, Any] = {}
    for index, entry in state["state"].items():
        parameter = parameters[index]
        found = layout.of(parameter)
        whole[index] = {
            key: _assemble(value, found, groups, device)
            if found is not None and isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0
            else value
            for key, value in entry.items()
        }
    return {**state, "state": whole}


def load_full_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], layout: ModelLayout, groups: ParallelGroups
) -> None:
    """Load a whole optimizer state; each rank takes its part of every moment.

    Raises:
        ValueError: if the state was written for other parameters.
    """
    parameters, rank = _parameters(optimizer), groups.rank("tp")
    local: dict[Any, Any] = {}
    for index, entry in state["state"].items():
        if not 0 <= int(index) < len(parameters):
            raise ValueError(
                f"optimizer state {index}: the optimizer has {len(parameters)} parameters; the checkpoint belongs to "
                "another model or another configure_optimizers"
            )
        found = layout.of(parameters[int(index)])
        local[index] = {
            key: found.take(value, rank)
            if found is not None and isinstance(value, Tensor) and value.ndim > 0
            else value
            for key, value in entry.items()
        }
    optimizer.load_state_dict({**state, "state": local})
