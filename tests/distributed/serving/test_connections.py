"""Which sessions have a connection: of real ones, as they come and go."""

from __future__ import annotations

from collections.abc import Callable

from memstore.distributed.links import CLIENT, Asked, Links, Listener, hello_of_this_process
from memstore.distributed.serving.requests import Connections
from memstore.engine import deadline_after
from tests.distributed.client.hosts import await_

MEMBER = b"m" * 16


def test_a_session_is_connected_until_its_last_connection_has_ended() -> None:
    connections = Connections()
    for connection, session in ((1, 7), (2, 7), (2, 8), (1, 7)):
        connections.note(connection, session)
    assert connections.sessions() == {7, 8}
    connections.end(2)
    assert connections.sessions() == {7, 8}, "it had one since"
    assert connections.sessions() == {7}
    connections.end(1)
    connections.end(1)
    connections.end(9)  # by which nothing had come
    assert (connections.sessions(), connections.sessions()) == ({7}, set())


def test_connections_that_end_are_told(scratch: str) -> None:
    """However they end: clients that are killed leave no other trace."""
    connections = Connections()

    def serve(asked: Asked) -> None:
        connections.note(asked.connection, int(asked.message))
        asked.reply(b"")

    hello = hello_of_this_process()
    listener = Listener(
        "tcp://127.0.0.1:0",
        secret=None,
        member=MEMBER,
        hello=hello,
        serve=serve,
        stream=lambda stream: stream.close(),
        ended=connections.end,
    )
    listener.start()
    clients = [Links(secret=None, kind=CLIENT, hello=hello) for _ in range(2)]
    ask: Callable[[int], object] = lambda one: clients[one].send(  # noqa: E731
        listener.address, MEMBER, b"%d" % one, deadline_after(10)
    )
    assert [ask(0), ask(1)] == [b"", b""]
    assert connections.sessions() == connections.sessions() == {0, 1}
    clients[0].close()
    await_(lambda: connections.sessions() == {1})
    assert ask(1) == b"" and connections.sessions() == {1}
    listener.close()
    clients[1].close()
    await_(lambda: connections.sessions() == set())
