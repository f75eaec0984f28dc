"""Addresses as users write them."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.distributed.links import Address, parse_address
from memstore.errors import InvalidAddressError


@pytest.mark.parametrize(
    "text, shown",
    [
        ("tcp://10.0.0.1:4242", "tcp://10.0.0.1:4242"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("tcp://[FE80:0::1%eth0]:4242", "tcp://[fe80::1%eth0]:4242"),
        ("tcp://[::1]:65535", "tcp://[::1]:65535"),
        ("tcp://[::ffff:127.0.0.1]:1", "tcp://127.0.0.1:1"),
    ],
)
def test_an_address_is_shown_in_one_way(text: str, shown: str) -> None:
    assert str(parse_address(text)) == shown
    assert parse_address(shown) == parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1:4242",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:",
        "tcp://10.0.0.1:65536",
        "tcp://10.0.0.1:-1",
        "tcp://10.0.0:4242",
        "tcp://10.0.0.01:4242",
        "tcp://256.0.0.1:4242",
        "tcp://localhost:4242",
        "tcp://::1:4242",
        "tcp://[10.0.0.1:4242",
        "tcp://[::1:4242",
        "tcp://[1::2::3]:4242",
        "tcp://0.0.0.0:4242",
        "tcp://[::]:4242",
        "tcp://224.0.0.1:4242",
        "tcp://10.0.0.1:4242/",
        "tcp://10.0.0.1:4242\n",
        "tcp://10.0.0.1:४२",
        "udp://10.0.0.1:4242",
        "tcp://[fe80::1%a/b]:4242",
    ],
)
def test_what_is_no_address_is_named_in_the_error(text: str) -> None:
    with pytest.raises(InvalidAddressError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, ValueError)


texts = st.text(alphabet="tcp:/[]%.0123456789abf \n\0٣é", max_size=40)


@given(texts.map(lambda text: f"tcp://{text}") | texts)
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except InvalidAddressError:
        return
    assert parse_address(str(address)) == address


@given(st.ip_addresses(), st.integers(0, 65_535))
def test_any_number_of_a_host_can_be_read_back(ip: object, port: int) -> None:
    text = f"tcp://[{ip}]:{port}" if ":" in str(ip) else f"tcp://{ip}:{port}"
    try:
        address = parse_address(text)
    except InvalidAddressError as error:
        assert "other hosts can't connect" in str(error)
        return
    assert address.port == port
    assert parse_address(str(address)) == address


def test_loopback_is_told_apart() -> None:
    inside = ("tcp://127.0.0.1:1", "tcp://127.255.0.9:1", "tcp://[::1]:1", "tcp://[::ffff:127.0.0.1]:1")
    outside = ("tcp://128.0.0.1:1", "tcp://12.70.0.1:1", "tcp://[::2]:1", "tcp://[fe80::1%lo]:1")
    assert [parse_address(text).is_loopback for text in inside + outside] == [True] * 4 + [False] * 4


def test_a_scope_becomes_the_number_of_its_network_card() -> None:
    name, number = socket.if_indextoname(1), 1
    assert parse_address(f"tcp://[fe80::1%{name}]:5").for_socket() == ("fe80::1", 5, 0, number)
    assert parse_address("tcp://[fe80::1%7]:5").for_socket() == ("fe80::1", 5, 0, 7)
    with pytest.raises(OSError):
        Address("fe80::1", 5, "none-such").for_socket()
