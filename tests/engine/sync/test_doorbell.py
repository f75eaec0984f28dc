"""A doorbell over any memory that processes share: words that wake."""

from __future__ import annotations

import mmap
import os
import random
import time
from pathlib import Path

import pytest

from memstore.engine import syscalls
from memstore.engine.sync.primitives import BELLS, Doorbell, Watch
from tests.children import Child, Wire, in_child
from tests.engine.bytes_store import opened


@pytest.fixture
def doorbell() -> Doorbell:
    """Over an anonymous page, which forked children share."""
    memory = mmap.mmap(-1, syscalls.PAGE)
    return Doorbell(syscalls.buffer_address(memory), BELLS, memory)


def test_a_change_before_the_wait_is_not_slept_through(doorbell: Doorbell) -> None:
    seen = doorbell.load(5)
    doorbell.change(5)
    started = time.monotonic()
    doorbell.wait(5, seen, 30)
    assert time.monotonic() - started < 20


def test_a_wake_reaches_another_process(doorbell: Doorbell) -> None:
    with Child(_wait, doorbell, 7) as child:
        child.receive()
        child.wait_until_it_sleeps_on_a_futex()
        started = time.monotonic()
        doorbell.change(7)
        doorbell.wake(7)
        assert child.receive() is True
        assert time.monotonic() - started < 20  # it would sleep for 30


def _wait(wire: Wire, doorbell: Doorbell, bell: int) -> bool:
    seen = doorbell.load(bell)
    wire.send("about to wait")
    deadline = time.monotonic() + 30
    while doorbell.load(bell) == seen and time.monotonic() < deadline:
        doorbell.wait(bell, seen, 30)
    return doorbell.load(bell) != seen and time.monotonic() < deadline


@pytest.fixture
def watched() -> Doorbell:
    """As `doorbell`, with a word for who watches all of it."""
    memory = mmap.mmap(-1, 2 * syscalls.PAGE)
    address = syscalls.buffer_address(memory)
    return Doorbell(address, BELLS, memory, Watch(address + syscalls.PAGE, memory))


@pytest.mark.parametrize("bell", [7, 8])
def test_who_watches_hears_of_any_change(watched: Doorbell, bell: int) -> None:
    with Child(_watch, watched) as child:
        child.receive()
        child.wait_until_it_sleeps_on_a_futex()
        watched.change(bell)
        watched.wake(bell)
        assert child.receive() < 20  # it would sleep for 30


def _watch(wire: Wire, doorbell: Doorbell) -> float:
    assert doorbell.watch is not None
    doorbell.watch.mark()
    wire.send("about to sleep")
    started = time.monotonic()
    doorbell.watch.sleep(30)
    return time.monotonic() - started


def test_a_change_between_mark_and_sleep_is_not_slept_through(watched: Doorbell) -> None:
    assert watched.watch is not None
    watched.watch.mark()
    watched.wake(5)
    started = time.monotonic()
    watched.watch.sleep(30)
    assert time.monotonic() - started < 20


def test_watchers_that_are_seeded_alike_have_marks_of_their_own(watched: Doorbell) -> None:
    """Each rank of a training calls `random.seed` with the same number, and relies on what it draws afterwards."""
    assert watched.watch is not None
    marks: list[int] = []
    for _ in range(2):
        random.seed(0)
        state = random.getstate()
        watched.watch.mark()
        marks.append(watched.watch.word[0])
        assert random.getstate() == state, "a wait has taken a number from the program"
    assert marks[0] != marks[1]


def test_while_nobody_watches_no_one_is_woken(watched: Doorbell, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    monkeypatch.setattr(syscalls, "futex_wake", woken.append)
    assert watched.watch is not None
    watched.wake(5)
    watched.watch.mark()
    watched.wake(5)
    watched.wake(5)  # the mark is gone: the watcher is awake
    bell = watched.address + 4 * 5
    assert woken == [bell, bell, watched.watch.address, bell]


def test_a_wait_ends_in_time(doorbell: Doorbell) -> None:
    started = time.monotonic()
    doorbell.wait(3, doorbell.load(3), 0.05)
    assert 0.04 < time.monotonic() - started < 10


def test_ringing_all_changes_every_word(doorbell: Doorbell) -> None:
    before = [doorbell.load(bell) for bell in range(BELLS)]
    doorbell.ring_all()
    assert [doorbell.load(bell) for bell in range(BELLS)] == [word + 1 for word in before]


def test_words_wrap() -> None:
    memory = mmap.mmap(-1, syscalls.PAGE)
    memory.write(b"\xff" * syscalls.PAGE)
    doorbell = Doorbell(syscalls.buffer_address(memory), BELLS, memory)
    doorbell.change(0)
    assert doorbell.load(0) == 0
    doorbell.wait(0, 0xFFFFFFFF, 30)


def test_keys_spread_over_the_words(doorbell: Doorbell) -> None:
    bells = {doorbell.bell(b"key/%d" % number) for number in range(5000)}
    assert min(bells) >= 0 and max(bells) < BELLS
    assert len(bells) > 0.9 * BELLS


def test_it_may_be_any_words_of_a_page() -> None:
    memory = mmap.mmap(-1, syscalls.PAGE)
    doorbell = Doorbell(syscalls.buffer_address(memory) + 64, 2, memory)
    doorbell.ring_all()
    assert memory[:80] == bytes(64) + b"\1\0\0\0" * 2 + bytes(8)
    assert {doorbell.bell(b"%d" % number) for number in range(100)} == {0, 1}


# --- the store's, in a file -------------------------------------------------------------------------------------------


@pytest.fixture
def path(scratch: str) -> str:
    Path(scratch).write_bytes(bytes(syscalls.PAGE))
    return scratch


def test_who_may_not_write_the_file_is_woken_too(path: str) -> None:
    doorbell = Doorbell.open(path, writable=True)
    with Child(_open_and_wait, path, 7) as child:
        child.receive()
        child.wait_until_it_sleeps_on_a_futex()
        doorbell.change(7)
        doorbell.wake(7)
        assert child.receive() is True


def _open_and_wait(wire: Wire, path: str, bell: int) -> bool:
    return _wait(wire, Doorbell.open(path, writable=False), bell)


def test_a_page_is_mapped_as_long_as_somebody_waits_on_it(root: str) -> None:
    """A close in another thread must not unmap the word under a waiter."""
    with opened(root) as opened_root:
        doorbell = opened_root.doorbell
    doorbell.wait(0, doorbell.load(0), 0.01)
    del doorbell, opened_root
    assert in_child(os.path.exists, root)
