"""Lightning's loops: the data that a rank reads in them, and what ranks agree on at their start and their end.

Of the learning-rate finder all ranks read one loss.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_seqpar.data.sampler import BroadcastLoader, OrderSeed, inject_sampler, replica_workers
from lightning_seqpar.distributed.host import any_rank_has
from lightning_seqpar.distributed.rendezvous import check_agreement, describe_optimizer
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.releases import LRCallback, pl
from lightning_seqpar.strategy.callbacks import share_metrics
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.steps import Steps, plain_optimizer
from lightning_seqpar.verify.guards.before_training import describe_bubble
from lightning_seqpar.verify.guards.while_training import OutputWatch


def share_losses_of_finders(callbacks: Sequence[Any]) -> None:
    """Let the learning-rate finder read the loss of all replicas: by its own each rank would end the search at another step."""
    for finder in callbacks:
        if isinstance(finder, LRCallback) and "on_train_batch_end" not in vars(finder):
            vars(finder)["on_train_batch_end"] = functools.partial(_read_mean, finder.on_train_batch_end)


def _read_mean(read: Callable[..., None], trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
    if isinstance(outputs, Mapping) and isinstance(loss := outputs.get("loss"), Tensor):
        outputs = {**outputs, "loss": trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")}
    read(trainer, pl_module, outputs, *batch)


class Loaders:
    """Divides samples among the replicas."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._user_sampler_flag: bool | None = None
        self.order_seed = OrderSeed()
        self.places: list[Any] = []  # of the training's loaders in their epoch, in the checkpoint that is restored
        self.begin(training=False)

    def take_over_samplers(self) -> None:
        """Keep Lightning from replacing samplers by its own, which shuffles; :func:`inject_sampler` keeps the user's order."""
        connector = self._env.trainer._accelerator_connector
        if self._user_sampler_flag is None:
            self._user_sampler_flag = connector.use_distributed_sampler
        connector.use_distributed_sampler = False

    def begin(self, *, training: bool) -> None:
        """Note that Lightning is about to make the loaders of a loop."""
        self._loaders, self._loads_training = 0, training  # how many of the loop were processed

    @property
    def _epoch_to_load(self) -> int:
        """The epoch of which loaders are made: the next one, where a run resumes from behind the last batch of one."""
        loop: Any = self._env.trainer.fit_loop
        progress = loop.epoch_progress.current
        ended = loop.restarting and loop.epoch_loop.batch_progress.is_last_batch and progress.started > progress.processed
        return int(progress.processed + ended)

    def _batches_done(self) -> int:
        """How many batches of the epoch are done, if it is in its middle and has one loader; else 0."""
        loop: Any = self._env.trainer.fit_loop
        loaders, progress = loop._combined_loader, loop.epoch_loop.batch_progress
        if loaders is None or len(loaders.flattened) != 1 or progress.is_last_batch:
            return 0
        done = int(progress.current.processed)
        return done if done < self._env.trainer.num_training_batches else 0

    def divide(self, dataloader: object) -> object:
        """Divide the samples among the replicas, in the user's order; with ``broadcast_batch`` one rank of each reads."""
        if isinstance(dataloader, BroadcastLoader):
            dataloader = dataloader.loader  # Lightning processes a loader that it keeps once more
        if isinstance(dataloader, DataLoader):
            if self._user_sampler_flag:
                dataloader = inject_sampler(
                    dataloader,
                    self._env.groups,
                    self.order_seed,
                    predicting=self._env.trainer.predicting,
                    place=self._loaders,
                    epoch=self._epoch_to_load,
                    batches_done=self._batches_done if self._loads_training else None,
                )
                self._loaders += 1
            replica_workers(dataloader, self._env.groups.rank("dp"))
        axes = self._env.groups.replica_axes
        if self._env.config.broadcast_batch and self._env.groups.size(axes) > 1:
            group = self._env.groups.gloo(axes) if self._env.config.gloo_twins else self._env.groups[axes]
            dataloader = BroadcastLoader(dataloader, group, self._env.groups.source(axes))
        if self._loads_training and self.places and hasattr(dataloader, "load_state_dict"):
            dataloader.load_state_dict(self.places.pop(0))
        return dataloader


class Loops:
    """Begins and ends Lightning's loops."""

    def __init__(self, environment: Environment, steps: Steps) -> None:
        self._env, self._steps = environment, steps
        self._muted_writers: list[tuple[int, Any]] = []
        self._validated_at = 0.0  # by time.monotonic()
        self._interval: float | None = None  # between validations, in seconds

    def _begin(self) -> None:
        share_metrics(self._env)
        if (launcher := self._env.launcher) is not None:  # Lightning has registered its handlers by now
            launcher.take_signals(self._env.trainer._signal_connector._original_handlers, self._env.ending)

    def begin_training(self) -> None:
        """Compare the settings of the training over the ranks, and log the global batch. Collective."""
        env, trainer = self._env, self._env.trainer
        self._interval = getattr(trainer, "_val_check_time_interval", None)
        self._begin()
        if env.world.size() > 1 and env.launcher is not None:
            env.ending.take_requeue_signal(trainer)
            ask = functools.partial(any_rank_has, group=env.world, device=env.device)
            watch = env.launcher.watch
            env.ending.begin(trainer, ask, (lambda: None) if watch is None else watch.expect_end)
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
        trainer: Any = self._env.trainer
        names = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "check_val_every_n_epoch")
        return {
            **{name: getattr(trainer, name) for name in names},
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm),
            "precision": str(trainer.precision),
            # A time interval ("00:01:00:00") is kept elsewhere, and the Trainer then has no attribute of the first name.
            "val_check_interval": getattr(trainer, "val_check_interval", None),
            "val_check_interval in seconds": getattr(trainer, "_val_check_time_interval", None),
            **{
                f"optimizer {number}": describe_optimizer(plain_optimizer(optimizer))
                for number, optimizer in enumerate(self._env.strategy.optimizers)
            },
            "the schedulers": [type(config.scheduler).__name__ for config in self._env.strategy.lr_scheduler_configs],
        }

    def begin_batch(self, batch_idx: int) -> None:
        """Compare the number of batches at an epoch's start; by a time interval agree whether a validation is due. Collective."""
        if self._interval is not None and (self._steps.stages.stage is None or self._env.begins_window):
            self._agree_on_time(self._interval)
        if batch_idx == 0:
            self._steps.schedule.begin_loop("training")
            batches = {"training batches in an epoch": self._env.trainer.num_training_batches}
            check_agreement(batches, self._env.world, self._env.device)

    def _agree_on_time(self, interval: float) -> None:
        """Let all ranks validate behind this batch if the interval is over by one rank's clock.

        Lightning compares ``_last_val_time`` with each rank's own clock; an infinite time in its place decides that comparison.
        """
        trainer: Any = self._env.trainer
        if math.isfinite(trainer._last_val_time):  # Lightning's, from the start or the end of a validation
            self._validated_at = trainer._last_val_time
        due = self._env.strategy.reduce_boolean_decision(time.monotonic() - self._validated_at >= interval, all=False)
        trainer._last_val_time = -math.inf if due else math.inf

    def end_training(self) -> None:
        """Read what was compared in the last step, and end if a signal came behind the last question. Collective."""
        self._steps.stages.finish_micro_batches()
        self._steps.settle()
        if self._env.ending.listens:
            self._env.ending.act()

    def begin_evaluation(self, loop: str) -> None:
        """Begin a loop without training: the ranks of a replica compare their numbers of batches. Collective."""
        trainer = self._env.trainer
        kind = "sanity_val" if trainer.sanity_checking else "val" if loop == "validation" else loop
        counts: Sequence[int | float] = getattr(trainer, f"num_{kind}_batches")
        self._begin()
        self._steps.schedule.begin_loop(loop)
        self._steps.outputs = OutputWatch()  # an earlier loop may have ended in the middle
        groups = self._env.groups
        if (stage := self._steps.stages.stage) is not None:
            stage.begin_evaluation(groups["fsdp_shard"])
        check_agreement({f"{loop} batches": list(counts)}, groups[groups.replica_axes], self._env.device)
        callbacks = self._env.callbacks
        if loop == "predict" and groups.rank(groups.replica_axes) > 0:
            self._muted_writers = [(i, c) for i, c in enumerate(callbacks) if isinstance(c, pl.callbacks.BasePredictionWriter)]
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
