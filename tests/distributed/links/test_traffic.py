"""What connections have moved, as the kernel counts it."""

from __future__ import annotations

import socket

from memstore.distributed.links import Links, Traffic
from memstore.distributed.links.sockets import Moved, moved_by
from tests.distributed.links.echoing import HELLO, MEMBER, SECRET, listening, soon, until

MEBIBYTE = 1 << 20


def test_both_sides_count_what_went_through_also_when_it_is_closed() -> None:
    here, there = Traffic(), Traffic()
    with listening(traffic=there) as listener:
        links = Links(secret=SECRET, kind=1, hello=HELLO, traffic=here)
        for _ in range(3):
            assert links.send(listener.address, MEMBER, bytes(MEBIBYTE), soon()) is not None
        open_yet = here.moved()
        assert 3 * MEBIBYTE <= open_yet.received < 3.01 * MEBIBYTE
        links.close()
        closed = here.moved()  # the kernel counts the end as a byte
        assert all(0 <= after - before <= 2 for before, after in zip(open_yet, closed, strict=True))
        until(lambda: 0 <= there.moved().received - open_yet.sent <= 2)
        again = Links(secret=SECRET, kind=1, hello=HELLO, traffic=here)
        assert again.send(listener.address, MEMBER, b"x", soon()) == b"x"
        assert open_yet.sent < here.moved().sent < open_yet.sent + 1000
        again.close()
    assert 3 * MEBIBYTE <= there.moved().sent < 3.01 * MEBIBYTE


def test_a_socket_that_is_closed_or_no_tcp_counts_for_nothing() -> None:
    one, other = socket.socketpair()
    traffic = Traffic()
    traffic.begin(one)
    one.sendall(b"x")
    assert traffic.moved() == Moved()
    one.close()
    other.close()
    assert moved_by(one) == Moved()
    traffic.end(one)
    traffic.end(one)
    assert traffic.moved() == Moved()
