"""Run a function on several gloo ranks of this machine, as a test would call it."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import socket
import tempfile
import traceback
import typing
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore


class RankFailedError(AssertionError):
    """A rank of :func:`run_distributed` raised or died; the message holds every rank's own."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tell(sender: Connection, good: bool, value: Any) -> None:
    # By value: multiprocessing would share a tensor's memory with a process that is about to end.
    sender.send_bytes(pickle.dumps((good, value)))


def _rank_main(
    sender: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    env: dict[str, str],
    timeout: timedelta,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    os.setsid()  # so that what this rank starts (data workers) ends with it
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), NODE_RANK="0")
    torch.set_num_threads(1)
    try:
        meeting = FileStore(store, world_size)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=timeout)
        # A rank that fails at once would end while others still connect to it, and they would tell of that alone.
        meeting.set(f"connected/{rank}", "")
        meeting.wait([f"connected/{each}" for each in range(world_size)], timeout)
        result = fn(*args, **kwargs)
        dist.barrier()
        _tell(sender, True, result)
        dist.destroy_process_group()
    except BaseException as error:  # told to the parent, which raises
        _tell(sender, False, (f"{type(error).__name__}: {error}", traceback.format_exc()))
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
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_seqpar.strategy"])
    with tempfile.TemporaryDirectory() as folder:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
        procs, receivers = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            rest = (
                rank,
                world_size,
                str(Path(folder, "store")),
                env,
                timedelta(seconds=timeout),
                args,
                kwargs,
            )
            proc = context.Process(target=_rank_main, args=(sender, fn, *rest))
            proc.start()
            sender.close()
            procs.append(proc)
            receivers.append(receiver)
        try:
            return _collect(receivers, timeout)
        finally:
            for proc in procs:
                proc.join(timeout=5)
                if proc.is_alive():
                    proc.kill()
                    with contextlib.suppress(ProcessLookupError):  # it had not got a session of its own yet
                        os.killpg(typing.cast("int", proc.pid), signal.SIGKILL)
                    proc.join()


def _collect(receivers: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_ends = {receiver: rank for rank, receiver in enumerate(receivers)}
    while open_ends:
        # Once a rank has failed the others only wait for it.
        ready = wait(list(open_ends), timeout=5.0 if failures else timeout)
        if not ready:
            for rank in open_ends.values():
                failures.setdefault(rank, "did not end in time" if not failures else "waited for the failed rank")
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = open_ends.pop(receiver)
            try:
                good, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                good, value = False, ("the process died", "")
            if good:
                results[rank] = value
            else:
                failures[rank] = "\n".join(value)
    if failures:
        report = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items()))
        raise RankFailedError(f"{len(failures)} of {len(receivers)} ranks failed\n{report}")
    return [results[rank] for rank in range(len(receivers))]
