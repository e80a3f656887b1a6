"""Averages of weights that Lightning's callbacks keep: copies of the model that hold shards as it does, and are saved whole.

``WeightAveraging`` and ``StochasticWeightAveraging`` copy the model before it is sharded. An average is made element by element, so
that of the shards is the shard of the average: the copies are cut as the model is, and the callbacks do with them what they always
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_seqpar.layout.param_layout import take_rows
from lightning_seqpar.parallel.sharded_model import ShardedModel


def averaging_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Those of the callbacks that average weights in a copy of the model."""
    return [each for each in callbacks if isinstance(each, WeightAveraging | StochasticWeightAveraging)]


def averages_of(callbacks: Iterable[Any]) -> list[nn.Module]:
    """The copies of the model in which callbacks average weights, if they have made them."""
    averages = []
    for callback in averaging_callbacks(callbacks):
        average = callback._average_model
        if average is not None:
            averages.append(average.module if isinstance(callback, WeightAveraging) else average)
    return averages


def refuse_on_meta(callbacks: Iterable[Any], model: nn.Module) -> None:
    """Refuse callbacks that copy a model on the meta device, which has no weights yet."""
    if any(parameter.is_meta for parameter in model.parameters()):
        for callback in averaging_callbacks(callbacks):
            raise ValueError(
                f"{type(callback).__name__} and a model of the meta device: the callback copies the weights before there are any; "
                "make the model with memory (without init_module(empty_init=True) or torch.device('meta')), or leave the callback "
                "out"
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

    def part(name: str, tensor: Tensor) -> Tensor:
        layout = record.layout.of(live[name]) or record.buffers.get(name)
        return take_rows(tensor.detach() if layout is None else layout.take(tensor.detach(), rank), live[name])

    with torch.no_grad():
        for name, parameter in average.named_parameters():
            cut[id(parameter)] = nn.Parameter(part(name, parameter), parameter.requires_grad)
        for name, buffer in average.named_buffers():
            cut[id(buffer)] = part(name, buffer)
        for module in average.modules():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        held[key] = cut[id(tensor)]  # type: ignore[assignment]


def save_whole(average: nn.Module, to_whole: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Let the state dict of an average hold what ``to_whole`` makes of its own tensors. Collective."""

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        state.update({f"{prefix}{name}": value for name, value in to_whole(own).items()})

    average.register_state_dict_post_hook(hook)
