"""What a run says of itself while it trains: a callback that logs speed, traffic, memory and the norm of the gradient."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.data.batch import tensors_in
from lightning_seqpar.distributed.counters import ModelFlops, Traffic
from lightning_seqpar.distributed.host import LateNumbers, host_device, send_numbers
from lightning_seqpar.distributed.rendezvous import check_agreement
from lightning_seqpar.layout.param_layout import local_rows
from lightning_seqpar.releases import get_available_flops, pl
from lightning_seqpar.strategy.steps import parameters_of, plain_optimizer
from lightning_seqpar.strategy.strategy import SeqParallelStrategy


class SeqParallelMonitor(pl.callbacks.Callback):
    """Logs what a training costs to every logger of the Trainer, under a ``SeqParallelStrategy`` or any other strategy.

    ``Trainer(logger=CSVLogger("runs"), callbacks=[SeqParallelMonitor()])``. Behind each ``every_n_steps``-th step, under the
    number that Lightning's own logs have there:

    - ``seqpar/tokens_per_second``, ``seqpar/samples_per_second``: of all replicas together. Tokens are the elements of a batch's
      largest tensor of integers ``[b, s]``, padding among them, or ``b * s`` of its first tensor with two dims or more.
    - ``seqpar/step_seconds``: of an optimizer step in the mean, with the loader's time and checkpoints, without validations.
    - ``seqpar/bytes_sent_per_step``: of the tensors that rank 0 gave to collectives (:class:`~lightning_seqpar.measure.Traffic`).
    - ``seqpar/memory_gib_max``, ``seqpar/memory_gib_min``: over the ranks. On CUDA the most that tensors took; elsewhere
      the resident memory of the process.
    - ``seqpar/parameters_gib``, ``seqpar/gradients_gib``, ``seqpar/optimizer_gib``: what these take, on the rank that has most.
    - ``seqpar/model_flops_utilization``: the floating-point operations of a step, which are three times those of its forwards (what
      ``recompute`` runs again does not count), over what the devices could do in its time. Not with ``compile``.
    - ``seqpar/grad_norm``: of the whole model's gradient before it is clipped, of the parameters of the optimizer that made the
      last step. Only under this package's strategy, DDP and on one process: elsewhere gradients may be in parts.

    No step waits for the device: what a step leaves is read a step later. In steps that are logged the ranks exchange a row of
    numbers each, and those of the norm; in others nothing.

    Args:
        every_n_steps: after how many optimizer steps to log; none for the Trainer's ``log_every_n_steps``.
        peak_flops: floating-point operations per second of a device; none for what Lightning knows of it, by its name and the
            precision of the Trainer.
        snapshot_step: of which optimizer step (0-based) torch records what is allocated where, on CUDA. Each rank writes
            ``memory-step{step}-rank{rank}.pickle`` into ``snapshot_folder``, for https://docs.pytorch.org/memory_viz.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1, ``peak_flops`` not above 0, ``snapshot_step`` negative; before a training
            if the Trainer has no logger, or a snapshot is asked for on another device.
    """

    only_reads_gradients = True
    """So that the strategy does not compare gradients over the ranks in every step, as it does where a callback may change them."""

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        peak_flops: float | None = None,
        snapshot_step: int | None = None,
        snapshot_folder: str | Path = ".",
    ) -> None:
        for name, value, least in (("every_n_steps", every_n_steps, 1), ("snapshot_step", snapshot_step, 0)):
            if value is not None and value < least:
                raise ValueError(f"SeqParallelMonitor({name}={value}): give {least} or more, or None")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"SeqParallelMonitor(peak_flops={peak_flops}): give a device's flops per second, such as 989e12")
        self.every_n_steps, self.peak_flops = every_n_steps, peak_flops
        self.snapshot_step, self.snapshot_folder = snapshot_step, Path(snapshot_folder)
        self._run: _Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or pickled: nothing of a run under way."""
        return {**vars(self), "_run": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a training that has no logger."""
        if stage == "fit" and not trainer.loggers:
            raise ValueError(
                "SeqParallelMonitor with Trainer(logger=False): there is nothing to log to; give the Trainer a logger, or leave "
                "the callback out"
            )
        if stage == "fit" and self.snapshot_step is not None and trainer.strategy.root_device.type != "cuda":
            raise ValueError(
                f"SeqParallelMonitor(snapshot_step={self.snapshot_step}): torch records memory on CUDA, and this run is on "
                f"{trainer.strategy.root_device.type}; leave it out"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to measure, once all ranks have said that they will log the same steps. Collective."""
        every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # type: ignore[attr-defined]
        self._run = _Run(trainer, every, self.peak_flops)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Count what is in the batch, and begin to count what is sent if its step is logged."""
        if (run := self._run) is not None:
            run.of_batch = _count(batch)
            if run.is_logged:
                run.traffic = run.traffic or Traffic()
                run.counting.enter_context(run.traffic)
                if run.peak is not None:
                    run.flops = run.flops or ModelFlops()
                    run.flops.counts = True
                    run.counting.enter_context(run.flops)
            if run.step == self.snapshot_step and run.begins_window:
                torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Note the norm of the gradients, which are whole here, if the step is logged. Collective in such steps."""
        if (run := self._run) is not None and run.is_logged:
            if run.flops is not None:
                run.flops.counts = False  # the products of an update (Muon's) are none of the model's
            before = 0 if run.traffic is None else run.traffic.total_bytes
            norm = _norm_before_step(trainer, optimizer)
            run.norm = None if norm is None else LateNumbers(norm.view(1))
            run.gradients = _nbytes(p.grad for group in trainer.optimizers for p in parameters_of(group))
            run.own_bytes += 0 if run.traffic is None else run.traffic.total_bytes - before

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what an earlier step has left, and take what this one leaves. Collective in steps that are logged."""
        if (run := self._run) is not None:
            if run.step == self.snapshot_step and run.ends_window:
                self.snapshot_folder.mkdir(parents=True, exist_ok=True)
                file = self.snapshot_folder / f"memory-step{run.step}-rank{trainer.global_rank}.pickle"
                torch.cuda.memory._dump_snapshot(str(file))
                torch.cuda.memory._record_memory_history(enabled=None)
            run.end_batch()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        if self._run is not None:
            self._run.stopped = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock go on."""
        if self._run is not None:
            self._run.began += time.perf_counter() - self._run.stopped

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop counting where a batch began but was skipped (a hook of the module may return -1 to end the epoch)."""
        if self._run is not None:
            self._run.counting.close()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what the last step has left."""
        if (run := self._leave()) is not None:
            run.log_late()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop measuring: later work of this thread must not be counted."""
        self._leave()

    def _leave(self) -> _Run | None:
        run, self._run = self._run, None
        if run is not None:
            run.counting.close()
        return run


_MOST_EVENTS = 200_000  # allocations of a step that are kept


class _Run:
    """One training that is measured, each ``every`` steps (0 for never). Making it is collective: ranks compare ``every``."""

    def __init__(self, trainer: pl.Trainer, every: int, peak_flops: float | None) -> None:
        self._trainer, self._every = trainer, every
        self._device = trainer.strategy.root_device
        # All ranks that train together; None if there is one, or they are not processes of torch.distributed.
        is_ours, strategy = isinstance(trainer.strategy, SeqParallelStrategy), trainer.strategy
        others = dist.group.WORLD if trainer.world_size > 1 and dist.is_initialized() else None
        self._group = strategy.environment.world if is_ours else others  # type: ignore[attr-defined]
        # Ranks of a replica read the same batches.
        sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": trainer.world_size}
        self._replicas = int(sampling["num_replicas"])
        self._tokens = self._samples = self._steps = 0  # since what was logged last
        self.of_batch = (0, 0)  # tokens and samples of the batch that is under way
        self.traffic: Traffic | None = None  # of a step that is logged
        compiles = is_ours and strategy.config.compile  # type: ignore[attr-defined]
        self.peak = None if compiles else peak_flops or _peak_flops(self._device, trainer.precision)  # of a device
        self.flops: ModelFlops | None = None  # of a step that is logged
        self.gradients = 0  # bytes of them on this rank
        self.counting = ExitStack()  # while it counts
        self.own_bytes = 0  # what of it the norm took
        self.norm: LateNumbers | None = None
        # By a logged step, to be read later: its number, how many it closes, their seconds, counts, bytes sent, and norm.
        self._left: tuple[int, int, float, Callable[[], Any], int, LateNumbers | None] | None = None
        # The host may be some steps ahead of the device, at both ends of what it measures alike.
        self.began, self.stopped = time.perf_counter(), 0.0
        if self._group is not None:
            check_agreement({"every_n_steps of SeqParallelMonitor": every}, self._group, self._device)

    @property
    def step(self) -> int:
        """The number under which Lightning logs the step that is under way."""
        return self._trainer.fit_loop.epoch_loop._batches_that_stepped

    @property
    def is_logged(self) -> bool:
        return self._every > 0 and (self.step + 1) % self._every == 0

    @property
    def begins_window(self) -> bool:
        """Whether the batch that is under way is the first of its step."""
        return self._trainer.fit_loop.batch_idx % self._trainer.accumulate_grad_batches == 0

    @property
    def ends_window(self) -> bool:
        """Whether the batch that is under way is the last of its step."""
        return not self._trainer.fit_loop._should_accumulate()

    def _kinds(self) -> list[int]:
        """Bytes of parameters, gradients and moments on this rank."""
        states = (value for one in self._trainer.optimizers for state in one.state.values() for value in state.values())
        moments = _nbytes(value for value in states if isinstance(value, Tensor))
        return [_nbytes(self._trainer.lightning_module.parameters()), self.gradients, moments]

    def end_batch(self) -> None:
        """A batch has ended, and with it a step unless more batches are accumulated. Collective in steps that are logged."""
        self.counting.close()
        self.log_late()
        self._tokens += self.of_batch[0]
        self._samples += self.of_batch[1]
        self.of_batch = (0, 0)
        if not self.ends_window:
            return
        self._steps += 1
        if self.is_logged:
            sent = 0 if self.traffic is None else self.traffic.total_bytes - self.own_bytes
            flops = 0 if self.flops is None else self.flops.total
            counted = self._gather([self._tokens, self._samples, _memory(self._device), flops, *self._kinds()])
            now = time.perf_counter()
            self._left = self.step, self._steps, now - self.began, counted, sent, self.norm
            self.began = now
            self._tokens = self._samples = self._steps = self.own_bytes = 0
            self.traffic = self.norm = self.flops = None

    def _gather(self, own: list[int]) -> Callable[[], list[list[float]]]:
        if self._group is None:
            return lambda: [[float(number) for number in own]]
        device = host_device(self._group, self._device)
        every = torch.empty(self._group.size(), len(own), dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(every, send_numbers(own, torch.float64, device).unsqueeze(0), group=self._group)
        return LateNumbers(every).read

    def log_late(self) -> None:
        if self._left is None:
            return
        (step, steps, seconds, counted, sent, norm), self._left = self._left, None
        rows = counted()
        *of_data, memory, flops, parameters, gradients, moments = zip(*rows, strict=True)
        tokens, samples = (sum(column) * self._replicas / len(rows) for column in of_data)
        kinds = {"parameters": parameters, "gradients": gradients, "optimizer": moments}
        possible = (self.peak or 0.0) * len(rows) * seconds / steps
        metrics = {
            **({"seqpar/tokens_per_second": tokens / seconds} if tokens else {}),
            **({"seqpar/samples_per_second": samples / seconds} if samples else {}),
            "seqpar/step_seconds": seconds / steps,
            "seqpar/bytes_sent_per_step": float(sent),
            "seqpar/memory_gib_max": max(memory) / 2**30,
            "seqpar/memory_gib_min": min(memory) / 2**30,
            **{f"seqpar/{kind}_gib": max(column) / 2**30 for kind, column in kinds.items()},
            **({"seqpar/model_flops_utilization": 3 * sum(flops) / possible} if possible else {}),
            **({} if norm is None else {"seqpar/grad_norm": norm.read()[0]}),
        }
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=step)


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of what this rank holds of tensors; what another stage of a pipeline holds is expanded here from nothing."""
    held = (local_rows(x) for x in tensors if x is not None)
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in held)


def _peak_flops(device: torch.device, precision: str) -> float | None:
    """What a device can do in a second at a precision of the Trainer's, if Lightning knows it."""
    narrow = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    dtype = next((dtype for name, dtype in narrow.items() if str(precision).startswith(name)), torch.float32)
    return None if device.type == "cpu" else get_available_flops(device, dtype)


def _count(batch: Any) -> tuple[int, int]:
    """How many tokens and samples are in a batch: 0 where that can't be told."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.ndim and not tensor.is_nested]
    ids = [x for x in tensors if x.ndim == 2 and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)]
    wide = [x for x in tensors if x.ndim >= 2]
    if ids or wide:
        found = max(ids, key=Tensor.numel) if ids else wide[0]
        return found.shape[0] * found.shape[1], found.shape[0]
    return 0, tensors[0].shape[0] if tensors else 0


@torch.no_grad()
def _norm_before_step(trainer: pl.Trainer, optimizer: Any) -> Tensor | None:
    """The norm of the whole model's gradient of an optimizer's parameters; None where it may be in parts. Collective."""
    plain, parameters, strategy = plain_optimizer(optimizer), parameters_of(optimizer), trainer.strategy
    if isinstance(strategy, SeqParallelStrategy):
        norm = strategy.steps.global_norm(parameters)
    elif isinstance(strategy, pl.strategies.SingleDeviceStrategy | pl.strategies.DDPStrategy) and not isinstance(
        strategy, pl.strategies.DeepSpeedStrategy
    ):
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    else:
        return None
    scale = getattr(getattr(trainer.precision_plugin, "scaler", None), "_scale", None)
    # Fused optimizers take the scale off themselves, in the step.
    return norm / scale if scale is not None and getattr(plain, "_step_supports_amp_scaling", False) else norm


def _memory(device: torch.device) -> int:
    """Bytes: on CUDA the most that tensors took at any time; else what the process has in memory, or had if only that is known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmRSS:")[1].split()[0]) * 1024
    import resource  # not on every system

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
