"""One side of a trial: a module that trains for three steps, alone or on ranks, and what it did, in files.

Two steps in a first epoch, with batches of two lengths; then a third, on ranks by a fresh module that resumes from a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader

from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.distributed.autograd import Watch, is_higher_order
from lightning_seqpar.inference.examples import count_samples, peek_batch, project
from lightning_seqpar.inference.model_copy import default_dtype, grouped_product, is_grouped_in_float64, move_weights
from lightning_seqpar.inference.reduction import IDS, holders
from lightning_seqpar.parallel.grad_sync import global_grad_norm
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.releases import check_package, is_overridden, pl
from lightning_seqpar.verify.parity import ParityRecorder, each_gradient, each_weight, norm_of
from lightning_seqpar.verify.traced_step import draw_tokens

DEFAULT_LENGTH = 32  # positions of a sample that is made up
SEED = 20_260_101
ALONE = "alone"  # the side of one process that reads the parts of all replicas one after the other, as micro-batches
AT_ONCE = "at-once"  # the side of one process that reads the parts of all replicas together


class TrialError(ValueError):
    """What was given makes no trial."""


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


class Feed(pl.LightningDataModule):
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


class KeepFloat64(Watch):
    """A mode in which all is float64: what the model's code casts (norms of Hugging Face's), and grouped products of experts."""

    casts = 0  # how many casts were turned down, and products without a kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if (
            func is torch.ops.aten._to_copy.default
            and kwargs.get("dtype") in (torch.float32, torch.bfloat16, torch.float16)
            and isinstance(args[0], Tensor)
            and args[0].dtype is torch.float64
        ):
            self.casts += 1
            kwargs["dtype"] = torch.float64
        if is_grouped_in_float64(func, args):
            self.casts += 1
            return grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


def switch_off_dropout(model: nn.Module) -> None:
    """Set numbers of modules, and of configurations that they hold, whose names speak of dropping, to zero."""
    for holder in holders(model):
        values = holder if isinstance(holder, dict) else vars(holder)
        for name, value in list(values.items()):
            drops = "drop" in str(name) or (name == "p" and isinstance(holder, _DropoutNd))
            if drops and isinstance(value, float) and 0 < value < 1:
                values[name] = 0.0


class PlainModule(pl.LightningModule):
    """A plain module as it is trained in a trial: by its own loss, or by a fixed projection of what it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss; mappings are named arguments of the module, tuples and lists its positional ones."""
        if isinstance(batch, Mapping):
            out = self.model(**batch)
        else:
            out = self.model(*batch) if isinstance(batch, tuple | list) else self.model(batch)
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.sum()
        return torch.stack([project(leaf) for leaf in tensors_in(out) if leaf.requires_grad]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, which turns small wrong gradients into large wrong steps."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Trial:
    """What both sides train; pickled once, for all processes."""

    make: Callable[[], nn.Module]  # makes the module, without arguments
    reference: Callable[[], nn.Module] | None  # makes the one that a single process trains; None for the same
    batch: Callable[[], Any] | None  # makes the first one, of all replicas; None makes one up, or reads the module's
    second: Callable[[], Any] | None  # makes the second one; None for a shorter one of other samples
    samples: int  # samples of a micro-batch that is made up
    length: int | None  # positions of a sample that is made up
    strategy: Callable[[], Any]  # makes the strategy of the ranks
    meshed: bool  # whether that is a ModelParallelStrategy
    micro_batches: int  # how many micro-batches a replica accumulates in a step
    unit: int | None  # of what the second batch is shorter; None for an odd length
    trainer: Mapping[str, Any]  # more arguments of both trainers
    dtype: torch.dtype  # of weights and batches: float64 or float32
    folder: str  # where the processes leave what they did

    def path(self, side: str, what: str) -> Path:
        """The file in which a side leaves something."""
        return Path(self.folder, f"{side}-{what}.pt")


class Digest(NamedTuple):
    """Two linear functionals of a tensor, by which ranks are compared without sending tensors."""

    first: float
    second: float

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Digest:
        """The digest of a tensor; the weights depend on its name alone."""
        flat = tensor.detach().double().flatten()
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        places = torch.arange(1, flat.numel() + 1, dtype=torch.float64) + seed % 1000
        return cls(float(flat @ (places * 12.9898).sin()), float(flat @ (places * 78.233).cos()))


@dataclass
class Outcome:
    """What one process of a trial did; tensors are in files of the trial's folder, written by the first rank."""

    losses: list[float] = field(default_factory=list)  # of each step, averaged over replicas and micro-batches
    norms: list[float] = field(default_factory=list)  # of each step, the global norm as the strategy computes it
    digests: list[dict[str, Digest]] = field(default_factory=list)  # of each step, of every whole gradient on this rank
    weight_digests: dict[str, Digest] = field(default_factory=dict)  # of the weights after two steps
    replicas: int = 1  # how many replicas read batches of their own
    replica: int = 0  # the one of this rank
    lengths: list[int | None] = field(default_factory=list)  # of the batches, if they are sequences
    is_complete: bool = False  # whether the training came to the end of its second epoch
    casts: int = 0  # how many casts to narrower types were turned down
    draws: bool = False  # whether a step drew random numbers
    failed_length: str = ""  # why the shorter batch could not be trained on; empty if it could
    parts: int = 1  # into how many micro-batches one process split a batch


class TrialRecorder(ParityRecorder):
    """Records every optimizer step, and leaves whole tensors in files one step at a time."""

    def __init__(self, trial: Trial, side: str, parts: int, *, stops: bool = False) -> None:
        super().__init__(tensors=False)
        self.outcome = Outcome()
        self._trial, self._side, self._parts, self._stops = trial, side, parts, stops
        self._of: dict[int, int] = {}  # steps that each optimizer has taken
        self._grads: dict[str, Tensor | None] = {}
        self._written = 0

    def fit(
        self, module: pl.LightningModule, strategy: Any, devices: int, batches: Callable[[int], Any], ckpt: Path | None = None
    ) -> pl.Trainer:
        """Train a module on batches, from a checkpoint on if there is one."""
        # ModelParallelStrategy refuses float64, which module and batches have without it too.
        narrow = isinstance(strategy, pl.strategies.ModelParallelStrategy) or self._trial.dtype is torch.float32
        options = {
            "accelerator": "cpu",
            "devices": devices,
            "strategy": strategy,
            "precision": "32-true" if narrow else "64-true",
            "max_epochs": 2,
            "reload_dataloaders_every_n_epochs": 1,
            "accumulate_grad_batches": self._parts,
            "callbacks": [self],
            "use_distributed_sampler": False,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        }
        silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = pl.Trainer(**{**options, **dict.fromkeys(silent, False), **self._trial.trainer})
        trainer.fit(module, Feed(batches, self._parts), ckpt_path=None if ckpt is None else str(ckpt))
        return trainer

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the replicas."""
        switch_off_dropout(pl_module)  # what configure_model made has its dropout still
        self.outcome.replicas, self.outcome.replica = replica_of(trainer.strategy)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed what the step draws by the number of its part, which is the same on both sides."""
        step, part = divmod(batch_idx, self._parts)
        _seed(SEED + 1000 * (step + 2 * trainer.current_epoch) + self.outcome.replica * self._parts + part)
        self._drawn = torch.get_rng_state()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Gather the gradients of the first epoch; several optimizers' of one step are put together."""
        if trainer.current_epoch:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        number = self._of[id(optimizer)] = self._of.get(id(optimizer), 0) + 1
        record, out = record_of(pl_module), self.outcome
        norm = None if record is None else float(global_grad_norm(parameters, record.layout, record.groups))
        if len(out.digests) < number:
            self._write_gradients(trainer)
            out.digests.append({})
            out.norms.append(0.0)
        keep: dict[str, Tensor | None] = {}
        for name, grad in each_gradient(pl_module, {id(parameter) for parameter in parameters}):
            if grad is not None:
                out.digests[-1][name] = Digest.of(name, grad)
            if trainer.is_global_zero:
                keep[name] = grad
        self._grads |= keep
        norm, before = norm_of(keep) if norm is None else norm, out.norms[-1]
        # Of several optimizers the largest; max() would forget one that is no number.
        out.norms[-1] = before if math.isnan(before) or norm <= before else norm

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep losses, and whether the step drew random numbers."""
        self.outcome.draws |= not torch.equal(self._drawn, torch.get_rng_state())
        # There is none of a step that optimizes by itself, or skips.
        if isinstance(outputs, Tensor) or (outputs or {}).get("loss") is not None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the weights."""
        self.outcome.is_complete = trainer.current_epoch == 1
        self._write_gradients(trainer)
        kept: dict[str, Tensor] = {}
        for name, weight in each_weight(pl_module):
            self.outcome.weight_digests[name] = Digest.of(name, weight)
            if trainer.is_global_zero:
                kept[name] = weight
        if trainer.is_global_zero:
            torch.save(kept, self._trial.path(self._side, f"weights-{trainer.current_epoch}"))
        if self._stops:
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sum the losses of micro-batches up to steps."""
        losses, each = self.trace.losses, self._parts
        self.outcome.losses = [sum(losses[at : at + each]) / each for at in range(0, len(losses), each)]

    def _write_gradients(self, trainer: pl.Trainer) -> None:
        if self._written == len(self.outcome.digests):
            return
        self._written += 1
        if trainer.is_global_zero:
            torch.save(self._grads, self._trial.path(self._side, f"gradients-{self._written}"))
        self._grads = {}


def read_trial(given: bytes) -> Trial:
    """Read a pickled trial in another process."""
    try:
        trial: Trial = pickle.loads(given)
    except (AttributeError, ImportError) as error:
        raise TrialError(
            f"the processes that are started can't find what was given ({error}): a class or function must stand at the top of a "
            "module that can be imported, or of the script, outside of what is below if __name__"
        ) from error
    return trial


def build(make: Callable[[], nn.Module], dtype: torch.dtype) -> pl.LightningModule:
    """Make the module of a trial without dropout, in ``dtype`` at once: Lightning loads weights before it converts."""
    pl.seed_everything(SEED, verbose=False)
    module = make()
    if not isinstance(module, nn.Module):
        raise TrialError(f"module_or_factory made a {type(module).__name__}; it must make an nn.Module")
    check_package(module)
    if not isinstance(module, pl.LightningModule):
        module = PlainModule(module)
    switch_off_dropout(module)
    return module.double() if dtype is torch.float64 else module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While open, neither log lines nor warnings appear."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def train_alone(given: bytes, replicas: int, same_length: bool, side: str = ALONE) -> Outcome:
    """Train the module in this process, which reads the parts of all replicas; the outcome tells of a shorter batch that fails."""
    trial = read_trial(given)
    with quiet(), default_dtype(trial.dtype):
        module = build(trial.reference or trial.make, trial.dtype)
        initial = trial.path("initial", "weights")
        if not initial.exists():
            move_weights(module)
            torch.save({name: p.detach() for name, p in module.named_parameters()}, initial)
        _load(module, initial)
        batches = make_batches(trial, module, replicas, same_length=same_length)
        parts = (replicas if side == ALONE else 1) * trial.micro_batches if module.automatic_optimization else 1
        for batch in batches:
            split_samples(batch, parts)  # what can't be dealt out is told before anything runs
        recorder = TrialRecorder(trial, side, parts)
        mode = KeepFloat64() if trial.dtype is torch.float64 else contextlib.nullcontext()  # type: ignore[no-untyped-call]
        outcome = recorder.outcome
        strategy: Any = "auto"
        if trial.meshed:  # a module that shards itself in configure_model asks for a mesh: in one process for one of one rank
            strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
        try:
            with mode:
                recorder.fit(module, strategy, 1, lambda count: batches)
        except Exception as error:
            if not outcome.digests or same_length or trial.second is not None:
                raise
            outcome.failed_length = f"{type(error).__name__}: {error}"
        outcome.parts, outcome.casts = parts, getattr(mode, "casts", 0)
        outcome.lengths = [length_of(batch) for batch in batches]
    return outcome


def train_on_ranks(given: bytes, same_length: bool, wide: bool) -> tuple[Outcome, Outcome]:
    """What the module does in two steps on this rank, and a fresh one that resumes from a checkpoint, in a third."""
    trial = read_trial(given)
    checkpoint, outcomes = Path(trial.folder, "trial.ckpt"), []
    mode = KeepFloat64() if wide else contextlib.nullcontext()  # type: ignore[no-untyped-call]
    with quiet(), default_dtype(trial.dtype), mode:
        for resumed in (False, True):
            module = build(trial.make, trial.dtype)
            # The second time with other weights, so that only the checkpoint can bring the right ones.
            _load(module, trial.path("initial", "weights"), factor=1.5 if resumed else 1.0)
            parts = trial.micro_batches if module.automatic_optimization else 1
            recorder = TrialRecorder(trial, "resumed" if resumed else "ranks", parts, stops=not resumed)
            batches = functools.partial(make_batches, trial, module, same_length=same_length)
            trainer = recorder.fit(module, trial.strategy(), dist.get_world_size(), batches, checkpoint if resumed else None)
            if not resumed:
                trainer.save_checkpoint(checkpoint)
            outcomes.append(recorder.outcome)
    return outcomes[0], outcomes[1]


def make_batches(trial: Trial, module: pl.LightningModule, replicas: int, *, same_length: bool) -> list[Any]:
    """The three batches of a trial: the first, a shorter one of its samples in another order, and that order at full length."""
    _seed(SEED)  # what makes a batch may draw it, in each process
    if trial.batch is not None:
        first = trial.batch()
    elif isinstance(module, PlainModule):
        first = make_batch(module.model, trial.samples * replicas * trial.micro_batches, trial.length)
    elif is_overridden("train_dataloader", module):
        first = peek_batch(module.train_dataloader, "training")
    else:
        raise TrialError(
            f"batch: {type(module).__name__} has no train_dataloader, so nothing says what its training_step takes; give a batch "
            "(--batch package.module:function that returns one, or a YAML file with data)"
        )
    first = map_tensors(lambda one: one.to(trial.dtype) if one.is_floating_point() else one, first)
    turned = reverse_samples(first)
    if trial.second is not None:
        return [first, trial.second(), turned]
    shorter = None if same_length else shorten(turned, trial.unit)
    return [first, turned if shorter is None else shorter, turned]


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _load(module: nn.Module, file: Path, factor: float = 1.0) -> None:
    """Give a module the weights that all sides begin with; one that makes its model later has none to be given yet."""
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in saved:
                parameter.copy_(saved[name] * factor if parameter.is_floating_point() else saved[name])
