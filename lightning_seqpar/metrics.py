"""torchmetrics over the data-parallel replicas."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric


def share_metrics(holders: Sequence[Any], group: ProcessGroup) -> None:
    """Tell every metric of the holders (modules, callbacks and what they hold) to sync over ``group``.

    torchmetrics sync over the world unless told a group, and sums would come out × tp. A metric with a group of its own
    keeps it.
    """
    found: list[Metric] = []
    _find(list(holders), found, depth=4)
    for metric in found:
        if metric.process_group is None:
            metric.process_group = group


def _find(value: Any, found: list[Metric], depth: int) -> None:
    """Collect metrics in modules, containers and helper objects, ``depth`` levels down."""
    if isinstance(value, nn.Module):
        found += [module for module in value.modules() if isinstance(module, Metric)]
    if depth == 0 or isinstance(value, Tensor | str | type) or value is None:
        return
    if isinstance(value, Mapping):
        items: Any = list(value.values())
    elif isinstance(value, list | tuple | set):
        items = list(value)
    else:
        skipped = ("_trainer", "_parameters", "_buffers", "_modules")
        items = [item for name, item in getattr(value, "__dict__", {}).items() if name not in skipped]
    for item in items:
        if (
            isinstance(item, nn.Module | Mapping | list | tuple | set)
            or type(item).__module__ not in sys.stdlib_module_names
        ):
            _find(item, found, depth - 1)
