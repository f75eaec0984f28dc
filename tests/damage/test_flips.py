"""Every single flipped bit of headers, data and records: an error that names key and file, or the value as it was.

`verify=True`, in a store with checksums. `Store.verify` finds each flip that lies in anything with a meaning.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import memstore
from memstore import contents
from memstore.engine.repair.verify import look_at
from memstore.engine.root.roots import Root
from tests.damage.stores import CATALOG, flip, header_size
from tests.inside import delete_raw_row, put_raw_row, raw_row, root_of
from tests.support.equality import is_same

KEY = "the key"
HEADER_STRIDE, DATA_STRIDE = 29, 53  # bits; none is a multiple of 8, so that all bits of a byte have their turn


def is_found(root: Root) -> bool:
    """Whether `verify` reports the key. (Its child process is spared: the catalog is whole.)"""
    try:
        assert look_at(root, KEY.encode(), contents.verify, id, 5.0, may_lock=True) is True
    except memstore.CorruptionError as error:
        assert error.key == KEY and error.path and error.detail
        return True
    return False


def get_flipped(store: memstore.Store, value: Any, path: str) -> str:
    """ "same", or "error"; anything else fails."""
    try:
        got = store.get(KEY)
    except memstore.CorruptionError as error:
        assert (error.key, error.path) == (KEY, path), error
        return "error"
    assert is_same(value, got)
    return "same"


@contextmanager
def one_key(root: str, value: Any) -> Iterator[tuple[memstore.Store, str]]:
    with memstore.open(root, checksum=True, verify=True, timeout=5.0) as store:
        store.put(KEY, value)
        (path,) = store.info(KEY).files
        yield store, path


VALUES = {
    "tensors": lambda: {"a": torch.arange(301), "b": torch.ones(3, 5), "c": torch.full((7,), 2, dtype=torch.uint8)},
    "objects": lambda: ["text " * 400, torch.arange(3)],
}


@pytest.mark.parametrize(
    "stride", [HEADER_STRIDE, pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
@pytest.mark.parametrize("name", VALUES)
def test_in_a_header(scratch: str, name: str, stride: int) -> None:
    value = VALUES[name]()
    with one_key(scratch, value) as (store, path):
        outcomes: set[str] = set()
        for bit in range(0, 8 * header_size(path), stride):
            flip(path, bit)
            outcomes.add(get_flipped(store, value, path))
            assert is_found(root_of(store)), f"bit {bit} of {path}"
            flip(path, bit)
        assert outcomes == {"same", "error"}
        assert not is_found(root_of(store))


@pytest.mark.parametrize("stride", [DATA_STRIDE, pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("name", VALUES)
def test_in_data(scratch: str, name: str, stride: int) -> None:
    value = VALUES[name]()
    with one_key(scratch, value) as (store, path):
        start = 8 * header_size(path)
        used = start + 8 * store.info(KEY).nbytes
        for bit in range(start, 8 * os.path.getsize(path), stride):
            flip(path, bit)
            outcome = get_flipped(store, value, path)
            assert is_found(root_of(store)) == (outcome == "error"), f"bit {bit}"
            assert outcome == "same" or bit < used
            if name == "tensors" and bit < start + 8 * 301 * 8:
                assert outcome == "error", f"bit {bit}"
            flip(path, bit)


def flips_of_a_row(root: Root, table: str, key: bytes, bits: Iterable[int] | None = None) -> Iterator[int]:
    """Flips one bit after another in the row as it lies in the catalog, and puts it back."""

    def write(stored: bytes) -> None:
        with root.guard:
            root.catalog.update(lambda t: put_raw_row(t, table, key, stored))

    with root.guard:
        stored = root.catalog.view(lambda t: raw_row(t, table, key))
    for bit in range(8 * len(stored)) if bits is None else bits:
        spoiled = bytearray(stored)
        spoiled[bit // 8] ^= 1 << bit % 8
        write(bytes(spoiled))
        yield bit
    write(stored)


@pytest.mark.parametrize("value", [torch.arange(301), {"inline": torch.arange(3)}], ids=["file", "inline"])
def test_in_a_record(scratch: str, value: Any) -> None:
    with memstore.open(scratch, checksum=True, verify=True) as store:
        store.put(KEY, value)
        for bit in flips_of_a_row(root_of(store), "entries", KEY.encode()):
            for call in (lambda: store.get(KEY), lambda: store.version(KEY), lambda: store.put(KEY, 1)):
                with pytest.raises(memstore.CorruptionError) as caught:
                    call()
                assert (caught.value.key, caught.value.path) == (KEY, f"{scratch}/{CATALOG}"), bit
        assert is_same(value, store.get(KEY))


@pytest.mark.parametrize("table", ["segments", "counters"])
def test_in_other_rows(scratch: str, table: str) -> None:
    """Reads go on, and no put counts on from a damaged number."""
    value = torch.arange(3001)
    with memstore.open(scratch, checksum=True, verify=True) as store:
        store.put(KEY, value)
        root = root_of(store)
        with root.guard:
            record = root.catalog.read(KEY.encode())
        assert record is not None
        row = b"counters" if table == "counters" else record.segment.to_bytes(8, "big")
        for bit in flips_of_a_row(root, table, row):
            assert is_same(value, store.get(KEY))
            with pytest.raises(memstore.CorruptionError):
                store.put(KEY, torch.zeros(3001))
            if bit % 97 == 0:
                report = store.verify()
                assert not report.ok and report.checked == 1
        assert store.verify().ok


def test_in_a_key(scratch: str) -> None:
    """It is another key then, whose record can't be read; the report names it."""
    with memstore.open(scratch, checksum=True, verify=True) as store:
        store.put(KEY, torch.arange(3001))
        root = root_of(store)
        with root.guard:
            stored = root.catalog.view(lambda t: raw_row(t, "entries", KEY.encode()))
        for bit in range(0, 8 * len(KEY), 13):
            spoiled = bytearray(KEY.encode())
            spoiled[bit // 8] ^= 1 << bit % 8

            def move(source: bytes, target: bytes) -> None:
                def write(transaction: Any) -> None:
                    delete_raw_row(transaction, "entries", source)
                    put_raw_row(transaction, "entries", target, stored)

                with root.guard:
                    root.catalog.update(write)

            move(KEY.encode(), bytes(spoiled))
            name = spoiled.decode(errors="backslashreplace")
            report = store.verify()
            assert name in {error.key for error in report.damaged}, report
            assert KEY in {error.key for error in report.damaged}, report  # its segment is nobody's
            move(bytes(spoiled), KEY.encode())
        assert store.verify().ok
