"""A backend whose collectives take a given time and send nothing: what overlap gains where a network is the other half.

Results are this rank's own numbers in every place, so a loss under it means nothing. A work is done when its time has
passed, by the wall or by a clock that products alone move on; with ``serial`` whoever starts one waits for it.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "latency"


class Clock(Protocol):
    """What time is, for the backend."""

    def now(self) -> float: ...

    def sleep_until(self, due: float) -> None: ...


class WallClock:
    """The machine's."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, due: float) -> None:
        while (left := due - time.perf_counter()) > 0:
            time.sleep(left)


class ProductClock(TorchDispatchMode):
    """Time passes with matrix products alone: one unit for each multiplication of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, due: float) -> None:
        self.time = max(self.time, due)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "addmm_"):
            self.time += out.numel() * args[1 if name.startswith("add") else 0].shape[-1]
        return out


class _Work(Work):
    """Done when its time has passed."""

    def __init__(self, group: LatencyGroup, tensors: list[Tensor]) -> None:
        super().__init__()
        self._clock, self._due = group.clock, group.clock.now() + group.latency
        self._future: Future[list[Tensor]] = Future()
        self._tensors = tensors
        LatencyGroup.latest = max(LatencyGroup.latest, self._due)
        if group.serial:
            self._clock.sleep_until(self._due)
            self._future.set_result(tensors)
        elif isinstance(self._clock, WallClock):  # a reducer waits for the future, past this object
            timer = threading.Timer(group.latency, self._future.set_result, [tensors])
            timer.daemon = True
            timer.start()
        else:
            self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        self._clock.sleep_until(self._due)
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future


class LatencyGroup(dist.ProcessGroup):
    """One rank's end of such a group."""

    clock: Clock = WallClock()
    latency = 0.0
    serial = False
    latest = 0.0  # when the last collective of all is done

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _get_backend(self, device: torch.device) -> LatencyGroup:
        return self

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return _Work(self, tensors)

    def allgather(self, outs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Work:
        for parts, own in zip(outs, given, strict=True):
            for part in parts:
                part.copy_(own)
        return _Work(self, given)

    def all_gather_single(self, out: Tensor, given: Tensor, opts: Any = None) -> Work:
        out.view(self.size(), *given.shape).copy_(given.expand(self.size(), *given.shape))
        return _Work(self, [out])

    def reduce_scatter_single(self, out: Tensor, given: Tensor, opts: Any = None) -> Work:
        out.copy_(given.view(self.size(), *out.shape)[self.rank()])
        return _Work(self, [out])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return _Work(self, tensors)

    def barrier(self, opts: Any = None) -> Work:
        return _Work(self, [])


def _create(store: Any, rank: int, size: int, timeout: Any) -> LatencyGroup:
    return LatencyGroup(rank, size)


def register() -> None:
    """Make the backend known to torch, once in a process."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
