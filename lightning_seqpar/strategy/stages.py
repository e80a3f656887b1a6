"""What the strategy does where the model runs in stages of a pipeline: how far a step goes, and when a backward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.pipeline.schedule import OneForwardOneBackward
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.region.schedule import WatchSchedule
from lightning_seqpar.strategy.environment import TopologyStrategy
from lightning_seqpar.strategy.stage_logs import StageLogs
from lightning_seqpar.verify.guards.model import check_buffers_of_stages


class StagedStrategy(TopologyStrategy):
    """The part of the strategy that runs this rank's stage.

    Args:
        config: the configuration.
        plugins: the other arguments of :class:`TopologyStrategy`.
    """

    def __init__(self, config: ParallelConfig, **plugins: Any) -> None:
        super().__init__(config, **plugins)
        self._schedule = WatchSchedule(config.check_every)
        self._micro_batches = OneForwardOneBackward(0)
        self._logs: StageLogs | None = None

    def _begin_stages(self, stage: Stage) -> None:
        """A training begins."""
        self._micro_batches = OneForwardOneBackward(stage.stages_behind)
        self._logs = StageLogs(self.groups["pp"], self.root_device, self.groups["dp"])

    @contextmanager
    def _in_stages(self, name: str) -> Generator[None, None, None]:
        """A context manager in which a step of the user's, called by its name, runs as far as this stage goes.

        Inside of DDP, which would take the end of a stage for an error.
        """
        stage = self._stage
        if stage is None:
            yield
            return
        own, step = vars(self._module).get(name), getattr(self._module, name)
        trains = name == "training_step"
        run: Callable[[Callable[[], Any]], Any] = stage.run if trains else stage.evaluate

        @functools.wraps(step)
        def in_stages(*args: Any, **kwargs: Any) -> Any:
            return run(lambda: step(*args, **kwargs))

        vars(self._module)[name] = in_stages
        try:
            with self._logs.step(self._trainer) if trains and self._logs is not None else nullcontext():
                yield
        finally:
            del vars(self._module)[name]
            if own is not None:
                vars(self._module)[name] = own

    @property
    def _stage(self) -> Stage | None:
        """What this rank runs of a pipeline."""
        record = record_of(self._module)
        return None if record is None else record.stage

    @property
    def runs_stages(self) -> bool:
        """Whether the model runs in stages of a pipeline."""
        return self._stage is not None

    def _run_when_due(self, loss: Tensor, backward: Callable[[], Any], stage: Stage) -> None:
        """Run the backwards that are due on a stage behind a micro-batch's forward; at the window's end all of them."""
        is_last = not self._trainer.fit_loop._should_accumulate()
        begins = self._trainer.fit_loop.batch_idx % self._trainer.accumulate_grad_batches == 0
        if begins and is_overridden("optimizer_zero_grad", self._module):
            stage.refuse_kept()

        def reduced() -> None:  # the window's last backward: DDP reduces what all of them added up
            if isinstance(self.model, DistributedDataParallel):
                prepare_for_backward(self.model, loss)
            backward()

        self._micro_batches.add(reduced if is_last else backward, is_last=is_last)
        if is_last:
            stage.settle()
            stage.sum_shared()  # once for each window, in which gradients were added up
            record = record_of(self._module)
            if record is not None and self._schedule.is_due("training"):
                check_buffers_of_stages(record, self.groups, self.root_device)
            if self._logs is not None:
                self._logs.share(self._trainer, self._module)

    def _finish_micro_batches(self) -> None:
        """Run the backwards that are still to come, in the middle of a window, and share what was logged. Collective over pp.

        Before the model is evaluated, and where a training ends: what is under way would come to the next one.
        """
        if (stage := self._stage) is None or self._logs is None:
            return
        with self.block_backward_sync():
            self._micro_batches.finish()
        stage.settle()
        self._logs.share(self._trainer, self._module)

    def _let_stages_run_ahead(self) -> None:
        """Let Lightning ask at the start of a window whether to end by SIGTERM, and not at every batch.

        All ranks wait for each other there: each micro-batch would go through all stages before the next could begin.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        ask = loop._broadcast_sigterm_tensor

        def ask_at_start() -> None:  # behind the batch before
            if (loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                ask()

        loop.__dict__["_broadcast_sigterm_tensor"] = ask_at_start
