"""Run a function on several gloo ranks of this machine, as a test would call it."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch._C._distributed_c10d import FileStore

from lightning_seqpar.distributed.rendezvous import loopback_only

_WAITED = "waited for the failed rank"


class RankFailure(NamedTuple):
    """How one process ended.

    Attributes:
        text: the type and message of what it raised, or what became of it.
        trace: the traceback; empty if there is none.
        refused: whether it raised a ``ValueError``: it was given something that can't be done.
    """

    text: str
    trace: str = ""
    refused: bool = False

    @property
    def lost_another(self) -> bool:
        """Whether it only waited for a rank that failed, or lost its connection to one."""
        return "gloo" in self.text or self.text == _WAITED

    @property
    def message(self) -> str:
        """The message alone, without the type."""
        return self.text.partition(": ")[2] if self.trace else self.text


class RankFailedError(AssertionError):
    """A rank of :func:`run_distributed` raised or died; the message holds every rank's own.

    Attributes:
        failures: how each rank that failed ended, by rank.
    """

    def __init__(self, failures: Mapping[int, RankFailure], world_size: int) -> None:
        self.failures = dict(sorted(failures.items()))
        report = "\n".join(f"--- rank {rank}: {one.text}\n{one.trace}" for rank, one in self.failures.items())
        super().__init__(f"{len(failures)} of {world_size} ranks failed\n{report}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failures, len(self.failures))


def _tell(sender: Connection, good: bool, value: Any) -> None:
    # By value: multiprocessing would share a tensor's memory with a process that is about to end.
    sender.send_bytes(pickle.dumps((good, value)))


@dataclass(frozen=True)
class _Call:
    """A call that processes make at once; each is handed this object."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float
    env: dict[str, str]
    world_size: int = 1
    store: str | None = None  # the file at which they meet as ranks; None where they are ranks of nothing

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)


def _end_with_parent() -> None:
    """End this process and what it has started when its parent is gone, which a signal may have ended."""
    parent = mp.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def _rank_main(sender: Connection, rank: int, call: _Call) -> None:
    """What a process of a call does: join the others if they are ranks, make the call, and tell the parent what came of it."""
    os.setsid()  # so that what this rank starts (data workers) ends with it
    _end_with_parent()
    os.environ.update(call.env)
    torch.set_num_threads(1)
    try:
        if call.store is None:
            _tell(sender, True, call())
            return
        world_size, timeout = call.world_size, timedelta(seconds=call.timeout)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), NODE_RANK="0")
        meeting = FileStore(call.store, world_size)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=timeout)
        # A rank that fails at once would end while others still connect to it, and they would tell of that alone.
        meeting.set(f"connected/{rank}", "")
        meeting.wait([f"connected/{each}" for each in range(world_size)], timeout)
        result = call()
        dist.barrier()
        _tell(sender, True, result)
        dist.destroy_process_group()
    except BaseException as error:  # told to the parent, which raises
        text = f"{type(error).__name__}: {error}"
        _tell(sender, False, RankFailure(text, traceback.format_exc(), isinstance(error, ValueError)))
    finally:
        sender.close()


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` gloo ranks and return what each returned, in rank order.

    The processes meet through a file (no ports to lose a race for), use one thread each, and see the environment
    of an external launcher, so that a ``Trainer(devices=world_size)`` in ``fn`` starts no others.

    Args:
        fn: a function at the top of a module; it and its arguments are pickled.
        world_size: number of ranks.
        timeout: seconds for the whole call and for each collective.

    Raises:
        RankFailedError: if any rank raised, died or ran past the timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "OMP_NUM_THREADS": "1"}
        env |= loopback_only()
        return _run(_Call(fn, args, kwargs, timeout, env, world_size, str(Path(folder, "store"))))


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> Any:
    """Call ``fn`` as :func:`run_distributed` does, in one process that is no rank of anything, and return what it returned."""
    return _run(_Call(fn, args, kwargs, timeout, {"OMP_NUM_THREADS": "1"}))[0]


def _run(call: _Call) -> list[Any]:
    """Let as many processes as a call asks for make it, and return their results, in rank order."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_seqpar.strategy"])
    procs, receivers = [], []
    for rank in range(call.world_size):
        receiver, sender = context.Pipe(duplex=False)
        proc = context.Process(target=_rank_main, args=(sender, rank, call))
        proc.start()
        sender.close()
        procs.append(proc)
        receivers.append(receiver)
    patience = 0.0  # if this process is interrupted
    try:
        results = _collect(receivers, procs, call.timeout)
        patience = 5.0
        return results
    except RankFailedError:
        patience = 5.0
        raise
    finally:
        for proc in procs:
            proc.join(timeout=patience)
            if proc.is_alive():
                proc.kill()
                with contextlib.suppress(ProcessLookupError):  # it had not got a session of its own yet
                    os.killpg(typing.cast("int", proc.pid), signal.SIGKILL)
                proc.join()


def _how_it_died(status: int | None) -> str:
    """What the exit status of a process says that ended without a word."""
    if status is None or status >= 0:
        return f"the process ended with {status}; what it said stands above"
    return f"the process died: {signal.Signals(-status).name}"


def _collect(receivers: list[Connection], procs: Sequence[BaseProcess], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, RankFailure] = {}
    open_ends = {receiver: rank for rank, receiver in enumerate(receivers)}
    while open_ends:
        # Once a rank has failed the others only wait for it.
        ready = wait(list(open_ends), timeout=5.0 if failures else timeout)
        if not ready:
            for rank in open_ends.values():
                text = "did not end in time" if not failures else _WAITED
                failures.setdefault(rank, RankFailure(text))
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = open_ends.pop(receiver)
            try:
                good, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                procs[rank].join(timeout=5)
                good, value = False, RankFailure(_how_it_died(procs[rank].exitcode))
            if good:
                results[rank] = value
            else:
                failures[rank] = value
    if failures:
        raise RankFailedError(failures, len(receivers))
    return [results[rank] for rank in range(len(receivers))]
