"""Changes of a sharded model that are refused while it trains: parameters added or replaced, buffers that drift apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.layout.module_names import in_all_layers
from lightning_seqpar.layout.param_layout import local_rows
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.topology.process_groups import ParallelGroups


def refuse_overlaps(model: nn.Module) -> None:
    """Refuse two parameters in one memory (``nn.Parameter(other.data)``), which would part when the model is cut."""
    in_storage: dict[int, list[tuple[int, int, str]]] = {}  # begin, end and name
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter.numel():
            start = int(parameter.storage_offset())
            in_storage.setdefault(storage_id(parameter), []).append((start, start + parameter.numel(), name))
    for extents in in_storage.values():
        for (_, stop, first), (start, _, second) in itertools.pairwise(sorted(extents)):
            if start < stop:
                raise ValueError(
                    f"{first} and {second} are two parameters in one memory, which would part when the model is cut; tie them "
                    "by one nn.Parameter under both names"
                )


def check_parameters(record: ShardedModel) -> None:
    """Refuse a model that holds another parameter under a name than the one that was sharded."""
    if replaced := record.layout.replaced(record.model):
        refuse_added([*record.model.parameters()], record)  # an adapter gives the linear inside it another name
        raise RuntimeError(
            f"{replaced[0]}: the model holds another parameter than the one that was laid out; do not replace parameters "
            "while training (change their data in place)"
        )


def refuse_added(parameters: Sequence[Tensor], record: ShardedModel) -> None:
    """Refuse a parameter that was added after the model was sharded: without a layout, nobody would sum its gradient."""
    if any(record.layout.of(parameter) is None for parameter in parameters):
        ids = {id(parameter) for parameter in parameters}
        names = [name for name in record.layout.added(record.model) if id(record.model.get_parameter(name)) in ids]
        if names:
            raise RuntimeError(
                f"{names[0]}: this parameter came after the model was sharded (an adapter that was added while training?); add "
                "it before trainer.fit, frozen or switched off if it is for later"
            )


def check_buffers(record: ShardedModel, groups: ParallelGroups, device: torch.device) -> None:
    """Refuse buffers that differ over the ranks of a replica (counts or means of each rank's tokens); collective over tp."""
    if name := _differing_buffer(record, groups["tp"], device):
        raise RuntimeError(
            f"{name}: this buffer is no longer the same on the ranks of a replica: the forward changes it where each rank sees "
            "its part of the sequence. Have its module computed whole, "
            f"{{pattern: {in_all_layers(name.rpartition('.')[0])}, style: whole}}, or set sp=False"
        )


def check_buffers_of_stages(record: ShardedModel, groups: ParallelGroups, device: torch.device) -> None:
    """Refuse buffers that differ over the stages of a pipeline; collective over pp, where all stages are equally far."""
    if name := _differing_buffer(record, groups["pp"], device):
        raise RuntimeError(
            f"{name}: this buffer is no longer the same on all stages of the pipeline: the step changes it where one stage alone "
            "comes (a batch norm's statistics, a counter), and checkpoints and evaluations would have an old one; use pp=1"
        )


def check_parameters_of_stages(record: ShardedModel, groups: ParallelGroups, device: torch.device) -> None:
    """Refuse parameters that differ over the stages that hold them; collective over pp, where all stages are equally far."""
    stage, layout = record.stage, record.layout
    assert stage is not None
    shared = [name for name in layout if len(stage.shared(name)) > 1]
    if not shared:
        return
    nothing = torch.zeros((), dtype=torch.float64, device=device)  # what is not here has no memory, and is to get none
    with torch.no_grad():
        here = {name: local_rows(layout.parameter(name)) for name in shared if stage.holds(name)}
        sums = torch.stack([here[name].sum(dtype=torch.float64).to(device) if name in here else nothing for name in shared])
    held = torch.tensor([stage.holds(name) for name in shared], device=device)
    sums = sums.nan_to_num(1e300, 1e301, -1e301)  # numbers that differ from those of another stage
    if name := _first_apart(shared, torch.stack([sums, -sums]).masked_fill(~held, float("-inf")), groups["pp"]):
        raise RuntimeError(
            f"{name}: this parameter is no longer the same on the stages of the pipeline that hold it: code of yours "
            "changes it that reads what one stage alone has (an average of weights towards parameters of another stage). "
            "Change it on all of them alike, or use pp=1"
        )


def _differing_buffer(record: ShardedModel, group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the first buffer that differs over a group; empty if none does."""
    buffers = record.equal_buffers()
    if not buffers:
        return ""
    sums = torch.stack([buffer.detach().double().nan_to_num(0.0, 0.0, 0.0).sum().to(device) for _, buffer in buffers])
    return _first_apart([name for name, _ in buffers], torch.stack([sums, -sums]), group)


def _first_apart(names: Sequence[str], sums: Tensor, group: dist.ProcessGroup) -> str:
    """The first name whose sum differs over a group, of sums and negated sums ``[2, n]``; empty if none does. Collective."""
    dist.all_reduce(sums, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = sums[0], -sums[1]
    apart = largest - smallest > 1e-5 * torch.maximum(largest.abs(), smallest.abs()).clamp_min(1e-30)
    return names[int(apart.nonzero()[0])] if bool(apart.any()) else ""
