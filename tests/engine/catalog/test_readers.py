"""Readers of the catalog: which pages they keep from writers, and who they are."""

from __future__ import annotations

import os
import signal
import struct

import pytest

import memstore
from memstore.engine.catalog.environment import STEP, CatalogReader, count_free, parse_readers
from memstore.engine.catalog.tables import NAMES, Transaction
from memstore.engine.root.roots import Root
from memstore.errors import CorruptionError, StoreFullError
from tests.children import Child, Wire
from tests.engine.bytes_store import delete, get, opened, put, put_many
from tests.inside import lmdb_of, lmdb_table

VALUE = b"v" * 1400
ALL = 1 << 60


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("(no active readers)\n", None),
        ("    pid     thread     txnid\n      7809 7f05ef61cb80 -\n", None),
        ("    pid     thread     txnid\n      7809 7f05ef61cb80 12\n       5 7f05ef61cb80 3\n", CatalogReader(5, 3)),
        (
            "    pid     thread     txnid\n1234567890 7f05ef61cb80 -\n1234567891 7f05ef61cb80 70\n",
            CatalogReader(1234567891, 70),
        ),
    ],
    ids=range(4),
)
def test_the_list_of_readers(listed: str, expected: CatalogReader | None) -> None:
    assert parse_readers(listed) == expected


# --- how many pages are free ------------------------------------------------------------------------------------------


def pages_of(root: Root) -> tuple[int, int]:
    """How many pages are free, by what all tables leave; how many the list of them takes."""
    env = lmdb_of(root)
    with env.begin() as handle:
        stats = [env.stat(), *(handle.stat(lmdb_table(root, name)) for name in NAMES)]
    used = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
    with open(f"{root.path}/catalog/local/data.mdb", "rb") as file:
        metas = [os.pread(file.fileno(), 4096, place) for place in (0, 4096)]
    newest = max(metas, key=lambda meta: struct.unpack_from("<Q", meta, 144))
    listing = sum(struct.unpack_from("<QQQ", newest, 48))
    return env.info()["last_pgno"] + 1 - 2 - used - listing, listing


def counted(root: Root, moment: int = ALL, enough: int = ALL) -> int:
    return count_free(f"{root.path}/catalog/local/data.mdb", moment, enough)


def test_none_is_free_in_a_new_store(root: str) -> None:
    with opened(root) as opened_root:
        assert counted(opened_root) == pages_of(opened_root)[0]


def test_all_are_counted(root: str) -> None:
    """Those of small changes, and those of one that freed more than a page's list can name."""
    with opened(root) as opened_root:
        for start in range(0, 3000, 500):
            put_many(opened_root, {b"%d" % number: VALUE for number in range(start, start + 500)})
        for number in range(300):
            put(opened_root, b"%d" % number, VALUE)
        free, _ = pages_of(opened_root)
        assert counted(opened_root) == free > 0
        with opened_root.guard:
            opened_root.catalog.update(lambda transaction: transaction.clear("entries"))
        free, _ = pages_of(opened_root)
        assert counted(opened_root) == free > 1000
        assert counted(opened_root, enough=10) >= 10
        assert counted(opened_root, moment=1) == 0


def test_those_that_a_reader_keeps_are_not_counted(root: str) -> None:
    """It stays while they come to fill a tree."""
    with opened(root) as opened_root:
        put_many(opened_root, {b"%d" % number: VALUE for number in range(500)})
        env = lmdb_of(opened_root)
        with Child(stay_in_a_read, root) as child:
            child.receive()
            moment = env.info()["last_txnid"]
            before = counted(opened_root, moment)
            for number in range(400):
                put(opened_root, b"%d" % number, VALUE)
            free, listing = pages_of(opened_root)
            assert listing > 5  # leaves, and a branch above them
            assert counted(opened_root) == free > 1000
            assert counted(opened_root, moment) <= before
            assert free // 3 < counted(opened_root, moment + 200) < 2 * free // 3


def test_a_damaged_list(scratch: str) -> None:
    with opened(scratch) as root:
        for number in range(10):
            put(root, b"%d" % number, VALUE)
        last = lmdb_of(root).info()["last_pgno"]
    path = f"{scratch}/catalog/local/data.mdb"
    with open(path, "r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\xff" * 4096 * (last - 1))
    with pytest.raises(CorruptionError, match="list of free pages"):
        count_free(path, ALL, ALL)


# --- a reader that stays ----------------------------------------------------------------------------------------------


def stay_in_a_read(wire: Wire, path: str) -> None:
    def stay(transaction: Transaction) -> None:
        transaction.counters()
        wire.send()
        wire.receive()

    with opened(path) as root, root.guard:
        root.catalog.view(stay)


def put_until_full(root: Root) -> StoreFullError:
    for number in range(100_000):
        try:
            put(root, b"%d" % (number % 500), VALUE)
        except StoreFullError as error:
            return error
    raise AssertionError("it never got full")


def test_a_stopped_reader_leaves_room_for_deletes_and_is_named(root: str) -> None:
    with opened(root, capacity=2 * STEP) as opened_root, Child(stay_in_a_read, root) as reader:
        put_many(opened_root, {b"%d" % number: VALUE for number in range(500)})
        reader.receive()
        os.kill(reader.pid, signal.SIGSTOP)
        before = opened_root.catalog.nbytes
        assert f"pid {reader.pid} " in str(put_until_full(opened_root))
        assert opened_root.catalog.nbytes > before  # it has grown as far as it may
        for number in range(50):
            delete(opened_root, b"%d" % number)
            assert get(opened_root, b"%d" % number) is None
        for number in range(500):
            if get(opened_root, b"%d" % number) is None:
                continue
            try:
                delete(opened_root, b"%d" % number)
            except StoreFullError as error:  # deletes replace pages too: there is an end to them
                assert f"pid {reader.pid} " in str(error)
                break
        else:
            raise AssertionError("the reader keeps no pages: the test is none")
        reader.kill()
        delete(opened_root, b"499")
        put(opened_root, b"499", VALUE)


def test_the_stores_error_names_it_too(root: str) -> None:
    with memstore.open(root, capacity=STEP) as store, Child(stay_in_a_read, root) as reader:
        reader.receive()
        with pytest.raises(memstore.StoreFullError, match=f"pid {reader.pid} has read since [0-9,]+ changes ago"):
            for number in range(100_000):
                store.put("key", b"%d" % number + VALUE)
        assert store.delete("key")
        reader.kill()
        store.put("key", VALUE)


def test_readers_that_come_and_go_are_no_reason_to_refuse(root: str) -> None:
    """One that is a moment behind keeps a few pages only: what else was deleted is used again."""
    with opened(root, capacity=STEP // 2) as opened_root:  # the first step, and no growth
        with pytest.raises(StoreFullError):
            for number in range(100_000):
                put(opened_root, b"%d" % number, VALUE)
        with Child(stay_in_a_read, root) as reader:
            reader.receive()
            with pytest.raises(StoreFullError) as caught:
                put(opened_root, b"0", VALUE)
            assert "pid" not in str(caught.value)  # it reads the present, so it keeps nothing
        with opened_root.guard:
            opened_root.catalog.update(lambda transaction: transaction.clear("entries"), is_delete=True)
        put_many(opened_root, {b"%d" % number: VALUE for number in range(200)})
        with Child(stay_in_a_read, root) as reader:
            reader.receive()
            for number in range(5):
                put(opened_root, b"%d" % number, VALUE)
