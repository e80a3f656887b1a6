"""What the strategy does where the model runs in stages of a pipeline: how far a step goes, what it logs, when a backward runs.

Where stages have several chunks of blocks, micro-batches are put off to the end of the accumulation window: in turns over the
chunks one is run before the one that came first is done. Until then Lightning has a number in the place of each loss.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_seqpar.data.batch import own_tensors
from lightning_seqpar.distributed.autograd import once_differentiable
from lightning_seqpar.distributed.host import object_of
from lightning_seqpar.distributed.rng import SavedStreams
from lightning_seqpar.layout.attributes import ModelAttributes, Values
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.pipeline.cut import OneForwardOneBackward, interleave
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.region.observers import WatchSchedule
from lightning_seqpar.releases import is_overridden, pl, prepare_for_backward
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.verify.guards.while_training import (
    check_buffers_of_stages,
    check_parameters_of_stages,
    refuse_hooks_of_reduced,
    refuse_hooks_on_shared,
)

_CPU = torch.device("cpu")


class StageLogs:
    """Keeps what the training steps of an accumulation window log on the last stage, and logs it on the others behind it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, replicas: dist.ProcessGroup) -> None:
        self._group, self._device, self._replicas = group, device, replicas
        self._is_last = group.rank() == group.size() - 1
        self._stops = False  # the step asked to stop, behind the blocks
        # Calls of self.log: the hook, the name, the tensor's dtype (None for a metric), options; and the values of tensors.
        self._calls: list[tuple[str, str, torch.dtype | None, dict[str, Any]]] = []
        self._values: list[Tensor] = []
        self._losses: list[Tensor] = []
        # Of the accumulation window that ended last, on all stages and on the device: nothing waits for it.
        self.window_loss = torch.full((), float("nan"), dtype=torch.float64, device=device)
        # Of each metric's lists how many entries all stages have, and the last of those.
        self._sent: dict[str, dict[str, tuple[int, Any]]] = {}

    @contextmanager
    def step(self, trainer: pl.Trainer, *, has_loss: bool) -> Generator[None, None, None]:
        """A context manager around a training step, or around the part of one that comes to the loss, or does not."""
        results: Any = trainer._results
        assert results is not None
        should_stop = trainer.should_stop
        results.log = functools.partial(self._note, results.log, results) if has_loss else _log_nothing
        try:
            yield
        finally:
            del results.log  # the class's own again
        if has_loss and trainer.should_stop and not should_stop:
            trainer.should_stop, self._stops = False, True  # all stages stop, where the window ends

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch, divided as Lightning divides it while gradients are accumulated; on the last stage."""
        self._losses.append(loss.detach().to(torch.float64))

    def share(
        self, trainer: pl.Trainer, module: pl.LightningModule, *, ends_window: bool = False, checks: bool = False
    ) -> None:
        """Log on all stages what the last one logged since the last call, and note a window's loss. Collective over pp.

        Calls go from host to host, and their numbers from device to device. With ``checks`` the loss is read, and NaN is told.
        """
        metrics = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
        told: Any = None
        last = self._group.size() - 1
        numbers = self.window_loss.view(1)
        if self._is_last:
            if ends_window and self._losses:
                numbers = torch.stack(self._losses).sum().view(1)
            numbers = torch.cat([numbers, *(value.view(1) for value in self._values)])
            told = (self._calls, {name: self._news(name, metric) for name, metric in metrics.items()}, self._stops)
            self._calls, self._values, self._stops = [], [], False
            self._losses = [] if ends_window else self._losses
        calls, news, stops = object_of(last, told, self._group)
        if not self._is_last:
            numbers = numbers.new_empty(1 + sum(dtype is not None for _, _, dtype, _ in calls))
        dist.broadcast(numbers, group=self._group, group_src=last)
        self.window_loss = numbers[0]
        if ends_window and checks and bool(self.window_loss.isnan()):
            rank_zero_warn(
                f"lightning_seqpar: the loss is NaN. With pp={self._group.size()} an activation between the blocks is NaN on "
                "stages that did not make it, a parameter on those that do not hold it, and so is a loss that reads one in a way "
                "which the first batch did not take (an auxiliary loss that begins later). If one process has a number there, "
                "train with pp=1"
            )
        trainer.should_stop |= stops
        if self._is_last:
            return
        for name, one in news.items():
            if one is not None:
                self._take(metrics[name], one)
        left, results = iter(numbers[1:]), trainer.fit_loop.epoch_loop._results  # also where a validation begins
        for fx, name, dtype, options in calls:
            metric = attrgetter(options["metric_attribute"])(module) if dtype is None else None
            value = metric if dtype is None else next(left).to(dtype, copy=True)
            results.log(fx, name, value, sync_dist_fn=trainer.strategy.reduce, **options)
            trainer._logger_connector._current_fx = fx

    def _note(self, log: Callable[..., None], results: Any, fx: str, name: str, value: Any, **options: Any) -> None:
        """Log by ``log``, and keep the call."""
        group = options.pop("sync_dist_group", None)
        if options.get("sync_dist") and group is not None and group is not self._replicas:
            raise ValueError(
                f"self.log({name!r}, sync_dist_group=...) with pp={self._group.size()}: the stages log what the last one logged, "
                "and are in other groups; leave it out to mean over the replicas"
            )
        log(fx, name, value, **options)
        del options["sync_dist_fn"]
        options["reduce_fx"] = getattr(options["reduce_fx"], "__name__", options["reduce_fx"])
        options["batch_size"] = options["batch_size"] or results.batch_size
        dtype = value.dtype if isinstance(value, Tensor) else None
        if dtype is not None:
            self._values.append(value.detach().to(self._device, torch.float64, non_blocking=True))
        self._calls.append((fx, name, dtype, options))

    def _news(self, name: str, metric: Metric) -> dict[str, Any] | None:
        """What the other stages don't have of a metric's state yet; of lists, which grow, what was added."""
        if not metric._update_count and name not in self._sent:
            return None
        sent, states = self._sent.get(name, {}), {}
        for state in metric._defaults:
            value = getattr(metric, state)
            if isinstance(value, list):
                at, last = sent.get(state, (0, None))
                if at > len(value) or (at and value[at - 1] is not last):
                    at = 0  # it was reset since
                states[state] = (at, _to(value[at:], _CPU))
            else:
                states[state] = _to(value, _CPU)
        lists = {state: value for state in states if isinstance(value := getattr(metric, state), list) and value}
        self._sent[name] = {state: (len(value), value[-1]) for state, value in lists.items()}
        return {"states": states, "count": metric._update_count, "cache": _to(metric._forward_cache, _CPU)}

    def _take(self, metric: Metric, news: dict[str, Any]) -> None:
        for name, value in news["states"].items():
            if isinstance(value, tuple):
                value = [*getattr(metric, name)[: value[0]], *_to(value[1], self._device)]
            setattr(metric, name, _to(value, self._device))
        metric._update_count, metric._computed = news["count"], None
        metric._forward_cache = _to(news["cache"], self._device)


def _log_nothing(*args: Any, **options: Any) -> None:
    """Where the loss is not computed."""


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_to(one, device) for one in value]
    return value.detach().to(device) if isinstance(value, Tensor) else value


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

    step: Callable[..., Any]  # the user's
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

    def __init__(self, stage: Stage, module: pl.LightningModule, device: torch.device) -> None:
        self._stage, self._module = stage, module
        self._anchor = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
        self._attributes = ModelAttributes(module)
        self._begun: dict[str, tuple[int, int]] = {}  # what must be the same for all micro-batches
        self._changed: list[Values] = []  # by each chunk's runs: attributes of modules
        self.micro_batches: list[MicroBatch] = []

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
                    f"virtual_pp={self._stage.chunks}: {what} whose gradients are accumulated, which are computed together where "
                    "the last of them has come. Do so where batch_idx % accumulate_grad_batches == 0, or leave virtual_pp out"
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
            for key in self._changed[-1]:
                if key in now and key in first and now[key] is not first[key]:
                    raise RuntimeError(
                        f"virtual_pp={self._stage.chunks}: both training_step and a hook between the batches of an accumulation "
                        f"window change {key[0] or type(self._module).__name__}.{key[1]}; the steps of a window are run together "
                        "where its last batch has come. Change it in one of them, or leave virtual_pp out"
                    )
        finally:
            _set_modes(modes)
            self._attributes.set({**now, **self._changed[-1]})
            self.micro_batches = []
            streams.restore()

    @contextmanager
    def entered(self, one: MicroBatch, chunk: int, trainer: pl.Trainer) -> Generator[Callable[[], Any], None, None]:
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
    states = {name: getattr(metric, name) for name in metric._defaults}
    copied = {name: list(state) if isinstance(state, list) else state.clone() for name, state in states.items()}
    return {**copied, **{name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}}


def _own(given: Any) -> Any:
    try:
        return copy.deepcopy(given)
    except (TypeError, RuntimeError):  # something in it can't be copied (a handle, a tensor with a graph)
        return own_tensors(given)


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, trains in modes:
        module.training = trains


class Stages:
    """Runs this rank's stage of a pipeline."""

    def __init__(
        self,
        environment: Environment,
        schedule: WatchSchedule,
        run_step: Callable[[str, Callable[..., Any], Any, Any], Any],
        before_backward: Callable[..., None],
    ) -> None:
        self._env, self._schedule = environment, schedule
        self._run_step, self._before_backward = run_step, before_backward
        self._micro_batches = OneForwardOneBackward(0)
        self._logs: StageLogs | None = None
        self.stage: Stage | None = None
        self.reduced: list[Tensor] = []  # parameters whose gradients DDP reduces over the replicas
        self.window: InterleavedWindow | None = None  # of put-off micro-batches, where stages have several chunks
        self._replaced: list[tuple[Any, str]] = []  # methods of Lightning's loops

    def begin(self, stage: Stage) -> None:
        """A training begins."""
        self.window = InterleavedWindow(stage, self._env.module, self._env.device) if stage.chunks > 1 else None
        self._micro_batches = OneForwardOneBackward(stage.stages_behind)
        self._logs = StageLogs(self._env.groups["pp"], self._env.device, self._env.groups["dp"])

    @contextmanager
    def running(self, stage: Stage, name: str) -> Generator[None, None, None]:
        """A context in which a step of the user's runs as far as a stage goes, inside of DDP, for which that would be an error."""
        module = self._env.module
        own, step = vars(module).get(name), getattr(module, name)
        trains = name == "training_step"
        run: Callable[[Callable[[], Any]], Any] = stage.run if trains else stage.evaluate
        logs, window = self._logs if trains else None, self.window if trains else None

        @functools.wraps(step)
        def in_stages(*args: Any, **kwargs: Any) -> Any:
            if window is not None:
                batch = self._env.trainer._results.batch  # type: ignore[union-attr]
                return window.put_off(step, (args, kwargs), self._schedule.number("training"), batch)
            return run(lambda: step(*args, **kwargs))

        vars(module)[name] = in_stages
        try:
            with nullcontext() if logs is None or window else logs.step(self._env.trainer, has_loss=stage.is_last):
                yield
        finally:
            del vars(module)[name]
            if own is not None:
                vars(module)[name] = own

    def run_when_due(self, loss: Tensor, backward: Callable[[], Any], stage: Stage) -> None:
        """Run the backwards that are due on a stage behind a micro-batch's forward; at the window's end all of them."""
        is_last = not self._env.trainer.fit_loop._should_accumulate()
        if self._env.begins_window and is_overridden("optimizer_zero_grad", self._env.module):
            stage.refuse_kept()
        if self.window is not None:
            self.window.micro_batches[-1].backward = backward
            if is_last:
                self._run_window(self.window, stage, reduces=True)
                self._end_window(stage)
            return

        def reduced() -> None:  # the window's last backward: DDP reduces what all of them added up
            if self._env.ddp is not None:
                prepare_for_backward(self._env.ddp, loss)
            backward()

        if stage.is_last and self._logs is not None:
            self._logs.note_loss(loss)
        self._micro_batches.add(reduced if is_last else backward, is_last=is_last)
        if is_last:
            self._end_window(stage)

    def _end_window(self, stage: Stage) -> None:
        """All backwards of a window have run. Collective over the pipeline."""
        stage.settle()
        stage.sum_shared()  # once for each window, in which gradients were added up
        record = record_of(self._env.module)
        if record is not None:
            record.forget_streams()
        if record is not None and self._schedule.is_due("training"):
            refuse_hooks_on_shared(record)
            check_buffers_of_stages(record, self._env.groups, self._env.device)
            check_parameters_of_stages(record, self._env.groups, self._env.device)
        if self._logs is not None:
            self._logs.share(self._env.trainer, self._env.module, ends_window=True, checks=self._schedule.is_due("training"))

    def _run_window(self, window: InterleavedWindow, stage: Stage, *, reduces: bool) -> None:
        found = window.micro_batches
        ddp = self._env.ddp
        with window.run():
            for part in interleave(stage.number, stage.count, stage.chunks, len(found)):
                one = found[part.micro_batch]
                with self._schedule.as_of("training", one.number):
                    if not part.is_backward:
                        one.losses[part.chunk] = self._run_chunk(window, stage, one, part.chunk)
                        continue
                    # DDP reduces each parameter once, and here it has as many backwards as there are chunks.
                    with self._env.strategy.block_backward_sync():
                        self._run_backward(one, part.chunk, stage)
        if ddp is not None and reduces:
            refuse_hooks_of_reduced(record_of(self._env.module), self.reduced)
            nothing = touch([p for p in self.reduced if p.grad is not None])
            prepare_for_backward(ddp, nothing)
            nothing.backward()

    def _run_chunk(self, window: InterleavedWindow, stage: Stage, one: MicroBatch, chunk: int) -> Tensor:
        """Run the forward of a micro-batch through one chunk; returns the loss, or what stands for it."""
        has_loss = stage.is_last and chunk == stage.chunks - 1
        logs = nullcontext() if self._logs is None else self._logs.step(self._env.trainer, has_loss=has_loss)
        with (
            window.entered(one, chunk, self._env.trainer) as step,
            logs,
            self._env.strategy.precision_plugin.train_step_context(),
        ):
            out = self._run_step("training", step, (), {})
        loss: Tensor = out["loss"] if isinstance(out, Mapping) else out
        if has_loss and self._logs is not None:
            self._logs.note_loss(loss / self._env.trainer.accumulate_grad_batches)
        return loss

    def _run_backward(self, one: MicroBatch, chunk: int, stage: Stage) -> None:
        loss, gradient = one.losses.pop(chunk), None
        if chunk == stage.chunks - 1:
            assert one.backward is not None
            one.backward()
            if stage.is_last:
                gradient = self._gradient_of(one).to(loss.dtype)
        self._before_backward(loss, is_loss=gradient is not None)
        torch.autograd.backward(loss, gradient)

    def _gradient_of(self, one: MicroBatch) -> Tensor:
        """By what Lightning multiplies the gradient of a loss that was put off."""
        own = is_overridden("backward", self._env.module)
        if not one.gradients or (own and not bool(one.gradients[-1].isfinite())):
            raise RuntimeError(
                f"{type(self._env.module).__name__}.backward reads the value of the loss, or runs no backward: with virtual_pp "
                "losses are computed behind it. Do so in training_step, or leave virtual_pp out"
            )
        return one.gradients[-1]

    def finish_micro_batches(self) -> None:
        """Run the backwards that are still to come, in the middle of a window, and share what was logged. Collective over pp."""
        if (stage := self.stage) is None or self._logs is None:
            return
        if self.window is not None and self.window.micro_batches:
            now = self._env.trainer.state.stage
            self._env.trainer.training = True  # where a validation begins too
            self._run_window(self.window, stage, reduces=False)
            self._env.trainer.state.stage = now
        with self._env.strategy.block_backward_sync():
            self._micro_batches.finish()
        stage.settle()
        self._logs.share(self._env.trainer, self._env.module)

    def enter_loops(self) -> None:
        """Change Lightning's loops for a training in stages, until :meth:`leave_loops`."""
        if self.stage is None:
            return
        trainer, fit = self._env.trainer, self._env.trainer.fit_loop
        loop: Any = fit.epoch_loop

        def asked(ask: Callable[[], Any]) -> None:  # whether to end by SIGTERM, behind a batch
            # At a window's start alone: all ranks wait for each other there, and each micro-batch would for all stages.
            if (loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                ask()

        def finished(call: Callable[[], Any]) -> Any:
            # A callback may exchange weights for a validation, or read what the epoch logged, which may end within a window.
            self.finish_micro_batches()
            return call()

        def with_loss(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            out = run(*args, **kwargs)
            if self._logs is None or "loss" not in out:
                return out
            # On all stages, of which the last one alone computes it.
            return {**out, "loss": self._logs.window_loss.expand_as(out["loss"]).clone()}

        changes: list[tuple[Any, str, Callable[..., Any]]] = [
            (loop, "_broadcast_sigterm_tensor", asked),
            (loop.val_loop, "run", finished),
            (fit, "on_advance_end", finished),
            (loop.automatic_optimization, "run", with_loss),
        ]
        for owner, name, change in changes:
            self._replaced.append((owner, name))
            owner.__dict__[name] = functools.partial(change, getattr(owner, name))

    def leave_loops(self) -> None:
        """Give Lightning's loops their methods back."""
        for owner, name in self._replaced:
            owner.__dict__.pop(name, None)
        self._replaced = []
