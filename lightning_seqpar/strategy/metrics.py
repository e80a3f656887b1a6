"""What is measured is measured over the data-parallel replicas: torchmetrics, and the losses of a learning-rate finder."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric


def share_metrics(holders: Sequence[Any], group: ProcessGroup) -> None:
    """Let every metric sync over ``group``.

    A metric without a group syncs over all ranks, and sums would be tp times too large. A metric whose group the user set
    keeps it; one whose group was set here, by an earlier strategy, gets the new one.

    Args:
        holders: modules and callbacks; metrics are looked for in them and in the objects that they have.
        group: the data-parallel replicas.
    """
    for metric in _find(list(holders), depth=4, seen=set()):
        group_of_metric = metric.process_group
        if group_of_metric is None or getattr(metric, _SHARED_GROUP, None) == id(group_of_metric):
            metric.process_group = group
            setattr(metric, _SHARED_GROUP, id(metric.process_group))
            if not isinstance(metric, _Copyable):
                kind = type(metric)
                names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_own_class": kind}
                metric.__class__ = type(kind.__name__, (_Copyable, kind), names)


class _Copyable(Metric):
    """Copying and pickling of a metric that was given a process group, which can be neither copied nor pickled.

    The class of such a metric is derived from this one and its own. A copy (``clone``, ``deepcopy`` of a callback) has the same
    group; what is pickled has none, and is of the metric's own class.
    """

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
        return _bare, (self._own_class,), state


def _bare(kind: type[Metric]) -> Metric:
    """An object of a class that has no attributes yet."""
    return kind.__new__(kind)


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


def share_losses_of_finders(callbacks: Sequence[Any]) -> None:
    """Let Lightning's learning-rate finder read the loss of all replicas.

    It would read that of each rank's own batch: it would suggest another rate than one process, and ranks would end the search at
    different steps and wait for each other.

    Args:
        callbacks: the trainer's; while a rate is looked for the finder is one of them, made for that search alone.
    """
    for finder in callbacks:
        if isinstance(finder, _LRCallback) and "on_train_batch_end" not in vars(finder):
            vars(finder)["on_train_batch_end"] = functools.partial(_read_mean, finder.on_train_batch_end)


def _read_mean(read: Callable[..., None], trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
    """Call a finder's own ``on_train_batch_end`` with the mean of the replicas' losses."""
    if isinstance(outputs, Mapping) and isinstance(loss := outputs.get("loss"), Tensor):
        outputs = {**outputs, "loss": trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")}
    read(trainer, pl_module, outputs, *batch)
