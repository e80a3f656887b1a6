"""torchmetrics over the data-parallel replicas."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric


def share_metrics(holders: Sequence[Any], group: ProcessGroup) -> None:
    """Tell every metric of the holders (modules, callbacks and what they hold) to sync over ``group``.

    torchmetrics sync over the world unless told a group, and sums would come out × tp. A metric with a group of its own
    keeps it; one that an earlier strategy told its group is told this one.
    """
    for metric in _find(list(holders), depth=4, seen=set()):
        told = metric.process_group
        if told is None or getattr(metric, _TOLD, None) == id(told):
            metric.process_group = group
            setattr(metric, _TOLD, id(metric.process_group))


_TOLD = "_lightning_seqpar_group"
"""Attribute of a metric: which group it was told here."""


_SKIPPED = ("_trainer", "_parameters", "_buffers", "_modules")
_TOO_MANY = 1000
"""A longer container holds data, not metrics."""


def _find(value: Any, depth: int, seen: set[int]) -> Iterator[Metric]:
    """Metrics in modules, containers and helper objects, ``depth`` levels down."""
    if value is None or isinstance(value, Tensor | str | bytes | int | float | type) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from (module for module in value.modules() if isinstance(module, Metric))
    if depth == 0:
        return
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, list | tuple | set):
        items = value
    elif type(value).__module__.split(".")[0] in sys.stdlib_module_names:
        return
    else:
        items = [item for name, item in getattr(value, "__dict__", {}).items() if name not in _SKIPPED]
    if len(items) <= _TOO_MANY:
        for item in list(items):
            yield from _find(item, depth - 1, seen)
