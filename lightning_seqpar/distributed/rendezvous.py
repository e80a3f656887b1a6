"""Ranks that meet: where, and who can reach it; what they compare and tell before the first step; meetings later on.

torch's store listens on every interface of the first rank's node, whatever ``MASTER_ADDR`` says, and gloo at the address of the
host's name. What arrives there is believed: ranks unpickle the objects that others send.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.host import host_device
from lightning_seqpar.releases import LIGHTNING_VERSION


def serve_store(address: str, port: int, timeout: timedelta, *, one_node: bool) -> TCPStore | None:
    """Let the ranks' store listen at the address that they look for it, and not at others; torch finds it by its port later.

    None if the port is taken, or the address is none of this node's alone (a proxy's, or loopback where other nodes are to come).
    """
    place = _place_of(address, port, one_node=one_node)
    if place is None:
        return None
    listener = socket.socket(place[0], socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place[1])
    except OSError:  # torch tries all interfaces, and says what is wrong
        listener.close()
        return None
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def keep_gloo_local(address: str, *, one_node: bool) -> None:
    """Let gloo listen on the loopback interface where all ranks are on one node and meet there, unless the user names another."""
    place = _place_of(address, 0, one_node=one_node)
    if place is not None and _is_loopback(place[1]):
        os.environ.update(loopback_only())


def loopback_only() -> dict[str, str]:
    """What makes gloo listen on the loopback interface, as variables of the environment; none if an interface is named there."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    there = {name for _, name in socket.if_nameindex()}
    return next(({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in there), {})


def _place_of(address: str, port: int, *, one_node: bool) -> tuple[socket.AddressFamily, Any] | None:
    """The family and the address to listen at; None if other ranks might look for another one."""
    try:
        found = {(family, place) for family, *_, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    if one_node:
        return min(found, key=lambda one: (one[0] != socket.AF_INET, one), default=None)
    if len(found) > 1 or any(_is_loopback(place) for _, place in found):
        return None
    return next(iter(found), None)


def _is_loopback(place: Sequence[Any]) -> bool:
    return ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback


class Meeting:
    """A place where all ranks of a group must arrive before they go on; collective over the group when it is made.

    A rank that waits in a collective for others that never come ends with the group's timeout, half an hour later and
    without a reason. Here it ends soon, and says who did not come. After the first times nobody waits any more.
    """

    def __init__(self, group: ProcessGroup, patience: timedelta = timedelta(minutes=2), times: int = 32) -> None:
        self._group, self._patience, self._left = group, patience, times
        made = dist.distributed_c10d._world.pg_map.get(group)
        if made is None or made[0] == "fake":  # there are no other ranks
            self._left = 0
            return
        self._store, self._rank = made[1], group.rank()
        self._name = f"meeting {self._store.add(f'meetings of rank {self._rank}', 1)}"

    def await_others(self, what: str, remedy: str) -> None:
        """Wait for the other ranks."""
        if self._left == 0:
            return
        self._left -= 1
        keys = [f"{self._name}, {self._left} to go, rank {rank}" for rank in range(self._group.size())]
        self._store.set(keys[self._rank], "")
        try:
            self._store.wait(keys, self._patience)
        except RuntimeError:
            missing = [dist.get_global_rank(self._group, rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"{what} on rank {dist.get_rank()}, and rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not do "
                f"the same within {self._patience.total_seconds():.0f} s, though it takes all of them. {remedy}"
            ) from None


_SHOWN = 4
"""How many ranks, and how many differing entries, an error names one by one."""


def check_agreement(own: Mapping[str, Any], group: ProcessGroup, device: torch.device) -> None:
    """Compare descriptions over the ranks of ``group``, by two numbers; only where they differ by the texts. Collective.

    Raises:
        ValueError: on every rank alike, naming the entries that differ and which ranks have which value.
    """
    texts = {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in own.items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=host_device(group, device))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if int(extremes[0]) == -int(extremes[1]):
        return
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, texts, group=group)
    ranks = dist.get_process_group_ranks(group)
    names = list(dict.fromkeys(name for described in everybody for name in described))
    values = {name: [described.get(name) for described in everybody] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    said = "; ".join(_who_says_what(name, values[name], ranks) for name in differing[:_SHOWN])
    said += f"; and {len(differing) - _SHOWN} more things" if len(differing) > _SHOWN else ""
    raise ValueError(f"the ranks were not told the same: {said}. Start every rank with the same code, files and arguments")


def _who_says_what(name: str, values: list[str | None], ranks: list[int]) -> str:
    """Say which ranks have which value of an entry: ``tp is 2 on ranks 0, 1, 2 and 4 on rank 3``."""
    parts = []
    for value, count in Counter(values).most_common(_SHOWN):
        where = [str(rank) for rank, own in zip(ranks, values, strict=True) if own == value]
        shown = ", ".join(where[:_SHOWN]) + (", ..." if count > _SHOWN else "")
        text = "missing" if value is None else value
        if len(text) >= 60:
            text = f"{text[:40]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"
        parts.append(f"{text} on rank{'s' if count > 1 else ''} {shown}")
    return f"{name} is {' and '.join(parts)}"


def describe_start(config: ParallelConfig, version: str) -> dict[str, Any]:
    """Describe a rank at its start: the configuration, field by field, and the versions of the libraries."""
    fields = {**config.model_dump(mode="json"), "timeout": f"{config.timeout.total_seconds()} s"}
    if isinstance(config.plan, str) and config.plan.endswith((".yaml", ".yml")):
        fields["plan"] = "a file"  # its path may differ from node to node, and its content is compared once it was read
    versions = {"torch": str(torch.__version__), "lightning": LIGHTNING_VERSION, "lightning_seqpar": version}
    # torch names a group by how many there are: ranks with other numbers of groups would never meet in a new one.
    groups = {"process groups made before": len(dist.distributed_c10d._world.pg_names)}
    return {**fields, **{f"version of {name}": value for name, value in versions.items()}, **groups}


def describe_model(model: nn.Module) -> dict[str, str]:
    """Describe a model: its parameters, buffers and modules, but for the outermost, where users keep state of their own."""
    entries = {
        f"parameter {name}": f"{list(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
        for name, parameter in model.named_parameters()
    }
    entries |= {f"buffer {name}": f"{list(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        if name:
            entries[f"module {name}"] = f"{type(module).__name__}({module.extra_repr()}){_settings(module)}"
    return entries


def _settings(module: nn.Module) -> str:
    """The numbers and switches among a module's own attributes, but for those that may rightly differ, as a text."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float)}
    differs = ("rank", "device", "training")
    shown = [f"{n}={own[n]}" for n in sorted(own) if n[0] != "_" and not any(word in n for word in differs)]
    return f" with {', '.join(shown)}" if shown else ""


def describe_optimizer(optimizer: Optimizer) -> list[Any]:
    """Describe an optimizer: its class, then of each parameter group the settings and the number of parameters."""
    groups = [
        {
            name: float(value) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params" and isinstance(value, bool | int | float | str | tuple | Tensor | None)
        }
        | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


PATIENCE = 3.0
"""Seconds that a phase may take in silence."""


class Phases:
    """Reports the phases of a start that take longer than ``patience`` seconds, on a rank that ``shows`` them."""

    def __init__(self, *, shows: bool, patience: float = PATIENCE, write: Callable[[str], None] = rank_zero_info) -> None:
        self._shows, self._patience, self._write = shows, patience, write

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Wraps a phase. A thread waits beside it to announce it, and is gone when it ends, however it ends."""
        if not self._shows:
            yield
            return
        announced: list[bool] = []

        def announce() -> None:
            announced.append(True)
            self._write(f"lightning_seqpar: {name} ...")

        timer = threading.Timer(self._patience, announce)
        timer.daemon = True  # a rank that is killed half way does not wait for it
        began, took = time.monotonic(), None
        timer.start()
        try:
            yield
            took = time.monotonic() - began
        finally:
            timer.cancel()
            timer.join()
            if announced and took is not None:
                self._write(f"lightning_seqpar: {name} took {took:.1f} s")
