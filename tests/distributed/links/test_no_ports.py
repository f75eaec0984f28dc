"""A host that has no free port left to connect from: told as what it is, and over when there is one again."""

from __future__ import annotations

import socket

import pytest

from memstore.errors import HomeUnavailableError
from tests.distributed.links.echoing import MEMBER, bare, linked, listening, soon, try_send, until
from tests.namespaces import NETWORK, in_namespaces, start_loopback

PORTS = (50_000, 50_003)  # of which the kernel takes some


def test_a_client_without_a_free_port_says_so_and_goes_on_when_there_is_one() -> None:
    in_namespaces(NETWORK, _use_up_ports)


def _use_up_ports() -> None:
    start_loopback(PORTS)
    with listening() as listener, linked() as links:
        crowd: list[socket.socket] = []
        with pytest.raises(OSError, match="Cannot assign requested address"):
            while len(crowd) < 10:
                crowd.append(bare(listener.address))
        with pytest.raises(HomeUnavailableError, match="no free port"):
            links.send(listener.address, MEMBER, b"x", soon(0.6))
        assert "no free port" in links.trouble_of(listener.address)
        with pytest.raises(HomeUnavailableError, match="no free port"):
            links.stream(listener.address, MEMBER, soon())
        for sock in crowd:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # the port is free at once
            sock.close()
        until(lambda: try_send(links, listener.address, b"x", soon()) == b"x")
