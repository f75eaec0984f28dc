"""A look at a catalog that others change: it keeps no pages from them, and takes no change for damage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

import memstore
from memstore.engine.catalog.environment import STEP
from memstore.engine.format.records import RETIRED
from memstore.engine.repair import survey
from memstore.engine.repair.survey import inspect
from memstore.engine.root.roots import Root
from tests.children import Child, Wire, children
from tests.inside import root_of

KEYS = 3000


def make(root: str, *, files: int = 0) -> None:
    """Many small values, so that a look at them takes a while."""
    with memstore.open(root) as store:
        store.put_many({f"key {i:05}": i for i in range(KEYS)})
        store.put_many({f"file {i:05}": torch.full((2000,), i) for i in range(files)})


class Words:
    """What a look says."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def say(self, *words: Any) -> None:
        self.all.append(words)

    def flush(self) -> None: ...

    @property
    def damage(self) -> list[tuple[Any, ...]]:
        return [words[1:] for words in self.all if words[0] == "damage"]


def look(root: Root, longest: float) -> Words:
    words = Words()
    inspect(root.catalog, words, with_rows=False, longest=longest)  # type: ignore[arg-type]
    assert words.all[-1][0] == "end"
    return words


@contextmanager
def a_writer_between_rows(monkeypatch: pytest.MonkeyPatch, every: int, write: Any, root: str) -> Iterator[list[int]]:
    """Another process takes turns with the look: each so many rows it is told to write. Yields how often."""
    turns = [0]
    looked_at = survey._CatalogWalk._look_at
    rows = 0

    def turn(*arguments: Any) -> None:
        nonlocal rows
        rows += 1
        if rows % every == 0:
            turns[0] += 1
            writer.send()
            writer.receive()
        looked_at(*arguments)

    with Child(write, root) as writer:
        writer.receive()
        monkeypatch.setattr(survey._CatalogWalk, "_look_at", turn)
        yield turns


def a_transaction_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `look(root, 0.0)`: more of them than are ever taken."""
    monkeypatch.setattr(survey, "_ROWS_A_TRANSACTION", 1)
    monkeypatch.setattr(survey, "_PAUSE", 0)


def put_one_key(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        while True:
            wire.send()
            wire.receive()
            for number in range(40):
                store.put("hot", number)


def test_the_catalog_does_not_grow(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a transaction may read, no writer uses again: one for the whole walk cost 20 KiB a put."""
    make(scratch)
    with memstore.open(scratch) as store, a_writer_between_rows(monkeypatch, 40, put_one_key, scratch) as turns:
        before = store.stats().catalog_bytes
        assert look(root_of(store), survey._TRANSACTION).damage == []
        assert turns[0] >= KEYS // 40
        assert store.stats().catalog_bytes == before


def change_all_kinds(wire: Wire, root: str) -> None:
    numbers = random.Random(3)
    with memstore.open(root) as store:
        while True:
            wire.send()
            wire.receive()
            one, other, file = (f"{kind} {numbers.randrange(200):05}" for kind in ("key", "key", "file"))
            store.delete(one, missing_ok=True)
            store.put_many({other: torch.ones(2000), file: torch.zeros(numbers.choice([2000, 3000]))})
            store.put(numbers.choice([one, file]), 1)


def test_no_change_is_taken_for_damage(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in rows that name each other, nor in sums."""
    make(scratch, files=200)
    a_transaction_a_row(monkeypatch)
    with memstore.open(scratch) as store, a_writer_between_rows(monkeypatch, 5, change_all_kinds, scratch) as turns:
        assert look(root_of(store), 0.0).damage == []
        assert turns[0] > KEYS // 5


def test_rows_that_contradict_each_other_are_found(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(scratch, files=300)
    a_transaction_a_row(monkeypatch)
    with memstore.open(scratch) as store:
        root = root_of(store)
        record, row = segment_of(root, b"file 00250")  # nothing that the writer touches
        last, _ = segment_of(root, b"file 00299")

        def spoil(transaction: Any) -> None:
            transaction.put_segment(record.segment, msgspec.structs.replace(row, state=RETIRED))
            transaction.delete_record(b"file 00299")
            transaction.put_number("held", 1 << 40, 77)

        with root.guard:
            root.catalog.update(spoil)
        with a_writer_between_rows(monkeypatch, 5, change_all_kinds, scratch):
            found = {(key, segment) for _, key, segment, _ in look(root, 0.0).damage}
    assert found == {(b"file 00250", record.segment), (b"file 00299", last.segment), (None, 77)}


def test_counters_that_would_repeat_are_found(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(scratch)
    a_transaction_a_row(monkeypatch)
    with memstore.open(scratch) as store:
        root = root_of(store)

        set_counters(root, version=1)
        with a_writer_between_rows(monkeypatch, 500, change_all_kinds, scratch):
            ((detail, *_),) = look(root, 0.0).damage
    assert "counters are behind" in detail


def set_counters(root: Root, **values: int) -> None:
    def spoil(transaction: Any) -> None:
        transaction.put_counters(msgspec.structs.replace(transaction.counters(), **values))

    with root.guard:
        root.catalog.update(spoil)


def segment_of(root: Root, key: bytes) -> Any:
    with root.guard:
        record = root.catalog.read(key)
        assert record is not None
        return record, root.catalog.view(lambda transaction: transaction.segment(record.segment))


def test_sums_are_compared_in_many_transactions_of_one_moment(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes: all is found that one transaction for the whole walk would find."""
    make(scratch)
    a_transaction_a_row(monkeypatch)
    with memstore.open(scratch) as store:
        root = root_of(store)

        assert look(root, 0.0).damage == []
        set_counters(root, live=5)  # it isn't
        ((detail, *_),) = look(root, 0.0).damage
    assert "live bytes" in detail


@pytest.mark.full
@pytest.mark.timeout(600)
def test_verify_beside_busy_writers(scratch: str) -> None:
    """With a capacity: puts are never refused for the pages that a look keeps."""
    with memstore.open(scratch, capacity="64MiB") as store:
        for start in range(0, 60_000, 5000):
            store.put_many({f"key {i:06}": i for i in range(start, start + 5000)})
        with children(2, put_until_told, scratch) as writers:
            for writer in writers:
                writer.receive()
            before = store.stats().catalog_bytes
            for _ in range(2):
                report = store.verify()
                assert report.ok and report.checked >= 60_000, report
            for writer in writers:
                writer.send()
                assert writer.receive() > 100  # puts: it was busy
        assert store.stats().catalog_bytes <= before + 3 * STEP  # a look that is interrupted keeps what it then reads


def put_until_told(wire: Wire, number: int, root: str) -> int:
    count = 0
    with memstore.open(root) as store:
        wire.send()
        while not wire.has_message:
            count += 1
            store.put(f"hot {number}", count)
            if count % 50 == 0:
                store.put_many({f"{number} {i}": torch.ones(2000) for i in range(3)})
                store.delete(f"{number} 0")
    return count
