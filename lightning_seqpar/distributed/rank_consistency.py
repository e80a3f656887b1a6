"""Ranks compare what they were started with: configuration, versions, plan, model and optimizer.

Ranks that were given different ones would hang in a collective or train wrong numbers. So each of them describes its own as
texts (the functions ``describe_...``), and :func:`check_agreement` compares the texts before anything depends on them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.host import host_device

_SHOWN = 4
"""How many ranks, and how many differing entries, an error names one by one."""


def check_agreement(own: Mapping[str, Any], group: ProcessGroup, device: torch.device) -> None:
    """Compare descriptions over the ranks of ``group``, by two numbers; only where they differ by the texts. Collective.

    Raises:
        ValueError: on every rank alike, naming the entries that differ and which ranks have which value.
    """
    texts = {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in own.items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=host_device(group, device))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if int(extremes[0]) == -int(extremes[1]):
        return
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, texts, group=group)
    ranks = dist.get_process_group_ranks(group)
    names = list(dict.fromkeys(name for described in everybody for name in described))
    values = {name: [described.get(name) for described in everybody] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    said = "; ".join(_who_says_what(name, values[name], ranks) for name in differing[:_SHOWN])
    said += f"; and {len(differing) - _SHOWN} more things" if len(differing) > _SHOWN else ""
    raise ValueError(f"the ranks were not told the same: {said}. Start every rank with the same code, files and arguments")


def _who_says_what(name: str, values: list[str | None], ranks: list[int]) -> str:
    """Say which ranks have which value of an entry: ``tp is 2 on ranks 0, 1, 2 and 4 on rank 3``."""
    parts = []
    for value, count in Counter(values).most_common(_SHOWN):
        where = [str(rank) for rank, own in zip(ranks, values, strict=True) if own == value]
        shown = ", ".join(where[:_SHOWN]) + (", ..." if count > _SHOWN else "")
        text = "missing" if value is None else value
        if len(text) >= 60:
            text = f"{text[:40]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"
        parts.append(f"{text} on rank{'s' if count > 1 else ''} {shown}")
    return f"{name} is {' and '.join(parts)}"


def describe_start(config: ParallelConfig, version: str) -> dict[str, Any]:
    """Describe a rank at its start: the configuration, field by field, and the versions of the libraries."""
    fields = {**config.model_dump(mode="json"), "timeout": f"{config.timeout.total_seconds()} s"}
    if isinstance(config.plan, str) and config.plan.endswith((".yaml", ".yml")):
        fields["plan"] = "a file"  # its path may differ from node to node, and its content is compared once it was read
    versions = {"torch": str(torch.__version__), "lightning": lightning.__version__, "lightning_seqpar": version}
    # torch names a group by how many there are: ranks with other numbers of groups would never meet in a new one.
    groups = {"process groups made before": len(dist.distributed_c10d._world.pg_names)}
    return {**fields, **{f"version of {name}": value for name, value in versions.items()}, **groups}


def describe_model(model: nn.Module) -> dict[str, str]:
    """Describe a model: its parameters, buffers and modules, but for the outermost, where users keep state of their own."""
    entries = {
        f"parameter {name}": f"{list(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
        for name, parameter in model.named_parameters()
    }
    entries |= {f"buffer {name}": f"{list(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        if name:
            entries[f"module {name}"] = f"{type(module).__name__}({module.extra_repr()}){_settings(module)}"
    return entries


def _settings(module: nn.Module) -> str:
    """The numbers and switches among a module's own attributes, but for those that may rightly differ, as a text."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float)}
    differs = ("rank", "device", "training")
    shown = [f"{n}={own[n]}" for n in sorted(own) if n[0] != "_" and not any(word in n for word in differs)]
    return f" with {', '.join(shown)}" if shown else ""


def describe_optimizer(optimizer: Optimizer) -> list[Any]:
    """Describe an optimizer: its class, then of each parameter group the settings and the number of parameters."""
    groups = [
        {
            name: float(value) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params" and isinstance(value, bool | int | float | str | tuple | Tensor | None)
        }
        | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]
