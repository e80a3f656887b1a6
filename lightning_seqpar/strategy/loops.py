"""What the strategy does at the start and the end of Lightning's loops: what ranks must agree on, and whose writers write."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

from lightning.pytorch.callbacks import BasePredictionWriter
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.host import any_rank_has
from lightning_seqpar.distributed.rank_consistency import check_agreement, describe_optimizer
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.strategy.ending import Ending
from lightning_seqpar.strategy.launcher import SeqParallelLauncher
from lightning_seqpar.strategy.metrics import share_losses_of_finders
from lightning_seqpar.strategy.steps import SteppingStrategy, plain_optimizer
from lightning_seqpar.verify.guards.batch import OutputWatch
from lightning_seqpar.verify.guards.pipeline import describe_bubble


class LoopStrategy(SteppingStrategy):
    """The part of the strategy that begins and ends loops.

    Args:
        config: the configuration.
        plugins: the other arguments of :class:`SteppingStrategy`.
    """

    def __init__(self, config: ParallelConfig, **plugins: Any) -> None:
        super().__init__(config, **plugins)
        self._muted_writers: list[tuple[int, Any]] = []
        self._ending = Ending()
        self._validated_at = 0.0  # by time.monotonic()

    def _on_loop_start(self) -> None:
        """Share metrics, and replace Lightning's signal handlers, which it has registered by now."""
        self._share_metrics()
        if isinstance(self.launcher, SeqParallelLauncher):
            user_handler = self.launcher.user_handler(self._trainer._signal_connector._original_handlers)
            self.launcher.take_signals(user_handler, self._ending)

    def on_train_start(self) -> None:
        """Compare the settings of the training over the ranks, and log the global batch. Collective."""
        self._on_loop_start()
        if self._world.size() > 1 and isinstance(self.launcher, SeqParallelLauncher):
            self._ending.take_requeue_signal(self._trainer)
            ask = functools.partial(any_rank_has, group=self._world, device=self.root_device)
            self._ending.begin(self._trainer, ask, self.launcher.expect_end)
        if self._stage is not None:
            self._let_stages_run_ahead()
            self._finish_in_front_of_hooks()
            self._tell_loss_of_window()
        if self.dp_size > 1:
            share_losses_of_finders(self._trainer.callbacks)  # type: ignore[attr-defined]
        check_agreement(self._describe_training(), self._world, self.root_device)
        if (record := record_of(self._module)) is not None:
            record.check_versions()
        if self.config.pp > 1:
            accumulate = self._trainer.accumulate_grad_batches
            tell = rank_zero_warn if accumulate < self.config.pp else rank_zero_info
            tell(f"lightning_seqpar: {describe_bubble(accumulate, self.config.pp, self.config.virtual_pp or 1)}")
        loader = self._trainer.train_dataloader
        size = getattr(loader, "batch_size", None)
        if isinstance(size, int):
            accumulate = self._trainer.accumulate_grad_batches
            rank_zero_info(
                f"lightning_seqpar: global batch {size * self.dp_size * accumulate} = {size} × dp {self.dp_size} × "
                f"accumulate {accumulate}"
            )

    def _describe_training(self) -> dict[str, Any]:
        """The settings that must be the same on all ranks of the world, so that they take the same steps."""
        trainer = self._trainer
        return {
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm),
            "precision": str(trainer.precision),
            # A time interval ("00:01:00:00") is kept elsewhere, and the Trainer then has no attribute of the first name.
            "val_check_interval": getattr(trainer, "val_check_interval", None),
            "val_check_interval in seconds": trainer._val_check_time_interval,  # type: ignore[attr-defined]
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
            **{
                f"optimizer {number}": describe_optimizer(plain_optimizer(optimizer))
                for number, optimizer in enumerate(self.optimizers)
            },
            "the schedulers": [type(config.scheduler).__name__ for config in self.lr_scheduler_configs],
        }

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Compare the number of batches over the ranks at the start of an epoch: loaders may have been made anew.

        With a time interval between validations the ranks agree at each batch whether one is due. Collective.
        """
        if self._stage is None or batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._agree_on_time()
        if batch_idx == 0:
            self._schedule.begin_loop("training")
            check_agreement(
                {"training batches in an epoch": self._trainer.num_training_batches}, self._world, self.root_device
            )

    def _agree_on_time(self) -> None:
        """Let all ranks validate behind this batch if the interval is over on one: each reads a clock of its own.

        Lightning compares ``_last_val_time`` with the clock once the batch is done, on every rank for itself, and ranks that
        decide differently would wait for each other. An infinite time in its place makes that comparison certain.
        """
        trainer: Any = self._trainer
        interval = trainer._val_check_time_interval
        if interval is None:
            return
        if math.isfinite(trainer._last_val_time):  # Lightning's, from the start or the end of a validation
            self._validated_at = trainer._last_val_time
        due = self.reduce_boolean_decision(time.monotonic() - self._validated_at >= interval, all=False)
        trainer._last_val_time = -math.inf if due else math.inf

    def _agree_on_batches(self, loop: str, counts: list[int | float]) -> None:
        """The ranks of a replica would wait for each other in different loops if one had fewer batches."""
        self._schedule.begin_loop(loop)
        self._outputs = OutputWatch()  # an earlier loop may have ended in the middle
        if (stage := self._stage) is not None:
            stage.begin_evaluation(self.groups[self.groups.mean_axes])
        group = self.groups[self.groups.replica_axes]
        check_agreement({f"{loop} batches": counts}, group, self.root_device)

    def _end_evaluation(self, loop: str) -> None:
        """Compare what the last steps returned over the ranks of a replica. Collective."""
        self._outputs.check(self.groups, loop)
        if (stage := self._stage) is not None:
            stage.end_evaluation()

    def on_train_end(self) -> None:
        """Read what was compared in the last step, and end if a signal came behind the last question. Collective."""
        self._finish_micro_batches()
        self.settle()
        if self._ending.listens and not self._is_tried:
            self._ending.act()

    @property
    def _is_tried(self) -> bool:
        """Whether this is a trial of a search, behind whose end the ranks meet otherwise."""
        return False

    def on_validation_start(self) -> None:
        """Compare the number of batches over the ranks of a replica. Collective."""
        checking = self._trainer.sanity_checking
        self._on_loop_start()
        counts = self._trainer.num_sanity_val_batches if checking else self._trainer.num_val_batches
        self._agree_on_batches("validation", list(counts))

    def on_validation_end(self) -> None:
        """Compare what the last steps returned over the ranks of a replica. Collective."""
        self._end_evaluation("validation")

    def on_test_start(self) -> None:
        """Compare the number of batches over the ranks of a replica. Collective."""
        self._on_loop_start()
        self._agree_on_batches("test", list(self._trainer.num_test_batches))

    def on_test_end(self) -> None:
        """Compare what the last steps returned over the ranks of a replica. Collective."""
        self._end_evaluation("test")

    def on_predict_start(self) -> None:
        """Compare the number of batches; leave prediction writers on the first rank of each replica alone. Collective."""
        self._on_loop_start()
        self._agree_on_batches("predict", list(self._trainer.num_predict_batches))
        if self.groups.rank(self.groups.replica_axes) > 0:
            callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
            self._muted_writers = [(i, c) for i, c in enumerate(callbacks) if isinstance(c, BasePredictionWriter)]
            for _, writer in self._muted_writers:
                callbacks.remove(writer)

    def on_predict_end(self) -> None:
        """Put prediction writers back, and compare what the last steps returned. Collective."""
        self._unmute_writers()
        self._end_evaluation("predict")

    def _unmute_writers(self) -> None:
        """Put prediction writers back among the callbacks, where they were."""
        for index, writer in self._muted_writers:
            self._trainer.callbacks.insert(index, writer)  # type: ignore[attr-defined]
        self._muted_writers = []
