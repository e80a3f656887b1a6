"""Lightning's batch-size finder on several ranks: all of them try the same sizes, and end or go on together."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.steps import Steps
from lightning_seqpar.topology.process_groups import ParallelGroups

PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the others behind a trial."""
_RAN = "came to the end of the trial"
_FULL = "ran out of memory"


class BatchSizeSearch:
    """One search of Lightning's batch-size finder, from the checkpoint that it saves first to the removal of that.

    Behind each trial the ranks meet in the store of the world's process group, whether the trial ran or raised: a rank that ran out
    of memory alone would try another size than the others, who wait for it in a collective of the trial. They go on if the trial
    ended alike on all of them, and each has started as many collectives as the others of its groups.

    Args:
        groups: the process groups.
        own: the path of the checkpoint, as this rank named it: the finder draws a name on each.
        place: where the checkpoint is, as the first rank named it.
        patience: how long a rank waits for the others.

    Attributes:
        size: the size of the batches of the trial, if its loader tells.
        largest: the largest size that ran; None before one did.
        has_tried: whether a loop has begun since the ranks met.
        sees_batches: whether the loaders that are made now are those that the search is about, and not those of a fit's validation.
    """

    def __init__(self, groups: ParallelGroups, own: str, place: str, patience: timedelta) -> None:
        self.own, self.place = own, place
        self.size: int | None = None
        self.largest: int | None = None
        self.has_tried = self.sees_batches = False
        self._groups, self._patience = groups, patience
        world = dist.group.WORLD
        assert world is not None
        self._store = dist.distributed_c10d._world.pg_map[world][1]
        self._rank, self._world = world.rank(), world.size()
        self._name = f"search {self._store.add(f'batch-size searches of rank {self._rank}', 1)}"
        self._meetings, self._end = 0, ""
        self._outer = sys.exc_info()[1]  # somebody may search where an exception is handled

    def meet(self) -> BaseException | None:
        """Wait for the other ranks behind a trial. Collective over the world.

        Returns:
            What the trial raised, on every rank; None if it ran.

        Raises:
            ValueError: if it ended otherwise on another rank, or that does not come. (The finder would take some sentences in a
                RuntimeError for a lack of memory.)
        """
        raised = sys.exc_info()[1]
        error = None if raised is self._outer else raised
        if self._end:
            raise ValueError(self._end) from error
        self._meetings += 1
        keys = [f"{self._name}, meeting {self._meetings}, rank {rank}" for rank in range(self._world)]
        own: dict[str, Any] = {"end": _described(error), "collectives": self._groups.sequence_numbers()}
        self._store.set(keys[self._rank], json.dumps(own))
        try:
            self._store.wait(keys, self._patience)
        except RuntimeError:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            seconds = f"{self._patience.total_seconds():.0f} s"
            self._refuse(own, f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not within {seconds}", error)
        for rank, key in enumerate(keys):
            other = json.loads(self._store.get(key))
            if other["end"] != own["end"]:
                self._refuse(own, f"rank {rank} {other['end']}", error)
            if not _fit(own["collectives"], other["collectives"]):
                self._refuse(own, f"rank {rank} did so at another point of the step", error)
        if error is None and self.has_tried and self.size is not None:
            self.largest = max(self.size, self.largest or 0)
        self.has_tried = False
        return error

    def _refuse(self, own: Mapping[str, Any], others: str, error: BaseException | None) -> None:
        """Raise ValueError: the ranks are not where they would have to be to go on."""
        ran = (
            "No size ran before; begin with a smaller one (init_val)"
            if self.largest is None
            else f"The largest that ran is {self.largest}: set the batch size to {self.largest}, and leave the finder out"
        )
        size = "a batch size" if self.size is None else f"batch size {self.size}"
        self._end = (
            f"the batch-size finder can't go on: at {size} rank {self._rank} {own['end']}, and {others}, so that ranks wait for "
            f"each other. {ran}"
        )
        raise ValueError(self._end) from error


def _described(error: BaseException | None) -> str:
    """How a trial ended on a rank."""
    if error is None:
        return _RAN
    return _FULL if is_oom_error(error) else f"raised {type(error).__name__}"


def _fit(own: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two ranks have started equally many collectives in the groups that both are in."""
    return all(own[name] == other[name] for name in own.keys() & other.keys())


class Searches:
    """Lets Lightning's batch-size finder search.

    Args:
        environment: the processes of the run.
        steps: runs steps and updates.
    """

    def __init__(self, environment: Environment, steps: Steps) -> None:
        self._env, self._steps = environment, steps
        self._search: BatchSizeSearch | None = None

    @property
    def is_trial(self) -> bool:
        """Whether a search runs: one rank may have run out of memory where others end, and :meth:`BatchSizeSearch.meet` tells."""
        return self._search is not None

    def begin(self, filepath: Any) -> Any:
        """Begin a search, if a checkpoint that is about to be written is the finder's. Collective.

        Returns:
            The path at which all ranks write it.
        """
        if self._env.has_groups and Path(filepath).name.startswith(".scale_batch_size_"):
            patience = min(PATIENCE, self._env.config.timeout / 2)
            place = self._env.broadcast(str(filepath))
            self._search = BatchSizeSearch(self._env.groups, str(filepath), place, patience)
        return self.place_of(filepath)

    def place_of(self, filepath: Any) -> Any:
        """The path of a checkpoint, of which the finder draws a name on each rank, as the first rank named it."""
        return filepath if self._search is None or not self.owns(filepath) else self._search.place

    def owns(self, filepath: Any) -> bool:
        """Whether a checkpoint is the one with which the search began."""
        return self._search is not None and str(filepath) == self._search.own

    def end(self) -> None:
        """End the search."""
        self._search = None

    def meet(self, *, training: bool) -> None:
        """Wait for the end of a trial on all ranks; loaders are made behind it.

        Args:
            training: whether they are those of a training.
        """
        if self._search is not None:
            error = self._search.meet()
            self._search.sees_batches = training or not self._env.fits
            if error is not None and is_oom_error(error):
                self._steps.forget_step()

    def note_loader(self, dataloader: object) -> None:
        """Note the size of the batches."""
        if self._search is not None and self._search.sees_batches:
            self._search.size = getattr(dataloader, "batch_size", None)

    def note_loop(self) -> None:
        """Note that a loop has begun."""
        if self._search is not None:
            self._search.has_tried = True
