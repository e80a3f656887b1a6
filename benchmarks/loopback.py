"""A backend by which one process plays one rank of many: every other rank has this rank's numbers, and they arrive late.

A sum over ``n`` ranks is ``n`` times this rank's term, and what is gathered is its own part ``n`` times: losses mean nothing, but a
step does all that a rank does. How a collective travels is a *wire*:

=============  =====================================================================================================
wire           a collective is done
=============  =====================================================================================================
:class:`Wire`  at once, on the caller's stream
ClockWire      at once, and waited for until its time has passed: by the wall, or by a clock that products alone move on
StreamWire     on a CUDA stream of its own, behind a delay that its bytes give; on CPUs by ``ThreadWire``
ThreadWire     on a thread of its own, as late as can be: when it is waited for
=============  =====================================================================================================

What must hold of late ones holds of nccl: what is sent may not change, and what comes may not be read, before the wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "loopback"


class Clock(Protocol):
    """What time is, for a :class:`ClockWire`."""

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
    """A collective under way. As with nccl, its tensors are kept until it is waited for."""

    def __init__(self, tensors: Sequence[Tensor], devices: Sequence[torch.device] = ()) -> None:
        super().__init__()
        self.tensors: list[Tensor] = list(tensors)
        self.future: Future[list[Tensor]] = Future(devices=list(devices))

    def finish(self) -> None:
        """Let those go on who wait for the future."""
        if not self.future.done():
            self.future.set_result(self.tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.future.done()

    def get_future(self) -> Future[list[Tensor]]:
        return self.future


class Wire:
    """Collectives that are done when they are started.

    Attributes:
        count: collectives so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def carry(self, tensors: Sequence[Tensor], run: Callable[[], None], nbytes: float) -> Work:
        """Begin a collective over these tensors, which ``run`` makes and for which a rank sends so many bytes."""
        self.count += 1
        with torch.no_grad():
            run()
        work = _Work(tensors)
        work.finish()
        return work


class ClockWire(Wire):
    """Collectives that take ``latency`` by a clock; whoever starts a ``serial`` one waits for it.

    Attributes:
        latest: when the last collective of all is done.
    """

    def __init__(self, clock: Clock, latency: float = 0.0, *, serial: bool = False) -> None:
        super().__init__()
        self.clock, self.latency, self.serial, self.latest = clock, latency, serial, 0.0

    def carry(self, tensors: Sequence[Tensor], run: Callable[[], None], nbytes: float) -> Work:
        self.count += 1
        with torch.no_grad():
            run()
        due = self.clock.now() + self.latency
        self.latest = max(self.latest, due)
        work = _TimedWork(tensors, self.clock, due)
        if self.serial:
            work.wait()
        if not self.serial and isinstance(self.clock, WallClock):  # a reducer waits for the future, past this object
            timer = threading.Timer(self.latency, work.finish)
            timer.daemon = True
            timer.start()
        else:
            work.finish()
        return work


class _TimedWork(_Work):
    """Done when its time has passed."""

    def __init__(self, tensors: Sequence[Tensor], clock: Clock, due: float) -> None:
        super().__init__(tensors)
        self._clock, self._due = clock, due

    def wait(self, timeout: Any = None) -> bool:
        self._clock.sleep_until(self._due)
        return True


class _ThreadWork(_Work):
    """Done by a thread, which begins it when somebody waits."""

    def __init__(self, tensors: Sequence[Tensor], release: Callable[[_ThreadWork], None]) -> None:
        super().__init__(tensors)
        self._release = release
        self._error: list[BaseException] = []
        self._done = threading.Event()

    def run(self, collective: Callable[[], None]) -> None:
        """Do it, on the thread."""
        try:
            collective()
        except BaseException as error:
            self._error.append(error)
        self._done.set()
        self.finish()

    def wait(self, timeout: Any = None) -> bool:
        # Profiles show it here: they do not look at the thread. Without one it would be an operation that counts.
        with record_function(NAME) if torch.autograd._profiler_enabled() else nullcontext():
            self._release(self)
            self._done.wait()
        if self._error:
            raise self._error[0]
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> Future[list[Tensor]]:
        self._release(self)
        return self.future


class ThreadWire(Wire):
    """Collectives that a thread does in the order in which they were started, none before it, or a later one, is waited for.

    So what is read too early has never been written, and what is changed too early is sent changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: deque[tuple[_ThreadWork, Callable[[], None]]] = deque()
        self._due: deque[tuple[_ThreadWork, Callable[[], None]]] = deque()
        self._wake = threading.Condition()
        threading.Thread(target=self._serve, daemon=True, name=NAME).start()

    def carry(self, tensors: Sequence[Tensor], run: Callable[[], None], nbytes: float) -> Work:
        self.count += 1
        # What is made in inference mode can be written there alone.
        inference = torch.is_inference_mode_enabled()

        def collective() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                run()

        work = _ThreadWork(tensors, self._release)
        self._held.append((work, collective))
        return work

    def _release(self, work: _ThreadWork) -> None:
        with self._wake:
            while self._held and not work.is_completed():
                self._due.append(self._held.popleft())
                if self._due[-1][0] is work:
                    break
            self._wake.notify()

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._due)
                work, collective = self._due.popleft()
            work.run(collective)
            del work, collective


@dataclass(frozen=True)
class Network:
    """What a rank's link can do."""

    latency: float
    """Seconds that a collective takes to start."""
    bandwidth: float
    """Bytes a second, each way."""


NETWORKS = {"nvlink": Network(12e-6, 400e9), "infiniband": Network(25e-6, 45e9), "pcie": Network(20e-6, 25e9)}
"""Eight GPUs of a node behind NVLink switches, nodes behind one 400 Gbit/s adapter a GPU, and GPUs on PCIe 4: what of their rate
nccl's own tests reach in collectives of some MiB. ``--latency`` and ``--bandwidth`` set others."""


class StreamWire(Wire):
    """Collectives on a CUDA stream for each group, which take the time that a network needs for their bytes."""

    def __init__(self, network: Network, device: torch.device | None = None) -> None:
        super().__init__()
        self.network = network
        properties: Any = torch.cuda.get_device_properties(device or torch.cuda.current_device())
        self._hertz = 1e3 * getattr(properties, "clock_rate", 1_755_000)  # kHz; some releases of torch do not tell it
        self._stream = torch.cuda.Stream()

    def carry(self, tensors: Sequence[Tensor], run: Callable[[], None], nbytes: float) -> Work:
        if not any(tensor.is_cuda for tensor in tensors):
            return super().carry(tensors, run, nbytes)
        self.count += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            torch.cuda._sleep(int((self.network.latency + nbytes / self.network.bandwidth) * self._hertz))
            run()
            return _StreamWork(tensors, self._stream)


class _StreamWork(_Work):
    """Done when a stream has come to where it is now, for which the current stream waits, and not the host."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        super().__init__(tensors, [stream.device])
        self._done = torch.cuda.Event()
        self._done.record(stream)
        self.finish()  # whoever waits for the future waits for the stream

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self._done)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        return bool(self._done.query())


class OwnGroup(dist.ProcessGroup):
    """What torch asks of a group that is written in Python, for tensors of the CPU and of CUDA devices."""

    NAME = ""
    supports_splitting = False
    _device_types = [torch.device("cpu"), torch.device("cuda")]  # noqa: RUF012

    def name(self) -> str:
        return self.NAME

    def getBackendName(self) -> str:  # noqa: N802
        return self.NAME

    def _get_backend(self, device: torch.device) -> OwnGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """None is kept."""

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    @property
    def group_desc(self) -> str:
        return self.NAME

    @classmethod
    def register(cls, create: Callable[[Any, int, int, Any], dist.ProcessGroup]) -> None:
        """Make the backend known to torch, once in a process."""
        if not hasattr(dist.Backend, cls.NAME.upper()):
            dist.Backend.register_backend(cls.NAME, create, devices=["cpu", "cuda"])


class LoopbackGroup(OwnGroup):
    """One rank's end of a group whose other ranks have its numbers; how they travel is the class's ``wire``."""

    NAME = NAME
    wire: Wire = Wire()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._mail: dict[int, deque[Tensor]] = {}

    def _carry(self, tensors: Sequence[Tensor], run: Callable[[], None], out: Sequence[Tensor], factor: float = 1.0) -> Work:
        others = (self.size() - 1) / self.size()
        return self.wire.carry(tensors, run, factor * others * sum(tensor.nbytes for tensor in out))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        sums = opts is None or opts.reduceOp == dist.ReduceOp.SUM

        def run() -> None:
            for tensor in tensors:
                if sums:
                    tensor.mul_(self.size())

        return self._carry(tensors, run, tensors, 2.0)

    allreduce_coalesced = allreduce

    def allgather(self, outs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Work:
        def run() -> None:
            for parts, own in zip(outs, given, strict=True):
                for part in parts:
                    part.copy_(own)

        made = [part for parts in outs for part in parts]
        return self._carry([*given, *made], run, made)

    def all_gather_single_coalesced(self, outs: list[Tensor], given: list[Tensor], opts: Any = None) -> Work:
        def run() -> None:
            for out, own in zip(outs, given, strict=True):
                parts = out.view(self.size(), *own.shape)
                for rank, part in enumerate(parts):
                    if part.data_ptr() != own.data_ptr() or rank != self.rank():
                        part.copy_(own)

        return self._carry([*outs, *given], run, outs)

    def all_gather_single(self, out: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([out], [given])

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], given: list[Tensor], opts: Any = None) -> Work:
        def run() -> None:
            for out, own in zip(outs, given, strict=True):
                part = own.view(self.size(), *out.shape)[self.rank()]
                if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
                    torch.mul(part, self.size(), out=out)
                else:
                    out.copy_(part)

        return self._carry([*outs, *given], run, given)

    def reduce_scatter_single(self, out: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([out], [given], opts)

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def scatter(self, outs: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> Work:
        def run() -> None:
            for out, parts in zip(outs, given, strict=bool(given)):
                out.copy_(parts[self.rank()])

        return self._carry(outs, run, outs)

    def alltoall_base(self, out: Tensor, given: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None) -> Work:
        def run() -> None:
            own = given.split(sizes)[self.rank()] if sizes else given.chunk(self.size())[self.rank()]
            for part in out.split(out_sizes) if out_sizes else out.chunk(self.size()):
                part.copy_(_fitted(own, part))

        return self._carry([out, given], run, [out])

    all_to_all_single = alltoall_base

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._carry(tensors, lambda: None, tensors)

    def barrier(self, opts: Any = None) -> Work:
        return self._carry([], lambda: None, [])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """What is sent comes back by :meth:`recv`: to a ring's rank all others look like itself."""

        def run() -> None:
            self._mail.setdefault(tag, deque()).extend(tensor.clone() for tensor in tensors)

        return self.wire.carry(tensors, run, sum(tensor.nbytes for tensor in tensors))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        def run() -> None:
            for tensor in tensors:
                tensor.copy_(_fitted(self._mail[tag].popleft(), tensor))

        return self.wire.carry(tensors, run, 0.0)


def _fitted(sent: Tensor, like: Tensor) -> Tensor:
    """What was sent, in another's shape: ranks whose parts are longer send their first numbers twice."""
    if sent.numel() == like.numel():
        return sent.view_as(like)
    return sent.flatten()[torch.arange(like.numel(), device=sent.device) % sent.numel()].view_as(like)


def _create(store: Any, rank: int, size: int, timeout: Any) -> LoopbackGroup:
    return LoopbackGroup(rank, size)


def placed(size: int) -> dict[str, str]:
    """What a launcher sets for the first rank of a world of so many nodes, for the Trainer."""
    found = {
        "RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0, "GROUP_RANK": 0, "NODE_RANK": 0, "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "played",
    }  # fmt: skip
    return {name: str(value) for name, value in found.items()}


def asks_nobody(self: Any, *, everything: bool = False) -> None:
    """In the place of ``LossWatch.settle``: each rank's loss has a place of its own in a sum, and nobody else's comes there."""


def play(rank: int, size: int, wire: Wire) -> None:
    """Let this process be one rank of a world of so many, whose collectives travel by ``wire``."""
    LoopbackGroup.register(_create)
    LoopbackGroup.wire = wire
    dist.init_process_group(NAME, rank=rank, world_size=size, store=dist.HashStore())
