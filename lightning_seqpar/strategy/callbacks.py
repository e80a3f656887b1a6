"""What callbacks keep beside the model: metrics, measured over the replicas, and averages of weights.

An average is made element by element, so that of the shards is the shard of the average: the copies are cut as the model is.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_seqpar.layout.param_layout import take_rows
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.releases import WeightAveraging, pl
from lightning_seqpar.strategy.environment import Environment


def share_metrics(environment: Environment) -> None:
    """Let metrics of the module, callbacks and what these have sync over the replicas, unless the user set a group of theirs."""
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


_SHARED_GROUP = "_lightning_seqpar_group"  # attribute of a metric: the id of the group that it was given here
_SKIPPED = ("_trainer", "_parameters", "_buffers", "_modules")  # attributes in which metrics are not looked for


def _find(value: Any, depth: int, seen: set[int]) -> Iterator[Metric]:
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
    if len(items) <= 1000:  # else it is data, in which no metrics are
        for item in list(items):
            yield from _find(item, depth - 1, seen)


def averaging_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Those of the callbacks that average weights in a copy of the model."""
    return [each for each in callbacks if isinstance(each, (WeightAveraging, pl.callbacks.StochasticWeightAveraging))]


def averages_of(callbacks: Iterable[Any]) -> list[nn.Module]:
    """The copies of the model in which callbacks average weights, if they have made them."""
    averages = [(each, each._average_model) for each in averaging_callbacks(callbacks)]
    return [one.module if isinstance(each, WeightAveraging) else one for each, one in averages if one is not None]


def refuse_on_meta(callbacks: Iterable[Any], model: nn.Module) -> None:
    """Refuse callbacks that copy a model on the meta device, which has no weights yet."""
    if any(parameter.is_meta for parameter in model.parameters()):
        for callback in averaging_callbacks(callbacks):
            raise ValueError(
                f"{type(callback).__name__} and a model of the meta device: the callback copies the weights before there are any; "
                "make the model with memory (no init_module(empty_init=True), no torch.device('meta')), or leave the callback out"
            )


def shard_average(average: nn.Module, record: ShardedModel) -> None:
    """Cut a whole copy of the model as the model is cut, in place; one that does not hold the same parameters is refused."""
    model, rank = record.model, record.groups.rank("tp")
    for kind in ("named_parameters", "named_buffers"):
        names, own = ([name for name, _ in getattr(each, kind)()] for each in (model, average))
        if names != own:
            other = next(iter({*names} ^ {*own}), "the order of them")
            raise ValueError(
                f"{other}: the average of weights and the model do not hold the same {kind[6:]}; make all of them in __init__ or "
                "configure_model, before the callback copies the model"
            )
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    cut: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, tensor in (*average.named_parameters(), *average.named_buffers()):
            layout, whole = record.layout.of(live[name]) or record.buffers.get(name), tensor.detach()
            part = take_rows(whole if layout is None else layout.take(whole, rank), live[name])
            cut[id(tensor)] = nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part
        for module in average.modules():
            for held in (module._parameters, module._buffers):
                held.update({key: cut[id(tensor)] for key, tensor in held.items() if tensor is not None})  # type: ignore[misc]


def save_whole(average: nn.Module, to_whole: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Let the state dict of an average hold what ``to_whole`` makes of its own tensors. Collective."""

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        state.update({f"{prefix}{name}": value for name, value in to_whole(own).items()})

    average.register_state_dict_post_hook(hook)
