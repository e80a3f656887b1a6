"""Who can reach the places where ranks meet: those that ``MASTER_ADDR`` names, and nobody from outside where all are on one node.

torch's store listens on every interface of the first rank's node, whatever ``MASTER_ADDR`` says, and gloo at the address of the
host's name. What arrives there is believed: ranks unpickle the objects that others send.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore


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
