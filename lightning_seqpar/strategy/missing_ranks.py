"""Which rank did not come to a collective: what ranks that wait tell each other when their wait is over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_seqpar.strategy.child_watch import CALL_ON_ALL
from lightning_seqpar.strategy.refusals import OTHER_COLLECTIVE, is_users

PATIENCE = timedelta(seconds=5)
"""How long a rank whose wait has ended gives the others to say what they waited for."""
CLOSED_PATIENCE = timedelta(seconds=1)
"""The same where its connection was closed: mostly by a rank that has died, which says nothing."""
MOST_PLACES = 4
"""How many different lines of the user's are told at which ranks waited."""
_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))


class Missing(NamedTuple):
    """What a rank has found out whose wait for others has ended."""

    sentence: str  # who is missing, and where each rank waited
    waited: Collection[int] = ()  # the ranks that said where they waited
    is_teller: bool = True  # of the ranks with logs of their own the one that tells it


class Wait(NamedTuple):
    """Where a rank waited: in which collective, and at which line of the user's (empty for none)."""

    where: str
    line: str


def exchange(world: dist.ProcessGroup, topic: str, own: object, patience: timedelta) -> dict[int, Any]:
    """What the ranks of a group say of a topic in its store, as JSON; without those that say nothing within ``patience``.

    A topic is the same on all ranks, and another one in each call. If the store is gone, it raises RuntimeError.
    """
    store = dist.distributed_c10d._world.pg_map[world][1]
    keys = [f"{topic}, rank {rank}" for rank in range(world.size())]
    store.set(keys[world.rank()], json.dumps(own))
    with contextlib.suppress(RuntimeError):
        store.wait(keys, patience)
    return {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}


def find_missing(error: BaseException, world: dist.ProcessGroup, trainer: Trainer) -> Missing:
    """Find which rank of the world did not come, after a collective raised an error that says that another rank is gone."""
    number = trainer.fit_loop.epoch_loop.batch_idx
    own = describe_wait(error, f", at batch {number}" if trainer.training and number >= 0 else "")
    rank, size = world.rank(), world.size()
    is_late = any(sign in str(error) for sign in ("timeout", "imed out", OTHER_COLLECTIVE))
    heard: dict[int, Wait] = {}

    def speak() -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone meanwhile
            # A rank comes a little later if it began to wait later, and one that is missing not at all.
            said = exchange(world, "lost another rank", own, PATIENCE if is_late else CLOSED_PATIENCE)
            heard.update({one: Wait(*wait) for one, wait in said.items()})

    # The store may have gone with the rank that is missing. So it is spoken to in a thread, and given up after a while.
    thread = threading.Thread(target=speak, name="last-words", daemon=True)
    thread.start()
    thread.join(2 * PATIENCE.total_seconds())
    if not is_late and len(heard) < size:
        # Its connection was closed by a rank that has ended, and not by one whose own wait is over.
        lost = f"rank {rank} lost another rank, which ended first, in {own.where}"
        return Missing(f"{lost}; look for its message above or in its own log")
    if not heard:
        return Missing(
            f"rank {rank} waited in {own.where}, and the store through which ranks speak (rank 0's, as a rule) does not answer: "
            "rank 0 may be the one that is missing"
        )
    return Missing(tell_waits(heard, [one for one in range(size) if one not in heard]), heard, rank == min(heard))


def describe_wait(error: BaseException, batch: str) -> Wait:
    """Describe where a rank waited that lost another one: in which collective (and ``batch``), and at which line."""
    stack = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in stack if frame.filename.endswith(_COLLECTIVES)]
    calls = [name for name in calls if not name.startswith("_") and name != "wrapper"]
    users = [frame for frame in stack if is_users(frame.filename)][-1:]
    lines = [f'File "{one.filename}", line {one.lineno}, in {one.name}: {(one.line or "")[:120]}' for one in users]
    return Wait((calls[-1] if calls else "a collective") + batch, "".join(lines))


def tell_waits(heard: Mapping[int, Wait], missing: Sequence[int]) -> str:
    """Tell which ranks are missing, where those that spoke waited, and what to do if they waited at different lines."""
    waits = sorted(heard.items())
    if missing:
        many = f"s {list_ranks(missing)} are" if len(missing) > 1 else f" {missing[0]} is"
        told = f"rank{many} missing: rank {waits[0][0]} waited in {waits[0][1].where}"
    else:
        apart = len({wait.where for _, wait in waits}) > 1
        told = f"every rank waited{', in different collectives' * apart}: " + "; ".join(
            f"rank {rank} in {wait.where}" for rank, wait in waits[:8]
        )
    alike: dict[str, list[int]] = {}
    for rank, wait in waits:
        alike.setdefault(wait.line, []).append(rank)
    for line, ranks in [*alike.items()][:MOST_PLACES]:
        many = "s" * (len(ranks) > 1)
        told += f"\n  rank{many} {list_ranks(ranks)}: {line or 'at no line of yours in a hook or step'}"
    if any(alike) and (len(alike) > 1 or missing):
        told += f"\n  {CALL_ON_ALL}, not under `if trainer.is_global_zero` or another condition that some of them do not meet"
    return told


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: ``0, 1``, or ``0, 8, ... 56`` if they are many."""
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:2], f"... {shown[-1]}"])


def end_stopped_parent() -> bool:
    """Kill the process that started this one if it is stopped (SIGSTOP), since nothing else would end it: whether it was."""
    parent = os.getppid()
    try:
        state = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    if state not in ("T", "t"):
        return False
    os.kill(parent, signal.SIGKILL)
    return True
