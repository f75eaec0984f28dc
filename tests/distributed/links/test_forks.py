"""Forked children, with calls of the parent under way: they make connections of their own, and end nobody's."""

from __future__ import annotations

import contextlib
import os
import queue
import threading

from memstore.distributed.links import Asked, Links
from tests.children import Child, Wire, in_child
from tests.distributed.links.echoing import MEMBER, linked, listening, new_links, soon, started_listener, until


def ask(links: Links, address: str, message: bytes) -> bytes | None:
    return links.send(address, MEMBER, message, soon())


def open_sockets() -> set[str]:
    """Their names, by which processes may compare them."""
    found: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


def test_a_child_has_a_connection_of_its_own() -> None:
    seen: dict[bytes, int] = {}

    def serve(asked: Asked) -> None:
        seen[asked.message] = asked.connection
        asked.reply(asked.message)

    with listening(serve) as listener, linked() as links:
        assert ask(links, listener.address, b"parent") == b"parent"
        assert in_child(ask, links, listener.address, b"child") == b"child"
        assert ask(links, listener.address, b"again") == b"again"
    assert seen[b"parent"] == seen[b"again"] != seen[b"child"]


def test_forks_with_calls_under_way_in_other_threads() -> None:
    """Threads lead, send and dial at the moment of each fork. Neither side waits for what is the other's."""
    with listening() as listener, linked() as links:
        stop = threading.Event()
        wrong: list[bytes | None] = []

        def work() -> None:
            while not stop.is_set():
                with linked() as others:  # dials
                    for _ in range(3):
                        wrong.extend({ask(links, listener.address, b"p"), ask(others, listener.address, b"p")} - {b"p"})

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                assert in_child(ask, links, listener.address, b"child") == b"child"
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert wrong == []


def test_a_connection_ends_with_the_parent_while_its_children_live() -> None:
    """A child's copy of the socket would keep it open, and the parent's waits at the server with it."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    came = threading.Event()

    def serve(asked: Asked) -> None:
        asked.on_close(lambda: ended.put(asked.connection))
        if asked.message == b"answer":
            asked.reply(b"")
        else:
            came.set()

    with listening(serve) as listener, linked() as links, Child(fork_and_wait, listener.address) as child:
        sleeper = child.receive()
        assert came.wait(20)
        child.kill()
        try:
            assert ended.get(timeout=20) > 0
            assert ask(links, listener.address, b"answer") == b""
        finally:
            os.kill(sleeper, 9)


def fork_and_wait(wire: Wire, address: str) -> None:
    links = new_links()
    assert ask(links, address, b"answer") == b""
    pid = os.fork()
    if not pid:
        threading.Event().wait(60)
        os._exit(0)
    wire.send(pid)
    threading.Thread(target=ask, args=(links, address, b"wait"), daemon=True).start()
    threading.Event().wait(60)


def test_a_child_of_a_listener_has_none_of_its_sockets() -> None:
    before = open_sockets()
    with listening() as listener, linked() as links:
        assert ask(links, listener.address, b"x") == b"x"
        ours = open_sockets() - before
        assert len(ours) == 3  # it listens, is connected, and was accepted
        assert not ours & in_child(open_sockets)
        assert ask(links, listener.address, b"x") == b"x"
        assert in_child(close_in_child, listener, links) == "closed"
        assert ask(links, listener.address, b"x") == b"x"


def close_in_child(listener: object, links: Links) -> str:
    listener.close()  # type: ignore[attr-defined]
    links.close()
    return "closed"


def test_an_interpreter_ends_with_calls_under_way() -> None:
    kept: list[Asked] = []
    with listening(kept.append) as listener, Child(leave_with_calls_under_way, listener.address) as child:
        until(lambda: len(kept) >= 2)  # both calls are under way
        child.send("leave")
        assert child.receive() == "leaving"
        child.process.join(30)
        assert child.process.exitcode == 0


def leave_with_calls_under_way(wire: Wire, address: str) -> None:
    links = new_links()
    other = started_listener()
    for _ in range(2):
        threading.Thread(target=ask, args=(links, address, b"wait"), daemon=True).start()
    assert ask(links, other.address, b"x") == b"x"
    assert wire.receive() == "leave"
    wire.send("leaving")
