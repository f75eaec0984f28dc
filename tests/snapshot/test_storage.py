"""Files of snapshots: written of parts, read into parts, published once; damage is found, failures leave nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tempfile
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from memstore.engine import syscalls
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidKeyError,
    KeyNotFoundError,
    NotAStoreError,
    ResourceLimitError,
    StoreFullError,
    UnsupportedFilesystemError,
)
from memstore.snapshot import chunks
from memstore.snapshot.chunks import CHUNK, SUM_SIZE, FilePart, LateBytes, in_parallel
from memstore.snapshot.storage import FileStorage, verify_file
from tests.children import in_child
from tests.overlay import on_overlay
from tests.small_tmpfs import fill, free_bytes, on_small_tmpfs
from tests.support import faults

SMALL_CHUNK = 64
STEPS = faults.STEPS - faults.CLEANUPS

BAD_DISK = OSError(errno.EIO, "injected")


@pytest.fixture(params=["memory", "disk"])
def storage(request: pytest.FixtureRequest) -> Iterator[FileStorage]:
    """A new one, in /dev/shm and in the folder for temporary files."""
    parent = "/dev/shm" if request.param == "memory" and os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="memstore-test-") as folder:
        yield FileStorage(folder)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", SMALL_CHUNK)


def write(storage: FileStorage, name: str, data: bytes, *, durable: bool = False) -> bytes:
    return storage.write(name, len(data), [FilePart(0, data)], durable=durable, checksum=True)


def content(storage: FileStorage, name: str) -> bytes:
    return Path(storage.path, name).read_bytes()


# --- what is written is read ------------------------------------------------------------------------------------------


@st.composite
def cut_files(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]], list[tuple[int, int]]]:
    """Bytes, where they are cut for a write, and runs of them to read, in any order."""
    data = draw(st.binary(max_size=5 * SMALL_CHUNK))
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=8))})
    written = draw(st.permutations(list(zip(cuts, cuts[1:], strict=False))))
    ends = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    read = draw(st.permutations(list(zip(ends[::2], ends[1::2], strict=False))))
    return data, written, read


@given(cut_files(), st.booleans())
def test_any_parts_make_the_file_and_any_runs_are_read(
    case: tuple[bytes, list[tuple[int, int]], list[tuple[int, int]]], checked: bool
) -> None:
    data, written, read = case
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(chunks, "CHUNK", SMALL_CHUNK)
        storage = FileStorage(folder)
        passed: list[int] = []
        parts = [FilePart(start, data[start:end]) for start, end in written]
        sums = storage.write("file", len(data), parts, durable=False, checksum=True, done=passed.append)
        assert content(storage, "file") == data and sum(passed) == len(data)
        pieces = [data[start : start + SMALL_CHUNK] for start in range(0, len(data), SMALL_CHUNK)]
        assert sums == b"".join(xxhash.xxh3_64_digest(piece) for piece in pieces)
        targets = [FilePart(start, np.zeros(end - start, np.uint8)) for start, end in read]
        storage.read("file", targets, sums=sums if checked else None)
        assert all(target.memory.tobytes() == data[target.offset :][: len(target.memory)] for target in targets)


def test_memory_that_is_made_late_is_made_once_and_soon_given_back(tmp_path: Path) -> None:
    sizes = [1 << 20] * 40 + [CHUNK * 2] + [0, 3]
    made: list[weakref.ref[object]] = []
    most = 0

    def make(number: int) -> object:
        nonlocal most
        found = np.full(sizes[number], number, np.uint8)
        made.append(weakref.ref(found))
        most = max(most, sum(one() is not None for one in made))
        return found

    parts = [FilePart(sum(sizes[:number]), LateBytes(size, partial(make, number))) for number, size in enumerate(sizes)]
    storage = FileStorage(tmp_path)
    sums = storage.write("file", sum(sizes), parts, durable=False, checksum=True)
    verify_file(storage, "file", sum(sizes), sums)
    assert content(storage, "file") == b"".join(bytes([number]) * size for number, size in enumerate(sizes))
    assert len(made) == len(sizes) - 1 and most < 30


@pytest.mark.parametrize("checked", [False, True])
def test_a_few_bytes_of_a_large_file_take_little_memory(tmp_path: Path, checked: bool) -> None:
    storage, size = FileStorage(tmp_path), 3 * CHUNK
    sums = storage.write("file", size, [FilePart(0, np.arange(size // 8))], durable=False, checksum=True)
    parts = [FilePart(start + at, bytearray(8)) for start in range(0, size, CHUNK) for at in (0, 8000, CHUNK - 8)]
    tracemalloc.start()
    try:
        storage.read("file", parts, sums=sums if checked else None)
        assert tracemalloc.get_traced_memory()[1] < CHUNK // 2
    finally:
        tracemalloc.stop()
    assert [int.from_bytes(part.memory, "little") for part in parts] == [part.offset // 8 for part in parts]


def test_large_files_go_through_several_threads(storage: FileStorage) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2 * CHUNK + 12345, np.uint8)
    parts = [FilePart(0, b"header!!"), FilePart(8, data[:1000]), FilePart(1008, data[1000:])]
    sums = storage.write("file", len(data) + 8, parts, durable=False, checksum=True)
    assert len(sums) == 3 * SUM_SIZE
    target = np.zeros_like(data)
    reached: list[int] = []
    storage.read("file", [FilePart(8, target)], sums=sums, done=reached.append)
    assert (target == data).all() and sum(reached) == len(data) + 8
    verify_file(storage, "file", len(data) + 8, sums)
    assert storage.write("plain", 3, [FilePart(0, b"abc")], durable=False) == b""


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_file_has_the_same_bytes_where_huge_pages_run_out(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    data = np.random.default_rng(0).bytes((33 << 20) + 5)
    real, calls = syscalls.collapse, iter(range(100))

    def run_out(address: int, size: int) -> bool:
        return next(calls) < steps and real(address, size)

    monkeypatch.setattr(syscalls, "collapse", run_out)
    sums = storage.write("file", len(data), [FilePart(0, data)], durable=False, checksum=True)
    assert storage.read_bytes("file", len(data)) == data
    assert sums == b"".join(xxhash.xxh3_64_digest(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK))


def test_memory_of_any_kind_is_written_and_read(storage: FileStorage) -> None:
    square = np.ones((3, 4), np.float32) / 3
    parts = [FilePart(0, b"ab"), FilePart(2, bytearray(b"cd")), FilePart(4, square), FilePart(52, np.zeros((0, 3)))]
    storage.write("file", 52, parts, durable=False)
    target = np.zeros_like(square)
    storage.read("file", [FilePart(4, target), FilePart(52, np.zeros((0, 3)))])
    assert (target == square).all()


@pytest.mark.parametrize(
    ("size", "spans", "message"),
    [
        (5, [(0, 4)], "end at 4"),
        (4, [(1, 3)], "from 0 to 1"),
        (4, [(0, 3), (2, 2)], "overlap"),
        (3, [(0, 4)], "end at 4"),
    ],
)
def test_parts_that_are_no_file_are_refused(
    storage: FileStorage, size: int, spans: list[tuple[int, int]], message: str
) -> None:
    parts = [FilePart(start, bytes(nbytes)) for start, nbytes in spans]
    with pytest.raises(ValueError, match=message):
        storage.write("file", size, parts, durable=False)
    assert storage.names() == []


def test_a_file_that_exists_is_left_as_it_is(storage: FileStorage) -> None:
    write(storage, "file", b"first")
    with pytest.raises(AlreadyExistsError, match="file"):
        write(storage, "file", b"second")
    with pytest.raises(AlreadyExistsError, match="file"):
        storage.publish("file", b"second", durable=False)
    os.symlink("/nowhere", f"{storage.path}/link")
    with pytest.raises(AlreadyExistsError):
        write(storage, "link", b"through")
    assert content(storage, "file") == b"first" and storage.names() == ["file", "link"]


def test_folders_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    storage = FileStorage.create(tmp_path / "a/b", durable=True)
    write(storage, "file", b"1")
    storage.publish("manifest", b"2", durable=True)
    modes = [
        os.stat(path).st_mode & 0o777 for path in (tmp_path / "a/b", tmp_path / "a/b/file", tmp_path / "a/b/manifest")
    ]
    assert modes == [0o700, 0o600, 0o600]
    FileStorage.create(tmp_path / "a/b", durable=False).remove("file")  # one that is there is opened
    with pytest.raises(NotAStoreError, match="missing"):
        FileStorage(tmp_path / "missing")
    with pytest.raises(NotAStoreError):
        FileStorage(tmp_path / "a/b/manifest")


def test_the_name_of_the_folder_is_synced_whoever_made_it(tmp_path: Path) -> None:
    def create() -> None:
        FileStorage.create(tmp_path / "a", durable=True)

    assert faults.record(create, names=frozenset({"make_folder", "sync_folder"})) == ["make_folder", "sync_folder"]
    assert "sync_folder" in faults.record(create)


def test_the_folder_is_the_one_that_was_opened(tmp_path: Path) -> None:
    storage = FileStorage.create(tmp_path / "before", durable=False)
    os.rename(tmp_path / "before", tmp_path / "after")
    os.mkdir(tmp_path / "before")
    write(storage, "file", b"1")
    storage.publish("manifest", b"2", durable=True)
    assert sorted(os.listdir(tmp_path / "after")) == ["file", "manifest"] and not os.listdir(tmp_path / "before")


@pytest.mark.parametrize("one_file_system", [True, False])
def test_folders_of_containers_are_storage(one_file_system: bool) -> None:
    on_overlay(write_and_read, one_file_system=one_file_system)


def write_and_read(path: str) -> None:
    storage = FileStorage.create(path, durable=True)
    sums = write(storage, "file", b"12345", durable=True)
    storage.publish("manifest", sums, durable=True)
    with pytest.raises(AlreadyExistsError):
        storage.publish("manifest", sums, durable=True)
    verify_file(storage, "file", 5, storage.read_bytes("manifest", 8))
    storage.remove("file")
    assert storage.names() == ["manifest"]


# --- damage and malice ------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found(storage: FileStorage, small_chunks: None) -> None:
    data = bytes(range(200))
    sums = write(storage, "file", data)
    for position in range(len(data)):
        with open(f"{storage.path}/file", "r+b") as file:
            file.write(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(CorruptionError, match=f"file: bytes .* .chunk {position // SMALL_CHUNK}") as caught:
            storage.read("file", [FilePart(position, bytearray(1))], sums=sums)
        assert caught.value.path == f"{storage.path}/file"
        with pytest.raises(CorruptionError):
            verify_file(storage, "file", len(data), sums)
        elsewhere = (position + SMALL_CHUNK) % 192
        storage.read("file", [FilePart(elsewhere, bytearray(1))], sums=sums)  # chunks that nobody wants aren't read


@pytest.mark.parametrize("size", [*range(0, 200, 23), 199, 201, 300])
def test_a_file_of_another_size_is_found(storage: FileStorage, small_chunks: None, size: int) -> None:
    sums = write(storage, "file", bytes(200))
    os.truncate(f"{storage.path}/file", size)
    with pytest.raises(CorruptionError, match="file"):
        verify_file(storage, "file", 200, sums)
    with pytest.raises(CorruptionError, match="file"):
        storage.read("file", [FilePart(0, bytearray(200))], sums=sums)
    if size < 200:
        with pytest.raises(CorruptionError, match=f"has {size} bytes"):
            storage.read("file", [FilePart(0, bytearray(200))])


@pytest.mark.parametrize("kind", ["missing", "link", "fifo", "folder"])
def test_what_is_no_file_is_damage(storage: FileStorage, kind: str) -> None:
    path = f"{storage.path}/file"
    write(storage, "other", b"12")
    make: dict[str, Callable[[], None]] = {
        "missing": lambda: None,
        "link": lambda: os.symlink("other", path),
        "fifo": lambda: os.mkfifo(path),
        "folder": lambda: os.mkdir(path),
    }
    make[kind]()
    with pytest.raises(CorruptionError, match="file"):
        storage.read("file", [FilePart(0, bytearray(1))])
    with pytest.raises(KeyNotFoundError if kind == "missing" else CorruptionError, match="file"):
        storage.read_bytes("file", 10)


def test_a_small_file_is_read_up_to_its_limit(storage: FileStorage) -> None:
    write(storage, "file", b"12345")
    assert storage.read_bytes("file", 5) == b"12345"
    with pytest.raises(CorruptionError, match="5 bytes, and 4"):
        storage.read_bytes("file", 4)


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "../up", "a/b", "a\0b", "x" * 256, "ü" * 128, "\ud800"])
def test_hostile_names_reach_no_file(storage: FileStorage, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: write(storage, name, b"1"),
        lambda: storage.read(name, []),
        lambda: storage.read_bytes(name, 10),
        lambda: storage.publish(name, b"1", durable=False),
        lambda: storage.size(name),
        lambda: storage.remove(name),
    ]
    for call in calls:
        assert faults.record(lambda call=call: pytest.raises(InvalidKeyError, call), names=STEPS) == []
    assert storage.names() == []


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_at_any_step_leaves_nothing(storage: FileStorage) -> None:
    names = faults.record(lambda: write(storage, "file", b"12345", durable=True), names=STEPS)
    assert names == ["open_into", "truncate", "write_parts_at", "start_sync", "sync"]
    storage.remove("file")
    for number in range(1, len(names) + 1):
        with (
            faults.at_step(number, faults.raising(BAD_DISK), names=STEPS),
            pytest.raises(OSError) as caught,
        ):
            write(storage, "file", b"12345", durable=True)
        assert caught.value.errno == errno.EIO and caught.value.filename == f"{storage.path}/file"
        with (
            faults.at_step(number, faults.raising(OSError(errno.ENOSPC, "injected")), names=STEPS),
            pytest.raises(StoreFullError, match="file has no room"),
        ):
            write(storage, "file", b"12345", durable=True)
        with faults.at_step(number, faults.raising(KeyboardInterrupt()), names=STEPS), pytest.raises(KeyboardInterrupt):
            write(storage, "file", b"12345", durable=True)
        assert storage.names() == []


def test_a_large_write_that_fails_at_any_step_leaves_nothing(tmp_path: Path) -> None:
    """In memory, where it is mapped; what has failed is held, as a debugger holds it, and keeps no memory."""
    data = np.random.default_rng(0).bytes(5 << 20)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        storage = FileStorage(folder)
        names = faults.record(lambda: write(storage, "file", data), names=STEPS)
        assert storage.read_bytes("file", len(data)) == data
        storage.remove("file")
        held: list[BaseException] = []
        for number in range(1, len(names) + 1):
            for failure in (OSError(errno.ENOSPC, "injected"), KeyboardInterrupt()):
                with faults.at_step(number, faults.raising(failure), names=STEPS):
                    try:
                        write(storage, "file", data)
                    except (StoreFullError, KeyboardInterrupt) as error:
                        held.append(error)
                assert storage.names() == []
        assert len(held) == 2 * len(names)
        with open("/proc/self/maps") as maps:
            assert not [line for line in maps if folder in line]


def test_an_error_in_one_of_several_threads_leaves_nothing(
    storage: FileStorage, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = syscalls.write_parts_at, iter(range(10))

    def fail_late(fd: int, parts: list[memoryview], offset: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.EIO, "injected")
        real(fd, parts, offset)

    monkeypatch.setattr(syscalls, "write_parts_at", fail_late)
    with pytest.raises(OSError, match="injected"):
        write(storage, "file", bytes(300))
    assert storage.names() == []


PUBLISHING = ["open_into", "write_at", "sync", "sync", "link", "unlink", "sync"]


def test_a_publication_that_fails_at_any_step_is_whole_or_absent(storage: FileStorage) -> None:
    names = faults.record(lambda: storage.publish("file", b"12345", durable=True), names=STEPS)
    assert names == PUBLISHING  # the data and the names of earlier files are on the disk before the link
    storage.remove("file")
    for number, name in enumerate(names, 1):
        told = contextlib.nullcontext() if name == "unlink" else pytest.raises(OSError, match="injected")
        with faults.at_step(number, faults.raising(BAD_DISK), names=STEPS), told:
            storage.publish("file", b"12345", durable=True)
        found = [found for found in storage.names() if not found.endswith(".new")]
        assert found == (["file"] if number > names.index("link") + 1 else []), name
        assert len(storage.names()) == len(found) + (name == "unlink")
        for left in storage.names():
            storage.remove(left)


def test_a_process_that_dies_at_any_step_publishes_all_or_nothing(tmp_path: Path) -> None:
    for number, name in enumerate(PUBLISHING, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(RuntimeError, match="exit code -9"):
            in_child(publish_and_die, str(folder), number)
        storage = FileStorage(folder)
        after_link = number >= PUBLISHING.index("link") + 1
        assert (storage.size("file") == 5) == after_link, name
        if not after_link:
            storage.publish("file", b"again", durable=True)
            assert content(storage, "file") == b"again"


def publish_and_die(folder: str, number: int) -> None:
    storage = FileStorage(folder)
    with faults.at_step(number, faults.die, after=True, names=STEPS):
        storage.publish("file", b"12345", durable=True)


def test_a_link_that_the_file_system_made_and_reported_twice_is_made(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = syscalls.link

    def twice(source: str, target: str, dir_fd: int | None = None) -> None:
        real(source, target, dir_fd)
        real(source, target, dir_fd)

    monkeypatch.setattr(syscalls, "link", twice)
    storage.publish("file", b"12345", durable=False)
    assert content(storage, "file") == b"12345" and storage.names() == ["file"]


def test_whoever_was_first_may_remove_what_was_to_be_published_at_any_time(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right behind the link that was refused, too."""
    storage.publish("other", b"first", durable=False)
    real = syscalls.link

    def late(source: str, target: str, dir_fd: int | None = None) -> None:
        real("other", target, dir_fd)
        try:
            real(source, target, dir_fd)
        finally:
            os.unlink(source, dir_fd=dir_fd)

    monkeypatch.setattr(syscalls, "link", late)
    with pytest.raises(AlreadyExistsError, match="somebody else"):
        storage.publish("file", b"12345", durable=False)
    assert content(storage, "file") == b"first" and sorted(storage.names()) == ["file", "other"]


def test_a_file_system_without_links_is_refused(storage: FileStorage) -> None:
    number = PUBLISHING.index("link") + 1
    with (
        faults.at_step(number, faults.raising(OSError(errno.EPERM, "injected")), names=STEPS),
        pytest.raises(UnsupportedFilesystemError, match="hard links"),
    ):
        storage.publish("file", b"12345", durable=True)
    assert storage.names() == []


def test_a_full_disk_leaves_nothing() -> None:
    on_small_tmpfs(4, write_more_than_fits)


def write_more_than_fits(folder: str) -> None:
    storage = FileStorage(folder)
    before = free_bytes(folder)
    with pytest.raises(StoreFullError, match="has no room") as caught:
        write(storage, "large", bytes(5 << 20))
    assert caught.value.errno == errno.ENOSPC
    assert storage.names() == [] and free_bytes(folder) == before
    ballast = fill(folder)
    with pytest.raises(StoreFullError):
        storage.publish("manifest", bytes(5000), durable=True)
    os.unlink(ballast)
    assert storage.names() == []
    write(storage, "large", bytes(3 << 20))


def test_a_limit_on_the_size_of_files_is_told(tmp_path: Path) -> None:
    in_child(write_beyond_the_limit, str(tmp_path))


def write_beyond_the_limit(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    storage = FileStorage(folder)
    with pytest.raises(ResourceLimitError, match="ulimit -f") as caught:
        write(storage, "large", bytes(10_001))
    assert caught.value.errno == errno.EFBIG and storage.names() == []


def test_short_calls_of_the_kernel_go_on(storage: FileStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal can cut them, and no call moves more than 2 GiB."""
    write_some, read_some = os.pwritev, os.preadv

    def write_few(fd: int, parts: list[memoryview], offset: int) -> int:
        return write_some(fd, [parts[0][:3]], offset)

    def read_few(fd: int, parts: list[memoryview], offset: int) -> int:
        return read_some(fd, [parts[0][:2]], offset)

    monkeypatch.setattr(os, "pwritev", write_few)
    monkeypatch.setattr(os, "preadv", read_few)
    storage.write("file", 12, [FilePart(0, b"12345"), FilePart(5, b"67"), FilePart(7, b"890ab")], durable=False)
    first, second = bytearray(5), bytearray(6)
    storage.read("file", [FilePart(0, first), FilePart(6, second)])
    assert (bytes(first), bytes(second)) == (b"12345", b"7890ab")


def test_memory_that_changes_meanwhile_makes_a_file_that_fits_its_sums(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In huge pages, and in the rest of the file."""
    data = bytearray((3 << 20) + 5)
    new_sum = chunks.new_sum

    class ChangesFirst:
        def __init__(self) -> None:
            self.digest = (inner := new_sum()).digest
            self._update = inner.update

        def update(self, copied: Any) -> None:
            data[:] = bytes([data[0] + 1]) * len(data)
            self._update(copied)

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "new_sum", ChangesFirst)
        sums = storage.write("file", len(data), [FilePart(0, data)], durable=False, checksum=True)
    assert data[0] > 10
    verify_file(storage, "file", len(data), sums)


def test_after_an_error_in_parallel_nothing_runs() -> None:
    running: list[int] = []
    finished: list[int] = []
    begun = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            begun.wait(60)
            raise KeyError(number)
        running.append(number)
        begun.set()
        threading.Event().wait(0.01)
        running.remove(number)
        finished.append(number)
        return number

    with pytest.raises(KeyError):
        in_parallel(work, range(1000), lambda _: None)
    assert running == [] and len(finished) < 500
