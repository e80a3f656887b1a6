"""Memory of this process, as the machine counts it."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch


def resident(key: str) -> int:
    """Bytes of this process in memory (``VmRSS``), or the most so far (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def used(peak: bool = False) -> int:
    """Bytes that this rank uses, on its GPU where it has one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    return resident("VmHWM" if peak else "VmRSS")


def forget_peak() -> None:
    """Peaks count from now on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def give_back() -> None:
    """Let memory that this process frees go back to the system at once, so that what it has is what it uses."""
    libc = ctypes.CDLL(None)
    for option, value in ((_MMAP_THRESHOLD, 16384), (_TRIM_THRESHOLD, 16384), (_ARENA_MAX, 1)):
        libc.mallopt(option, value)


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def limit(room: int) -> None:
    """Let allocations past ``room`` bytes raise, where otherwise the kernel would end some process of the machine."""
    resource.setrlimit(resource.RLIMIT_DATA, (room, room))


def of_machine(key: str) -> int:
    """Bytes of memory of the machine: all (``MemTotal``), or what processes can still have (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {key}")
