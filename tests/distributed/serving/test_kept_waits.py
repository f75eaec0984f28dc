"""An owner looks at the waits that a change may have ended, and at no others; none of them is slept through.

Nothing here is found by the look at all waits that comes each second: it is put off.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import pytest

import memstore
from memstore.distributed.catalog import run
from memstore.distributed.links import CLIENT, Asked, Begun, Links, hello_of_this_process
from memstore.distributed.rules import Index, Look, Tables, Wait, group_of
from memstore.distributed.rules.messages import IsAt, NotOwner
from memstore.distributed.serving import requests
from memstore.distributed.serving.questions import Told, decode_answer, encode
from memstore.distributed.serving.requests import KeyWaits
from memstore.engine import deadline_after
from tests.distributed.serving.agents import LONG, eventually
from tests.distributed.serving.homes import AnsweringHome, answering
from tests.inside import root_of

KEPT = 10_000  # milliseconds


class Asker:
    """Asks the home, by one connection, and waits for nothing."""

    def __init__(self, home: AnsweringHome, links: Links) -> None:
        self._home, self._links = home, links
        self._told = threading.Semaphore(0)
        self._begun: dict[str, Begun] = {}

    def begin(self, key: str, newer_than: int = 0, *, milliseconds: int = KEPT) -> None:
        (grant,) = self._home.own(group_of(key.encode()))
        self.ask(key, Wait(key.encode(), grant, newer_than, milliseconds))

    def ask(self, name: str, request: Wait | Look) -> None:
        message, until = encode(request), time.monotonic() + LONG
        home = self._home
        self._begun[name] = self._links.begin(home.address, home.member, message, LONG, self._told.release, until)

    def told(self) -> tuple[str, Told]:
        """The next key whose wait has ended."""
        assert self._told.acquire(timeout=LONG), "nobody is told"
        name, begun = next((name, begun) for name, begun in self._begun.items() if begun.is_over)
        del self._begun[name]
        assert begun.answer is not None
        return name, decode_answer(begun.answer)

    @property
    def names(self) -> list[str]:
        """Of those that have not ended, as far as this has been told."""
        return list(self._begun)


class Looks:
    """Which tickets the home has looked at, each time that it looked; and which waits it keeps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at: deque[list[int]] = deque()
        self.kept: set[bytes | None] = set()
        self.forgotten = 0
        ended_waits, keep, forget = Index.ended_waits, Index.keep, Index.forget

        def look(index: Index, tables: object, tickets: object = None) -> object:
            self.at.append(list(tickets))  # pyright: ignore
            return ended_waits(index, tables, tickets)  # pyright: ignore

        def note(index: Index, ticket: int, wait: Wait | Look) -> None:
            keep(index, ticket, wait)
            self.kept.add(wait.key)

        def count(index: Index, ticket: int) -> None:
            forget(index, ticket)
            self.forgotten += 1

        patch.setattr(Index, "ended_waits", look)
        patch.setattr(Index, "forget", count)
        patch.setattr(Index, "keep", note)

    def until_kept(self, count: int) -> None:
        """And looked at: no later look is due to them alone."""
        eventually(lambda: len(self.kept) == count and sum(map(len, self.at)) >= count, "they are kept")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    monkeypatch.setattr(requests, "_LOOK_EVERY", 1000.0)
    return Looks(monkeypatch)


@pytest.fixture
def home(scratch: str, looks: Looks) -> Iterator[AnsweringHome]:
    with answering(scratch, with_waits=True) as one:
        yield one


@pytest.fixture
def store(home: AnsweringHome) -> Iterator[memstore.Store]:
    with memstore.open(home.root.path) as one:
        yield one


@pytest.fixture
def asker(home: AnsweringHome) -> Asker:
    return Asker(home, home._links)


def last_of(asker: Asker, store: memstore.Store) -> str:
    """The key of the one wait that is left, which ends."""
    (name,) = asker.names
    version = store.put(name, 1)
    assert asker.told() == (name, IsAt(version))
    return name


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_each_wait_ends_with_a_put_of_its_own_key(
    store: memstore.Store, asker: Asker, looks: Looks, count: int
) -> None:
    keys = [f"key{number}" for number in range(count)]
    for key in keys:
        asker.begin(key)
    looks.until_kept(count)
    for key in keys:
        version = store.put(key, 1)
        assert asker.told() == (key, IsAt(version))
    assert asker.names == []


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_one_put_of_many_keys_ends_the_waits_for_all(
    store: memstore.Store, asker: Asker, looks: Looks, count: int
) -> None:
    keys = [f"key{number}" for number in range(count)]
    for key in [*keys, "other"]:
        asker.begin(key)
    looks.until_kept(count + 1)
    versions = store.put_many(dict.fromkeys(keys, 1))
    assert dict(asker.told() for _ in keys) == {key: IsAt(version) for key, version in versions.items()}
    assert asker.names == ["other"]
    assert last_of(asker, store) == "other"


def test_a_put_that_nobody_waits_for_is_looked_at_by_nobody(
    home: AnsweringHome, store: memstore.Store, asker: Asker, looks: Looks
) -> None:
    doorbell = root_of(store).doorbell
    keys = [f"key{number}" for number in range(50)]
    bells = {doorbell.bell(key.encode()) for key in [*keys, "last"]}
    others = [key for key in (f"other{number}" for number in range(100)) if doorbell.bell(key.encode()) not in bells]
    home.own(*(key.encode() for key in others))
    for key in [*keys, "last"]:
        asker.begin(key)
    looks.until_kept(51)
    looks.at.clear()
    for key in others:
        store.put(key, 1)
    version = store.put("last", 1)
    assert asker.told() == ("last", IsAt(version))
    assert [len(tickets) for tickets in looks.at] == [1]
    store.put_many(dict.fromkeys(keys, 1))
    for _ in keys:
        asker.told()


def test_keys_that_share_a_bell_are_told_apart(store: memstore.Store, asker: Asker, looks: Looks) -> None:
    doorbell = root_of(store).doorbell
    other = next(
        key
        for key in (f"other{number}" for number in range(10**6))
        if doorbell.bell(key.encode()) == doorbell.bell(b"k")
    )
    for key in ("k", other, "last"):
        asker.begin(key)
    looks.until_kept(3)
    version = store.put(other, 1)
    assert asker.told() == (other, IsAt(version))
    version = store.put("last", 1)
    assert asker.told() == ("last", IsAt(version))
    assert last_of(asker, store) == "k"


def test_none_is_missed_when_puts_come_while_waits_begin(
    home: AnsweringHome, store: memstore.Store, asker: Asker
) -> None:
    """Where one is, it ends after its time, with no version."""
    keys = [f"key{number}" for number in range(300)]
    home.own(*(key.encode() for key in keys))
    versions: dict[str, int] = {}
    begins = threading.Barrier(2)

    def put() -> None:
        begins.wait()
        for key in keys:
            versions[key] = store.put(key, 1)

    putter = threading.Thread(target=put)
    putter.start()
    begins.wait()
    for key in keys:
        asker.begin(key)
    told = dict(asker.told() for _ in keys)
    putter.join()
    assert told == {key: IsAt(version) for key, version in versions.items()}


def test_a_put_between_the_first_look_and_the_keeping_of_a_wait_is_seen(
    store: memstore.Store, asker: Asker, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, versions = KeyWaits.keep, dict[str, int]()

    def keep_later(waits: KeyWaits, asked: Asked, wait: Wait | Look) -> None:
        assert wait.key is not None
        key = wait.key.decode()
        versions[key] = store.put(key, 1)
        keep(waits, asked, wait)

    asker.begin("other")
    looks.until_kept(1)  # the first look is at all waits
    monkeypatch.setattr(KeyWaits, "keep", keep_later)
    for key in ("one", "two"):
        asker.begin(key)
        assert asker.told() == (key, IsAt(versions[key]))
    assert last_of(asker, store) == "other"


def test_a_delete_ends_no_wait_and_the_next_put_does(
    home: AnsweringHome, store: memstore.Store, asker: Asker, looks: Looks
) -> None:
    home.own(b"key")
    version = store.put("key", 1)
    asker.begin("key", version)
    asker.begin("other")
    looks.until_kept(2)
    store.delete("key")
    there = store.put("other", 1)
    assert asker.told() == ("other", IsAt(there))
    assert last_of(asker, store) == "key"


def test_waits_are_told_when_their_group_goes_to_another_host(home: AnsweringHome, asker: Asker, looks: Looks) -> None:
    names = [f"key{number}" for number in range(50)]
    for name in names:
        asker.begin(name)
    looks.until_kept(50)

    def give_all_away(tables: Tables) -> None:
        standing = tables.standing()
        assert standing is not None
        for name in names:
            tables.drop_owned(name.encode())
        tables.put_standing(msgspec.structs.replace(standing, floor=tables.granted))

    run(home.root, give_all_away, deadline_after(10))
    assert {answer for _, answer in (asker.told() for _ in names)} == {NotOwner()}


def test_waits_whose_time_is_over_end_and_others_stay(store: memstore.Store, asker: Asker, looks: Looks) -> None:
    asker.begin("long")
    for number in range(10):
        asker.begin(f"short{number}", milliseconds=50 + 10 * number)
    assert dict(asker.told() for _ in range(10)) == {f"short{number}": IsAt(0) for number in range(10)}
    assert last_of(asker, store) == "long"


def test_who_looks_at_sharded_puts_of_any_key_is_looked_for_after_each_change(
    home: AnsweringHome, store: memstore.Store, asker: Asker, looks: Looks
) -> None:
    asker.ask("any", Look(None, None, 0, milliseconds=KEPT))
    looks.until_kept(1)
    home.own(b"key")
    before = len(looks.at)
    store.put("key", 1)
    eventually(lambda: len(looks.at) > before, "it is looked for")
    assert asker.names == ["any"]


def test_waits_that_are_forgotten_leave_nothing(
    home: AnsweringHome, store: memstore.Store, asker: Asker, looks: Looks
) -> None:
    links = Links(secret=None, kind=CLIENT, hello=hello_of_this_process())
    other = Asker(home, links)
    asker.begin("kept")
    for number in range(20):
        other.begin(f"key{number}")
    looks.until_kept(21)
    links.close()
    eventually(lambda: looks.forgotten == 20, "they are forgotten")
    looks.at.clear()
    store.put_many({f"key{number}": 1 for number in range(20)})
    version = store.put("kept", 1)
    assert asker.told() == ("kept", IsAt(version))
    assert sum(map(len, looks.at)) == 1
