"""Run a function on several gloo ranks of this machine, as a test would call it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from lightning_seqpar.distributed.rendezvous import loopback_only
from lightning_seqpar.releases import find_free_network_port, pl

_WAITED = "waited for the failed rank"


class RankFailure(NamedTuple):
    """How one process ended."""

    text: str  # the type and message of what it raised, or what became of it
    trace: str = ""  # the traceback; empty if there is none
    refused: bool = False  # whether it raised a ``ValueError``: it was given something that can't be done

    @property
    def lost_another(self) -> bool:
        """Whether it only waited for a rank that failed, or lost its connection to one."""
        return "gloo" in self.text or self.text == _WAITED

    @property
    def message(self) -> str:
        """The message alone, without the type."""
        return self.text.partition(": ")[2] if self.trace else self.text


class RankFailedError(AssertionError):
    """A rank of :func:`run_distributed` raised or died; ``failures`` says how, by rank, and the message holds every rank's own."""

    def __init__(self, failures: Mapping[int, RankFailure], world_size: int) -> None:
        self.failures = dict(sorted(failures.items()))
        report = "\n".join(f"--- rank {rank}: {one.text}\n{one.trace}" for rank, one in self.failures.items())
        super().__init__(f"{len(failures)} of {world_size} ranks failed\n{report}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failures, len(self.failures))


def _end_with_parent() -> None:
    """End this process and what it has started when its parent is gone, which a signal may have ended."""
    parent = mp.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def _rank_main(
    sender: Connection,
    rank: int,
    call: Callable[[], Any],
    env: dict[str, str],
    seconds: float,
    world_size: int,
    store: str | None,
) -> None:
    """Join the other ranks at ``store``, if there is one, make the call, and tell the parent what came of it."""
    os.setsid()  # so that what this rank starts (data workers) ends with it
    _end_with_parent()
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        if store is not None:
            timeout = timedelta(seconds=seconds)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), NODE_RANK="0")
            meeting = FileStore(store, world_size)
            dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=timeout)
            # A rank that fails at once would end while others still connect to it, and they would tell of that alone.
            meeting.set(f"connected/{rank}", "")
            meeting.wait([f"connected/{each}" for each in range(world_size)], timeout)
        # By value: multiprocessing would share a tensor's memory with a process that is about to end.
        told = pickle.dumps((True, call()))
        if store is not None:
            dist.barrier()
    except BaseException as error:  # told to the parent, which raises
        failure = RankFailure(f"{type(error).__name__}: {error}", traceback.format_exc(), isinstance(error, ValueError))
        sender.send_bytes(pickle.dumps((False, failure)))
    else:
        sender.send_bytes(told)
        if store is not None:
            dist.destroy_process_group()
    sender.close()


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` gloo ranks and return what each returned, in rank order.

    The processes meet through a file (no ports to lose a race for), use one thread each, and see the environment
    of an external launcher, so that a ``Trainer(devices=world_size)`` in ``fn`` starts no others.

    Args:
        fn: a function at the top of a module; it and its arguments are pickled.
        world_size: number of ranks.
        timeout: seconds for the whole call and for each collective.

    Raises RankFailedError if any rank raised, died or ran past the timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "OMP_NUM_THREADS": "1"}
        env |= loopback_only()
        call = functools.partial(fn, *args, **kwargs)
        return _run(call, timeout, env, world_size, str(Path(folder, "store")))


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> Any:
    """Call ``fn`` as :func:`run_distributed` does, in one process that is no rank of anything, and return what it returned."""
    return _run(functools.partial(fn, *args, **kwargs), timeout, {"OMP_NUM_THREADS": "1"})[0]


def _run(
    call: Callable[[], Any], timeout: float, env: dict[str, str], world_size: int = 1, store: str | None = None
) -> list[Any]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", pl.__name__, "lightning_seqpar.strategy"])
    procs, receivers = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        proc = context.Process(target=_rank_main, args=(sender, rank, call, env, timeout, world_size, store))
        proc.start()
        sender.close()
        procs.append(proc)
        receivers.append(receiver)
    patience = 0.0  # if this process is interrupted
    try:
        results, failures = _collect(receivers, procs, timeout)
        patience = 5.0
    finally:
        for proc in procs:
            proc.join(timeout=patience)
            if proc.is_alive():
                proc.kill()
                with contextlib.suppress(ProcessLookupError):  # it had not got a session of its own yet
                    os.killpg(typing.cast("int", proc.pid), signal.SIGKILL)
                proc.join()
    if failures:
        raise RankFailedError(failures, world_size)
    return [results[rank] for rank in range(world_size)]


def _collect(
    receivers: list[Connection], procs: Sequence[BaseProcess], timeout: float
) -> tuple[dict[int, Any], dict[int, RankFailure]]:
    results: dict[int, Any] = {}
    failures: dict[int, RankFailure] = {}
    open_ends = {receiver: rank for rank, receiver in enumerate(receivers)}
    while open_ends:
        # Once a rank has failed the others only wait for it.
        ready = wait(list(open_ends), timeout=5.0 if failures else timeout)
        if not ready:
            failures |= dict.fromkeys(open_ends.values(), RankFailure(_WAITED if failures else "did not end in time"))
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = open_ends.pop(receiver)
            try:
                good, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                procs[rank].join(timeout=5)
                status = procs[rank].exitcode
                text = f"the process ended with {status}; what it said stands above"
                if status is not None and status < 0:
                    text = f"the process died: {signal.Signals(-status).name}"
                good, value = False, RankFailure(text)
            (results if good else failures)[rank] = value
    return results, failures
