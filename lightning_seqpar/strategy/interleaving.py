"""Accumulation windows whose micro-batches are put off to their end, where stages of a pipeline have several chunks of blocks.

In turns over the chunks a micro-batch is run before the one that came first is done, so all must be there. Until then Lightning
has a number in the place of each loss; its backward tells by what Lightning would multiply the loss's gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_seqpar.data.batch import own_tensors
from lightning_seqpar.distributed.autograd import once_differentiable
from lightning_seqpar.distributed.rng import SavedStreams
from lightning_seqpar.layout.attributes import ModelAttributes, Values
from lightning_seqpar.pipeline.stage import Stage


class _InPlaceOfLoss(torch.autograd.Function):
    """Forward: no number, in the place of a loss that is still to be computed. Backward: note the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, noted: list[Tensor]) -> Tensor:
        ctx.noted = noted
        return torch.full_like(anchor, float("nan"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.noted.append(grad)
        return None, None


def touch(parameters: list[Tensor]) -> Tensor:
    """A number whose backward adds nothing to the gradients of ``parameters``, but lets their hooks run."""
    return 0.0 * torch.stack([p.sum().to(torch.float64) for p in parameters]).sum()


@dataclass(eq=False)
class MicroBatch:
    """A training step that was put off."""

    step: Callable[..., Any]  # the user's step
    given: tuple[tuple[Any, ...], dict[str, Any]]  # its arguments
    number: int  # of the training step
    streams: SavedStreams  # the random streams at its beginning
    attributes: Values  # of the modules then
    modes: list[tuple[nn.Module, bool]]  # of the modules then: whether they trained
    batch: Any  # what Lightning counts samples by
    gradients: list[Tensor] = field(default_factory=list)  # what its loss's gradient is multiplied by
    backward: Callable[[], Any] | None = None  # Lightning's, of what stands in the loss's place
    losses: dict[int, Tensor] = field(default_factory=dict)  # of each chunk that was run, or what stands for it


class InterleavedWindow:
    """The micro-batches of an accumulation window, from its beginning until they are run."""

    def __init__(self, stage: Stage, module: LightningModule, device: torch.device) -> None:
        self._stage, self._module = stage, module
        self._anchor = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
        self._attributes = ModelAttributes(module)
        self._begun: dict[str, tuple[int, int]] = {}  # what must be the same for all micro-batches
        self._changed: list[Values] = []  # by each chunk's runs: attributes of modules
        self.micro_batches: list[MicroBatch] = []
        self._where = f"virtual_pp={stage.chunks}"

    def put_off(self, step: Callable[..., Any], given: tuple[Any, Any], number: int, batch: Any) -> Tensor:
        """Keep a step for the window's end, unless parameters or buffers changed meanwhile; returns what stands for its loss."""
        if not self.micro_batches:
            self._attributes, self._begun = ModelAttributes(self._module), self._tensors()
        else:
            self._check_tensors()
        kept = _own(given)  # a loader may use its memory again
        modes = [(module, module.training) for module in self._module.modules()]
        one = MicroBatch(step, kept, number, self._stage.put_off(), self._attributes.read(), modes, batch)
        self.micro_batches.append(one)
        out: Tensor = _InPlaceOfLoss.apply(self._anchor, one.gradients)  # type: ignore[no-untyped-call]
        return out

    def _tensors(self) -> dict[str, tuple[int, int]]:
        """Of parameters whether they train, and of buffers which tensors they are; and how often each was changed."""
        return {
            **{name: (one.requires_grad, one._version) for name, one in self._module.named_parameters()},
            **{name: (id(one), one._version) for name, one in self._module.named_buffers()},
        }

    def _check_tensors(self) -> None:
        now = self._tensors()
        for name, was in self._begun.items():
            seen = now.get(name, was)
            if seen != was:
                what = f"{name} was {'frozen, or thawed,' if seen[0] != was[0] else 'changed'} between batches"
                raise RuntimeError(
                    f"{self._where}: {what} whose gradients are accumulated, which are computed together where the last of "
                    "them has come. Do so where batch_idx % accumulate_grad_batches == 0, or leave virtual_pp out"
                )

    @contextmanager
    def run(self) -> Generator[None, None, None]:
        """A context in which the micro-batches are run, and behind which there are none."""
        now, streams = self._attributes.read(), SavedStreams()
        self._changed = [{} for _ in range(self._stage.chunks)]
        modes = [(module, module.training) for module in self._module.modules()]
        try:
            yield
            first = self.micro_batches[0].attributes
            for holder, name in self._changed[-1]:
                key = holder, name
                if key in now and key in first and now[key] is not first[key]:
                    raise RuntimeError(
                        f"{self._where}: both training_step and a hook between the batches of an accumulation window change "
                        f"{holder or type(self._module).__name__}.{name}; the steps of a window are run together where its last "
                        "batch has come. Change it in one of them, or leave virtual_pp out"
                    )
        finally:
            _set_modes(modes)
            self._attributes.set({**now, **self._changed[-1]})
            self.micro_batches = []
            streams.restore()

    @contextmanager
    def entered(self, one: MicroBatch, chunk: int, trainer: Trainer) -> Generator[Callable[[], Any], None, None]:
        """A context as it was when a step was put off, and what runs one chunk of it.

        Each chunk has the attributes of modules as if it were run by a rank of its own: a counter in the step counts each
        micro-batch once. Metrics count in the run of the last chunk. A step that changes a buffer raises RuntimeError.
        """
        module, results, own = self._module, trainer._results, self._changed[chunk]
        assert results is not None
        kept = results.batch, results.batch_size, module._current_fx_name
        before = {**one.attributes, **own}
        self._attributes.set(before)
        _set_modes(one.modes)
        results.batch, results.batch_size, module._current_fx_name = one.batch, None, "training_step"
        one.streams.restore()
        args, kwargs = _own(one.given)
        number = self.micro_batches.index(one) + 1
        counts = chunk == self._stage.chunks - 1
        buffers = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]
        metrics = [] if counts else [each for each in module.modules() if isinstance(each, Metric)]
        counted = [_counted(metric) for metric in metrics]
        try:
            yield lambda: self._stage.run(lambda: one.step(*args, **kwargs), chunk=chunk, micro_batch=number)
        finally:
            results.batch, results.batch_size, module._current_fx_name = kept
        after = self._attributes.read()
        own.update({key: value for key, value in after.items() if before.get(key, own) is not value})
        for metric, counted_before in zip(metrics, counted, strict=True):
            for name, value in counted_before.items():
                setattr(metric, name, value)
        for name, buffer, version in () if counts else buffers:
            if buffer._version != version:
                raise RuntimeError(
                    f"virtual_pp={self._stage.chunks}: the step changes the buffer {name}, and is run once for each chunk of "
                    "blocks, so that it would be changed as often. Keep a number in its place, or leave virtual_pp out"
                )


def _counted(metric: Metric) -> dict[str, Any]:
    """The attributes that tell what a metric has counted."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    copied = {name: list(state) if isinstance(state, list) else state.clone() for name, state in states.items()}
    return {**copied, **{name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}}


def _own(given: Any) -> Any:
    """A step's arguments with tensors, containers and objects of their own."""
    try:
        return copy.deepcopy(given)
    except (TypeError, RuntimeError):  # something in it can't be copied (a handle, a tensor with a graph)
        return own_tensors(given)


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, trains in modes:
        module.training = trains
