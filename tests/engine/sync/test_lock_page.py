"""The lock page: one of another boot, of a copy, or of another size; and its owner's notes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memstore.engine import syscalls
from memstore.engine.sync.pages import LockPage, LockPageNotes, emptied, publications_rung, read_notes
from memstore.engine.sync.primitives import Doorbell, deadline_after
from memstore.errors import CorruptionError
from tests.children import Child, Wire
from tests.engine.bytes_store import get, opened, put
from tests.leaks import open_files


@pytest.fixture
def folder(scratch: str) -> Iterator[Path]:
    os.mkdir(scratch)
    Path(scratch, "lock").write_bytes(bytes(syscalls.PAGE))
    yield Path(scratch)
    shutil.rmtree(scratch)


def open_page(folder: Path) -> LockPage:
    page = LockPage(str(folder / "lock"))
    page.recover = lambda: None
    page.run(lambda: None, deadline_after(1))  # a new page has its next owner recover
    return page


def soon() -> float:
    return deadline_after(30)


IDENTITY = 64  # magic, two words of the boot id, inode


def _hold(wire: Wire, folder: Path) -> None:
    page = open_page(folder)

    def hold() -> None:
        wire.send("held")
        wire.receive()

    page.run(hold, soon())


def stuck_page(folder: Path) -> None:
    """Leaves a page whose mutex is held by somebody who will never unlock it, and whom no kernel remembers."""
    open_page(folder)
    with Child(_hold, folder) as child:
        child.receive()
        held = (folder / "lock").read_bytes()
    (folder / "lock").write_bytes(held)


def test_a_page_of_another_boot_is_written_anew(folder: Path) -> None:
    stuck_page(folder)
    with open(folder / "lock", "r+b") as file:
        file.seek(IDENTITY + 8)
        file.write(b"another boot's id")
    page = LockPage(str(folder / "lock"))
    recovered: list[int] = []
    page.recover = lambda: recovered.append(1)
    page.run(lambda: None, deadline_after(1))
    assert recovered == [1]


def test_a_page_of_a_copied_store_is_written_anew(folder: Path) -> None:
    stuck_page(folder)
    shutil.copy(folder / "lock", folder / "copy")
    os.rename(folder / "copy", folder / "lock")
    open_page(folder)


def test_a_lease_of_another_boot_is_over_and_a_copy_holds_none(folder: Path) -> None:
    def write(at: int, content: bytes) -> None:
        with open(folder / "lock", "r+b") as file:
            file.seek(at)
            file.write(content)

    page = open_page(folder)
    page.host_lease[0] = later = 1 << 62
    del page
    assert open_page(folder).host_lease[0] == later
    write(IDENTITY + 40, b"a pid ns")  # as of a container that was started again
    assert open_page(folder).host_lease[0] == later
    write(IDENTITY + 8, b"another boot's id")
    assert open_page(folder).host_lease[0] == 1
    page = open_page(folder)
    page.host_lease[0] = later
    del page
    shutil.copy(folder / "lock", folder / "copy")
    os.rename(folder / "copy", folder / "lock")
    assert open_page(folder).host_lease[0] == 0


def test_after_a_repair_the_lease_of_a_member_is_over(folder: Path) -> None:
    page = open_page(folder)
    page.host_lease[0] = 1 << 62
    del page
    content = (folder / "lock").read_bytes()
    for is_member, found in ((True, 1), (False, 0)):
        (folder / "lock").write_bytes(emptied(content, is_member=is_member))
        assert open_page(folder).host_lease[0] == found
    assert not any(emptied(bytes(syscalls.PAGE), is_member=True))


def test_a_page_in_use_is_left_alone(folder: Path) -> None:
    page = open_page(folder)
    page.notes.publications_rung = 17
    with Child(_hold, folder) as child:
        child.receive()
        other = LockPage(str(folder / "lock"))
        assert other.owner() == child.pid
        assert other.notes.publications_rung == 17


@pytest.mark.parametrize("keep_open", [False, True])
def test_a_page_is_in_use_until_nothing_refers_to_it(folder: Path, keep_open: bool) -> None:
    page = LockPage(str(folder / "lock"), keep_open=keep_open)
    assert open_files(str(folder)) == [str(folder / "lock")] * keep_open
    fd = os.open(folder / "lock", os.O_RDWR)
    assert not syscalls.lock_exclusive(fd)
    del page
    assert syscalls.lock_exclusive(fd)
    os.close(fd)
    assert open_files(str(folder)) == []


def test_a_copied_store_opens_while_the_original_is_busy(scratch: str) -> None:
    with opened(scratch) as root:
        put(root, b"key", b"x" * 5000)
        root.mutex.run(lambda: shutil.copytree(scratch, f"{scratch}.copy"), soon())
    with opened(f"{scratch}.copy") as copy:
        assert get(copy, b"key") == b"x" * 5000
        put(copy, b"key", b"y" * 5000)
    with opened(scratch) as root:
        assert get(root, b"key") == b"x" * 5000


@pytest.mark.parametrize("page", [LockPage, lambda path: Doorbell.open(path, writable=True)], ids=["lock", "doorbell"])
@pytest.mark.parametrize("size", [0, 100, 4095, 4097])
def test_another_size_is_damage(folder: Path, size: int, page: Callable[[str], object]) -> None:
    os.truncate(folder / "lock", size)
    with pytest.raises(CorruptionError, match=f"{size} bytes instead of 4096") as caught:
        page(str(folder / "lock"))
    assert caught.value.path == str(folder / "lock")


def test_its_notes_can_be_read_without_opening_it(folder: Path) -> None:
    page = open_page(folder)
    page.notes.batch, page.notes.publications_rung = 5, 2**40
    content = (folder / "lock").read_bytes()
    assert read_notes(content) == LockPageNotes(batch=5, publications_rung=2**40)
    assert publications_rung(str(folder / "lock")) == 2**40
    damaged = bytearray(content)
    damaged[IDENTITY] ^= 1
    assert read_notes(damaged) == read_notes(content[:-1]) == read_notes(b"") == LockPageNotes()


def test_garbage_in_a_page_is_written_over(scratch: str) -> None:
    with opened(scratch) as root:
        put(root, b"key", b"value")
    del root  # its pages are mapped as long as it lives
    for name in ("lock", "doorbell"):
        Path(scratch, name).write_bytes(os.urandom(syscalls.PAGE))
    with opened(scratch) as root:
        put(root, b"key", b"other")
        assert get(root, b"key") == b"other"
