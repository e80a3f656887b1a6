"""A backend by which ranks share one device: gloo's, with all that is sent taken by way of the CPU.

nccl refuses two ranks on a GPU, and gloo has no messages between GPUs, and loses ranks whose compiled graphs call it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from loopback import OwnGroup
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "shared"
_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "alltoall_base", "all_to_all_single", "broadcast",
    "gather", "reduce", "reduce_scatter", "scatter", "_allgather_base", "all_gather_single", "_reduce_scatter_base",
    "reduce_scatter_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "send", "recv",
)  # fmt: skip
"""Methods of groups, by the names of several releases of torch; what they change comes first."""


class _Staged(Work):
    """A collective under way between tensors on the CPU, which are copied to where they belong when it is waited for."""

    def __init__(self, work: Work, made: Sequence[tuple[Tensor, Tensor]], kept: Any) -> None:
        super().__init__()
        self._work, self._made, self._kept = work, list(made), kept

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        with torch.no_grad():
            for tensor, on_host in self._made:
                tensor.copy_(on_host)
        self._made, self._kept = [], None
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Future[list[Tensor]]:
        made = [tensor for tensor, _ in self._made]
        self.wait()
        done: Future[list[Tensor]] = Future(devices=[tensor.device for tensor in made[:1] if not tensor.is_cpu])
        done.set_result(made)
        return done


class SharedDeviceGroup(OwnGroup):
    """A gloo group for tensors of any device."""

    NAME = NAME

    def __init__(self, gloo: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def barrier(self, opts: Any = None) -> Work:
        return self._gloo.barrier()


def _staged(name: str) -> Any:
    """A method that calls gloo's with copies on the CPU; torch's C++ finds it only as a function of Python's, on the class."""

    def method(self: SharedDeviceGroup, changed: Any, *args: Any, **kwargs: Any) -> Work:
        on_host, *others = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), (changed, *args))
        work = getattr(self._gloo, name)(on_host, *others, **kwargs)
        pairs = zip(tree_leaves(changed), tree_leaves(on_host), strict=True)
        return _Staged(work, [] if name == "send" else list(pairs), (on_host, others))

    return method


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(SharedDeviceGroup, _name, _staged(_name))


def _create(store: Any, rank: int, size: int, timeout: Any) -> SharedDeviceGroup:
    gloo = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return SharedDeviceGroup(gloo, rank, size)


def register() -> None:
    """Make the backend known to torch, once in a process."""
    SharedDeviceGroup.register(_create)
