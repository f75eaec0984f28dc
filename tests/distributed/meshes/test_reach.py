"""At which address others reach the first host."""

from __future__ import annotations

import ipaddress
import socket
import time
from pathlib import Path

import pytest

from memstore.distributed.meshes.launching import Reception, free_port, own_ips, try_all
from memstore.errors import AddressUnavailableError


def test_own_ips_begin_with_what_is_known_and_leave_out_what_others_cannot_reach() -> None:
    found = own_ips(("192.0.2.7", "127.0.0.1", "fe80::1", "0.0.0.0", "no-ip", "192.0.2.7", "2001:DB8::1"))
    assert found[:2] == ["192.0.2.7", "2001:db8::1"] and len(set(found)) == len(found)
    assert not any(ipaddress.ip_address(one).is_loopback for one in found)


def test_a_reception_sends_its_token_to_who_connects() -> None:
    reception = Reception(("127.0.0.1", "127.0.0.2"), 0)
    with socket.create_server(("127.0.0.3", 0)) as other, socket.socket() as nobody:
        other.settimeout(5)
        nobody.bind(("127.0.0.4", 0))
        others = f"tcp://127.0.0.3:{other.getsockname()[1]}"
        addresses = (*reception.addresses, f"tcp://127.0.0.4:{nobody.getsockname()[1]}")
        tried = try_all(addresses, reception.token, time.monotonic() + 5)
        assert tried == [("127.0.0.1", ""), ("127.0.0.1", ""), ("", "Connection refused")]
        assert try_all(addresses[:1], b"x" * 16, time.monotonic() + 5) == [("", "somebody else listens there")]
        assert try_all([others], reception.token, time.monotonic() + 0.2) == [("", "no answer")]
    reception.close()
    assert try_all(addresses[:1], reception.token, time.monotonic() + 5) == [("", "Connection refused")]
    for address in reception.addresses:  # and who listens next can
        ip, _, port = address.partition("//")[2].rpartition(":")
        assert free_port(ip, int(port)) == int(port)


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_addresses_may_be_of_ipv6() -> None:
    reception = Reception(("::1",), 0)
    assert reception.addresses[0].startswith("tcp://[::1]:")
    assert try_all(reception.addresses, reception.token, time.monotonic() + 5) == [("::1", "")]
    reception.close()


def test_a_port_that_is_taken_is_passed_over_unless_it_was_named() -> None:
    first = free_port("127.0.0.5", 0)
    with socket.create_server(("127.0.0.5", first)):
        assert free_port("127.0.0.5", 0) > first
        with pytest.raises(AddressUnavailableError, match=f"127.0.0.5:{first}: Address already in use: end who"):
            free_port("127.0.0.5", first)
        with pytest.raises(AddressUnavailableError, match="can't listen at"):
            Reception(("127.0.0.5",), first)
    with pytest.raises(AddressUnavailableError, match="no address at which others could reach it"):
        Reception((), 0)
