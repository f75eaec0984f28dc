"""Writers that stop, die or fork in the middle of a row: the others go on, nothing torn is seen, no slot is stuck."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

import memstore
from memstore.engine import INSERTS, deadline_after
from memstore.replay.ring import BufferWait
from tests.children import Child, Wire
from tests.replay.rows import SPEC, check_whole, in_the_copy, new, numbers_of, ring_of, rows, there, writer_of
from tests.replay.workers import work
from tests.support import faults
from tests.support.fork_server import ForkServer, Worker


def _stop_in_a_row(wire: Wire, root: str, number: int, count: int, sampler: Any = "uniform") -> list[int]:
    """Stops itself in the middle of its rows, and says what it got when it was woken up."""
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay", sampler=sampler)

    def stop() -> None:
        wire.send()
        os.kill(os.getpid(), signal.SIGSTOP)

    with in_the_copy(buffer, stop):
        return buffer.extend(rows(number, count)).tolist()


def stopped(child: Child) -> None:
    child.receive()
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_a_stopped_writer_is_passed_over_and_completes_its_rows_later(root: str, sampler: Any) -> None:
    with memstore.open(root) as store:
        buffer = new(store, sampler=sampler)
        buffer.extend(rows(0, 2))
        with Child(_stop_in_a_row, root, 500, 3, sampler) as child:
            stopped(child)
            assert there(store, "replay") == {0: 0, 1: 1}
            index = [position for start in range(10, 40, 5) for position in buffer.extend(rows(start, 5)).tolist()]
            assert len(index) == 30 and not {position % 8 for position in index} & {2, 3, 4}
            assert there(store, "replay") == dict(zip(index[-5:], range(35, 40), strict=True))
            assert (len(buffer), buffer.cursor) == (5, index[-1] + 1)
            with pytest.raises(memstore.StoreTimeoutError, match=rf"held by pid {child.pid} .*T \(stopped\)"):
                buffer.extend(rows(0, 6), timeout=0.02)
            os.kill(child.pid, signal.SIGCONT)
            assert child.receive() == [2, 3, 4]
        assert there(store, "replay") == {2: 500, 3: 501, 4: 502, **dict(zip(index[-5:], range(35, 40), strict=True))}
        check_whole(store, buffer)


@pytest.mark.parametrize("sampler", ["fifo", "lifo"])
def test_rows_of_a_writer_that_was_passed_over_are_handed_out(root: str, sampler: Any) -> None:
    with memstore.open(root) as store:
        buffer = new(store, sampler=sampler)
        with Child(_stop_in_a_row, root, 500, 2) as child:
            stopped(child)
            buffer.extend(rows(0, 6))
            assert sorted(numbers_of(buffer.sample(6))) == list(range(6))
            buffer.extend(rows(6, 5))  # over the head of the ring
            os.kill(child.pid, signal.SIGCONT)
            child.receive()
        found = [*numbers_of(buffer.sample(3)), *numbers_of(buffer.sample(4))]
        assert sorted(found) == [*range(6, 11), 500, 501]
        with pytest.raises(memstore.StoreTimeoutError):
            buffer.sample(1, timeout=0)


def test_a_writer_that_is_killed_in_a_row_leaves_it_unsampled(root: str) -> None:
    with memstore.open(root) as store:
        buffer = new(store)
        buffer.extend(rows(0, 7))
        with Child(_stop_in_a_row, root, 500, 3) as child:
            stopped(child)
        assert there(store, "replay") == {position: position for position in range(2, 7)}
        check_whole(store, buffer)


@pytest.mark.parametrize("is_killed", [False, True])
def test_rows_that_wait_for_room_come_when_the_stopped_one_goes_on_or_is_killed(root: str, is_killed: bool) -> None:
    with memstore.open(root) as store:
        new(store)
        with Child(_stop_in_a_row, root, 500, 5) as first:
            stopped(first)
            with Child(_extend, root, 4) as second:
                second.receive()
                second.wait_until_it_sleeps_on_a_futex()
                if is_killed:
                    first.kill()
                else:
                    os.kill(first.pid, signal.SIGCONT)
                assert second.receive(20.0 if is_killed else 240.0) == [5, 6, 7, 8]
                assert is_killed or first.receive() == [0, 1, 2, 3, 4]


def _extend(wire: Wire, root: str, count: int) -> list[int]:
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay")
    wire.send()
    return buffer.extend(rows(0, count), timeout=60.0).tolist()


def test_who_stops_inside_a_hold_is_named(root: str) -> None:
    with memstore.open(root) as store:
        buffer = new(store)
        buffer.extend(rows(0, 4))
        with Child(_stop_in_a_hold, root) as child:
            stopped(child)
            with pytest.raises(memstore.StoreTimeoutError, match=rf"held by pid {child.pid} .*stopped"):
                buffer.extend(rows(0, 1), timeout=0.02)
            assert len(numbers_of(buffer.sample(4))) == 4  # takes no mutex
        check_whole(store, buffer)


def _stop_in_a_hold(wire: Wire, root: str) -> None:
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay")

    def stop(_: int, name: str) -> None:
        if name == "mutex_lock":
            wire.send()
            os.kill(os.getpid(), signal.SIGSTOP)

    def nothing(*_: object) -> None:
        pass

    with faults.watching(nothing, stop):
        buffer.extend(rows(0, 1))


@pytest.mark.parametrize("small", [False, True])
def test_an_error_in_the_copy_gives_the_slots_back(store: memstore.Store, small: bool) -> None:
    buffer = new(store)
    buffer.extend(rows(0, 4))

    def fail() -> None:
        raise RuntimeError("in the middle")

    with in_the_copy(buffer, fail, small=small), pytest.raises(RuntimeError, match="in the middle"):
        buffer.extend(rows(500, 3))
    assert ring_of(buffer).claims.in_use() == ([0] if small else [])  # one of the dead, which others give back
    assert there(store, "replay") == {position: position for position in range(4)}
    assert buffer.extend(rows(10, 2)).tolist() == [7, 8]
    check_whole(store, buffer)


@pytest.mark.parametrize("small", [False, True])
def test_a_write_inside_a_write_of_one_thread_is_refused(store: memstore.Store, small: bool) -> None:
    buffer = new(store)

    def write() -> None:
        with pytest.raises(memstore.ContentionError, match="a signal handler or finalizer must not"):
            buffer.extend(rows(900, 1))

    with in_the_copy(buffer, write, small=small):
        buffer.extend(rows(0, 2))
    assert there(store, "replay") == {0: 0, 1: 1}
    check_whole(store, buffer)


@pytest.mark.parametrize("small", [False, True])
def test_a_fork_in_the_middle_of_a_row_stays_its_parents(root: str, small: bool) -> None:
    """The thread that copies forks, as a signal handler might: the child must not publish, and can write by itself."""
    with memstore.open(root) as store:
        buffer = new(store)
        pids: list[int] = []
        with in_the_copy(buffer, lambda: pids.append(os.fork()), small=small):
            try:
                buffer.extend(rows(0, 2))
            except memstore.ContentionError as error:
                status = 2
                if not pids[0] and "forked in the middle of a" in str(error):
                    status = 0 if memstore.ReplayBuffer(store, "replay").extend(rows(50, 1)).tolist() == [2] else 3
                os._exit(status)
        if not pids[0]:
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
        assert there(store, "replay") == {0: 0, 1: 1, 2: 50}
        check_whole(store, buffer)


def test_a_fork_beside_a_write_of_another_thread(root: str) -> None:
    with memstore.open(root) as store:
        buffer = new(store)
        inside, go_on = threading.Event(), threading.Event()

        def pause() -> None:
            inside.set()
            assert go_on.wait(60)

        def write() -> None:
            with in_the_copy(buffer, pause):
                buffer.extend(rows(0, 2))

        thread = threading.Thread(target=write)
        thread.start()
        assert inside.wait(60)
        pid = os.fork()
        if not pid:
            other = memstore.ReplayBuffer(store, "replay")
            os._exit(0 if other.extend(rows(50, 1)).tolist() == [2] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        go_on.set()
        thread.join(60)
        assert there(store, "replay") == {0: 0, 1: 1, 2: 50}
        check_whole(store, buffer)


def test_a_thread_that_ends_in_the_middle_of_a_row_is_dead(store: memstore.Store) -> None:
    """As one that the interpreter leaves behind, and whose process goes on."""
    buffer = new(store, 4)
    claims = ring_of(buffer).claims

    thread = threading.Thread(target=claim, args=(buffer,))
    thread.start()
    ended(thread)
    assert len(claims.of_the_dead()) == 1
    check_whole(store, buffer)
    memstore.ReplayBuffer(store, "replay")  # and lets go of the memory that the dead kept


def claim(buffer: memstore.ReplayBuffer) -> None:
    ring, deadline = ring_of(buffer), deadline_after(10.0)
    ring.run(writer_of(buffer)._claim, deadline, 1, BufferWait(ring, INSERTS, 1, deadline, str))


def ended(thread: threading.Thread) -> None:
    """The thread of the system is gone, some time after that of Python."""
    thread.join(60)
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_more_writers_than_claims_wait(store: memstore.Store) -> None:
    buffer = new(store, 256)
    held = threading.Barrier(129), threading.Event()

    def hold() -> None:
        claim(buffer)
        held[0].wait(60)
        held[1].wait(60)

    threads = [threading.Thread(target=hold) for _ in range(128)]
    for thread in threads:
        thread.start()
    held[0].wait(60)
    with pytest.raises(memstore.StoreTimeoutError, match=f"its slots or claims are held by pid {os.getpid()} "):
        buffer.extend(rows(0, 1), timeout=0.02)
    held[1].set()
    for thread in threads:
        ended(thread)
    check_whole(store, buffer)
    memstore.ReplayBuffer(store, "replay")


# --- writers, samplers, consumers and learners, killed and stopped at random all the time -----------------------------
# No row is torn, no acknowledged row is lost before the ring comes to it, no slot is stuck.


CAPACITY = 64
ROLES: list[tuple[str, Any]] = [
    ("write", "uniform"),
    ("write", "prioritized"),
    ("sample", "uniform"),
    ("sample", "prioritized"),
    ("sample", "fifo"),
    ("slices", "uniform"),
]


@pytest.mark.parametrize(
    "seconds", [0.7, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(300)])], ids=["short", "long"]
)
def test_kills_and_stops_at_random(fork_server: ForkServer, root: str, seconds: float) -> None:
    chance = random.Random(seconds)
    with memstore.open(root, timeout=60.0) as store:
        buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=CAPACITY, sampler="prioritized")
        buffer.extend(rows(0, CAPACITY))
        sampler = memstore.ReplayBuffer(store, "replay")
        workers = [_start(fork_server, root, role, chance) for role in ROLES]
        over, kills = time.monotonic() + seconds, 0
        while time.monotonic() < over or kills < 3 or buffer.cursor <= 10 * CAPACITY:
            which = chance.randrange(len(workers))
            worker = workers[which]
            for each in workers:
                _drain(each, most=100)  # it writes on meanwhile
            if chance.random() < 0.5:
                worker.kill(signal.SIGSTOP)
                numbers_of(sampler.sample(8))  # takes no mutex, which the stopped one may hold
                worker.kill(signal.SIGCONT)
            else:
                worker.kill()
                assert worker.wait() == -signal.SIGKILL, "it ended by itself: see what it raised"
                kills += 1
                workers[which] = _start(fork_server, root, ROLES[which], chance)
        _check_end(store, buffer, workers)
        print(f"{kills} kills, {buffer.cursor:,} rows")


def _start(fork_server: ForkServer, root: str, role: tuple[str, Any], chance: random.Random) -> Worker:
    worker = fork_server.start(work, root, *role, chance.randrange(1 << 30))
    assert worker.recv(60.0) == "ready"
    return worker


def _drain(worker: Worker, most: int = 1 << 30) -> list[tuple[list[int], int]]:
    found: list[tuple[list[int], int]] = []
    while len(found) < most and worker.channel.poll():
        found.append(worker.recv())
    return found


def _check_end(store: memstore.Store, buffer: memstore.ReplayBuffer, workers: list[Worker]) -> None:
    """All are stopped: what the last writers had acknowledged lies there, unless the ring came to it again."""
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    acknowledged = {
        position: first + offset
        for worker in workers
        for index, first in _drain(worker)
        for offset, position in enumerate(index)
    }
    for worker in workers:
        worker.kill()
        worker.wait()
    found = there(store, "replay")  # completes the claims that were being made, and so moves the head
    head = buffer.cursor
    for position, number in acknowledged.items():
        assert position < head - CAPACITY or found[position] == number, "an acknowledged row is lost"
    check_whole(store, buffer)
