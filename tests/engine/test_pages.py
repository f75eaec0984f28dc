"""The lock page and the doorbell: one owner at a time, who dies without harm; words that wake."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.engine import syscalls
from memstore.engine.sync.clocks import deadline_after
from memstore.engine.sync.pages import BELLS, Doorbell, LockPage
from memstore.errors import CorruptionError, StoreTimeoutError
from tests.children import Child, Wire, children, in_child
from tests.engine.bytes_store import get, opened, put
from tests.leaks import open_files


@pytest.fixture
def folder(scratch: str) -> Iterator[Path]:
    os.mkdir(scratch)
    for name in ("lock", "doorbell"):
        Path(scratch, name).write_bytes(bytes(syscalls.PAGE))
    yield Path(scratch)
    shutil.rmtree(scratch)


def open_page(folder: Path) -> LockPage:
    page = LockPage(str(folder / "lock"))
    page.recover = lambda: None
    page.run(lambda: None, deadline_after(1))  # a new page has its next owner recover
    return page


def soon() -> float:
    return deadline_after(30)


# --- the mutex --------------------------------------------------------------------------------------------------------


def test_processes_and_threads_take_turns(folder: Path) -> None:
    open_page(folder)
    counter = folder / "counter"
    counter.write_bytes(struct.pack("<Q", 0))
    with children(3, _count, folder) as counting:
        for child in counting:
            child.receive()
    assert struct.unpack("<Q", counter.read_bytes()) == (3 * 2 * 400,)


def _count(_: Wire, number: int, folder: Path) -> None:
    page = open_page(folder)
    fd = os.open(folder / "counter", os.O_RDWR)

    def increment() -> None:
        (count,) = struct.unpack("<Q", os.pread(fd, 8, 0))
        os.pwrite(fd, struct.pack("<Q", count + 1), 0)

    def run() -> None:
        for _ in range(400):
            page.run(increment, soon())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_it_returns_what_the_action_returns_and_is_free_then(folder: Path) -> None:
    page = open_page(folder)
    assert page.run(lambda: page.owner(), soon()) == threading.get_native_id()
    assert page.owner() == 0


def test_an_exception_frees_it_and_the_next_owner_recovers(folder: Path) -> None:
    page = open_page(folder)
    recovered: list[int] = []
    page.recover = lambda: recovered.append(page.owner())
    with pytest.raises(ZeroDivisionError):
        page.run(lambda: 1 // 0, soon())
    assert page.owner() == 0
    assert recovered == []
    page.run(lambda: recovered.append(-1), soon())
    page.run(lambda: None, soon())
    assert recovered == [threading.get_native_id(), -1]  # once, before the action, under the mutex


def test_a_killed_owner_is_succeeded(folder: Path) -> None:
    page = open_page(folder)
    recovered: list[int] = []
    page.recover = lambda: recovered.append(page.owner())
    with Child(_hold, folder) as child:
        child.receive()
        assert page.owner() == child.pid
    page.run(lambda: recovered.append(-1), soon())
    assert recovered == [threading.get_native_id(), -1]


def _hold(wire: Wire, folder: Path) -> None:
    page = open_page(folder)

    def hold() -> None:
        wire.send("held")
        wire.receive()

    page.run(hold, soon())


def test_a_failed_recovery_is_tried_again(folder: Path) -> None:
    page = open_page(folder)
    attempts: list[int] = []

    def recover() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("not yet")

    page.recover = recover
    with pytest.raises(ZeroDivisionError):
        page.run(lambda: 1 // 0, soon())
    for _ in range(2):
        with pytest.raises(OSError, match="not yet"):
            page.run(lambda: pytest.fail("ran before the recovery"), soon())
    page.run(lambda: attempts.append(-1), soon())
    assert attempts == [1, 1, 1, -1]


def test_a_timeout_names_the_owner(folder: Path) -> None:
    page = open_page(folder)
    with Child(_hold, folder) as child:
        child.receive()
        started = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=rf"lock: waited .* held by pid {child.pid} \("):
            page.run(lambda: None, deadline_after(0.2))
        assert 0.2 <= time.monotonic() - started < 5
        with pytest.raises(TimeoutError):
            page.run(lambda: None, deadline_after(0))
        child.send()
        page.run(lambda: None, soon())


def test_a_waiter_gets_it_when_it_is_freed(folder: Path) -> None:
    page = open_page(folder)
    with Child(_hold, folder) as child:
        child.receive()
        waiting = threading.Thread(target=lambda: page.run(lambda: done.set(), soon()))
        done = threading.Event()
        waiting.start()
        child.send()
        assert done.wait(30)
        waiting.join()


def test_other_threads_run_while_one_waits(folder: Path) -> None:
    page = open_page(folder)
    with Child(_hold, folder) as child:
        child.receive()
        waiting = threading.Thread(target=lambda: page.run(lambda: None, soon()))
        waiting.start()
        child.send()  # could not be said if the waiter kept the interpreter
        waiting.join(100)
        assert not waiting.is_alive()


# --- pages of another time --------------------------------------------------------------------------------------------

IDENTITY = 64  # magic, two words of the boot id, inode


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


def test_a_page_in_use_is_left_alone(folder: Path) -> None:
    page = open_page(folder)
    page.ring = 17
    with Child(_hold, folder) as child:
        child.receive()
        other = LockPage(str(folder / "lock"))
        assert other.owner() == child.pid
        assert other.ring == 17


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


@pytest.mark.parametrize("size", [0, 100, 4095, 4097])
@pytest.mark.parametrize("name", ["lock", "doorbell"])
def test_another_size_is_damage(folder: Path, name: str, size: int) -> None:
    os.truncate(folder / name, size)
    with pytest.raises(CorruptionError, match=f"{size} bytes instead of 4096") as caught:
        LockPage(str(folder / name))
    assert caught.value.path == str(folder / name)


def test_garbage_in_a_page_is_written_over(scratch: str) -> None:
    with opened(scratch) as root:
        put(root, b"key", b"value")
    del root  # its pages are mapped as long as it lives
    for name in ("lock", "doorbell"):
        Path(scratch, name).write_bytes(os.urandom(syscalls.PAGE))
    with opened(scratch) as root:
        put(root, b"key", b"other")
        assert get(root, b"key") == b"other"


# --- the doorbell -----------------------------------------------------------------------------------------------------


def open_bell(folder: Path) -> Doorbell:
    return Doorbell(str(folder / "doorbell"), writable=True)


def test_a_change_before_the_wait_is_not_slept_through(folder: Path) -> None:
    doorbell = open_bell(folder)
    seen = doorbell.load(5)
    doorbell.change(5)
    started = time.monotonic()
    doorbell.wait(5, seen, 30)
    assert time.monotonic() - started < 20


def test_a_wake_reaches_another_process(folder: Path) -> None:
    doorbell = open_bell(folder)
    with Child(_wait, folder, 7) as child:
        child.receive()
        child.wait_until_it_sleeps_on_a_futex()
        started = time.monotonic()
        doorbell.change(7)
        doorbell.wake(7)
        assert child.receive() is True
        assert time.monotonic() - started < 20  # it would sleep for 30


def _wait(wire: Wire, folder: Path, bell: int) -> bool:
    doorbell = Doorbell(str(folder / "doorbell"), writable=False)  # a reader who may not write can wait
    seen = doorbell.load(bell)
    wire.send("about to wait")
    deadline = time.monotonic() + 30
    while doorbell.load(bell) == seen and time.monotonic() < deadline:
        doorbell.wait(bell, seen, 30)
    return doorbell.load(bell) != seen and time.monotonic() < deadline


def test_a_wait_ends_in_time(folder: Path) -> None:
    doorbell = open_bell(folder)
    started = time.monotonic()
    doorbell.wait(3, doorbell.load(3), 0.05)
    assert 0.04 < time.monotonic() - started < 10


def test_ringing_all_changes_every_word(folder: Path) -> None:
    doorbell = open_bell(folder)
    before = [doorbell.load(bell) for bell in range(BELLS)]
    doorbell.ring_all()
    assert [doorbell.load(bell) for bell in range(BELLS)] == [word + 1 for word in before]


def test_words_wrap(folder: Path) -> None:
    (folder / "doorbell").write_bytes(b"\xff" * syscalls.PAGE)
    doorbell = open_bell(folder)
    doorbell.change(0)
    assert doorbell.load(0) == 0
    doorbell.wait(0, 0xFFFFFFFF, 30)


def test_keys_spread_over_the_words() -> None:
    bells = {Doorbell.bell(b"key/%d" % number) for number in range(5000)}
    assert min(bells) >= 0 and max(bells) < BELLS
    assert len(bells) > 0.9 * BELLS


def test_a_page_is_mapped_as_long_as_somebody_waits_on_it(root: str) -> None:
    """A close in another thread must not unmap the word under a waiter."""
    with opened(root) as opened_root:
        doorbell = opened_root.doorbell
    doorbell.wait(0, doorbell.load(0), 0.01)
    del doorbell, opened_root
    assert in_child(os.path.exists, root)
