"""Where the store listens, and gloo: at the address that the ranks look for, and not at others."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from lightning_seqpar.distributed.rendezvous import keep_gloo_local, serve_store
from tests.helpers.processes import free_port

SOON = timedelta(seconds=10)
LOOPBACK = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def is_open(address: str, port: int) -> bool:
    """Whether something listens there."""
    with socket.socket() as caller:
        caller.settimeout(5)
        return caller.connect_ex((address, port)) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_listens_at_its_address_alone(address):
    port = free_port()
    served = serve_store(address, port, SOON, one_node=True)
    assert served is not None
    assert is_open("127.0.0.1", port)
    assert not is_open("127.0.0.2", port), "another address of this node"
    # As torch makes it, which would listen everywhere.
    store = TCPStore(address, port, 1, is_master=True, timeout=SOON, multi_tenant=True)
    del served
    store.set("key", "value")
    assert not is_open("127.0.0.2", port)
    assert store.get("key") == b"value"


def test_it_is_left_to_torch_where_others_may_come_from_elsewhere():
    port = free_port()
    assert serve_store("127.0.0.1", port, SOON, one_node=False) is None
    assert serve_store("no such host", port, SOON, one_node=True) is None
    assert serve_store("192.0.2.123", port, SOON, one_node=False) is None, "of no interface here"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert serve_store("127.0.0.1", port, SOON, one_node=True) is None
    assert not is_open("127.0.0.1", port)


@pytest.mark.skipif(LOOPBACK is None, reason="no interface of a name that is known")
def test_gloo_stays_on_one_node(monkeypatch):
    for address, one_node, named, expected in (
        ("127.0.0.1", True, None, LOOPBACK),
        ("localhost", True, None, LOOPBACK),
        ("127.0.0.1", False, None, None),
        ("192.0.2.123", True, None, None),
        ("127.0.0.1", True, "eth0", "eth0"),
    ):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named or "")
        if named is None:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        keep_gloo_local(address, one_node=one_node)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected, (address, one_node, named)
