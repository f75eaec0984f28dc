"""The catalog: grows, is shared, tells damage, and never leaves a raw LMDB error to its callers."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest

from memstore.engine.catalog import environment as catalogs
from memstore.engine.catalog import tables
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.catalog.environment import STEP
from memstore.engine.catalog.tables import Transaction
from memstore.engine.format.records import LIVE, SegmentRow
from memstore.engine.protocols.change import Change, Content
from memstore.engine.protocols.put import commit
from memstore.engine.protocols.sweep import sweep, sweep_all
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CorruptionError, ResourceLimitError, StoreClosedError
from tests.children import Child, Wire, children, in_child
from tests.engine.bytes_store import delete, get, keys, opened, put
from tests.examples import one_in

VALUE = b"v" * 1400


def put_inline(path: str, first: int, count: int, batch: int = 50) -> None:
    with opened(path) as root:
        for start in range(first, first + count, batch):
            changes = [
                Change(b"%08d" % number, Content(b"bytes", b"", len(VALUE), inline=VALUE))
                for number in range(start, start + batch)
            ]
            commit(root, changes, deadline_after(30))


def test_it_grows_beyond_its_first_step(root: str) -> None:
    with opened(root) as opened_root:
        before = opened_root.catalog.nbytes
    put_inline(root, 0, 8000)
    with opened(root) as opened_root:
        assert opened_root.catalog.nbytes > before + STEP // 2
        assert keys(opened_root) == [b"%08d" % number for number in range(8000)]
        assert get(opened_root, b"00007999") == VALUE


def test_two_processes_grow_it_at_once(root: str) -> None:
    with opened(root) as opened_root:
        put(opened_root, b"first", b"1")
        with children(2, _put_inline_child, root, 6000) as both:
            for child in both:
                child.receive(60)
        # This process saw none of the growth: its map is the first one still.
        assert get(opened_root, b"first") == b"1"
        put(opened_root, b"last", b"2")
        assert len(keys(opened_root)) == 12_002
        assert get(opened_root, b"00005999") == get(opened_root, b"01005999") == VALUE


def _put_inline_child(_: Wire, number: int, path: str, count: int) -> None:
    put_inline(path, number * 1_000_000, count)


@pytest.mark.parametrize("operation", ["get", "put", "delete", "keys", "many"])
def test_a_map_that_others_grew_is_taken_over(root: str, operation: str) -> None:
    with opened(root) as opened_root:
        put(opened_root, b"first", b"1")
        in_child(put_inline, root, 0, 12_000)  # two steps further
        if operation == "get":
            assert get(opened_root, b"00011999") == VALUE
        elif operation == "put":
            put(opened_root, b"last", b"2")
            assert get(opened_root, b"last") == b"2"
        elif operation == "delete":
            delete(opened_root, b"00000000")
            assert get(opened_root, b"00000000") is None
        elif operation == "keys":
            assert len(keys(opened_root)) == 12_001
        else:
            put_inline(root, 20_000, 8000)
            assert len(keys(opened_root)) == 20_001


def test_deletes_and_puts_use_the_same_pages_again(root: str) -> None:
    with opened(root) as opened_root:
        for _ in range(6):
            for start in range(0, 2000, 500):
                changes = [
                    Change(b"%08d" % number, Content(b"bytes", b"", len(VALUE), inline=VALUE))
                    for number in range(start, start + 500)
                ]
                commit(opened_root, changes, deadline_after(30))
            for start in range(0, 2000, 500):
                gone = [Change(b"%08d" % number, None) for number in range(start, start + 500)]
                commit(opened_root, gone, deadline_after(30))
        assert opened_root.catalog.nbytes < 3 * STEP  # 17 MiB of values were written


def test_overwrites_of_one_key_need_no_room(root: str) -> None:
    with opened(root) as opened_root:
        for number in range(8000):
            put(opened_root, b"key", b"%08d" % number + VALUE)
        assert opened_root.catalog.nbytes < 2 * STEP
        assert get(opened_root, b"key") == b"00007999" + VALUE


def test_it_is_allocated_so_that_no_commit_finds_the_disk_full(root: str) -> None:
    with opened(root):
        for name in ("data.mdb", "lock.mdb"):
            status = os.stat(f"{root}/catalog/local/{name}")
            assert status.st_blocks * 512 >= status.st_size, name
        assert os.stat(f"{root}/catalog/local/data.mdb").st_size == STEP


def test_pages_of_keys_are_in_order_and_complete(root: str) -> None:
    names = sorted(text.encode() for text in ("a", "b", "ä", "a/b", "z", "\x01", "🐍", "a" * 500, "ab"))
    with opened(root) as opened_root:
        for name in names:
            put(opened_root, name, b"")

        def page(prefix: bytes, after: bytes | None, limit: int) -> list[bytes]:
            with opened_root.guard:
                return opened_root.catalog.view(lambda transaction: transaction.keys(prefix, after, limit))

        assert page(b"", None, 100) == names
        found: list[bytes] = []
        while more := page(b"", found[-1] if found else None, 2):
            found += more
        assert found == names
        assert page(b"a", None, 100) == [name for name in names if name.startswith(b"a")]
        assert page(b"a", b"a", 100) == [name for name in names if name.startswith(b"a")][1:]
        assert page(b"a", b"aa", 1) == [b"a" * 500]
        assert page("🐍".encode(), None, 100) == ["🐍".encode()]
        assert page(b"\xff", None, 100) == []
        assert page(b"a" * 500, None, 100) == [b"a" * 500]
        assert page(b"a" * 501, None, 100) == page(b"a" * 5000, None, 100) == []


def test_numbers_never_repeat(root: str) -> None:
    with opened(root) as opened_root:
        put(opened_root, b"a", b"x" * 5000)
        delete(opened_root, b"a")
        put(opened_root, b"a", b"x" * 5000)
        with opened_root.guard:
            counters = opened_root.catalog.view(lambda transaction: transaction.counters())
    assert counters.number == 3  # one segment, used again, and two put ids
    assert counters.version == 2


def test_a_table_that_a_later_version_adds(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that was made before has it as soon as somebody may write, and can be read without it."""
    with opened(scratch) as root:
        put(root, b"key", b"value")
    monkeypatch.setattr(tables, "OPTIONAL", ("added",))
    reading = Catalog(f"{scratch}/catalog/local", durable=False, writable=False)
    assert reading.read(b"key") is not None
    reading.close()
    with opened(scratch) as root:
        root.mutex.run(lambda: root.catalog.update(lambda found: found.put_number("added", 1, 2)), deadline_after(30))
    reading = Catalog(f"{scratch}/catalog/local", durable=False, writable=False)
    assert reading.view(lambda transaction: transaction.numbers("added", 10)) == [(1, 2)]
    reading.close()
    monkeypatch.undo()
    assert in_child(_read, scratch) == b"value"  # an earlier version takes no notice of it


def limit_readers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(catalogs, "MAX_READERS", count)
    monkeypatch.setattr(catalogs, "_LOCK_FILE_SIZE", 1)  # a larger file has room for more readers, and LMDB uses it


def test_readers_that_were_killed_leave_no_slots(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_readers(monkeypatch, 8)
    with opened(root) as opened_root:
        put(opened_root, b"key", b"value")
        for _ in range(12):
            with Child(_stay_in_a_read, 0, root) as child:
                child.receive()  # and is killed
        assert get(opened_root, b"key") == b"value"


def test_a_forked_child_reads_in_its_own_name(root: str) -> None:
    """With its parent's environment it would read in the parent's name: killed, it kept old pages for ever."""
    with opened(root) as opened_root:
        put(opened_root, b"key", VALUE)
        with Child(_stay_in_a_read, 0, root) as child:
            child.receive()  # and is killed
        for number in range(2000):
            put(opened_root, b"key", b"%08d" % number + VALUE)
        assert opened_root.catalog.nbytes < 2 * STEP


def test_too_many_readers_are_told_so(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_readers(monkeypatch, 3)
    with opened(root) as opened_root:
        put(opened_root, b"key", b"value")
        with children(2, _stay_open, root) as readers:
            for child in readers:
                child.receive()
            with pytest.raises(ResourceLimitError, match="3 processes have this store open"):
                in_child(_read, root)
            assert get(opened_root, b"key") == b"value"
        sweep_all(opened_root, deadline_after(30))  # both were killed
        assert in_child(_read, root) == b"value"


def test_an_environment_that_others_opened_here_is_no_damage(root: str) -> None:
    with opened(root) as opened_root:
        put(opened_root, b"key", b"value")
    with (
        lmdb.open(f"{root}/catalog/local", max_dbs=8, map_size=STEP),
        pytest.raises(ResourceLimitError, match="something else than memstore has it open"),
        opened(root),
    ):
        pass
    with opened(root) as opened_root:
        assert get(opened_root, b"key") == b"value"


def _stay_open(wire: Wire, _: int, path: str) -> None:
    with opened(path) as root:
        get(root, b"key")
        wire.send("in")
        wire.receive()


def _stay_in_a_read(wire: Wire, _: int, path: str) -> None:
    def stay(transaction: Transaction) -> None:
        transaction.record(b"key")
        wire.send("in")
        wire.receive()

    with opened(path) as root, root.guard:
        root.catalog.view(stay)


def test_a_lost_reader_table_is_made_again(root: str) -> None:
    with opened(root) as opened_root:
        put(opened_root, b"key", b"value")
    os.unlink(f"{root}/catalog/local/lock.mdb")
    assert in_child(_read, root) == b"value"


def _read(path: str) -> bytes | None:
    with opened(path) as root:
        return get(root, b"key")


# --- damage -----------------------------------------------------------------------------------------------------------


def spoil(path: str, table: str, key: bytes, value: bytes) -> None:
    """Writes a row behind memstore's back; in a process that has the store not open."""
    env = lmdb.open(f"{path}/catalog/local", max_dbs=8, map_size=STEP)
    with env.begin(write=True) as transaction:
        transaction.put(key, value, db=env.open_db(table.encode(), transaction))
    env.close()


BAD_VALUES = [b"", b"\x00", b"\xff" * 7, b"\x94\x01", b"\x80" * 40, b"x" * 100]
U64 = struct.Struct(">Q").pack


ROWS = [
    ("entries", b"key"),
    ("segments", U64(1)),
    ("segments", b"odd"),
    ("filling", U64(1)),
    ("filling", b"odd"),
    ("retired", U64(1)),
    ("retired", b"odd"),
    ("leases", U64(1)),
    ("counters", b"counters"),
    ("counters", b"store"),
]


@pytest.mark.parametrize(("table", "key"), one_in(2, ROWS), ids=str)
def test_a_damaged_row_is_a_typed_error(scratch: str, table: str, key: bytes) -> None:
    with opened(scratch) as root:
        put(root, b"key", b"x" * 5000)
        put(root, b"other", b"y" * 5000)
    for value in BAD_VALUES:
        copy = f"{scratch}.{value.hex()}"
        shutil.copytree(scratch, copy)
        in_child(_spoil_and_use, copy, table, key, value)
        shutil.rmtree(copy)


def _spoil_and_use(path: str, table: str, key: bytes, value: bytes) -> None:
    spoil(path, table, key, value)
    for action in (_read, _overwrite, _sweep):
        with contextlib.suppress(CorruptionError):
            action(path)


def _overwrite(path: str) -> None:
    with opened(path) as root:
        put(root, b"key", b"z" * 5000)


def _sweep(path: str) -> None:
    with opened(path) as root:
        root.mutex.run(lambda: sweep(root, [], files=100, keep=0), deadline_after(10))


def test_a_flipped_bit_in_a_record_is_told_with_its_key(scratch: str) -> None:
    with opened(scratch) as root:
        put(root, b"key", b"needle" * 100)
    path = Path(scratch, "catalog/local/data.mdb")
    stored = bytearray(path.read_bytes())
    place = stored.index(b"needle" * 100)
    stored[place + 40] ^= 4
    path.write_bytes(stored)
    with opened(scratch) as root, pytest.raises(CorruptionError, match="'key'") as caught:
        get(root, b"key")
    assert caught.value.key == "key"


def test_a_truncated_file_is_refused_before_it_is_a_sigbus(scratch: str) -> None:
    put_inline_and_close(scratch)
    path = f"{scratch}/catalog/local/data.mdb"
    copy = f"{scratch}.copy"
    shutil.copy(path, copy)
    size = os.stat(path).st_size
    refused = 0
    for kept in (1, 100, 4096, 5000, 8192, 12288, 65536, 500_000, 700_001, size - 4096, size):
        shutil.copy(copy, path)
        os.truncate(path, kept)
        try:
            in_child(_read_all, scratch)  # a SIGBUS would be a RuntimeError here
        except CorruptionError as error:
            assert error.path == path
            refused += 1
    assert refused == 9  # all but the last two, which cut no page that is in use


def put_inline_and_close(path: str) -> None:
    in_child(put_inline, path, 0, 1000)


def _read_all(path: str) -> None:
    with opened(path) as root:
        for key in keys(root):
            assert get(root, key) == VALUE


def test_garbage_is_no_catalog(scratch: str) -> None:
    put_inline_and_close(scratch)
    path = Path(scratch, "catalog/local/data.mdb")
    path.write_bytes(os.urandom(STEP))
    with pytest.raises(CorruptionError) as caught:
        in_child(_read_all, scratch)
    assert caught.value.path == str(path)


def test_transactions_hand_out_copies(scratch: str) -> None:
    with opened(scratch) as root:
        with root.guard:
            root.catalog.update(lambda transaction: transaction.put_segment(1, SegmentRow(b"key", 2, LIVE, 3)))
            row = root.catalog.view(lambda transaction: transaction.segment(1))
        for number in range(500):
            put(root, b"%d" % number, VALUE)
        assert row == SegmentRow(b"key", 2, LIVE, 3)


def test_a_failed_update_changes_nothing(root: str) -> None:
    with opened(root) as opened_root:
        put(opened_root, b"key", b"old")

        def fail(transaction: Transaction) -> None:
            transaction.delete_record(b"key")
            raise ZeroDivisionError

        with opened_root.guard, pytest.raises(ZeroDivisionError):
            opened_root.catalog.update(fail)
        assert get(opened_root, b"key") == b"old"


def test_an_interrupt_before_an_abort_leaves_no_transaction(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who keeps the error keeps the frames of its traceback, and LMDB begins no second transaction in a thread."""
    with opened(root) as opened_root:
        put(opened_root, b"a", b"1")
        catalog, waits = opened_root.catalog, [KeyboardInterrupt()]
        abort = catalog._abort

        def interrupted() -> None:
            if waits:
                raise waits.pop()
            abort()

        monkeypatch.setattr(catalog, "_abort", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            catalog.update(_refuse)
        assert kept.tb is not None
        put(opened_root, b"a", b"2")
        assert get(opened_root, b"a") == b"2"


def _refuse(_: Transaction) -> None:
    raise ValueError("not like this")


@pytest.mark.parametrize("call", [Catalog.view, Catalog.update], ids=["view", "update"])
def test_a_transaction_holds_the_guard_that_forks_take(root: str, call: Callable[..., bool]) -> None:
    with opened(root) as opened_root, ThreadPoolExecutor(1) as pool:

        def is_free(_: Transaction | None) -> bool:
            return pool.submit(opened_root.guard.acquire, blocking=False).result()

        assert not call(opened_root.catalog, is_free)
        assert is_free(None)
        pool.submit(opened_root.guard.release).result()


def test_a_child_has_a_guard_of_its_own(root: str) -> None:
    with opened(root) as opened_root, opened_root.guard:
        before = opened_root.guard
        in_child(_guard_is_new, opened_root, before)
        assert opened_root.guard is opened_root.catalog.guard is before


def _guard_is_new(root: Root, before: object) -> None:
    assert root.guard is root.catalog.guard is not before


def test_two_openings_in_one_process_share_one_environment(root: str) -> None:
    with opened(root) as one, opened(f"{root}/../{os.path.basename(root)}/.") as other:
        assert one is other
        put(one, b"key", b"value")
    with opened(root) as again:
        assert again is not one
        assert get(again, b"key") == b"value"


def test_a_closed_catalog_says_so(root: str) -> None:
    with opened(root) as opened_root:
        catalog: Catalog = opened_root.catalog
    with pytest.raises(StoreClosedError, match="open it again"):
        catalog.read(b"key")
