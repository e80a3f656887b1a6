"""Lightning's finders on several ranks: of the batch size all try the same ones; of the learning rate all read one loss."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor

from lightning_seqpar.strategy.ending import exchange
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.steps import Steps

PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the others behind a trial."""


class Searches:
    """Lets Lightning's batch-size finder search, from the checkpoint that it saves first to the removal of that.

    Behind each trial the ranks meet in the store of the world's process group, whether the trial ran or raised: a rank that ran out
    of memory alone would try another size than the others, who wait for it in a collective of the trial. They go on if the trial
    ended alike on all of them, and each has started as many collectives as the others of its groups.
    """

    def __init__(self, environment: Environment, steps: Steps) -> None:
        self._env, self._steps = environment, steps
        # The checkpoint's path: as this rank named it, and as the first did; empty for no search.
        self._own = self._place = ""
        self.has_tried = False  # whether a loop has begun since the ranks met

    @property
    def is_trial(self) -> bool:
        """Whether a search runs: one rank may have run out of memory where others end, and :meth:`meet` tells."""
        return self._own != ""

    def begin(self, filepath: Any) -> Any:
        """Begin a search, if a checkpoint is the finder's; returns the path at which all ranks write it. Collective."""
        if self._env.has_groups and Path(filepath).name.startswith(".scale_batch_size_"):
            self._own, self._place = str(filepath), self._env.strategy.broadcast(str(filepath))
            self._size: int | None = None  # of the batches of the trial, if its loader tells
            self._largest: int | None = None  # that ran
            self.has_tried = self._sees_batches = False  # loaders are those of the search
            self._trials, self._end = 0, ""
            self._outer = sys.exc_info()[1]  # somebody may search where an exception is handled
        return self.place_of(filepath)

    def place_of(self, filepath: Any) -> Any:
        """The path of a checkpoint, of which the finder draws a name on each rank, as the first rank named it."""
        return self._place if self.owns(filepath) else filepath

    def owns(self, filepath: Any) -> bool:
        """Whether a checkpoint is the one with which the search began."""
        return self.is_trial and str(filepath) == self._own

    def end(self) -> None:
        """End the search."""
        self._own = ""

    def note_loader(self, dataloader: object) -> None:
        """Note the size of the batches."""
        if self.is_trial and self._sees_batches:
            self._size = getattr(dataloader, "batch_size", None)

    def meet(self, *, training: bool) -> None:
        """Wait for the end of a trial on all ranks; ValueError if it ended otherwise on another, or that does not come."""
        if not self.is_trial:
            return
        raised = sys.exc_info()[1]
        error = None if raised is self._outer else raised
        if self._end:
            raise ValueError(self._end) from error
        self._trials += 1
        world, patience = self._env.world, min(PATIENCE, self._env.config.timeout / 2)
        ended, collectives = _described(error), self._env.groups.sequence_numbers()
        said = exchange(world, f"{self._place}, trial {self._trials}", [ended, collectives], patience)
        if missing := [str(rank) for rank in range(world.size()) if rank not in said]:
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
            self._refuse(ended, f"{names} did not within {patience.total_seconds():.0f} s", error)
        for rank, (end, others) in said.items():
            if end != ended:
                self._refuse(ended, f"rank {rank} {end}", error)
            if any(others[name] != collectives[name] for name in others.keys() & collectives.keys()):
                self._refuse(ended, f"rank {rank} did so at another point of the step", error)
        if error is None and self.has_tried and self._size is not None:
            self._largest = max(self._size, self._largest or 0)
        self.has_tried, self._sees_batches = False, training or not self._env.fits
        if error is not None and is_oom_error(error):
            self._steps.forget_step()

    def _refuse(self, ended: str, others: str, error: BaseException | None) -> NoReturn:
        """Raise ValueError: the ranks are not where they would have to be to go on."""
        ran = (
            "No size ran before; begin with a smaller one (init_val)"
            if self._largest is None
            else f"The largest that ran is {self._largest}: set the batch size to {self._largest}, and leave the finder out"
        )
        size = "a batch size" if self._size is None else f"batch size {self._size}"
        self._end = (
            f"the batch-size finder can't go on: at {size} rank {self._env.world.rank()} {ended}, and {others}, so that ranks wait "
            f"for each other. {ran}"
        )
        raise ValueError(self._end) from error


def _described(error: BaseException | None) -> str:
    if error is None:
        return "came to the end of the trial"
    return "ran out of memory" if is_oom_error(error) else f"raised {type(error).__name__}"


def share_losses_of_finders(callbacks: Sequence[Any]) -> None:
    """Let Lightning's learning-rate finder, a callback made for one search, read the loss of all replicas: by its own each rank
    would end the search at another step.
    """
    for finder in callbacks:
        if isinstance(finder, _LRCallback) and "on_train_batch_end" not in vars(finder):
            vars(finder)["on_train_batch_end"] = functools.partial(_read_mean, finder.on_train_batch_end)


def _read_mean(read: Callable[..., None], trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
    if isinstance(outputs, Mapping) and isinstance(loss := outputs.get("loss"), Tensor):
        outputs = {**outputs, "loss": trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")}
    read(trainer, pl_module, outputs, *batch)
