"""Two runs compared: what is recorded of a run, and when a loss, a gradient or a weight is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_seqpar.parallel.apply import whole_tensor
from lightning_seqpar.parallel.grad_sync import global_grad_norm
from lightning_seqpar.parallel.sharded_model import ShardedModel, record_of
from lightning_seqpar.releases import pl

FLOAT64_TOLERANCE = 1e-9  # largest difference of two runs in float64 that counts as equal: a parallel run sums in another order
OWN_LIMIT = 2e-2
"""Largest error of a gradient relative to its own largest element: one that is counted twice is wrong however small it is."""

_PIECE = 2**20  # numbers that are compared at a time


@dataclass(frozen=True)
class Limits:
    """The largest errors that count as equal."""

    losses: float  # of a loss, relative to itself, or to ``least_loss`` where it is below that
    tensors: float  # of a gradient, relative to the global gradient norm; of a weight, absolute
    noise: float  # of a gradient, relative to the global norm, up to which it is rounding however small the gradient is
    least_loss: float = 1.0
    none_is_zero: bool = False  # whether a gradient that is missing is one of zeros

    @classmethod
    def up_to(cls, limit: float) -> Limits:
        """One limit for all; one for float64 looks at the own size of gradients too."""
        return cls(limit, limit, 1e-13 if limit <= 1e-8 else limit)


RUNS = {False: Limits.up_to(FLOAT64_TOLERANCE), True: Limits(1e-5, 1e-4, 1e-7)}
"""Limits of runs of a Trainer in float64 (False) and in float32 (True)."""

COPIES = {
    False: Limits(1e-8, 1e-8, 1e-13, least_loss=1e-12, none_is_zero=True),
    True: Limits(1e-4, 1e-4, 1e-7, least_loss=1e-12, none_is_zero=True),
}
"""Limits of copies of a model whose own forward computes in float64 (False), or in 32 bits or less (True)."""


@dataclass(frozen=True)
class Row:
    """One line of a report."""

    quantity: str  # what is compared
    error: float  # its largest error
    limit: float  # the largest error that counts as equal
    where: str  # the step or the parameter with the largest error

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit (a NaN never is)."""
        return self.error <= self.limit


@dataclass(frozen=True)
class ParityReport:
    """The comparison of two runs; ``str()`` is a table."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every quantity is within its limit."""
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row that lies highest against its limit."""
        return max(self.rows, key=lambda row: math.inf if math.isnan(row.error) else row.error / row.limit)

    def raise_if_failed(self) -> None:
        """Raise ``AssertionError`` with the table if anything is out of its limit."""
        if not self.ok:
            raise AssertionError(f"the runs differ\n{self}")

    def __str__(self) -> str:
        width = max(34, *(len(row.quantity) for row in self.rows))
        lines = [f"{'quantity':<{width}} {'largest error':>13} {'limit':>8}  {'':<4}  where"]
        for row in self.rows:
            ok = "ok" if row.ok else "FAIL"
            lines.append(f"{row.quantity:<{width}} {row.error:>13.2e} {row.limit:>8.0e}  {ok:<4}  {row.where}")
        return "\n".join(lines)


class WrongTensor(NamedTuple):
    """A tensor that is not what it is in the other run."""

    name: str  # the parameter's
    error: float  # its largest error; of a gradient, relative to the global norm
    own_error: float  # its largest error, relative to its largest number
    ratio: float  # its norm, relative to the norm that it should have


def compare_losses(quantity: str, right: Sequence[float], got: Sequence[float], limits: Limits) -> Row:
    """The row of the losses of some steps."""
    if len(right) != len(got):
        return Row(quantity, math.inf, limits.losses, f"{len(got)} steps against {len(right)}")
    gaps = [(spread(pair), max(limits.least_loss, abs(pair[0]))) for pair in zip(right, got, strict=True)]
    errors = [gap if math.isinf(gap) else gap / size for gap, size in gaps]
    if not errors:
        return Row(quantity, 0.0, limits.losses, "the step returns none")
    at = errors.index(max(errors))
    step = f"step {at + 1} of {len(errors)}"
    if errors[at] <= limits.losses:
        return Row(quantity, errors[at], limits.losses, step if len(errors) > 1 else f"{got[at]:.9g}")
    told = f"{got[at]:.9g} instead of {right[at]:.9g}" + f" in {step}" * (len(errors) > 1)
    return Row(quantity, errors[at], limits.losses, told)


def compare_norms(quantity: str, right: float, got: float, norm: float, limits: Limits) -> Row:
    """The row of two global gradient norms, relative to the ``norm`` of the right gradients."""
    return Row(quantity, spread((right, got)) / max(norm, 1e-30), limits.tensors, f"{got:.9g} instead of {right:.9g}")


def compare_tensors(
    quantity: str,
    right: Mapping[str, Tensor | None],
    got: Iterable[tuple[str, Tensor | None]],
    limits: Limits,
    norm: float | None = None,
    part: Callable[[str, Tensor], Tensor] | None = None,
) -> tuple[Row, list[WrongTensor]]:
    """Compare named tensors: the row, and those that are wrong, in the order of ``got``.

    Gradients are compared relative to the global ``norm`` of the right ones, and a small one also by its own size: some are zero
    analytically (a key bias before a softmax), so that their own relative error has no meaning. Without a ``norm``, as of
    weights, differences are absolute. Those of ``got`` are read one by one: only one of them need be in memory. ``part`` makes
    of a right one the part of it that the other run has.
    """
    scale, limit = 1.0 if norm is None else max(norm, 1e-30), limits.tensors
    wrong: list[WrongTensor] = []
    worst, where = 0.0, "-"
    seen: set[str] = set()
    missing = ((name, None) for name in right if name not in seen)
    for name, tensor in itertools.chain(got, missing):
        seen.add(name)
        whole, b = _plain(right.get(name)), _plain(tensor)
        a = whole if part is None or whole is None else part(name, whole)
        if limits.none_is_zero:
            a = torch.zeros_like(b) if a is None and b is not None else a
            b = torch.zeros_like(a) if b is None and a is not None else b
        gap = largest_gap(a, b)
        error = gap if math.isinf(gap) else gap / scale
        own = gap / max(0.0 if whole is None else largest_number(whole), 1e-300)
        if error > limit or (norm is not None and own > OWN_LIMIT and error > limits.noise):
            wrong.append(WrongTensor(name, error, own, norm_of({name: b}) / max(norm_of({name: a}), 1e-300)))
            error = max(error, 2 * limit)  # of a small one, whose own size shows it
        if error > worst:
            shapes = [None if t is None else list(t.shape) for t in (b, a)]
            worst, where = error, name if shapes[0] == shapes[1] else f"{name}: {shapes[0]} against {shapes[1]}"
    return Row(quantity, worst, limit, where), wrong


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to_dense().cpu()


def spread(values: Iterable[float]) -> float:
    """The largest difference of some numbers; infinite if one of them is not finite."""
    numbers = list(values)
    return max(numbers) - min(numbers) if all(map(math.isfinite, numbers)) else math.inf


def norm_of(grads: Mapping[str, Tensor | None]) -> float:
    """The global 2-norm of whole gradients; a parameter without a gradient counts as zero."""
    norms = [float(torch.linalg.vector_norm(grad.to_dense().double())) for grad in grads.values() if grad is not None]
    return math.hypot(*norms)


def largest_number(x: Tensor) -> float:
    """The largest absolute number of a tensor, in one pass over it; 0 of an empty one, NaN where there is one."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.abs() if x.is_complex() else x)
    return max(-float(low), float(high))


def largest_gap(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of two tensors' numbers; infinite if it is not a number, if shapes differ, or one is missing."""
    if one is None or other is None or one.shape != other.shape:
        return 0.0 if one is other else math.inf
    # Piece by piece: new memory for all differences costs more than numbers.
    pieces = zip(one.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True)
    gaps = [largest_number(a.double() - b.double()) for a, b in pieces]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps, default=0.0)


def is_close(one: Tensor, other: Tensor, limit: float, least: float = 1e-12) -> bool:
    """Whether two tensors have the same numbers, up to ``limit`` of the largest finite one, or of ``least``."""
    if one.shape != other.shape:
        return False
    a, b = one.double(), other.double()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())  # equal infinities would give NaN
    size = torch.where(a.isfinite(), a.abs(), 0.0)
    return not gap.numel() or bool(gap.max() <= limit * size.max().clamp_min(least))


@dataclass
class Trace:
    """What one run did, in whole tensors."""

    losses: list[float] = field(default_factory=list)  # of every training batch, averaged over the replicas
    grads: dict[str, Tensor | None] = field(default_factory=dict)  # at the first optimizer step, as the optimizer read them
    grad_norm: float = 0.0  # the global norm of these
    weights: dict[str, Tensor] = field(default_factory=dict)  # at the end of the run

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


class ParityRecorder(pl.callbacks.Callback):
    """Records a :class:`Trace` of ``Trainer.fit``; the same callback on one process and on many.

    Gradients are those that reach the first optimizer step, after sync and before clipping; losses are averaged over
    the data-parallel replicas, as the one process saw the whole batch. All ranks hold the same trace. With ``tensors`` it has
    whole gradients and weights too (memory for the whole model).
    """

    only_reads_gradients = True
    """So that a run that is recorded checks gradients in the same steps as one that is not."""

    def __init__(self, *, tensors: bool = True) -> None:
        self.trace = Trace()
        self._tensors = tensors
        self._seen: set[int] = set()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
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
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch's loss; those of stages where the accumulation window ends, and all are computed."""
        if outputs is None or (isinstance(outputs, dict) and "loss" not in outputs):
            return  # a step that skips
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        values = own_whole(loss).double().view(1) * trainer.accumulate_grad_batches
        record = record_of(pl_module)
        if record is not None and (stage := record.stage) is not None:
            if trainer.fit_loop._should_accumulate():
                return
            values = stage.of_last(torch.stack(stage.losses).double() if stage.is_last else values)
        self.trace.losses += trainer.strategy.reduce(values, reduce_op="mean").tolist()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the final weights."""
        if self._tensors:
            self.trace.weights = gather_weights(pl_module)
