"""What is measured is measured over the data-parallel replicas: torchmetrics, and the losses of a learning-rate finder."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_seqpar.strategy.environment import Environment


def share_metrics(environment: Environment) -> None:
    """Let every metric of the module and the callbacks, and of objects that they have, sync over the replicas.

    A metric without a group syncs over all ranks, and sums would be tp times too large. A metric whose group the user set
    keeps it; one whose group was set here, by an earlier strategy, gets the new one.
    """
    group = environment.groups["dp"]
    for metric in _find([environment.module, *environment.callbacks], depth=4, seen=set()):
        group_of_metric = metric.process_group
        if group_of_metric is None or getattr(metric, _SHARED_GROUP, None) == id(group_of_metric):
            metric.process_group = group
            setattr(metric, _SHARED_GROUP, id(metric.process_group))
            if not isinstance(metric, _Copyable):
                kind = type(metric)
                names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_own_class": kind}
                metric.__class__ = type(kind.__name__, (_Copyable, kind), names)


class _Copyable(Metric):
    """A metric that was given a process group, which can't be copied or pickled; a base of the metric's class from then on."""

    _own_class: type

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.process_group)] = self.process_group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = self.__getstate__()
        if state.pop(_SHARED_GROUP, None) is not None:
            state["process_group"] = None
        return object.__new__, (self._own_class,), state


_SHARED_GROUP = "_lightning_seqpar_group"
"""Attribute of a metric: the id of the group that it was given here."""
_SKIPPED = ("_trainer", "_parameters", "_buffers", "_modules")
"""Attributes in which metrics are not looked for."""
_TOO_MANY = 1000
"""Length from which a container is taken for data, in which no metrics are."""


def _find(value: Any, depth: int, seen: set[int]) -> Iterator[Metric]:
    """Find the metrics in modules, containers and other objects."""
    if value is None or isinstance(value, Tensor | str | bytes | int | float | type) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from (module for module in value.modules() if isinstance(module, Metric))
    if depth == 0:
        return
    if isinstance(value, Mapping | list | tuple | set):
        items: Any = value.values() if isinstance(value, Mapping) else value
    elif type(value).__module__.split(".")[0] in sys.stdlib_module_names:
        return
    else:
        items = [item for name, item in getattr(value, "__dict__", {}).items() if name not in _SKIPPED]
    if len(items) <= _TOO_MANY:
        for item in list(items):
            yield from _find(item, depth - 1, seen)


def share_losses_of_finders(callbacks: Sequence[Any]) -> None:
    """Let Lightning's learning-rate finder, which is a callback made for one search, read the loss of all replicas.

    By that of its own batch each rank would end the search at another step, and wait for the others.
    """
    for finder in callbacks:
        if isinstance(finder, _LRCallback) and "on_train_batch_end" not in vars(finder):
            vars(finder)["on_train_batch_end"] = functools.partial(_read_mean, finder.on_train_batch_end)


def _read_mean(read: Callable[..., None], trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
    """Call a finder's own ``on_train_batch_end`` with the mean of the replicas' losses."""
    if isinstance(outputs, Mapping) and isinstance(loss := outputs.get("loss"), Tensor):
        outputs = {**outputs, "loss": trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")}
    read(trainer, pl_module, outputs, *batch)
