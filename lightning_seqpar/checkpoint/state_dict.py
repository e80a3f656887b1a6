"""Canonical state dicts ↔ shards: a checkpoint has the original names, shapes and order, at any topology."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_seqpar.checkpoint.folder import Opened, Part, own_memory
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout
from lightning_seqpar.parallel.apply import ShardedModel, refuse_copies
from lightning_seqpar.topology.process_groups import ParallelGroups


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
    made: dict[int, Tensor] = {}  # tied weights are one tensor
    for name, value in local.items():
        if isinstance(value, Tensor) and id(value) not in made:
            layout = _layout_of(record, name, value)
            made[id(value)] = value.detach() if layout is None else _assemble(value, layout, record.groups, device)
    return {name: made.get(id(value), value) for name, value in local.items()}


def _layout_of(record: ShardedModel, name: str, value: object) -> ParamLayout | None:
    if not isinstance(value, Tensor):
        return None
    return record.layout.of(value) or record.buffers.get(name)


def model_parts(model: nn.Module, record: ShardedModel | None, groups: ParallelGroups) -> dict[str, Any]:
    """``state_dict()`` with a :class:`~lightning_seqpar.checkpoint.folder.Part` for each tensor: what this rank writes of it.

    Raises:
        RuntimeError: on every rank, for a copy of a sharded module.
    """
    if record is not None:
        refuse_copies(record)
    with nullcontext() if record is None else record.allow_state_dict():
        local = model.state_dict(keep_vars=True)
    turn = _Turn(groups)
    found: dict[int, Part] = {}  # tied weights are one part
    for name, value in local.items():
        if isinstance(value, Tensor) and id(value) not in found:
            layout = None if record is None else _layout_of(record, name, value)
            found[id(value)] = turn.part(value, layout, alike=isinstance(value, nn.Parameter))
    return {name: found.get(id(value), value) for name, value in local.items()}


def optimizer_parts(optimizer: Optimizer, layout: ModelLayout | None, groups: ParallelGroups) -> dict[str, Any]:
    """``optimizer.state_dict()`` with a :class:`~lightning_seqpar.checkpoint.folder.Part` for each moment."""
    state: dict[str, Any] = optimizer.state_dict()
    parameters, turn = _parameters(optimizer), _Turn(groups)
    parts = {}
    for index, entry in state["state"].items():
        parameter = parameters[index]
        found = None if layout is None else layout.of(parameter)
        parts[index] = {
            key: turn.part(value, found if value.shape == parameter.shape else None)
            if isinstance(value, Tensor)
            else value
            for key, value in entry.items()
        }
    return {**state, "state": parts}


class _Turn:
    """Deals out what several ranks hold alike: the one writes it that has the fewest bytes yet."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self._loads = torch.zeros(groups.size("dp"), groups.size("tp"), dtype=torch.float64)

    def part(self, value: Tensor, layout: ParamLayout | None, *, alike: bool = True) -> Part:
        """The next tensor's part; every rank must ask for the same tensors in the same order.

        Args:
            value: what this rank holds.
            layout: how the whole is dealt out.
            alike: whether replicas hold the same; of what they count for themselves (buffers) the first one's is saved.
        """
        dp, tp = self._groups.rank("dp"), self._groups.rank("tp")
        if layout is None or layout.shard is None:  # all ranks hold it
            writer = divmod(int(self._loads.argmin()), self._loads.shape[1]) if alike else (0, 0)
            self._loads[writer] += value.numel() * value.element_size()
            return Part(value, layout, tp, writes=writer == (dp, tp))
        row = int(self._loads.sum(1).argmin()) if alike else 0  # every tensor-parallel rank of one replica
        self._loads[row] += math.prod(layout.global_shape) * value.element_size() / self._loads.shape[1]
        return Part(value, layout, tp, writes=row == dp)


def load_full_state_dict(
    record: ShardedModel, state: Mapping[str, Any], *, strict: bool, opened: Opened | None = None
) -> Any:
    """Load a whole model's state dict into a parallelised one; each rank takes its part.

    Args:
        record: the parallelised model's record.
        state: the whole tensors.
        strict: as ``load_state_dict`` has it.
        opened: the folder that they are read from, where they are meta tensors.

    Raises:
        ValueError: for a tensor of another shape than the model's, naming it.
    """
    with record.allow_state_dict():
        local = record.model.state_dict(keep_vars=True)
    rank = record.groups.rank("tp")
    layouts = {name: _layout_of(record, name, value) for name, value in local.items()}
    sliced = dict(state) if opened is None else opened.take(state, layouts, rank)
    for name, layout in layouts.items():
        if layout is not None and name in sliced and (opened is None or opened.key_of(state[name]) is None):
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
    optimizer: Optimizer,
    state: Mapping[str, Any],
    layout: ModelLayout | None,
    groups: ParallelGroups,
    opened: Opened | None = None,
) -> None:
    """Load a whole optimizer state; each rank takes its part of every moment.

    Raises:
        ValueError: if the state was written for other parameters.
    """
    parameters, rank = _parameters(optimizer), groups.rank("tp")
    flat = {(index, key): value for index, entry in state["state"].items() for key, value in entry.items()}
    layouts: dict[tuple[Any, str], ParamLayout | None] = {}
    for index, key in flat:
        if not 0 <= int(index) < len(parameters):
            raise ValueError(
                f"optimizer state {index}: the optimizer has {len(parameters)} parameters; the checkpoint belongs to "
                "another model or another configure_optimizers"
            )
        layouts[index, key] = None if layout is None else layout.of(parameters[int(index)])
    taken = flat if opened is None else opened.take(flat, layouts, rank)
    local: dict[Any, Any] = {index: {} for index in state["state"]}
    for (index, key), value in taken.items():
        found = layouts[index, key]
        is_whole = found is not None and isinstance(value, Tensor) and value.ndim > 0 and value is flat[index, key]
        if found is not None and is_whole:
            value = found.take(value, rank)
        # In memory of its own: the optimizer keeps it, and what was read may lie in a file.
        local[index][key] = own_memory(value) if value is flat[index, key] else value
    optimizer.load_state_dict({**state, "state": local})
