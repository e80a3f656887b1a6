"""What the strategy does where the model runs in stages of a pipeline: how far a step goes, and when a backward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.pipeline.schedule import OneForwardOneBackward, interleave
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.region.schedule import WatchSchedule
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.interleaving import InterleavedWindow, MicroBatch, touch
from lightning_seqpar.strategy.stage_logs import StageLogs
from lightning_seqpar.verify.guards.while_training import (
    check_buffers_of_stages,
    check_parameters_of_stages,
    refuse_hooks_of_reduced,
    refuse_hooks_on_shared,
)


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
        begins = self._env.trainer.fit_loop.batch_idx % self._env.trainer.accumulate_grad_batches == 0
        if begins and is_overridden("optimizer_zero_grad", self._env.module):
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
            self._logs.share(self._env.trainer, self._env.module, ends_window=True)

    def _run_window(self, window: InterleavedWindow, stage: Stage, *, reduces: bool) -> None:
        """Run the micro-batches that were put off, in turns over the chunks of this stage."""
        found = window.micro_batches
        ddp = self._env.ddp
        with window.run():
            for part in interleave(stage.number, stage.count, stage.chunks, len(found)):
                one = found[part.micro_batch]
                # DDP reduces each parameter once, and here it has as many backwards as there are chunks.
                waits = ddp is not None or not reduces or one is not found[-1]
                with self._schedule.as_of("training", one.number):
                    if not part.is_backward:
                        one.losses[part.chunk] = self._run_chunk(window, stage, one, part.chunk)
                        continue
                    with self._env.strategy.block_backward_sync() if waits else nullcontext():
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
        """Run the backward of a micro-batch through one chunk."""
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
            return {**out, "loss": torch.full_like(out["loss"], self._logs.window_loss, dtype=torch.float64)}

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
