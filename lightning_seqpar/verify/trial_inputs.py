"""What both sides of a trial are given: batches dealt out over replicas and micro-batches, and models without chance."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.inference.reduction import IDS
from lightning_seqpar.verify.traced_step import draw_tokens

DEFAULT_LENGTH = 32
"""Positions of a sample that is made up."""


class TrialError(ValueError):
    """What was given makes no trial."""


def count_samples(batch: Any) -> int:
    """How many samples a batch holds: the first dim of its tensors; 0 if they have none in common."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else 0


def split_samples(batch: Any, count: int) -> list[Any]:
    """``count`` equal parts of a batch, each with as many of its samples; raises TrialError if they can't be dealt out evenly."""
    if count == 1:
        return [batch]
    samples = count_samples(batch)
    if samples == 0 or samples % count:
        has = f"{samples} samples" if samples else "tensors whose first dims differ"
        raise TrialError(
            f"batch: it has {has}, and it must be dealt out over {count} parts (replicas × micro-batches); give one whose tensors "
            f"all begin with the samples, {count} of them or a multiple"
        )
    each = samples // count

    def part(tensor: Tensor, at: int) -> Tensor:
        return tensor[at * each : (at + 1) * each] if tensor.ndim else tensor

    return [map_tensors(functools.partial(part, at=at), batch) for at in range(count)]


def reverse_samples(batch: Any) -> Any:
    """The batch with its samples in reverse order, so that each replica reads others."""
    if not count_samples(batch):
        return batch
    return map_tensors(lambda tensor: tensor.flip(0) if tensor.ndim else tensor, batch)


def length_of(batch: Any) -> int | None:
    """How long the sequences of a batch are: the second dim of its tokens, or else of its tensors ``[b, s, h]``; None without."""
    tensors = list(tensors_in(batch))
    tokens = [tensor.shape[1] for tensor in tensors if tensor.ndim > 1 and tensor.dtype in IDS]
    features = [tensor.shape[1] for tensor in tensors if tensor.ndim == 3 and tensor.is_floating_point()]
    return next(iter(tokens or features), None)


def shorten(batch: Any, unit: int | None = None) -> Any:
    """The batch with sequences cut to about three quarters of their length; None if there are none, or they are too short."""
    length = length_of(batch)
    if length is None:
        return None
    short = (3 * length // 4 - 1) | 1 if unit is None else length - unit * max(1, round(length / 4 / unit))
    if not 2 <= short < length:
        return None

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.ndim):  # masks [b, 1, s, s] have the length twice
            if tensor.shape[dim] == length:
                tensor = tensor.narrow(dim, 0, short).contiguous()  # as a loader makes it: labels.view(-1) works
        return tensor

    return map_tensors(cut, batch)


def make_batch(model: nn.Module, samples: int, length: int | None) -> Any:
    """A batch for a plain module: tokens or pixels for one of Hugging Face's, else its ``example_input_array``."""
    if tokens := draw_tokens(model, samples, length, DEFAULT_LENGTH):
        return tokens
    config, takes = getattr(model, "config", None), inspect.signature(model.forward).parameters
    size = getattr(config, "image_size", None)
    if "pixel_values" in takes and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        shape = samples, getattr(config, "num_channels", 3), height, width
        return {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(1234))}
    if (example := getattr(model, "example_input_array", None)) is None:
        raise TrialError(
            "batch: nothing says what the model takes; give a batch (--batch package.module:function that returns one, or a YAML "
            "file with data), or set example_input_array on the module"
        )
    return example


class Feed(LightningDataModule):
    """Gives replica ``r`` its parts of the batches of an epoch, ``micro_batches`` of them from ``r * micro_batches`` on."""

    def __init__(self, batches: Callable[[int], Sequence[Any]], micro_batches: int) -> None:
        super().__init__()
        self._batches, self._micro_batches = batches, micro_batches

    def train_dataloader(self) -> DataLoader[Any]:
        """The parts of the epoch that begins, of this rank's replica."""
        assert self.trainer is not None
        replicas, own = replica_of(self.trainer.strategy)
        mine = slice(own * self._micro_batches, (own + 1) * self._micro_batches)
        batches = self._batches(replicas)
        batches = batches[2:] if self.trainer.current_epoch else batches[:2]
        parts = [part for batch in batches for part in split_samples(batch, replicas * self._micro_batches)[mine]]
        return DataLoader(parts, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


def replica_of(strategy: Any) -> tuple[int, int]:
    """How many replicas read batches of their own under a strategy, and which of them this rank is in."""
    told = getattr(strategy, "distributed_sampler_kwargs", None)
    return (told["num_replicas"], told["rank"]) if told else (1, 0)


class KeepFloat64(TorchDispatchMode):
    """A mode in which float64 activations stay so where the model's code casts them: norms and softmaxes of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0  # how many were turned down

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (
            func is torch.ops.aten._to_copy.default
            and kwargs.get("dtype") in (torch.float32, torch.bfloat16, torch.float16)
            and isinstance(args[0], Tensor)
            and args[0].dtype is torch.float64
        ):
            self.casts += 1
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def switch_off_dropout(model: nn.Module) -> None:
    """Set numbers of modules, and of configurations that they hold, whose names speak of dropping, to zero."""
    for holder in {id(one): one for one in _holders(model)}.values():
        for name, value in list(vars(holder).items()):
            drops = "drop" in name or (name == "p" and isinstance(holder, _DropoutNd))
            if drops and isinstance(value, float) and 0 < value < 1:
                setattr(holder, name, 0.0)


def _holders(model: nn.Module) -> Iterator[Any]:
    """The modules of a model, and the configurations that they hold: objects named ``config`` or ``hparams`` with attributes."""
    for module in model.modules():
        yield module
        for name, value in vars(module).items():
            if "config" in name.lower() and hasattr(value, "__dict__") and not isinstance(value, type):
                yield value
                yield from (one for one in vars(value).values() if type(one).__name__.endswith("Config"))
