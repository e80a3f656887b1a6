"""A run that is asked to end, by SIGTERM or SLURM's requeue signal: all ranks agree between two steps, save, and leave."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_seqpar.strategy.missing_ranks import PATIENCE, exchange
from lightning_seqpar.strategy.refusals import is_lost_peer

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""Of an object, as Python shows it: each rank has its own."""


class Ending:
    """What asks a training to end, noted on any rank at any moment, and acted on by all of them between two optimizer steps.

    A signal comes to each rank at a place of its own, where a save would pair its collectives with those of a step elsewhere.

    Attributes:
        together: whether all ranks have agreed to end here, so that they may save.
    """

    def __init__(self) -> None:
        self._is_asked_to_end = self._is_asked_to_requeue = self._has_requeued = False
        self._asking: Trainer | None = None
        self._error: BaseException | None = None  # what ends the run, and whether ranks are at different places of it
        self._apart = False
        self.together = False

    @property
    def listens(self) -> bool:
        """Whether ranks ask each other between the steps now, so that noting a signal is enough."""
        return self._asking is not None

    def begin(self, trainer: Trainer, ask: Callable[[Sequence[bool]], list[bool]], agreed: Callable[[], None]) -> None:
        """Let the training that begins ask between its steps, in the place of Lightning's broadcast of rank 0's flag.

        ``ask`` says which of some flags are set on any rank (collective); ``agreed`` is called on every rank in front of the save.
        """
        self._is_asked_to_end = self._is_asked_to_requeue = self._has_requeued = self.together = False
        self._asking, self._agreed, self._ask = trainer, agreed, ask
        loop = trainer.fit_loop.epoch_loop

        def ask_between_steps() -> None:  # it is called in front of each batch, with the number of the one before
            if (loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                self.act()

        loop.__dict__["_broadcast_sigterm_tensor"] = ask_between_steps

    def leave(self) -> None:
        """Give the loop Lightning's method back, and forget what ended the run."""
        self._error = None  # it holds the frames of the run
        if self._asking is not None:
            self._asking.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
            self._asking = None

    def note(self) -> bool:
        """Note SIGTERM: whether that is all that is to be done now. It is not where nobody asks, or for the second time."""
        if not self.listens or self._is_asked_to_end:
            return False
        self._is_asked_to_end = True
        return True

    def note_requeue(self, signum: int, frame: Any) -> None:
        """Handle SLURM's requeue signal: note it."""
        self._is_asked_to_requeue = True

    def take_requeue_signal(self, trainer: Trainer) -> None:
        """Put :meth:`note_requeue` where Lightning's handler saves at once, at whatever place this rank is."""
        environment = trainer._accelerator_connector.cluster_environment
        if (
            isinstance(environment, SLURMEnvironment)
            and environment.auto_requeue
            and environment.requeue_signal is not None
            and type(signal.getsignal(environment.requeue_signal)).__name__ == "_HandlersCompose"
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(environment.requeue_signal, self.note_requeue)

    def is_apart(self, trainer: Trainer, world: dist.ProcessGroup) -> bool:
        """Whether an exception, in which callbacks may save, ends the run on ranks that may be at different places of it."""
        if trainer.state.status != TrainerStatus.INTERRUPTED or self.together:
            return False
        error = sys.exc_info()[1]
        if error is None:  # somebody has caught it, and saves later
            return False
        if error is not self._error:
            self._error = error
            shared = isinstance(error, Exception) and not is_lost_peer(error) and is_shared(error, world)
            self._apart = world.size() > 1 and not shared
        return self._apart

    def act(self) -> None:
        """Do what some rank was asked to do; after SIGTERM SIGTERMException on every rank. Collective, between two steps."""
        trainer = self._asking
        assert trainer is not None
        ends, requeues = self._ask([self._is_asked_to_end, self._is_asked_to_requeue])
        if requeues and not self._has_requeued:
            self._has_requeued = True  # SLURM may send it several times
            environment: Any = trainer._accelerator_connector.cluster_environment
            trainer._signal_connector._slurm_sigusr_handler_fn(environment.requeue_signal, None)  # type: ignore[arg-type]
        if ends:
            self.together = True
            self._agreed()
            if not self._has_requeued:
                save_before_end(trainer)
            rank_zero_info(f"lightning_seqpar: the training ends at step {trainer.global_step}: SIGTERM")
            raise SIGTERMException(128 + signal.SIGTERM)


def save_before_end(trainer: Trainer) -> None:
    """Save, unless this step is saved, as the last checkpoint if the first ``ModelCheckpoint`` keeps that."""
    callback = next((one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)), None)
    if callback is None or callback.dirpath is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    if callback._last_global_step_saved == trainer.global_step or callback.save_on_exception:  # which the end is
        return
    if callback.save_last:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
        return
    path = Path(callback.dirpath, f"interrupted-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")
    trainer.save_checkpoint(path)
    rank_zero_info(f"lightning_seqpar: saved {path}")


def is_shared(error: BaseException, world: dist.ProcessGroup) -> bool:
    """Whether every rank raises this error now, with the same text: they say so within :data:`PATIENCE`."""
    own = f"{type(error).__name__}: {_ADDRESS.sub('', str(error))}"
    try:
        number = dist.distributed_c10d._world.pg_map[world][1].add(f"errors of rank {world.rank()}", 1)
        said = exchange(world, f"error {number}", own, PATIENCE)
    except RuntimeError:  # the store is gone
        return False
    return len(said) == world.size() and {*said.values()} == {own}
