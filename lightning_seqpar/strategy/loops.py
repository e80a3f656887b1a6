"""The start and the end of Lightning's loops: settings on which ranks must agree, and the ranks whose prediction writers write."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import BasePredictionWriter
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_seqpar.distributed.host import any_rank_has
from lightning_seqpar.distributed.rank_consistency import check_agreement, describe_optimizer
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.metrics import share_losses_of_finders, share_metrics
from lightning_seqpar.strategy.steps import Steps, plain_optimizer
from lightning_seqpar.strategy.tuning import Searches
from lightning_seqpar.verify.guards.before_training import describe_bubble
from lightning_seqpar.verify.guards.while_training import OutputWatch


class Loops:
    """Begins and ends Lightning's loops."""

    def __init__(self, environment: Environment, steps: Steps, searches: Searches) -> None:
        self._env, self._steps, self._searches = environment, steps, searches
        self._muted_writers: list[tuple[int, Any]] = []
        self._validated_at = 0.0  # by time.monotonic()
        self._interval: float | None = None  # between validations, in seconds

    def _listen(self) -> None:
        """Share metrics, and replace Lightning's signal handlers, which it has registered by now."""
        self._searches.note_loop()
        share_metrics(self._env)
        if (launcher := self._env.launcher) is not None:
            launcher.take_signals(self._env.trainer._signal_connector._original_handlers, self._env.ending)

    def begin_training(self) -> None:
        """Compare the settings of the training over the ranks, and log the global batch. Collective."""
        env, trainer = self._env, self._env.trainer
        self._interval = trainer._val_check_time_interval  # type: ignore[attr-defined]
        self._listen()
        if env.world.size() > 1 and env.launcher is not None:
            env.ending.take_requeue_signal(trainer)
            ask = functools.partial(any_rank_has, group=env.world, device=env.device)
            env.ending.begin(trainer, ask, env.launcher.expect_end)
        self._steps.stages.enter_loops()
        dp = env.groups.size("dp")
        if dp > 1:
            share_losses_of_finders(env.callbacks)
        check_agreement(self._describe_training(), env.world, env.device)
        if (record := record_of(env.module)) is not None:
            record.check_versions()
        pp, accumulate = env.config.pp, trainer.accumulate_grad_batches
        if pp > 1:
            tell = rank_zero_warn if accumulate < pp else rank_zero_info
            tell(f"lightning_seqpar: {describe_bubble(accumulate, pp, env.config.virtual_pp or 1)}")
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if isinstance(size, int):
            rank_zero_info(
                f"lightning_seqpar: global batch {size * dp * accumulate} = {size} × dp {dp} × accumulate {accumulate}"
            )

    def _describe_training(self) -> dict[str, Any]:
        """The settings that must be the same on all ranks of the world, so that they take the same steps."""
        trainer = self._env.trainer
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
                for number, optimizer in enumerate(self._env.strategy.optimizers)
            },
            "the schedulers": [type(config.scheduler).__name__ for config in self._env.strategy.lr_scheduler_configs],
        }

    def begin_batch(self, batch_idx: int) -> None:
        """Compare the number of batches at an epoch's start; by a time interval agree whether a validation is due. Collective."""
        if self._interval is not None and (
            self._steps.stages.stage is None or batch_idx % self._env.trainer.accumulate_grad_batches == 0
        ):
            self._agree_on_time(self._interval)
        if batch_idx == 0:
            self._steps.schedule.begin_loop("training")
            check_agreement(
                {"training batches in an epoch": self._env.trainer.num_training_batches},
                self._env.world,
                self._env.device,
            )

    def _agree_on_time(self, interval: float) -> None:
        """Let all ranks validate behind this batch if the interval is over by one rank's clock.

        Lightning compares ``_last_val_time`` with each rank's own clock; an infinite time in its place decides that comparison.
        """
        trainer: Any = self._env.trainer
        if math.isfinite(trainer._last_val_time):  # Lightning's, from the start or the end of a validation
            self._validated_at = trainer._last_val_time
        due = self._env.reduce_boolean_decision(time.monotonic() - self._validated_at >= interval, all=False)
        trainer._last_val_time = -math.inf if due else math.inf

    def end_training(self) -> None:
        """Read what was compared in the last step, and end if a signal came behind the last question. Collective."""
        self._steps.stages.finish_micro_batches()
        self._steps.settle()
        if self._env.ending.listens and not self._searches.is_trial:  # behind a trial the ranks meet otherwise
            self._env.ending.act()

    def begin_evaluation(self, loop: str) -> None:
        """Begin a loop without training: the ranks of a replica compare their numbers of batches. Collective.

        In predictions only the first rank of each replica has prediction writers.
        """
        trainer = self._env.trainer
        kind = "sanity_val" if trainer.sanity_checking else "val" if loop == "validation" else loop
        counts: Sequence[int | float] = getattr(trainer, f"num_{kind}_batches")
        self._listen()
        self._steps.schedule.begin_loop(loop)
        self._steps.outputs = OutputWatch()  # an earlier loop may have ended in the middle
        groups = self._env.groups
        if (stage := self._steps.stages.stage) is not None:
            stage.begin_evaluation(groups[groups.mean_axes])
        check_agreement({f"{loop} batches": list(counts)}, groups[groups.replica_axes], self._env.device)
        callbacks = self._env.callbacks
        if loop == "predict" and groups.rank(groups.replica_axes) > 0:
            self._muted_writers = [(i, c) for i, c in enumerate(callbacks) if isinstance(c, BasePredictionWriter)]
            for _, writer in self._muted_writers:
                callbacks.remove(writer)

    def end_evaluation(self, loop: str) -> None:
        """Compare what the last steps returned over the ranks of a replica. Collective."""
        self.unmute_writers()
        self._steps.outputs.check(self._env.groups, loop)
        if (stage := self._steps.stages.stage) is not None:
            stage.end_evaluation()

    def unmute_writers(self) -> None:
        """Put prediction writers back among the callbacks, where they were."""
        for index, writer in self._muted_writers:
            self._env.callbacks.insert(index, writer)
        self._muted_writers = []
