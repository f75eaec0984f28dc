"""A robust mutex over any memory that processes share: one owner at a time, who dies without harm."""

from __future__ import annotations

import mmap
import threading
import time

import pytest

from memstore.engine import syscalls
from memstore.engine.sync.primitives import RobustMutex, deadline_after
from memstore.errors import ContentionError, KeyNotFoundError, StoreTimeoutError
from tests.children import Child, Wire, children

COUNT_AT = 2048  # in the page: far from the mutex
OTHER_AT = 1024


@pytest.fixture
def memory() -> mmap.mmap:
    """An anonymous page, which forked children share."""
    memory = mmap.mmap(-1, syscalls.PAGE)
    RobustMutex(syscalls.buffer_address(memory), name="it").create()
    return memory


def open_mutex(memory: mmap.mmap) -> RobustMutex:
    mutex = RobustMutex(syscalls.buffer_address(memory), lambda: None, name="it")
    mutex.run(lambda: None, deadline_after(1))  # a new one has its first owner recover
    return mutex


def soon() -> float:
    return deadline_after(30)


def test_processes_and_threads_take_turns(memory: mmap.mmap) -> None:
    open_mutex(memory)
    with children(3, _count, memory) as counting:
        for child in counting:
            child.receive()
    assert syscalls.long_words(syscalls.buffer_address(memory) + COUNT_AT, 1)[0] == 3 * 2 * 400


def _count(_: Wire, number: int, memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)
    words = syscalls.long_words(syscalls.buffer_address(memory) + COUNT_AT, 1)

    def increment() -> None:
        count = words[0]
        time.sleep(0)  # others may run in between
        words[0] = count + 1

    def run() -> None:
        for _ in range(400):
            mutex.run(increment, soon())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_it_returns_what_the_action_returns_and_is_free_then(memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)
    assert mutex.run(lambda: mutex.owner(), soon()) == threading.get_native_id()
    assert mutex.owner() == 0


def test_an_exception_frees_it_and_the_next_owner_recovers(memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)
    recovered: list[int] = []
    mutex.recover = lambda: recovered.append(mutex.owner())
    with pytest.raises(ZeroDivisionError):
        mutex.run(lambda: 1 // 0, soon())
    assert mutex.owner() == 0
    assert recovered == []
    mutex.run(lambda: recovered.append(-1), soon())
    mutex.run(lambda: None, soon())
    assert recovered == [threading.get_native_id(), -1]  # once, before the action, under the mutex


def test_a_killed_owner_is_succeeded(memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)
    recovered: list[int] = []
    mutex.recover = lambda: recovered.append(mutex.owner())
    with Child(_hold, memory) as child:
        child.receive()
        assert mutex.owner() == child.pid
    mutex.run(lambda: recovered.append(-1), soon())
    assert recovered == [threading.get_native_id(), -1]


def _hold(wire: Wire, memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)

    def hold() -> None:
        wire.send("held")
        wire.receive()

    mutex.run(hold, soon())


def test_a_failed_recovery_is_tried_again(memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)
    attempts: list[int] = []

    def recover() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("not yet")

    mutex.recover = recover
    with pytest.raises(ZeroDivisionError):
        mutex.run(lambda: 1 // 0, soon())
    for _ in range(2):
        with pytest.raises(OSError, match="not yet"):
            mutex.run(lambda: pytest.fail("ran before the recovery"), soon())
    mutex.run(lambda: attempts.append(-1), soon())
    assert attempts == [1, 1, 1, -1]


def test_a_timeout_names_the_owner(memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)
    with Child(_hold, memory) as child:
        child.receive()
        started = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=rf"it: waited .* held by pid {child.pid} \("):
            mutex.run(lambda: None, deadline_after(0.2))
        assert 0.2 <= time.monotonic() - started < 20
        with pytest.raises(TimeoutError):
            mutex.run(lambda: None, deadline_after(0))
        child.send()
        mutex.run(lambda: None, soon())


def test_a_waiter_gets_it_when_it_is_freed(memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)
    with Child(_hold, memory) as child:
        child.receive()
        waiting = threading.Thread(target=lambda: mutex.run(lambda: done.set(), soon()))
        done = threading.Event()
        waiting.start()
        child.send()
        assert done.wait(30)
        waiting.join()


def test_other_threads_run_while_one_waits(memory: mmap.mmap) -> None:
    mutex = open_mutex(memory)
    with Child(_hold, memory) as child:
        child.receive()
        waiting = threading.Thread(target=lambda: mutex.run(lambda: None, soon()))
        waiting.start()
        child.send()  # could not be said if the waiter kept the interpreter
        waiting.join(100)
        assert not waiting.is_alive()


def test_a_thread_that_is_inside_is_refused(memory: mmap.mmap) -> None:
    """As a signal's handler is, or a finalizer: to wait for itself would take for ever."""
    mutex = open_mutex(memory)
    with pytest.raises(ContentionError, match="it: this thread is in the middle of a change already"):
        mutex.run(lambda: mutex.run(lambda: pytest.fail("it ran within itself"), soon()), soon())
    assert mutex.run(lambda: "free", soon()) == "free"


def test_what_changed_nothing_needs_no_recovery(memory: mmap.mmap) -> None:
    recovered: list[int] = []
    mutex = RobustMutex(syscalls.buffer_address(memory), name="it", refusals=(KeyNotFoundError,))
    mutex.recover = lambda: recovered.append(1)
    mutex.run(lambda: None, soon())
    assert recovered == [1]

    def refuse() -> None:
        raise KeyNotFoundError("no key")

    with pytest.raises(KeyNotFoundError):
        mutex.run(refuse, soon())
    mutex.run(mutex.owe_recovery, soon())
    assert recovered == [1]
    mutex.run(lambda: None, soon())
    assert recovered == [1, 1]


def test_its_first_owner_is_told_that_it_is_new(memory: mmap.mmap) -> None:
    """But not before it knows how to recover."""
    mutex = RobustMutex(syscalls.buffer_address(memory), name="it")
    mutex.run(lambda: None, soon())
    seen: list[bool] = []
    mutex.recover = lambda: seen.append(mutex.is_new)
    mutex.run(lambda: None, soon())
    mutex.run(mutex.owe_recovery, soon())
    mutex.run(lambda: None, soon())
    assert seen == [True, False]


def test_two_in_a_page_know_nothing_of_each_other(memory: mmap.mmap) -> None:
    one, address = open_mutex(memory), syscalls.buffer_address(memory) + OTHER_AT
    other = RobustMutex(address, name="other", dirty_at=address + 256)
    other.create()
    recovered: list[str] = []
    one.recover, other.recover = lambda: recovered.append("one"), lambda: recovered.append("other")
    with Child(_hold, memory) as child:
        child.receive()
        other.run(lambda: None, deadline_after(1))
    assert recovered == ["other"]  # which was new
    one.run(lambda: other.run(lambda: None, soon()), soon())
    assert recovered == ["other", "one"]  # whose owner was killed
