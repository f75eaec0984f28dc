"""Lookups of more keys, or of more that is said of them, than a message has room for: all of them, at one moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memstore.distributed.rules import Answer, Change, Entry, Send, Transact, owning, reading
from memstore.distributed.rules.messages import Found, Lookup
from memstore.errors import HomeUnavailableError
from tests.distributed.rules.test_membership import cluster, key_at, run
from tests.distributed.rules.world import Host, Process, World

COUNT = 20


class Reading:
    """A process on one host that looks up keys whose home is the other one.

    Attributes:
        before: called before each lookup is answered, with how many were.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = cluster(2)
        self.home, self.process = self.world.hosts["h0"], self.world.start_process(self.world.hosts["h1"])
        group = key_at(self.world, self.home)
        self.keys = [group + b"/%02d" % number for number in range(COUNT)]
        self.before: Callable[[int], None] = lambda number: None
        self.lookups: list[Lookup] = []
        answer = self.world.answer

        def answered(host: Host, index: Any, request: Any) -> Answer:
            if isinstance(request, Lookup):
                self.before(len(self.lookups))
                self.lookups.append(request)
            return answer(host, index, request)

        monkeypatch.setattr(self.world, "answer", answered)

    def put(self, body: bytes, *keys: bytes) -> None:
        """At once, as a process of the home's host does."""
        tables = self.home.tables
        changes = [Change(key, body) for key in keys or self.keys]
        owning.apply(tables, tables.standing(), changes)

    def delete(self, *keys: bytes) -> None:
        tables = self.home.tables
        owning.apply(tables, tables.standing(), [Change(key, None) for key in keys])

    def get(self, seconds: float = 5) -> list[bytes | None]:
        entries: tuple[Entry | None, ...] = run(
            self.world, self.process, reading.look_up(self.process.client, self.keys), seconds
        )
        return [None if entry is None else entry.body for entry in entries]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch)


def limit(monkeypatch: pytest.MonkeyPatch, *, keys: int = 1 << 16, nbytes: int = 1 << 24) -> None:
    monkeypatch.setattr(reading, "BATCH_LIMIT", keys)
    monkeypatch.setattr(owning, "BYTES_LIMIT", nbytes)


def test_what_fits_is_one_message(reader: Reading) -> None:
    reader.put(b"x")
    assert reader.get() == [b"x"] * COUNT
    assert len(reader.lookups) == 1


@pytest.mark.parametrize(("keys", "nbytes"), [(7, 1 << 24), (1 << 16, 3000), (5, 3000), (1, 1)])
def test_any_number_of_keys_comes_in_order(
    reader: Reading, monkeypatch: pytest.MonkeyPatch, keys: int, nbytes: int
) -> None:
    limit(monkeypatch, keys=keys, nbytes=nbytes)
    for number, key in enumerate(reader.keys):
        if number % 3:
            reader.put(b"%d" % number, key)
    assert reader.get() == [b"%d" % number if number % 3 else None for number in range(COUNT)]
    assert len(reader.lookups) > 2
    assert all(len(one.keys) <= keys for one in reader.lookups)


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("change", ["put", "delete", "first", "last"])
def test_several_messages_are_of_one_moment(
    reader: Reading, monkeypatch: pytest.MonkeyPatch, change: str, at: int
) -> None:
    """A batch is put, or deleted, between two of them."""
    limit(monkeypatch, keys=6)
    reader.put(b"old", *(reader.keys if change != "first" else reader.keys[1:]))
    states = [reader.get()]

    def now(number: int) -> None:
        if number != at + done:
            return
        if change == "delete":
            reader.delete(*reader.keys)
        else:
            reader.put(b"new", *reader.keys)

    done = len(reader.lookups)
    reader.before = now
    found = reader.get()
    reader.before = lambda number: None
    states.append(reader.get())
    assert found in states


def test_what_changes_in_the_middle_of_each_try_is_asked_for_until_the_time_is_over(
    reader: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, keys=6)
    reader.put(b"0")
    reader.before = lambda number: reader.put(b"%d" % number)
    with pytest.raises(HomeUnavailableError):
        reader.get(seconds=2)
    reader.before = lambda number: None
    assert len(set(reader.get())) == 1


def test_an_answer_of_too_many_or_no_entries_says_nothing(reader: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.put(b"x")
    answer = reader.world.answer
    wrong = [Found(()), Found((None,) * (COUNT + 1))]

    def answered(host: Host, index: Any, request: Any) -> Answer:
        right = answer(host, index, request)
        return wrong.pop() if isinstance(request, Lookup) and wrong else right

    monkeypatch.setattr(reader.world, "answer", answered)
    assert reader.get() == [b"x"] * COUNT
    assert not wrong


def test_a_key_that_is_given_away_while_it_is_to_be_pinned_is_looked_for_again(reader: Reading) -> None:
    """A schedule has found that: it was called missing."""
    reader.put(b"x")
    tables, key = reader.home.tables, reader.keys[0]
    steps: Any = reading.look_up(reader.process.client, [key], pin=True)
    grants = steps.send(next(steps).action(tables))
    request = steps.send(grants.action(tables))
    assert isinstance(request, Send)
    again = steps.send(None)  # the index process was killed
    tables.delete_record(key)
    assert isinstance(steps.send(again.action(tables)), Transact)


def test_keys_whose_home_is_here_are_pinned_in_several_messages(
    reader: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, keys=6)
    reader.put(b"x")
    process: Process = reader.world.start_process(reader.home)
    entries = run(reader.world, process, reading.look_up(process.client, reader.keys, pin=True))
    assert [entry.body for entry in entries] == [b"x"] * COUNT
    assert sum(one.pin for one in reader.lookups) == 4 and isinstance(reader.world, World)
