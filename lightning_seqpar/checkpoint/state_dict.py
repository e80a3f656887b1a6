"""State dicts of the whole model (names, shapes, order), made from the shards of the ranks and loaded into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_seqpar.checkpoint.folder import K, Opened, Part, own_memory, walk
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout, gather_rows, is_split, take_rows
from lightning_seqpar.parallel.sharded_model import ShardedModel, refuse_copies
from lightning_seqpar.pipeline.cut import from_holder
from lightning_seqpar.topology.process_groups import ParallelGroups


def _assemble(local: Tensor, layout: ParamLayout, groups: ParallelGroups, device: torch.device) -> Tensor:
    """Gathers a tensor on the rank that writes; elsewhere a meta tensor. Collective over tp, and over dp if replicas split it."""
    local = from_holder((gather_rows(local, groups["fsdp_shard"]) if is_split(local) else local).detach(), layout, groups)
    writes = groups.rank(groups.mean_axes) == 0 and ("pp" not in groups.topology.axes or groups.rank("pp") == 0)
    is_first = groups.rank("tp") == 0
    if layout.shard is None:
        return local if writes and is_first else local.to("meta")
    whole = torch.empty(layout.global_shape, dtype=local.dtype, device="meta")
    if not writes:
        return whole
    sent = local.to(device).contiguous()
    parts = [torch.empty_like(sent) for _ in range(groups.size("tp"))] if is_first else None
    dist.gather(sent, parts, dst=groups.ranks("tp")[0], group=groups["tp"])
    return whole if parts is None else layout.shard.assemble([part.to(local.device) for part in parts])


def full_state_dict(record: ShardedModel, device: torch.device, held: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Makes ``state_dict()`` of the model as before sharding, with meta tensors on all ranks but the first. Collective.

    ``device`` is where collectives run; ``held`` the state dict of a copy that is sharded alike, in the place of the model's.
    """

    def gathered(mine: Tensor, layout: ParamLayout | None, _: bool) -> Tensor:
        return mine.detach() if layout is None else _assemble(mine, layout, record.groups, device)

    return _model_state(record.model, record, held, gathered)


def _model_state(
    model: nn.Module,
    record: ShardedModel | None,
    held: Mapping[str, Any] | None,
    change: Callable[[Tensor, ParamLayout | None, bool], Any],
) -> dict[str, Any]:
    """``state_dict()`` with other things in the place of tensors; ``change`` also hears whether one is a parameter."""
    if record is not None:
        refuse_copies(record)
    with nullcontext() if record is None else record.allow_state_dict():
        local = model.state_dict(keep_vars=True)
    held = local if held is None else held
    changed: dict[int, Any] = {}  # by the id of the model's own tensor: tied weights are one
    for name, value in local.items():
        if isinstance(held[name], Tensor) and id(value) not in changed:
            layout = None if record is None else _layout_of(record, name, value)
            changed[id(value)] = change(held[name], layout, isinstance(value, nn.Parameter))
    return {name: changed.get(id(local[name]), value) for name, value in held.items()}


def _layout_of(record: ShardedModel, name: str, value: object) -> ParamLayout | None:
    """The layout of a parameter or buffer of the state dict; None for anything that is not sharded."""
    if not isinstance(value, Tensor):
        return None
    return record.layout.of(value) or record.buffers.get(name)


def model_parts(
    model: nn.Module, record: ShardedModel | None, groups: ParallelGroups, held: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Makes ``state_dict()`` (or takes that of a copy, ``held``) with a ``Part`` for each tensor. Nothing is sent."""
    writers = _WriterChoice(groups)

    def part(mine: Tensor, layout: ParamLayout | None, is_parameter: bool) -> Part:
        return writers.part(mine, layout, () if layout is None else layout.stages, alike=is_parameter)

    return _model_state(model, record, held, part)


def optimizer_parts(optimizer: Optimizer, layout: ModelLayout | None, groups: ParallelGroups) -> dict[str, Any]:
    """Makes ``optimizer.state_dict()`` with a ``Part`` for each moment. Collective over the stages of a pipeline."""
    return _optimizer_state(optimizer, layout, groups, _WriterChoice(groups).part)


def _optimizer_state(
    optimizer: Optimizer,
    layout: ModelLayout | None,
    groups: ParallelGroups,
    change: Callable[[Tensor, ParamLayout | None, Sequence[int]], Any],
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with other things in the place of moments; ``change`` hears of one's layout and stages."""
    state: dict[str, Any] = optimizer.state_dict()
    if not _is_torchs_layout(state):
        _refuse_own_layout(optimizer, state, layout)
        whole = walk(state, lambda _, leaf: change(leaf, None, ()) if isinstance(leaf, Tensor) else leaf)
        return cast("dict[str, Any]", whole)
    parameters = _parameters(optimizer)
    entries = state["state"] if layout is None else _of_all_stages(state["state"], parameters, layout, groups)
    changed: dict[Any, Any] = {}
    for index, entry in entries.items():
        parameter = parameters[index]
        own = None if layout is None else layout.of(parameter)
        stages = () if own is None else own.stages
        changed[index] = {
            key: change(value, own if value.ndim and value.shape == parameter.shape else None, stages)
            if isinstance(value, Tensor)
            else value
            for key, value in entry.items()
        }
    return {**state, "state": changed}


class _WriterChoice:
    """Chooses which rank writes what several ranks hold alike: the one that has the fewest bytes to write so far."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self._loads = torch.zeros(groups.size(groups.mean_axes), groups.size("tp"), dtype=torch.float64)

    def part(self, value: Tensor, layout: ParamLayout | None, stages: Sequence[int] = (), *, alike: bool = True) -> Part:
        """Makes the next tensor's part. Of what is not ``alike`` (buffers) the first replica writes; of stages the first one."""
        dp, tp, loads = self._groups.rank(self._groups.mean_axes), self._groups.rank("tp"), self._loads
        here = "pp" not in self._groups.topology.axes or self._groups.rank("pp") == next(iter(stages), 0)
        sharded = layout is not None and layout.shard is not None
        if is_split(value):  # each of those that share it out writes its rows: of what the ranks of tp hold alike, one of them
            shares = loads.view(-1, self._groups.size("fsdp_shard"), loads.shape[1])
            at = int(shares.sum((1, 2)).argmin())
            column = int(shares[at].sum(0).argmin())
            shares[at, :, slice(None) if sharded else column] += value.nbytes / shares.shape[1]
            writes = at == dp // shares.shape[1] and (sharded or column == tp)
        elif layout is None or layout.shard is None:  # all ranks of a replica hold the whole tensor
            writer = divmod(int(loads.argmin()), loads.shape[1]) if alike else (0, 0)
            loads[writer] += value.nbytes
            writes = writer == (dp, tp)
        else:  # a replica, of which every tensor-parallel rank writes its part
            row = int(loads.sum(1).argmin()) if alike else 0
            loads[row] += math.prod(layout.global_shape) * value.element_size() / loads.shape[1]
            writes = row == dp
        return Part(value, layout, tp, writes=here and writes)


def load_full_state_dict(record: ShardedModel, state: Mapping[str, Any], *, strict: bool, opened: Opened | None = None) -> Any:
    """Loads the state dict of a whole model into one of shards; each rank takes its part, or reads it from ``opened``."""
    with record.allow_state_dict():
        local = record.model.state_dict(keep_vars=True)
    layouts = {name: _layout_of(record, name, value) for name, value in local.items()}
    likes = {name: value for name, value in local.items() if isinstance(value, Tensor)}
    elsewhere = [name for name, layout in layouts.items() if _is_elsewhere(layout, record.groups)]
    here = {name: value for name, value in state.items() if name not in elsewhere}
    taken = _take(here, layouts, likes, record.groups.rank("tp"), opened)
    if not elsewhere:
        return record.model.load_state_dict(taken, strict=strict)
    unknown = [name for name in elsewhere if name not in state]
    found = record.model.load_state_dict(taken, strict=False)
    missing = [name for name in found.missing_keys if name not in elsewhere or name in unknown]
    if strict and (missing or found.unexpected_keys):
        raise RuntimeError(
            f"the checkpoint does not fit {type(record.model).__name__}: it lacks {missing}, and has {found.unexpected_keys} too"
        )
    return found


def _take(
    values: Mapping[K, Any],
    layouts: Mapping[K, ParamLayout | None],
    likes: Mapping[K, Tensor],
    rank: int,
    opened: Opened | None,
) -> dict[K, Any]:
    """This rank's parts of whole tensors, by any names: read from ``opened``, or cut out. ``likes`` are what they are for."""
    taken = dict(values) if opened is None else opened.take(values, layouts, rank, likes)
    for name, value in values.items():
        if (layout := layouts.get(name)) is not None and taken[name] is value:  # it was not read
            taken[name] = take_rows(layout.take(value, rank), likes[name])
    return taken


def _is_elsewhere(layout: ParamLayout | None, groups: ParallelGroups) -> bool:
    """Whether only other stages of a pipeline hold a parameter."""
    return layout is not None and not layout.is_on(groups.rank("pp"))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_torchs_layout(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state dict is laid out as torch's own are: ``{"state": {index: {name: moment}}, ...}``."""
    entries = state.get("state")
    return isinstance(entries, Mapping) and all(
        isinstance(index, int) and isinstance(entry, Mapping) for index, entry in entries.items()
    )


def _refuse_own_layout(optimizer: Optimizer, state: Mapping[str, Any], layout: ModelLayout | None) -> None:
    """Refuses a state dict of a layout of its own where parameters are sharded; an empty one has nothing to shard."""
    if layout is not None and state:
        raise ValueError(
            f"{type(optimizer).__name__}: its state dict holds {', '.join(map(str, state))} in a layout of its own, of which it is "
            "not known what belongs to which parameter, so it can't be sharded or made whole; use the optimizer with tp=1, or let "
            "its state_dict() be torch's, {'state': {index: {name: tensor}}, 'param_groups': [...]}"
        )


def full_optimizer_state(
    optimizer: Optimizer, layout: ModelLayout, groups: ParallelGroups, device: torch.device
) -> dict[str, Any]:
    """Makes ``optimizer.state_dict()`` with whole moments on the first rank, and meta tensors elsewhere. Collective over tp."""

    def gathered(value: Tensor, own: ParamLayout | None, _: Sequence[int]) -> Tensor:
        return value if own is None else _assemble(value, own, groups, device)

    return _optimizer_state(optimizer, layout, groups, gathered)


def _of_all_stages(
    entries: Mapping[Any, Any], parameters: Sequence[Tensor], layout: ModelLayout, groups: ParallelGroups
) -> dict[Any, Any]:
    """The states of an optimizer's parameters, with empty tensors for those that another stage holds. Collective over pp."""
    if not any(one.stages for one in layout.values()):
        return dict(entries)
    own = {
        index: {key: value.shape if isinstance(value, Tensor) and value.ndim else value for key, value in entry.items()}
        for index, entry in entries.items()
    }
    told: list[Any] = [None] * groups.size("pp")
    dist.all_gather_object(told, own, group=groups["pp"])
    found: dict[Any, Any] = {}
    for index, entry in sorted((item for one in told for item in one.items()), key=lambda item: int(item[0])):
        found[index] = entries.get(index) or {
            key: parameters[index].new_empty(()).expand(value) if isinstance(value, torch.Size) else value
            for key, value in entry.items()
        }
    return found


def load_full_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    layout: ModelLayout | None,
    groups: ParallelGroups,
    opened: Opened | None = None,
) -> None:
    """Loads the optimizer state of a whole model; each rank takes its part of every moment, or reads it from ``opened``."""
    parameters, rank = _parameters(optimizer), groups.rank("tp")
    if not _is_torchs_layout(state):
        _refuse_own_layout(optimizer, state, layout)
        optimizer.load_state_dict(read_whole(state, rank, opened))
        return
    flat = {(index, key): value for index, entry in state["state"].items() for key, value in entry.items()}
    if not_ours := [index for index, _ in flat if not 0 <= int(index) < len(parameters)]:
        raise ValueError(
            f"optimizer state {not_ours[0]}: the optimizer has {len(parameters)} parameters; the checkpoint belongs to "
            "another model or another configure_optimizers"
        )
    likes = {(index, key): parameters[int(index)] for index, key in flat}
    layouts = {at: None if layout is None else layout.of(parameter) for at, parameter in likes.items()}
    elsewhere = {index for (index, _), one in layouts.items() if _is_elsewhere(one, groups)}
    flat = {at: value for at, value in flat.items() if at[0] not in elsewhere}
    cut = {at: layouts[at] for at, value in flat.items() if isinstance(value, Tensor) and value.ndim}
    local: dict[Any, Any] = {index: {} for index in state["state"] if index not in elsewhere}
    for (index, key), value in _take(flat, cut, likes, rank, opened).items():
        # A copy in memory of its own: the optimizer keeps it, and what was read may be mapped from a file.
        local[index][key] = own_memory(value) if value is flat[index, key] else value
    optimizer.load_state_dict({**state, "state": local})


def read_whole(state: Mapping[str, Any], rank: int, opened: Opened | None) -> dict[str, Any]:
    """A state dict of any layout with whole tensors, in memory of their own."""
    meta: dict[str, Any] = {}
    if opened is not None:
        walk(dict(state), lambda key, leaf: meta.update({key: leaf} if opened.key_of(leaf) is not None else {}))
    read = {} if opened is None else opened.take(meta, {}, rank)
    return cast("dict[str, Any]", own_memory(walk(dict(state), lambda key, leaf: read.get(key, leaf))))
