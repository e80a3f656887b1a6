"""Accumulation windows whose micro-batches are put off to their end, where stages of a pipeline have several chunks of blocks.

In turns over the chunks a micro-batch is run before the one that came first is done, so all must be there. Until then Lightning
has a number in the place of each loss; its backward tells by what Lightning would multiply the loss's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_seqpar.data.batch import own_tensors
from lightning_seqpar.distributed.autograd import once_differentiable
from lightning_seqpar.distributed.rng import SavedStreams
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


class _TouchGradients(torch.autograd.Function):
    """A number whose backward adds nothing to the gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype) for p in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros((), dtype=dtype, device=grad.device).expand(shape) for shape, dtype in ctx.like)


def touch(parameters: list[Tensor]) -> Tensor:
    """A number whose backward adds nothing to the gradients of ``parameters``, but lets their hooks run."""
    out: Tensor = _TouchGradients.apply(*parameters)  # type: ignore[no-untyped-call]
    return out


@dataclass(eq=False)
class MicroBatch:
    """A training step that was put off.

    Attributes:
        step: the user's step.
        given: its arguments.
        number: of the training step.
        streams: the random streams at its beginning.
        attributes: what :func:`_plain` found on the module then.
        batch: what Lightning counts samples by.
        gradients: what its loss's gradient is multiplied by, once ``backward`` has run.
        backward: Lightning's, of what stands in the loss's place.
        losses: of each chunk that was run, the loss or what stands for it.
    """

    step: Callable[..., Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    number: int
    streams: SavedStreams
    attributes: dict[str, Any]
    batch: Any
    gradients: list[Tensor] = field(default_factory=list)
    backward: Callable[[], Any] | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)


class InterleavedWindow:
    """The micro-batches of an accumulation window, from its beginning until they are run.

    Args:
        stage: what this rank runs.
        module: the user's.
        device: of this rank.
    """

    def __init__(self, stage: Stage, module: LightningModule, device: torch.device) -> None:
        self._stage, self._module = stage, module
        self._anchor = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
        self._trains: tuple[bool, ...] = ()
        self._modes: list[tuple[nn.Module, bool]] = []
        self._changed: list[dict[str, Any]] = []  # by each chunk's runs: attributes of the module
        self.micro_batches: list[MicroBatch] = []

    def put_off(self, step: Callable[..., Any], given: tuple[Any, Any], number: int, batch: Any) -> Tensor:
        """Keep a step for the window's end.

        Returns:
            What stands in the place of its loss.

        Raises:
            RuntimeError: if a parameter was frozen, or thawed, since the window's beginning.
        """
        trains = tuple(parameter.requires_grad for parameter in self._module.parameters())
        if self.micro_batches and trains != self._trains:
            raise RuntimeError(
                f"virtual_pp={self._stage.chunks}: a parameter was frozen, or thawed, between batches whose gradients are "
                "accumulated, which are computed together where the last of them has come. Switch requires_grad where "
                "batch_idx % accumulate_grad_batches == 0, or leave virtual_pp out"
            )
        self._trains, self._modes = trains, [(module, module.training) for module in self._module.modules()]
        kept = own_tensors(given)  # a loader may use its memory again
        one = MicroBatch(step, kept, number, self._stage.put_off(), _plain(self._module), batch)
        self.micro_batches.append(one)
        out: Tensor = _InPlaceOfLoss.apply(self._anchor, one.gradients)  # type: ignore[no-untyped-call]
        return out

    @contextmanager
    def run(self) -> Generator[None, None, None]:
        """A context in which the micro-batches are run, with modules in the modes of their steps, and behind which there are none.

        Raises:
            RuntimeError: if steps change an attribute of the module that hooks change between them too.
        """
        now, streams = _plain(self._module), SavedStreams()
        self._changed = [{} for _ in range(self._stage.chunks)]
        modes = [(module, module.training) for module in self._module.modules()]
        try:
            _set_modes(self._modes)
            yield
            first = self.micro_batches[0].attributes
            for name in self._changed[-1]:
                if name in now and name in first and now[name] is not first[name]:
                    raise RuntimeError(
                        f"virtual_pp={self._stage.chunks}: both training_step and a hook between the batches of an accumulation "
                        f"window change {type(self._module).__name__}.{name}; the steps of a window are run together where its "
                        "last batch has come. Change it in one of them, or leave virtual_pp out"
                    )
        finally:
            _set_modes(modes)
            self._set({**now, **self._changed[-1]})
            self.micro_batches = []
            streams.restore()

    @contextmanager
    def entered(self, one: MicroBatch, chunk: int, trainer: Trainer) -> Generator[Callable[[], Any], None, None]:
        """A context as it was when a step was put off, and what runs one chunk of it.

        Each chunk has the module's attributes as if it were run by a rank of its own: a counter in the step counts each
        micro-batch once.
        """
        module, results, own = self._module, trainer._results, self._changed[chunk]
        assert results is not None
        kept = results.batch, results.batch_size, module._current_fx_name
        before = {**one.attributes, **own}
        self._set(before)
        results.batch, results.batch_size, module._current_fx_name = one.batch, None, "training_step"
        one.streams.restore()
        args, kwargs = own_tensors(one.given)
        number = self.micro_batches.index(one) + 1
        try:
            yield lambda: self._stage.run(lambda: one.step(*args, **kwargs), chunk=chunk, micro_batch=number)
        finally:
            results.batch, results.batch_size, module._current_fx_name = kept
        after = _plain(module)
        own.update({name: value for name, value in after.items() if before.get(name, own) is not value})

    def _set(self, attributes: dict[str, Any]) -> None:
        """Set attributes of the module, but for those that have become objects of another kind."""
        own = vars(self._module)
        own.update({name: value for name, value in attributes.items() if isinstance(own.get(name), _PLAIN)})


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, trains in modes:
        module.training = trains


_PLAIN = (bool, int, float, str, tuple, Tensor, type(None))
"""What a step can't change, but only replace."""

_LIGHTNINGS = frozenset(vars(LightningModule()))


def _plain(module: LightningModule) -> dict[str, Any]:
    """The numbers, words, tensors and the like that a module has as attributes; not Lightning's own."""
    return {name: one for name, one in vars(module).items() if isinstance(one, _PLAIN) and name not in _LIGHTNINGS}
