"""Measures what a machine reaches: products by size, memory traffic, the host's time for an operation, and collectives."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from lightning_seqpar.sizing.machines import Machine, presets
from lightning_seqpar.verify.ranks import run_distributed

_TYPES = (torch.bfloat16, torch.float32)


def calibrated(file: Path, name: str | None = None) -> str:
    """Measure the machine that this runs on, and write it into a YAML file; returns what is told of it.

    On a GPU its memory is what torch reports; links stay those of the nearest preset. On CPUs a device is one core with its share
    of the memory, and links are gloo's between processes. Raises OSError if the file can't be written.
    """
    on_gpu = torch.cuda.is_available()
    name = name or (torch.cuda.get_device_name().replace(" ", "-") if on_gpu else "CPU")
    like = next((one for key, one in presets().items() if on_gpu and key in name), presets()["H100" if on_gpu else "CPU"])
    count = torch.cuda.device_count() if on_gpu else len(os.sched_getaffinity(0))
    if on_gpu:
        found = _measured(torch.device("cuda"), like, count)
    else:  # on all cores at once: they share caches and memory
        ranks = run_distributed(_measured, min(count, 8), torch.device("cpu"), like, count)
        found = max(ranks, key=lambda rank: rank["flops"]["float32"])
    file.write_text(f"# seqpar plan MODEL --fit '{count}x {name}' --machines {file}\n" + yaml.safe_dump({name: found}))
    told = ", ".join(f"{kind} {found['flops'][kind] / 1e12:.3g} TFLOPS" for kind in ("bfloat16", "float32"))
    return (
        f"{file}: {name}: {told}, memory {found['bandwidth'] / 1e9:.3g} GB/s, link {found['in_node'] / 1e9:.3g} GB/s, "
        f"{found['host'] * 1e6:.2g} µs an operation"
    )


def _measured(device: torch.device, like: Machine, count: int) -> dict[str, Any]:
    """Fields of a machine; on CPUs of each rank, while the others measure theirs."""
    on_gpu = device.type == "cuda"
    rates = {str(dtype).removeprefix("torch."): _products(device, dtype) for dtype in _TYPES}
    flops = {kind: max(rate for _, rate in rows) for kind, rows in rates.items()}
    most = rates["bfloat16" if on_gpu else "float32"]
    peak = flops["bfloat16" if on_gpu else "float32"]
    found: dict[str, Any] = {
        **like.model_dump(),
        "memory": float(torch.cuda.get_device_properties(0).total_memory if on_gpu else _memory() / count),
        "flops": {**like.flops, **flops, "float16": flops["bfloat16"]},
        "bandwidth": _bandwidth(device),
        "bandwidth_share": 1.0,
        "efficiency": [[flops_of, rate / peak] for flops_of, rate in most],
        "attention": min(1.0, _attention(device) / peak),
        "host": _host(device),
        "per_node": count,
        "sources": [f"measured by seqpar plan --calibrate on {platform.machine()}, torch {torch.__version__}"],
    }
    if not on_gpu:
        found["flops"]["float64"] = flops["float32"] / 2
        if count > 1:
            latency, speed = _links()
            found["in_node"] = found["network"] = speed
            found["latency"] = {"in_node": latency, "network": latency}
    return found


def _seconds(run: Callable[[], Any], device: torch.device, least: float = 0.1) -> float:
    """Median seconds of a call."""
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < least and len(times) < 200):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _products(device: torch.device, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Flops of products, and how many of them a second has."""
    rows = []
    for size in (256, 512, 1024, 2048, 4096, 8192) if device.type == "cuda" else (32, 64, 128, 256, 512):
        a, b = torch.randn(size, size, device=device, dtype=dtype), torch.randn(size, size, device=device, dtype=dtype)
        rows.append((2.0 * size**3, 2.0 * size**3 / _seconds(lambda a=a, b=b: a @ b, device)))  # type: ignore[misc]
    return rows


def _attention(device: torch.device) -> float:
    size = 4096 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(1, 8, size, 64, device=device, dtype=dtype)
    run = torch.nn.functional.scaled_dot_product_attention
    return 4.0 * 8 * size * size * 64 / _seconds(lambda: run(q, q, q), device)


def _bandwidth(device: torch.device) -> float:
    count = 2**26 if device.type == "cuda" else 2**22
    a, b = torch.ones(count, device=device), torch.ones(count, device=device)
    return 3.0 * a.nbytes / _seconds(lambda: torch.add(a, b), device)


def _host(device: torch.device) -> float:
    x = torch.ones(8, device=device)

    def run() -> Tensor:
        y = x
        for _ in range(200):
            y = y + 1
        return y

    return _seconds(run, device) / 200


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _links() -> tuple[float, float]:
    """Latency of an all-gather, and the bytes a second that a rank receives by one."""

    def gather(count: int) -> float:
        given = torch.ones(count)
        out = [given.new_empty(count) for _ in range(dist.get_world_size())]
        times = []
        for _ in range(6):  # all ranks must call it equally often
            dist.barrier()
            begin = time.perf_counter()
            dist.all_gather(out, given)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    latency, count = gather(1), 2**22
    others = dist.get_world_size() - 1
    return latency, others * count * 4 / max(1e-9, gather(count) - latency)
