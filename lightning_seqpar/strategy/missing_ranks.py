"""Which rank did not come to which collective: what ranks that wait tell each other when their wait is over."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_seqpar.topology.process_groups import ParallelGroups

PATIENCE = 5.0
"""Seconds that a rank whose wait has ended gives the others to say what they waited for."""

_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))
_PACKAGE = Path(__file__).parent.parent


def find_missing(
    error: BaseException, world: dist.ProcessGroup, groups: ParallelGroups | None, trainer: Trainer
) -> str:
    """Which rank did not come, after an error that says that another rank is gone, and where this one waited.

    Args:
        error: what the collective raised.
        world: the process group of all ranks.
        groups: the process groups; None before there are any.
        trainer: the Trainer.
    """

    def axes_of(ranks: Sequence[int]) -> str:
        if len(ranks) == world.size() or groups is None:
            return "all ranks"
        names = sorted(groups.topology.axes)
        sets = [axes for size in range(1, len(names) + 1) for axes in combinations(names, size)]
        return next((" × ".join(axes) for axes in sets if groups.ranks(axes) == list(ranks)), "a group")

    number = trainer.fit_loop.epoch_loop.batch_idx
    batch = f", at batch {number}" if trainer.training and number >= 0 else ""
    where = describe_wait(error, axes_of) + batch
    words = LastWords(world)
    if "timeout" in str(error) or "imed out" in str(error):
        return words.exchange(where)
    # Its connection was closed at once. Others may find that out only when their timeout is over, so it waits for nobody.
    words.tell(where)
    return f"rank {world.rank()} lost another rank, which ended first, in {where}; look for its message above or in its own log"


def describe_wait(error: BaseException, axes_of: Callable[[Sequence[int]], str]) -> str:
    """Where a rank waited that lost another one: ``all_reduce of dp (ranks 0, 2)``.

    Args:
        error: what the collective raised.
        axes_of: names the axes of a group of ranks.
    """
    what, ranks = "a collective", ""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        name = frame.f_code.co_name
        if frame.f_code.co_filename.endswith(_COLLECTIVES) and not name.startswith("_") and name != "wrapper":
            what = name
            group = frame.f_locals.get("group") or dist.group.WORLD
            if isinstance(group, dist.ProcessGroup):
                members = dist.get_process_group_ranks(group)
                ranks = f" of {axes_of(members)} (ranks {list_ranks(members)})"
        elif name == "wait" and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
            what, ranks = _name_of(frame.f_locals.get("self")), ""
        trace = trace.tb_next
    return what + ranks


def _name_of(pending: Any) -> str:
    """The collective that a started one of this package is: ``PendingReduceScatter`` is a reduce scatter."""
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in type(pending).__name__.lstrip("_"))
    return words.replace("pending", "").replace("exchanged", "").strip() or "a collective"


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: ``0, 1``, or ``0, 8, ... 56`` if they are many."""
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:2], f"... {shown[-1]}"])


class LastWords:
    """What ranks say to each other, through the store of the world's group, when their wait has ended.

    The store may have gone with the rank that is missing. So it is spoken to in a thread, and given up after :data:`PATIENCE`.

    Args:
        world: the process group of all ranks.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._store = dist.distributed_c10d._world.pg_map[world][1]
        self._rank, self._size = world.rank(), world.size()
        self._heard: dict[int, str] | None = None

    def exchange(self, own: str) -> str:
        """Tell the others where this rank waited, hear where they did, and say who is missing, in a sentence.

        Args:
            own: where this rank waited.
        """
        self._in_thread(self._listen, own)
        if self._heard is None:
            return (
                f"rank {self._rank} waited in {own}, and the store through which ranks speak (rank 0's, as a rule) does not "
                "answer: rank 0 may be the one that is missing"
            )
        missing = [rank for rank in range(self._size) if rank not in self._heard]
        if missing:
            many = f"s {list_ranks(missing)} are" if len(missing) > 1 else f" {missing[0]} is"
            return f"rank{many} missing: rank {self._rank} waited in {own}"
        waits = sorted(self._heard.items())
        apart = len({where for _, where in waits}) > 1
        told = "; ".join(f"rank {rank} in {where}" for rank, where in waits[:8])
        return f"every rank waited{', in different collectives' * apart}: {told}"

    def tell(self, own: str) -> None:
        """Tell the others where this rank waited, and hear nobody."""
        self._in_thread(lambda own: self._store.set(self._keys[self._rank], own), own)

    @property
    def _keys(self) -> dict[int, str]:
        return {rank: f"rank {rank} lost another one" for rank in range(self._size)}

    @staticmethod
    def _in_thread(speak: Callable[[str], None], own: str) -> None:
        def try_to_speak() -> None:
            with contextlib.suppress(RuntimeError):  # the store has gone meanwhile
                speak(own)

        thread = threading.Thread(target=try_to_speak, name="last-words", daemon=True)
        thread.start()
        thread.join(2 * PATIENCE)

    def _listen(self, own: str) -> None:
        keys = self._keys
        self._store.set(keys[self._rank], own)
        # A rank comes a little later if it began to wait later, and one that is missing not at all.
        with contextlib.suppress(RuntimeError):
            self._store.wait(list(keys.values()), timedelta(seconds=PATIENCE))
        self._heard = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP, or a debugger); False where that can't be found out."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def end_stopped_parent() -> bool:
    """Kill the process that started this one if it is stopped, since nothing else would end it: whether it was."""
    parent = os.getppid()
    if not is_stopped(parent):
        return False
    os.kill(parent, signal.SIGKILL)
    return True
