"""Numbers on their way between the host and a device, without making either wait for the other.

A plain ``tolist`` waits until the device has done all that it was given, and a plain ``torch.tensor(..., device="cuda")``
until it has taken the numbers. A step that does either keeps the host from running ahead, and the device idle behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

T = TypeVar("T")


class LateNumbers:
    """Numbers that a device makes, copied into pinned memory as soon as they are made; :meth:`read` waits for that copy alone."""

    def __init__(self, numbers: Tensor) -> None:
        self._made: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers.detach(), non_blocking=True)
            self._made = torch.cuda.Event()
            self._made.record()
        else:
            self._host = numbers.detach().clone()

    def read(self) -> list[Any]:
        """The numbers, in lists as deep as the tensor has dims."""
        if self._made is not None:
            self._made.synchronize()
        out: list[Any] = self._host.tolist()
        return out


class OneStepLate(Generic[T]):
    """What a step leaves to be looked at in the course of the next one: by then a device has long made it."""

    def __init__(self) -> None:
        self._now: list[T] = []
        self._earlier: list[T] = []

    def add(self, left: T) -> None:
        """Leave something."""
        self._now.append(left)

    def begin_step(self) -> None:
        """A step begins: all that was left belongs to earlier ones."""
        self._earlier += self._now
        self._now = []

    def take(self, *, everything: bool = False) -> list[T]:
        """Remove and return what earlier steps have left, or ``everything``."""
        if everything:
            self.begin_step()
        taken, self._earlier = self._earlier, []
        return taken


def send_numbers(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ``numbers`` on a device, ``[n]``; the host does not wait until they are there."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def require_inside(values: Tensor, inside: Tensor, message: str) -> None:
    """Raise IndexError for indices outside of what they index; on a GPU the device asserts it, and the host does not wait."""
    if values.device.type != "cpu" or isinstance(values, FakeTensor):
        torch._assert_async(inside.all(), message.format("(of some position)"))
    elif not bool(inside.all()):
        raise IndexError(message.format(int(values[~inside][0])))


def default_backend(device: torch.device) -> str:
    """The backends of a run's process groups: the device's own, and gloo beside it for objects, batches and numbers of the host."""
    own = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return "gloo" if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def host_device(group: ProcessGroup, otherwise: torch.device) -> torch.device:
    """Where numbers that the host has, and reads again, are sent: the CPU if the group has a backend for it."""
    taken = {device.type for device in group._device_types} if dist.is_initialized() else set()
    return torch.device("cpu") if "cpu" in taken else otherwise


def read_on_host(numbers: Tensor) -> list[Any]:
    """Numbers that lie where :func:`host_device` says, and so on the host, wherever a group has a backend for it."""
    out: list[Any] = numbers.tolist()
    return out


def object_of(rank: int, value: T, group: ProcessGroup) -> T:
    """What a rank of the group has, on every rank; collective. It goes from CPU to CPU where there is a backend for that."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=rank)
    return box[0]


def any_rank_has(flags: Sequence[bool], group: ProcessGroup, device: torch.device) -> list[bool]:
    """Which of some flags are set on any rank; collective over ``group``, and the host waits for the other hosts alone."""
    highest = torch.tensor(flags, dtype=torch.uint8, device=host_device(group, device))
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in highest.tolist()]
