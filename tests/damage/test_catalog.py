"""A damaged LMDB file may end who opens it; `verify` and `repair` look at it in a child, and survive."""

from __future__ import annotations

import os
import random
import signal
import struct

import msgspec
import pytest
import torch

import memstore
from memstore.engine.repair import survey as surveys
from memstore.engine.repair.survey import survey
from tests.children import in_child
from tests.damage.stores import (
    CATALOG,
    INLINE,
    check_repaired,
    content_of,
    copy,
    flip,
    make,
    overwrite,
    read_all,
    values,
)
from tests.inside import lmdb_of, root_of

PAGE = 4096
FLIPS, ALL_FLIPS = 3, 2000


def used_pages(root: str) -> list[int]:
    """Pages of data.mdb that are not empty."""
    with open(f"{root}/{CATALOG}", "rb") as file:
        content = file.read()
    return [i for i in range(len(content) // PAGE) if any(content[i * PAGE : (i + 1) * PAGE])]


def outlive(root: str, what: str, spoil: object) -> None:
    """Damage under an open store, then `verify`, `repair` and `open`. Runs in a child, so that a death is a failure."""
    with memstore.open(root, verify=True, timeout=5.0) as store:
        spoil(root)  # type: ignore[operator]
        report = store.verify()
        if report.ok:
            assert set(read_all(store, values()).values()) == {"same"}, what
        assert all(error.detail and error.path for error in report.damaged), report
    repaired = memstore.repair(root)
    assert set(values()) - INLINE <= set(repaired.recovered), (what, repaired)
    lost = INLINE - set(repaired.recovered)
    assert not report.ok or not lost, (what, repaired)
    check_repaired(root, lost=lost)


FULL = [pytest.mark.full, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("count", "seed"), [(FLIPS, 11), *(pytest.param(ALL_FLIPS // 4, seed, marks=FULL) for seed in range(4))]
)
def test_flipped_bits(scratch: str, count: int, seed: int) -> None:
    make(f"{scratch}0")
    numbers = random.Random(seed)
    pages = used_pages(f"{scratch}0")
    for number in range(count):
        bit = numbers.choice(pages) * PAGE * 8 + numbers.randrange(PAGE * 8)
        if number % 2:  # the pages' own words, where a page number or a size may be
            bit = bit // (PAGE * 8) * PAGE * 8 + numbers.randrange(80 * 8)
        copy(f"{scratch}0", scratch)
        in_child(outlive, scratch, f"bit {bit}", Flip(bit))


class Flip:
    def __init__(self, bit: int) -> None:
        self.bit = bit

    def __call__(self, root: str) -> None:
        flip(f"{root}/{CATALOG}", self.bit)


class Blank:
    def __init__(self, page: int, filling: bytes) -> None:
        self.page, self.filling = page, filling

    def __call__(self, root: str) -> None:
        overwrite(f"{root}/{CATALOG}", self.page * PAGE, self.filling * PAGE)


@pytest.mark.parametrize(
    ("filling", "step"),
    [
        (b"\0", 9),
        *(pytest.param(filling, step, marks=pytest.mark.full) for filling, step in ((b"\0", 4), (b"\xff", 8))),
    ],
)
def test_blanked_pages(scratch: str, filling: bytes, step: int) -> None:
    make(f"{scratch}0")
    for page in used_pages(f"{scratch}0")[::step]:
        copy(f"{scratch}0", scratch)
        in_child(outlive, scratch, f"page {page} of {filling!r}", Blank(page, filling))


def test_a_shorter_file(scratch: str) -> None:
    """Cut while nobody has it open: it is refused, or is as it was, and is repaired."""
    make(f"{scratch}0")
    end = (used_pages(f"{scratch}0")[-1] + 1) * PAGE
    for size in (1, end // 2 + 1, end - PAGE, end):
        copy(f"{scratch}0", scratch)
        in_child(open_cut, scratch, size)
        memstore.repair(scratch)
        check_repaired(scratch, lost=INLINE if size < end else set())


def open_cut(root: str, size: int) -> None:
    os.truncate(f"{root}/{CATALOG}", size)
    try:
        with memstore.open(root, verify=True) as store:
            assert set(read_all(store, values()).values()) == {"same"}
    except memstore.CorruptionError as error:
        assert error.path == f"{root}/{CATALOG}"


@pytest.mark.parametrize(
    "size", [0, 2 * PAGE, *(pytest.param(size, marks=pytest.mark.full) for size in (100, PAGE, 3 * PAGE + 5))]
)
def test_a_file_cut_while_it_is_open(scratch: str, size: int) -> None:
    """Nothing but `verify` can be asked then: each read may be a SIGBUS."""
    make(scratch)
    in_child(cut_and_verify, scratch, size)
    assert memstore.repair(scratch).lost == ()
    check_repaired(scratch, lost=INLINE)


def cut_and_verify(root: str, size: int) -> None:
    with memstore.open(root) as store:
        os.truncate(f"{root}/{CATALOG}", size)
        report = store.verify()
        assert not report.ok and report.checked == report.unchecked == 0
        assert report.damaged[0].path == f"{root}/{CATALOG}" and "repair" in report.damaged[0].detail


GREETING = "import os, sys, signal; os.write(1, b'\\7\\0\\0\\0\\x91\\xa5hello'); "


@pytest.mark.parametrize("name", [signal.SIGBUS, signal.SIGABRT, signal.SIGSEGV])
def test_a_child_that_dies_is_told(scratch: str, name: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    make(scratch)
    monkeypatch.setattr(surveys, "_PROGRAM", f"{GREETING} os.kill(os.getpid(), {int(name)})")
    with memstore.open(scratch) as store:
        (error,) = store.verify().damaged
        assert error.path == f"{scratch}/{CATALOG}" and name.name in error.detail
    assert memstore.repair(scratch).lost == ()
    monkeypatch.undo()
    check_repaired(scratch, lost=INLINE)


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.kill(os.getpid(), 7)",  # before it came to the catalog
        f"{GREETING} os.kill(os.getpid(), signal.SIGKILL)",  # no memory, maybe
        f"{GREETING} os.kill(os.getpid(), signal.SIGTERM)",
        f"{GREETING} sys.exit(1)",
        "import no_such_module",
        "print('x' * 100)",
        "import sys; sys.stdout.write('\\1\\0\\0\\0\\300')",
        "pass",
    ],
    ids=range(8),
)
def test_a_child_that_says_nothing_of_the_catalog(scratch: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't thrown away for that."""
    make(scratch)
    monkeypatch.setattr(surveys, "_PROGRAM", program)
    with memstore.open(scratch) as store:
        (error,) = store.verify().damaged
        assert error.path == f"{scratch}/{CATALOG}" and "can't be looked at" in error.detail
    with pytest.raises(memstore.ResourceLimitError, match="nothing was changed"):
        memstore.repair(scratch)
    monkeypatch.setattr(surveys.sys, "executable", "/nowhere/python")
    with pytest.raises(memstore.ResourceLimitError, match="nothing was changed"):
        memstore.repair(scratch)
    monkeypatch.undo()
    assert memstore.repair(scratch).lost == ()
    check_repaired(scratch)


def test_a_child_that_hangs_is_ended(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(scratch)
    monkeypatch.setattr(surveys, "SILENCE", 1.0)
    monkeypatch.setattr(surveys, "_PROGRAM", f"{GREETING} signal.pause()")
    found = survey(f"{scratch}/catalog/local", locked=True)
    assert "1 seconds" in found.broken
    monkeypatch.setattr(surveys, "_PROGRAM", "import signal; signal.pause()")
    found = survey(f"{scratch}/catalog/local", locked=True)
    assert "1 seconds" in found.refused and not found.broken and not found.is_sound


def test_rows_that_contradict_each_other(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        root = root_of(store)
        with root.guard:
            record = root.catalog.read(b"nested")
        assert record is not None
        row = root.catalog.view(lambda t: t.segment(record.segment))
        assert row is not None

        def change(action: object) -> set[str | None]:
            with root.guard:
                root.catalog.update(action)  # type: ignore[arg-type]
            return {error.key for error in store.verify().damaged}

        assert "nested" in change(lambda t: t.delete_segment(record.segment))
        others = msgspec.structs.replace(row, key=b"other")
        assert "nested" in change(lambda t: t.put_segment(record.segment, others))
        assert change(lambda t: t.put_segment(record.segment, row)) == set()
        assert change(lambda t: t.delete_record(b"nested")) == {"nested"}  # its segment is nobody's
        assert change(lambda t: t.put_record(b"nested", record)) == set()
        assert change(lambda t: t.put_number("filling", record.segment, 1)) == {None}
        assert change(lambda t: t.delete_number("filling", record.segment)) == set()
        assert store.verify(["nested"]).ok


@pytest.mark.parametrize("how", ["dropped", "exchanged"])
def test_rows_that_a_page_has_lost_or_mixed_up(scratch: str, how: str) -> None:
    """By one word of a page: each row by itself is whole."""
    with memstore.open(scratch, checksum=True) as store:
        for key in ("a", "b", "last"):
            store.put(key, {"inline": key})
    path = f"{scratch}/{CATALOG}"
    content = bytearray(content_of(path))
    for start in range(0, len(content), PAGE):
        flags, lower = struct.unpack_from("<HH", content, start + 10)
        page = bytes(content[start : start + PAGE])
        if flags & 2 and b"last" in page and b"inline" in page:  # a leaf, of LMDB's; its rows' offsets start at 16
            offsets = page[16:lower]
            rows = [struct.unpack_from("<HH", offsets, i) for i in range(0, len(offsets) - 2, 2)]
            if how == "dropped" and rows:
                struct.pack_into("<H", content, start + 12, lower - 2)
            elif rows:
                struct.pack_into("<HH", content, start + 16, *reversed(rows[0]))
    assert content != content_of(path)
    overwrite(path, 0, bytes(content))
    with memstore.open(scratch) as store:
        report = store.verify()
        assert not report.ok and report.damaged[0].path == path, report


def test_counters_that_would_repeat(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        root = root_of(store)
        for name, value in (("version", 1), ("number", 1), ("live", 5), ("retired", 1 << 40)):

            def spoil(transaction: object, name: str = name, value: int = value) -> None:
                counters = transaction.counters()  # type: ignore[attr-defined]
                setattr(counters, name, value)
                transaction.put_counters(counters)  # type: ignore[attr-defined]

            with root.guard:
                before = root.catalog.view(lambda t: t.counters())
                root.catalog.update(spoil)
            (error,) = store.verify().damaged
            assert "counters" in error.detail and error.key is None
            with root.guard:
                root.catalog.update(lambda t, before=before: t.put_counters(before))
        assert store.verify().ok


def test_a_flipped_list_of_readers(scratch: str) -> None:
    """lock.mdb, while the store is closed and while it is open."""
    make(f"{scratch}0")
    numbers = random.Random(5)
    for _ in range(2):
        copy(f"{scratch}0", scratch)
        bit = numbers.randrange(8 * 256)
        in_child(outlive, scratch, f"bit {bit} of lock.mdb", FlipReaders(bit))


class FlipReaders:
    def __init__(self, bit: int) -> None:
        self.bit = bit

    def __call__(self, root: str) -> None:
        flip(f"{root}/catalog/local/lock.mdb", self.bit)


def test_puts_go_on_while_it_looks(scratch: str) -> None:
    """The child is one more reader: it takes part in LMDB's locks, and gives its place back."""
    make(scratch)
    with memstore.open(scratch) as store:
        for number in range(5):
            assert store.verify(["nested"]).ok
            store.put("nested", torch.full((5000,), number))
            assert (store.get("nested") == number).all()
        env = lmdb_of(root_of(store))
        env.reader_check()
        assert env.readers().count("\n") <= 3
