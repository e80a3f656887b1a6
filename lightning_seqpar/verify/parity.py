"""The record of a run of a Trainer, whole on every rank, and its comparison with another one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_seqpar.parallel.apply import whole_tensor
from lightning_seqpar.parallel.grad_sync import global_grad_norm
from lightning_seqpar.parallel.sharded_model import ShardedModel, record_of
from lightning_seqpar.verify.comparison import (
    FLOAT64_TOLERANCE,
    Limits,
    ParityReport,
    compare_losses,
    compare_norms,
    compare_tensors,
    norm_of,
)


@dataclass
class Trace:
    """What one run did, in whole tensors.

    Attributes:
        losses: the loss of every training batch, averaged over the replicas.
        grads: whole gradients by parameter name at the first optimizer step, as the optimizer read them.
        grad_norm: the global norm of these gradients.
        weights: the whole weights at the end of the run, by parameter name.
    """

    losses: list[float] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    grad_norm: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write to a file that :meth:`load` reads."""
        torch.save(self.__dict__, path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what :meth:`save` wrote."""
        return cls(**torch.load(path, weights_only=True))


def gather_grads(model: nn.Module, only: Collection[int] | None = None) -> dict[str, Tensor | None]:
    """Whole gradients by parameter name, on the CPU, of a parallelised model (collective over tp) or a plain one.

    With ``only``, of the parameters with these ids alone: gradients of the others may not be summed over tp yet.
    """
    return dict(each_gradient(model, only))


def each_gradient(model: nn.Module, only: Collection[int] | None = None) -> Iterator[tuple[str, Tensor | None]]:
    """The items of :func:`gather_grads` one by one, each gathered when it is asked for; every rank must ask for all."""
    record = record_of(model)
    named = [(name, p) for name, p in model.named_parameters() if only is None or id(p) in only]
    has_one = [parameter.grad is not None for _, parameter in named]
    if record is not None and record.stage is not None:
        has_one = record.stage.on_any(has_one)
    for (name, parameter), has in zip(named, has_one, strict=True):
        # A stage that does not hold the parameter gets the gradient in the parameter's shape.
        held = parameter if parameter.grad is None else parameter.grad
        yield name, _whole(record, name, held) if has else None


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights by parameter name, on the CPU, of a parallelised model (collective over tp) or a plain one."""
    return dict(each_weight(model))


def each_weight(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The items of :func:`gather_weights` one by one, each gathered when it is asked for; every rank must ask for all."""
    record = record_of(model)
    return ((name, _whole(record, name, parameter)) for name, parameter in model.named_parameters())


def _whole(record: ShardedModel | None, name: str, held: Tensor) -> Tensor:
    """A parameter or its gradient, whole and on the CPU."""
    return (own_whole(held) if record is None else whole_tensor(held, record.layout[name], record.groups)).cpu()


def own_whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, detached; of a DTensor, whole (collective over its mesh)."""
    detached = tensor.detach()
    if not isinstance(detached, DTensor):
        return detached.clone()
    # What every rank holds whole comes back without a copy, and would change as the gradients are clipped.
    whole, own = detached.full_tensor(), detached.to_local()
    return whole.clone() if whole.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() else whole


def compare(reference: Trace, candidate: Trace, limit: float = FLOAT64_TOLERANCE) -> ParityReport:
    """Compare a parallel run with the reference, a run of one process; ``limit`` is the largest error that counts as equal.

    Gradients are relative to the *global* norm; in float64 a small one must be right by its own size too. Weights are absolute.

    Raises:
        ValueError: if neither trace holds anything.
    """
    if not any((trace.losses or trace.grads or trace.weights) for trace in (reference, candidate)):
        raise ValueError(
            "both traces are empty: no step was recorded, so there is nothing to compare; give a ParityRecorder to the callbacks "
            "of both Trainers, and let each fit at least one batch"
        )
    limits, norm = Limits.up_to(limit), norm_of(reference.grads)
    rows = [compare_losses("losses (relative)", reference.losses, candidate.losses, limits)]
    if reference.grads or candidate.grads:
        what = "gradients (of the global norm)"
        rows.append(compare_tensors(what, reference.grads, candidate.grads.items(), limits, norm)[0])
        rows.append(compare_norms("global norm (relative)", reference.grad_norm, candidate.grad_norm, norm, limits))
    rows.append(compare_tensors("weights (absolute)", reference.weights, candidate.weights.items(), limits)[0])
    return ParityReport(tuple(rows))


class ParityRecorder(Callback):
    """Records a :class:`Trace` of ``Trainer.fit``; the same callback on one process and on many.

    Gradients are those that reach the first optimizer step, after sync and before clipping; losses are averaged over
    the data-parallel replicas, as the one process saw the whole batch. All ranks hold the same trace.

    Args:
        tensors: also keep whole gradients and weights (memory for the whole model).
    """

    only_reads_gradients = True
    """So that a run that is recorded checks gradients in the same steps as one that is not."""

    def __init__(self, *, tensors: bool = True) -> None:
        self.trace = Trace()
        self._tensors = tensors
        self._seen: set[int] = set()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Keep the gradients of each optimizer's first step; the norm is the first optimizer's."""
        if id(optimizer) in self._seen or not self._tensors:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self._seen:
            if (record := record_of(pl_module)) is not None:
                norm = global_grad_norm(parameters, record.layout, record.groups)
            else:
                norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            self.trace.grad_norm = float(norm)
        self._seen.add(id(optimizer))
        self.trace.grads.update(gather_grads(pl_module, {id(parameter) for parameter in parameters}))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch's loss; those of stages where the accumulation window ends, and all are computed."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        values = own_whole(loss).double().view(1) * trainer.accumulate_grad_batches
        record = record_of(pl_module)
        if record is not None and (stage := record.stage) is not None:
            if trainer.fit_loop._should_accumulate():
                return
            values = stage.of_last(torch.stack(stage.losses).double() if stage.is_last else values)
        self.trace.losses += trainer.strategy.reduce(values, reduce_op="mean").tolist()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the final weights."""
        if self._tensors:
            self.trace.weights = gather_weights(pl_module)
