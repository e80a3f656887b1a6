"""Which rank did not come to which collective: what ranks that wait tell each other when their wait is over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_seqpar.strategy.child_watch import OTHER_COLLECTIVE
from lightning_seqpar.strategy.tracebacks import users_call
from lightning_seqpar.topology.process_groups import ParallelGroups

PATIENCE = 5.0
"""Seconds that a rank whose wait has ended gives the others to say what they waited for."""

CLOSED_PATIENCE = 1.0
"""The same where its connection was closed: mostly by a rank that has died, which says nothing."""
MOST_CALLS = 4
"""How many different calls are told that ranks waited in."""

_ENTRIES = ("Trainer.fit", "Trainer.validate", "Trainer.test", "Trainer.predict")
_TOLD = "where ranks waited was told"
_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))
_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Missing:
    """What a rank has found out whose wait for others has ended.

    Attributes:
        sentence: who is missing, and in which call of the user's and in which collective each rank waited.
        words: what the ranks said to each other.
        waited: the ranks that said where they waited.
        is_teller: whether this rank tells it where each rank has a log of its own; the others leave it to that one.
    """

    sentence: str
    words: LastWords
    waited: Collection[int] = ()
    is_teller: bool = True


def find_missing(
    error: BaseException, world: dist.ProcessGroup, groups: ParallelGroups | None, trainer: Trainer
) -> Missing:
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
    assert error.__traceback__ is not None
    wait = Wait(where, *users_call(error.__traceback__))
    if any(sign in str(error) for sign in ("timeout", "imed out", OTHER_COLLECTIVE)):
        return words.exchange(wait)
    # Its connection was closed: by a rank that has ended, or by one whose own wait is over.
    found = words.exchange(wait, CLOSED_PATIENCE)
    if len(found.waited) == world.size():
        return found
    sentence = f"rank {world.rank()} lost another rank, which ended first, in {where}; look for its message above or in its own log"
    return Missing(sentence, words)


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


class Wait(NamedTuple):
    """Where a rank waited: in which collective, and in which call of the user's (:class:`UsersCall`)."""

    where: str
    call: str
    caller: str
    lines: list[str]


def tell_waits(heard: dict[int, Wait], missing: Sequence[int]) -> str:
    """Where ranks waited, the calls that they were in, and what to do if some made a call that others did not.

    Args:
        heard: the waits of the ranks that spoke.
        missing: the ranks that did not.
    """
    waits = sorted(heard.items())
    if missing:
        many = f"s {list_ranks(missing)} are" if len(missing) > 1 else f" {missing[0]} is"
        told = f"rank{many} missing: rank {waits[0][0]} waited in {waits[0][1].where}"
    else:
        apart = len({wait.where for _, wait in waits}) > 1
        told = f"every rank waited{', in different collectives' * apart}: " + "; ".join(
            f"rank {rank} in {wait.where}" for rank, wait in waits[:8]
        )
    alike: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, wait in waits:
        alike.setdefault((wait.call, tuple(wait.lines)), []).append(rank)
    for (call, lines), ranks in [*alike.items()][:MOST_CALLS]:
        who = f"  rank{'s' * (len(ranks) > 1)} {list_ranks(ranks)}: in {call or 'no call of yours'}"
        told = "\n    ".join((f"{told}\n{who}", *lines))
    if len(alike) > MOST_CALLS:
        told += f"\n  and {len(alike) - MOST_CALLS} more"
    if len(alike) > 1 or missing:
        special = [wait for _, wait in waits if wait.call and not wait.call.endswith(_ENTRIES)]
        outside = [wait for wait in special if not wait.caller.endswith("_step")] or special
        calls = list(dict.fromkeys(wait.call for wait in outside))
        if calls:
            told += (
                f"\n  {' and '.join(calls[:3])} need{'s' * (len(calls) == 1)} every rank: call it on all ranks, not "
                "under `if trainer.is_global_zero` or another condition that some of them do not meet"
            )
    return told


class LastWords:
    """What ranks say to each other, through the store of the world's group, when their wait has ended.

    The store may have gone with the rank that is missing. So it is spoken to in a thread, and given up after :data:`PATIENCE`.

    Args:
        world: the process group of all ranks.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._store = dist.distributed_c10d._world.pg_map[world][1]
        self._rank, self._size = world.rank(), world.size()
        self._heard: dict[int, Wait] | None = None

    def exchange(self, own: Wait, patience: float = PATIENCE) -> Missing:
        """Tell the others where this rank waited, hear where they did, and say who is missing, in a sentence.

        Args:
            own: where this rank waited.
            patience: seconds that the others have to say it.
        """
        self._in_thread(lambda: self._listen(own, patience))
        if self._heard is None:
            return Missing(
                f"rank {self._rank} waited in {own.where}, and the store through which ranks speak (rank 0's, as a rule) does not "
                "answer: rank 0 may be the one that is missing",
                self,
            )
        missing = [rank for rank in range(self._size) if rank not in self._heard]
        sentence = tell_waits(self._heard, missing)
        return Missing(sentence, self, self._heard, self._rank == min(self._heard))

    def note_told(self) -> None:
        """Let the other ranks know that this one has told for all of them where they waited."""
        self._in_thread(lambda: self._store.set(_TOLD, ""))

    def await_told(self) -> None:
        """Wait until another rank has told where all of them waited: torchrun would end it with the first rank that goes."""
        self._in_thread(lambda: self._store.wait([_TOLD], timedelta(seconds=PATIENCE)))

    @property
    def _keys(self) -> dict[int, str]:
        return {rank: f"rank {rank} lost another one" for rank in range(self._size)}

    @staticmethod
    def _in_thread(speak: Callable[[], None]) -> None:
        def try_to_speak() -> None:
            with contextlib.suppress(RuntimeError):  # the store has gone meanwhile
                speak()

        thread = threading.Thread(target=try_to_speak, name="last-words", daemon=True)
        thread.start()
        thread.join(2 * PATIENCE)

    def _listen(self, own: Wait, patience: float) -> None:
        keys = self._keys
        self._store.set(keys[self._rank], json.dumps(own))
        # A rank comes a little later if it began to wait later, and one that is missing not at all.
        with contextlib.suppress(RuntimeError):
            self._store.wait(list(keys.values()), timedelta(seconds=patience))
        self._heard = {
            rank: Wait(*json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }


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
