"""The data that a rank reads."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_seqpar.data.broadcast import BroadcastLoader
from lightning_seqpar.data.sampler import OrderSeed, inject_sampler, replica_workers
from lightning_seqpar.strategy.environment import Environment


class Loaders:
    """Divides samples among the replicas."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._user_sampler_flag: bool | None = None
        self.order_seed = OrderSeed()
        self.places: list[Any] = []  # of the training's loaders in their epoch, in the checkpoint that is restored
        self._loaders = 0  # how many loaders of the loop that is being prepared were processed
        self._loads_training = False

    def take_over_samplers(self) -> None:
        """Keep Lightning from replacing samplers by its own, which shuffles; :func:`inject_sampler` keeps the user's order."""
        connector = self._env.trainer._accelerator_connector
        if self._user_sampler_flag is None:
            self._user_sampler_flag = connector.use_distributed_sampler
        connector.use_distributed_sampler = False

    def begin(self, *, training: bool) -> None:
        """Note that Lightning is about to make the loaders of a loop."""
        self._loaders, self._loads_training = 0, training

    @property
    def _epoch_to_load(self) -> int:
        """The epoch of which loaders are made: the next one, where a run resumes from behind the last batch of one."""
        loop: Any = self._env.trainer.fit_loop
        progress = loop.epoch_progress.current
        ended = loop.restarting and loop.epoch_loop.batch_progress.is_last_batch and progress.started > progress.processed
        return int(progress.processed) + int(ended)

    def _batches_done(self) -> int:
        """How many batches of the epoch are done, if it is in its middle and has one loader; else 0."""
        loop = self._env.trainer.fit_loop
        loaders = loop._combined_loader
        done: int = loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
        if loaders is None or len(loaders.flattened) != 1 or loop.epoch_loop.batch_progress.is_last_batch:
            return 0
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
