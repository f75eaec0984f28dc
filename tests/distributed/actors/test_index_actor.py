"""An index actor answers as the listener does. Real agents, and real processes in which Monarch runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import memstore
from memstore.distributed.actors import ActorLinks, Reference
from memstore.distributed.actors.reference import decode_reference, encode_reference
from memstore.distributed.catalog import change_of
from memstore.distributed.rules import Done, Failed, IsAt, Wait
from memstore.distributed.rules.messages import Call, Close, Commit, Committed, Found, List, Lookup, Open, Opened
from memstore.distributed.serving.messages import Report, Reported, decode_answer, encode
from memstore.engine import Change, Content
from memstore.errors import CorruptionError, LinkRefusedError
from tests.distributed.actors.actor_clients import (
    ActorClient,
    client_of,
    find_actor,
    needs_monarch,
    send,
    wait_for_actor,
)
from tests.distributed.serving.agents import LONG, Agent, Agents, Caller, agents_in, eventually

pytestmark = needs_monarch


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as path,
        agents_in(Path(path), tmp_path_factory.mktemp("logs")) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def caller(many: Agents) -> Iterator[Caller]:
    with Caller(many.secret) as made:
        yield made


@pytest.fixture(scope="module")
def agent(many: Agents) -> Agent:
    """One for all of these tests."""
    return many.serve("a", "--monarch")


@pytest.fixture(scope="module")
def reference(agent: Agent, caller: Caller) -> bytes:
    return wait_for_actor(caller, agent).reference


@pytest.fixture(scope="module")
def client(many: Agents, agent: Agent, reference: bytes) -> Iterator[ActorClient]:
    with client_of(agent, many.secret, reference, decode_reference(reference).member) as made:
        yield made


@pytest.fixture
def epoch(client: ActorClient) -> int:
    """Another one once the second host has joined."""
    report = client.ask(Report())
    assert isinstance(report, Reported)
    return report.epoch


def opened(client: ActorClient) -> int:
    answer = client.ask(Open())
    assert isinstance(answer, Opened)
    return answer.session


def commit(epoch: int, session: int, number: int, *keys: str, body: bytes = b"v", expect: int | None = None) -> Commit:
    content = Content(b"d", b"", len(body), inline=body)
    changes = tuple(change_of(Change(key.encode(), content, expect=expect), b"t" * 16) for key in keys)
    return Commit(Call(session, 0, number, epoch), changes)


def test_it_answers_by_the_same_bytes_as_the_listener(
    agent: Agent, client: ActorClient, caller: Caller, epoch: int
) -> None:
    session = opened(client)
    made = client.ask(commit(epoch, session, 1, "same/a", "same/b"))
    assert isinstance(made, Committed) and len(made.versions) == 2
    assert client.ask(commit(epoch, session, 1, "same/a", "same/b")) == made  # its outcome is recorded
    for request in (Lookup(epoch, (b"same/a", b"same/none", b"same/b")), List(epoch, b"same/", b"", 10)):
        answer = client.ask(request)
        assert answer == caller.call(agent, request) and not isinstance(answer, Failed)
    report = client.ask(Report())
    assert isinstance(report, Reported) and report.pid == caller.report(agent).pid
    assert client.ask(Close(session)) == Done()


def test_errors_come_across_with_their_types(client: ActorClient, epoch: int) -> None:
    session = opened(client)
    failed = client.ask(commit(epoch, session, 1, "errors/k", expect=7))
    assert isinstance(failed, Failed) and failed.error == "VersionConflictError" and failed.key == b"errors/k"
    with pytest.raises(LinkRefusedError, match="index actor says"):
        client.ask(b"garbage")
    assert isinstance(client.ask(Report()), Reported)


def test_a_wait_is_answered_by_a_put_and_holds_up_nobody(agent: Agent, client: ActorClient, epoch: int) -> None:
    for key in ("wait/a", "wait/b"):
        client.begin(Wait(epoch, key.encode(), 0, 10_000))
    time.sleep(0.2)  # so that they are kept, most of the time; the answers are the same if they aren't
    assert isinstance(client.ask(Report()), Reported)
    started = time.monotonic()
    with memstore.open(agent.root, "r+") as store:
        versions = [store.put(key, 1) for key in ("wait/a", "wait/b")]
    assert client.end() == [IsAt(version) for version in versions]
    assert time.monotonic() - started < 9


def test_a_wait_ends_at_the_deadline_of_who_asks(client: ActorClient, epoch: int) -> None:
    started = time.monotonic()
    answer = client.ask(Wait(epoch, b"wait/never", 0, 10_000), timeout=0.5)
    assert answer in (None, IsAt(0))  # the home ends it just then: who is first is chance
    assert time.monotonic() - started < 5
    assert isinstance(client.ask(Report()), Reported)


def test_long_messages_go_in_pieces(agent: Agent, client: ActorClient, caller: Caller, epoch: int) -> None:
    session, keys = opened(client), [f"long/{number}" for number in range(900)]
    made = client.ask(commit(epoch, session, 1, *keys, body=bytes(1000)))
    assert isinstance(made, Committed) and len(made.versions) == 900
    lookup = Lookup(epoch, tuple(key.encode() for key in keys))
    found = client.ask(lookup)
    assert isinstance(found, Found) and len(encode(found)) > 900_000
    assert found == caller.call(agent, lookup)


def test_another_member_is_not_taken_for_it(agent: Agent, client: ActorClient, reference: bytes) -> None:
    wrong = decode_reference(reference)
    wrong = encode_reference(Reference(b"w" * 16, wrong.hello, wrong.actor))
    with pytest.raises(LinkRefusedError, match=f"and {(b'w' * 16).hex()} was asked"):
        client.run(ask_by, wrong, agent.address)


def ask_by(ways: ActorLinks, reference: bytes, address: str) -> bytes | None:
    other = ActorLinks(ways._links, [reference])  # pyright: ignore[reportPrivateUsage]
    return send(other, address, decode_reference(reference).member, encode(Report()), LONG)


def test_a_reference_that_is_none_runs_nothing(client: ActorClient, reference: bytes) -> None:
    real = decode_reference(reference)
    for actor in (b"cos\nsystem\n(S'touch /dev/shm/ran'\ntR.", b"garbage", b"", b"N."):
        with pytest.raises(CorruptionError, match="a reference to"):
            client.run(ask_by, encode_reference(Reference(real.member, real.hello, actor)), "tcp://127.0.0.1:1")
    assert not os.path.exists("/dev/shm/ran")


@pytest.mark.parametrize("is_anew", [False, True])
def test_a_child_forked_after_asks_by_sockets(
    agent: Agent, client: ActorClient, reference: bytes, is_anew: bool
) -> None:
    """Also by links that it has made itself: it has its parent's Monarch, which hangs there."""
    report = decode_answer(client.run(send_in_a_fork, agent.address, reference, is_anew))
    assert isinstance(report, Reported) and report.name
    assert isinstance(client.ask(Report()), Reported)


def send_in_a_fork(ways: ActorLinks, address: str, reference: bytes, is_anew: bool) -> bytes:
    member = decode_reference(reference).member
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if is_anew:
                ways = ActorLinks(ways._links, [reference])  # pyright: ignore[reportPrivateUsage]
            os.write(writer, send(ways, address, member, encode(Report()), LONG) or b"")
        finally:
            os._exit(0)
    os.close(writer)
    received = os.read(reader, 1 << 16)
    os.close(reader)
    os.waitpid(pid, 0)
    return received


def test_a_store_asks_by_it(many: Agents, agent: Agent, client: ActorClient, caller: Caller, reference: bytes) -> None:
    """A host whose keys have their home at the actor's: put, get, wait, and bytes over TCP. It has none itself."""
    other = many.serve("b", "--no-homes", join=agent, members=2)
    agent.wait_until_serving(2)
    assert client.run(use_a_store, other.root, str(many.secret), reference) == ["by actors", 42.0, [1.0, 2.0], True]
    found = find_actor(caller, other)
    assert not found.reference and "--monarch" in found.why
    maps = Path(f"/proc/{caller.report(other).pid}/maps").read_text()
    assert "lmdb" in maps and "monarch/_rust_bindings" not in maps, "Monarch is loaded, and nobody asked for it"
    other.terminate()


def use_a_store(_: ActorLinks, root: str, secret: str, reference: bytes) -> list[object]:
    import torch

    from memstore.distributed.actors import use_actors

    os.environ["MEMSTORE_SECRET_FILE"] = secret
    use_actors([reference])
    with memstore.open(root, "r+") as store:
        version = store.put("store/k", torch.tensor(42.0))
        store.put("store/l", torch.arange(1 << 18, dtype=torch.float32))
        there = store.wait("store/k", newer_than=version - 1) == version
        return ["by actors", float(store.get("store/k")), store.get("store/l")[1:3].tolist(), there]


@pytest.mark.parametrize("seconds", [1.0, pytest.param(40.0, marks=pytest.mark.full)])
def test_a_client_that_is_killed_ends_nobody_else(
    many: Agents, agent: Agent, client: ActorClient, caller: Caller, reference: bytes, seconds: float
) -> None:
    """By its defaults Monarch gives up after half a minute, and some of its processes with that."""
    before = caller.report(agent)
    with client_of(agent, many.secret, reference, decode_reference(reference).member) as other:
        other.begin(Wait(before.epoch, f"killed/{seconds:g}".encode(), 0, 10_000))
        time.sleep(0.2)
        os.kill(other.pid, signal.SIGKILL)
    with memstore.open(agent.root, "r+") as store:
        store.put(f"killed/{seconds:g}", 1)  # its answer can't be delivered
    time.sleep(seconds)
    assert client.ask(Report()) is not None and caller.report(agent).pid == before.pid


@pytest.mark.full
def test_an_old_reference_ends_in_time_and_the_next_actor_is_found(many: Agents, caller: Caller) -> None:
    agent = many.serve("d", "--monarch")
    reference = wait_for_actor(caller, agent).reference
    with client_of(agent, many.secret, reference, decode_reference(reference).member) as client:
        kill_it(agent, client, caller, reference)


def kill_it(agent: Agent, client: ActorClient, caller: Caller, reference: bytes) -> None:
    before = caller.report(agent)
    client.begin(Wait(before.epoch, b"old/k", 0, 10_000))
    os.kill(before.pid, signal.SIGKILL)
    started = time.monotonic()
    assert client.end() in ([None], [IsAt(0)])
    assert time.monotonic() - started < 20
    after = eventually(lambda: client.ask(Report()), "it is asked by the listener, and then by the next actor")
    assert isinstance(after, Reported) and after.pid != before.pid
    assert wait_for_actor(caller, agent).reference != reference
    eventually(lambda: client.run(asks_by_actor, agent.address), "the next actor")
    assert isinstance(client.ask(Report()), Reported)


def asks_by_actor(ways: ActorLinks, address: str) -> bool:
    member = next(iter(ways._ways))  # pyright: ignore[reportPrivateUsage]
    assert send(ways, address, member, encode(Report()), LONG) is not None
    return ways._ways[member].is_there  # pyright: ignore[reportPrivateUsage]


@pytest.mark.full
def test_an_old_reference_where_nobody_listens_is_no_answer_and_says_why(many: Agents, caller: Caller) -> None:
    """The host has had a clean end, which its index actor doesn't hold up."""
    agent = many.serve("c", "--monarch")
    old = wait_for_actor(caller, agent).reference
    assert "Monarch listens too: it authenticates nobody" in agent.log()
    with client_of(agent, many.secret, old, decode_reference(old).member) as client:
        assert isinstance(client.ask(Report()), Reported)
        started = time.monotonic()
        agent.terminate()
        assert time.monotonic() - started < 9, "it had to be killed"
        for _ in range(8):
            started = time.monotonic()
            assert client.ask(Report(), timeout=0.5) is None
            assert time.monotonic() - started < 5
        assert client.run(trouble, agent.address)


def trouble(ways: ActorLinks, address: str) -> str:
    return ways.trouble_of(address)


def test_monarch_is_not_imported_by_what_does_without() -> None:
    code = (
        "import sys, memstore, memstore.distributed.serving, memstore.distributed.serving.index_process\n"
        "print([name for name in ('monarch', 'asyncio', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
