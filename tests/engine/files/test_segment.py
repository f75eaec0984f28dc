"""Segments: valid safetensors files, with slots at fixed places, locked as long as they are mapped."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors

from memstore.engine import syscalls
from memstore.engine.files.mapping import LockFile, Mapping
from memstore.engine.files.segments import ClaimedFile, SegmentWriter, map_segment, write_state
from memstore.engine.format import headers
from memstore.engine.format.headers import Header, HeaderSlots, Span, lay_out
from memstore.engine.format.records import FILLING, LIVE, RETIRED, SegmentExtent
from memstore.engine.root.storage import size_class
from memstore.errors import CorruptionError, UnsupportedValueError
from tests.children import in_child
from tests.engine.files.interrupts import interrupted
from tests.leaks import mapped_files, open_files

STORE = "5" * 32
SIZES = [1, 4096, 10_000, syscalls.HUGE_PAGE - 4097, syscalls.HUGE_PAGE - 4096, syscalls.HUGE_PAGE, (5 << 20) + 3]


@pytest.fixture
def folder(scratch: str) -> Iterator[Path]:
    os.mkdir(scratch)
    yield Path(scratch)
    shutil.rmtree(scratch)


def create(path: Path, size: int, put_id: int = 0x1234) -> SegmentWriter:
    file = LockFile(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL)
    assert syscalls.lock_exclusive(file.fd)
    return SegmentWriter(ClaimedFile(str(path), file), 1, put_id, size, is_new=True)


def find(path: Path, nbytes: int, put_id: int = 0x1234, *, keep_open: bool = False) -> tuple[Mapping, int] | None:
    extent = SegmentExtent(1, put_id, size_class(nbytes) + 4096, 4096)
    mapping = map_segment(str(path), extent, store=STORE, keep_open=keep_open)
    return None if mapping is None else (mapping, extent.start)


def write(path: Path, data: np.ndarray, put_id: int = 0x1234, *, huge_pages: bool = False) -> SegmentWriter:
    layout = lay_out([Span(("data",), "uint8", 1, (data.nbytes,), data.nbytes)])
    header = Header("a key", STORE, b"\xffdescription", b"objects", layout.header)
    writer = create(path, header.nbytes + size_class(data.nbytes), put_id)
    writer.allocate(header, data.nbytes, threading.RLock(), on_tmpfs=huge_pages)
    np.asarray(writer)[:] = data
    writer.seal(None, durable=False)
    return writer


def publish(path: Path, data: np.ndarray, put_id: int = 0x1234) -> None:
    writer = write(path, data, put_id)
    go_live(writer, 7, 8, 2, durable=True)
    writer.close()


def go_live(writer: SegmentWriter, version: int, batch: int, count: int, *, durable: bool = False) -> None:
    writer.file.go_live(HeaderSlots(writer.put_id, LIVE, version, batch, count), durable=durable)


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_segment_is_a_safetensors_file(folder: Path, size: int, huge_pages: bool) -> None:
    path, data = folder / "1.safetensors", random_bytes(size)
    writer = write(path, data, huge_pages=huge_pages)
    for change in (lambda: None, lambda: go_live(writer, 7, 8, 2), writer.close):
        change()
        with safetensors.safe_open(path, "np") as file:
            assert (file.get_tensor("data") == data).all()
            metadata = file.metadata()
    assert metadata["key"] == "a key"
    assert metadata["memstore"].startswith(
        "put=0000000000001234 state=live    version=0000000000000007 batch=0000000000000008/00000002 check="
    )


def test_slots_stand_where_the_format_says(folder: Path) -> None:
    path = folder / "1.safetensors"
    writer = write(path, random_bytes(100))
    text = path.read_bytes()
    assert text[37:151] == HeaderSlots(0x1234).encode()
    assert (text[41:57], text[64:71], text[80:96]) == (b"0000000000001234", b"filling", b"0" * 16)
    assert (text[103:119], text[120:128]) == (b"0" * 16, b"0" * 8)
    go_live(writer, 2**63 + 1, 2**62, 1000)
    text = path.read_bytes()
    assert (text[64:71], text[80:96]) == (b"live   ", b"8000000000000001")
    assert (text[103:119], text[120:128]) == (b"4000000000000000", b"000003e8")
    writer.close()


@pytest.mark.parametrize("state", [FILLING, LIVE, RETIRED])
def test_slots_keep_their_width(state: int) -> None:
    largest = HeaderSlots(2**64 - 1, state, 2**64 - 1, 2**64 - 1, 2**32 - 1).encode()
    assert len(largest) == len(HeaderSlots(0).encode()) == headers.SLOTS_SIZE
    assert re.fullmatch(
        rb"put=[0-9a-f]{16} state=[a-z ]{7} version=[0-9a-f]{16} batch=[0-9a-f]{16}/[0-9a-f]{8} check=[0-9a-f]{16}",
        largest,
    )


def test_a_state_is_written_in_place(folder: Path) -> None:
    path = folder / "1.safetensors"
    publish(path, random_bytes(100))
    before = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    write_state(fd, RETIRED)
    os.close(fd)
    after = path.read_bytes()
    assert after != before
    assert after == before.replace(b"state=live   ", b"state=retired")


def test_data_starts_on_a_page_and_nothing_trails(folder: Path) -> None:
    path = folder / "1.safetensors"
    publish(path, random_bytes(1000))
    text = path.read_bytes()
    start = 8 + int.from_bytes(text[:8], "little")
    assert start % syscalls.PAGE == 0
    assert len(text) == start + size_class(1000)
    assert text[start - 8 : start].strip() == b""
    json.loads(text[8:start])


def test_headers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "HEADER_LIMIT", 20_000)
    Header("key", "store", b"", b"o" * 7000, b"")
    with pytest.raises(UnsupportedValueError, match="20,000") as caught:
        Header("key", "store", b"", b"o" * 15_000, b"")
    assert caught.value.key == "key"


def test_a_mapping_keeps_the_lock_and_no_file(folder: Path) -> None:
    path = folder / "1.safetensors"
    publish(path, random_bytes(5000))
    found = find(path, 5000)
    assert found is not None
    array = np.asarray(found[0])[found[1] :][10:20]
    del found
    gc.collect()
    assert [name for name in os.listdir("/proc/self/fd") if _target(name) == str(path)] == []
    fd = os.open(path, os.O_RDWR)
    assert not syscalls.lock_exclusive(fd)  # a slice is enough to hold it
    del array
    assert syscalls.lock_exclusive(fd)
    os.close(fd)


def test_a_file_that_is_to_stay_open_is_closed_with_the_last_array(folder: Path) -> None:
    path = folder / "1.safetensors"
    publish(path, random_bytes(5000))
    found = find(path, 5000, keep_open=True)
    assert found is not None
    array = np.asarray(found[0])[found[1] :][10:20]
    del found
    gc.collect()
    assert open_files(str(folder)) == mapped_files(str(folder)) == [str(path)]
    del array
    assert open_files(str(folder)) == mapped_files(str(folder)) == []


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.parametrize("size", [5000, 3 << 20])
def test_a_mapping_is_private(folder: Path, size: int) -> None:
    path, data = folder / "1.safetensors", random_bytes(size)
    publish(path, data)
    one, other = (find(path, size) for _ in range(2))
    assert one is not None and other is not None
    mine, others = (np.asarray(mapping)[start : start + size] for mapping, start in (one, other))
    mine[:] = 0
    assert not mine.any()
    assert (others == data).all()
    assert path.read_bytes()[4096 : 4096 + size] == data.tobytes()


def test_large_mappings_are_aligned_for_huge_pages(folder: Path) -> None:
    path = folder / "1.safetensors"
    writer = write(path, random_bytes(5 << 20))
    go_live(writer, 1, 1, 1)
    assert writer.__array_interface__["data"][0] % syscalls.HUGE_PAGE == writer.size - (5 << 20)
    writer.close()
    found = find(path, 5 << 20)
    assert found is not None
    assert found[0].address % syscalls.HUGE_PAGE == 0


def test_mappings_leave_no_address_space_behind(folder: Path) -> None:
    path = folder / "1.safetensors"
    publish(path, random_bytes(5 << 20))

    def regions() -> int:
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)

    find(path, 5 << 20)
    before = regions()
    held = [find(path, 5 << 20) for _ in range(20)]
    assert regions() <= before + len(held)
    held.clear()
    assert regions() <= before


@pytest.mark.parametrize("keep_open", [False, True])
def test_an_interrupt_at_any_point_leaves_no_file_open(folder: Path, keep_open: bool) -> None:
    """Nor mapped: the lock of either would keep the segment from being swept as long as the process lives."""
    path = folder / "1.safetensors"
    publish(path, random_bytes(5000))

    def use() -> None:
        find(path, 5000, keep_open=keep_open)

    use()
    points = 0
    while interrupted(use, points):
        assert open_files(str(folder)) == mapped_files(str(folder)) == [], f"at point {points}"
        points += 1
    assert points > 100, "few points: this tests nothing"


def test_another_put_is_told_apart(folder: Path) -> None:
    path = folder / "1.safetensors"
    publish(path, random_bytes(5000))
    assert find(path, 5000, 0x1235) is None
    assert find(folder / "2.safetensors", 5000) is None


def test_a_locked_segment_is_left_alone(folder: Path) -> None:
    path = folder / "1.safetensors"
    writer = write(path, random_bytes(5000))
    assert find(path, 5000) is None
    go_live(writer, 1, 1, 1)
    assert find(path, 5000) is not None
    writer.close()


@pytest.mark.parametrize("change", [-1, 1, 4096, -4096, 100 - 12_288, -12_288])
def test_another_length_is_damage(folder: Path, change: int) -> None:
    path = folder / "1.safetensors"
    publish(path, random_bytes(5000))
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CorruptionError, match="12,288") as caught:
        find(path, 5000)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("bit", range(64))
def test_another_header_length_is_damage(folder: Path, bit: int) -> None:
    path = folder / "1.safetensors"
    publish(path, random_bytes(5000))
    text = bytearray(path.read_bytes())
    text[bit // 8] ^= 1 << bit % 8
    path.write_bytes(text)
    with pytest.raises(CorruptionError):
        find(path, 5000)


def test_a_forked_child_inherits_no_writer(folder: Path) -> None:
    path = folder / "1.safetensors"
    writer = write(path, random_bytes(4 << 20))
    assert str(path) in mapped_files(str(folder))
    assert in_child(mapped_files, str(folder)) == []
    writer.close()


def test_blocks_are_reserved_before_they_are_written(folder: Path) -> None:
    """Else the page that the disk has no room for would be a SIGBUS in the middle of a copy."""
    writer = create(folder / "1.safetensors", (9 << 20) + 4096)
    writer.allocate(Header("k", "s", b"", b"", b""), 9 << 20, threading.RLock(), on_tmpfs=True)
    assert os.stat(writer.file.path).st_blocks * 512 >= writer.size
    writer.close()


def test_no_room_shows_before_anything_is_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(syscalls, "allocate", full)
    writer = create(folder / "1.safetensors", (9 << 20) + 4096)
    with pytest.raises(OSError, match="full"):
        writer.allocate(Header("k", "s", b"", b"", b""), 9 << 20, threading.RLock(), on_tmpfs=False)
    writer.close()
    assert mapped_files(str(folder)) == []
