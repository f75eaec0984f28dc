"""A process is killed before and after each of its steps: what it was doing is then done wholly, or not at all."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import memstore
from memstore.engine import index as entries
from memstore.engine.protocols.put import claim
from memstore.engine.root import folder
from memstore.engine.sync.primitives import deadline_after
from tests.crash import workers
from tests.crash.blockers import NEVER
from tests.crash.leftovers import headers_not_live, left_after_gc, leftovers
from tests.crash.operations import MAIN, ON_DISK, OPERATIONS
from tests.crash.tracer import Tracer
from tests.crash.values import INLINE, LARGE, SMALL, stamp_at, stamp_of, stamped
from tests.inside import root_of
from tests.support import faults
from tests.support.fork_server import ForkServer, Worker

KILLED = -9


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    """A thread that waits, and that only a wake ends in time."""
    monkeypatch.setattr(entries, "LOOK_EVERY", NEVER)
    with ThreadPoolExecutor(1) as pool:
        yield pool


# What the next process does first meets what the dead one left.


def _get(store: memstore.Store, server: ForkServer) -> None:
    assert "nothing" not in store


def _put(store: memstore.Store, server: ForkServer) -> None:
    store.put("other", stamped(7, SMALL))


def _gc(store: memstore.Store, server: ForkServer) -> None:
    store.gc()


def _open(store: memstore.Store, server: ForkServer) -> None:
    with server.start(workers.open_once, store.root) as worker:
        worker.join()


First = Callable[[memstore.Store, ForkServer], None]
FIRST: list[First] = [_get, _put, _gc, _open]


def test_disk_is_written_before_the_catalog_says_so(disk_store: memstore.Store) -> None:
    """What a kill can't show: file and folder are synced before the commit, and so is the header."""
    disk_store.put("first", stamped(1, SMALL))  # the first one of a new store recovers
    for nbytes in (SMALL, LARGE):
        names = faults.record(lambda nbytes=nbytes: disk_store.put("k", stamped(1, nbytes)))
        written = [name for name in names if name in {"write_at", "sync", "sync_folder", "sync_data", faults.COMMIT}]
        assert written[:7] == [faults.COMMIT, "write_at", "sync", "sync_folder", "write_at", "sync_data", faults.COMMIT]


@pytest.mark.parametrize(
    ("name", "meets"),
    [
        ("reuse-small", lambda names: "unlink" not in names and _claimed(names) == ["lock_exclusive"]),
        ("claim-held", lambda names: _claimed(names) == ["lock_exclusive"] * 2),
        (
            "book-ahead",
            lambda names: names.count("mutex_lock") == 2 and _booked(names) == ["lock_exclusive", "write_at"],
        ),
        (
            "use-ahead",
            lambda names: names.count("mutex_lock") == 1 and _booked(names) == ["lock_exclusive", "write_at"],
        ),
        ("map-ahead", lambda names: names.index("allocate") < names.index("map_shared") < names.index("write_at")),
        ("mapped-ahead", lambda names: "map_shared" not in names and _booked(names) == ["lock_exclusive", "write_at"]),
        ("book-held", lambda names: _booked(names) == ["lock_exclusive", faults.COMMIT, "write_at"]),
        ("book-another", lambda names: _booked(names) == ["lock_exclusive", "write_at", "unlock"]),
        ("abandon-ahead", lambda names: "lock_exclusive" not in names[: names.index("mutex_unlock")]),
        ("gc-ahead", lambda names: names[:4] == ["mutex_lock", faults.COMMIT, "unlock", "close_all"]),
        ("abandon-small", lambda names: "unlink" not in names and "futex_wake" not in names),
        ("delete-and-sweep", lambda names: names.count("unlink") > 4),
        ("put-at-capacity", lambda names: names.index("unlink") < names.index("futex_wake")),
    ],
)
def test_operations_meet_what_they_are_for(
    name: str, meets: Callable[[list[str]], bool], store: memstore.Store, server: ForkServer
) -> None:
    OPERATIONS[name].reset(store)
    with server.start(workers.steps_of, store.root, name) as worker:
        names = worker.recv()
        worker.join()
    assert meets(names), names


def _claimed(names: list[str]) -> list[str]:
    """The locks that the first hold of the mutex asks for."""
    return [name for name in names[: names.index("mutex_unlock")] if name == "lock_exclusive"]


def _booked(names: list[str]) -> list[str]:
    """What the hold of the mutex that publishes does after its commit."""
    before = names[: names.index("futex_wake")]
    hold = before[len(before) - before[::-1].index("mutex_lock") :]
    after = hold[hold.index(faults.COMMIT) + 1 :]
    return [name for name in after if name in {"lock_exclusive", "write_at", "unlock", faults.COMMIT}]


@pytest.mark.parametrize(
    ("name", "durability", "stride"),
    [
        *(pytest.param(name, "process", 3 if name in MAIN else 6, id=name) for name in OPERATIONS),
        *(pytest.param(name, "disk", 6, id=f"{name}-disk") for name in ON_DISK),
        *(pytest.param(name, "process", 1, id=f"{name}-whole", marks=pytest.mark.full) for name in OPERATIONS),
        *(pytest.param(name, "disk", 1, id=f"{name}-disk-whole", marks=pytest.mark.full) for name in OPERATIONS),
    ],
)
def test_kill_at_each_step(
    name: str,
    durability: str,
    stride: int,
    request: pytest.FixtureRequest,
    server: ForkServer,
    waiting: ThreadPoolExecutor,
) -> None:
    """Kills before and after each step; with a longer stride at some of them, and always after the last."""
    store: memstore.Store = request.getfixturevalue("store" if durability == "process" else "disk_store")
    operation = OPERATIONS[name]
    operation.reset(store)
    with server.start(workers.steps_of, store.root, name) as worker:
        names = worker.recv()
        worker.join()
    assert operation.outcome(store) == "new", "it does nothing"

    outcomes: list[str] = []
    # From here on, in halves of steps, the doorbell counts as rung, and the wake is still to come: the look that a
    # waiter takes each second would stand in for it.
    wake = names.index("futex_wake") if "futex_wake" in names else 0
    rung = 2 * max((number for number in range(wake) if names[number] == "mutex_unlock"), default=0)
    for half in [*range(stride - 1, 2 * len(names) - 1, stride), 2 * len(names) - 1]:
        number, after = half // 2 + 1, half % 2 == 1
        what = f"{name}, killed {'after' if after else 'before'} step {number} of {names}: {names[number - 1]}"
        versions = operation.reset(store)
        waited = min(operation.keys)
        wait = waiting.submit(store.wait, waited, newer_than=versions[waited], timeout=60.0)
        with server.start(workers.die_at, store.root, name, number, after) as worker:
            assert worker.wait() == KILLED, what
        FIRST[half // stride % len(FIRST)](store, server)
        outcomes.append(operation.outcome(store))
        if half < rung and _newer(store, waited, versions[waited]):
            store.put("other", stamped(7, SMALL))  # whoever takes the mutex next rings for the dead
            assert wait.result(30) > versions[waited], what
        check_goes_on(store, waited, what)
        assert wait.result(30) > versions[waited], what
    # Once published, a change is there to stay; and an operation that did all its steps is done.
    assert outcomes == sorted(outcomes, reverse=True), outcomes
    assert outcomes[-1] == "new"


def _newer(store: memstore.Store, key: str, version: int) -> bool:
    return key in store and store.version(key) > version


def check_goes_on(store: memstore.Store, key: str, what: str, *, looks_at_kept: bool = True) -> None:
    """The next put works, and nothing is left over."""
    store.put(key, stamped(5, SMALL))
    assert stamp_at(store, key) == 5, what
    assert left_after_gc(store) == [], what
    assert headers_not_live(store, looks_at_kept=looks_at_kept) == [], what
    assert root_of(store).mutex.owner() == 0, what


# --- while it creates or opens a store: whoever comes next has a whole store ------------------------------------------


FILES = {"catalog", folder.DOORBELL, folder.LOCK, folder.SEGMENTS, folder.SETTINGS}
KILLS = [  # at each so many-th of the steps, before them and after them in turn
    ("process", 5),
    *(pytest.param(durability, 1, marks=pytest.mark.full) for durability in ("process", "disk")),
]


@pytest.mark.parametrize(("durability", "stride"), KILLS)
def test_kill_while_creating(durability: str, stride: int, request: pytest.FixtureRequest, server: ForkServer) -> None:
    path: str = request.getfixturevalue("root" if durability == "process" else "disk_root")
    with server.start(workers.steps_of_open, path, durability) as worker:
        names = worker.recv()
    for half in range(stride // 2, 2 * len(names), stride):
        number, after = half // 2 + 1, half % 2 == 1
        shutil.rmtree(path, ignore_errors=True)
        what = f"killed {'after' if after else 'before'} step {number} of {names}: {names[number - 1]}"
        with server.start(workers.die_in_open, path, durability, number, after) as worker:
            assert worker.wait() == KILLED, what
        _check_reader_sees_all_or_nothing(path, what)
        with memstore.open(path, durability=durability, timeout=30.0) as store:
            store.put("a", stamped(1, SMALL))
            assert stamp_at(store, "a") == 1, what
            assert leftovers(store) == [], what
        assert set(os.listdir(path)) == FILES, what
        blocks = os.stat(f"{path}/{folder.CATALOG}/lock.mdb").st_blocks * 512
        assert blocks >= os.stat(f"{path}/{folder.CATALOG}/lock.mdb").st_size, f"sparse, {what}"


def _check_reader_sees_all_or_nothing(path: str, what: str) -> None:
    try:
        memstore.open(path, "r", timeout=30.0).close()
    except memstore.NotAStoreError:
        assert not os.path.exists(f"{path}/{folder.SETTINGS}"), what


@pytest.mark.parametrize(("durability", "stride"), KILLS)
def test_kill_while_opening(durability: str, stride: int, request: pytest.FixtureRequest, server: ForkServer) -> None:
    """What the dead opener was to sweep, the next one sweeps, or a put of its kind uses."""
    path: str = request.getfixturevalue("root" if durability == "process" else "disk_root")

    def leave_work() -> None:
        with memstore.open(path, durability=durability) as store:
            store.put("a", stamped(1, SMALL))
            held = store.get("a")
            store.put("a", stamped(2, SMALL))
            del held
            claim(root_of(store), b"b", 4096, SMALL, 0, deadline_after(5)).close()  # as one who died filling

    leave_work()
    with server.start(workers.steps_of_open, path, durability) as worker:
        names = worker.recv()
    assert "unlink" in names
    for half in range(stride // 2, 2 * len(names), stride):
        number, after = half // 2 + 1, half % 2 == 1
        what = f"killed {'after' if after else 'before'} step {number} of {names}: {names[number - 1]}"
        leave_work()
        with server.start(workers.die_in_open, path, durability, number, after) as worker:
            assert worker.wait() == KILLED, what
        with memstore.open(path, timeout=30.0) as store:
            assert leftovers(store, spares=True) == [], what
            assert stamp_at(store, "a") == 2, what
            store.put("a", stamped(3, SMALL))
            assert stamp_at(store, "a") == 3, what
            store.gc()
            assert leftovers(store) == [], what


# --- writers, in the middle of large puts, again and again, while others read -----------------------------------------


READERS = 2


@pytest.mark.parametrize(
    ("kills", "nbytes"),
    [(8, 16 << 20), pytest.param(300, 64 << 20, marks=[pytest.mark.full, pytest.mark.timeout(600)])],
)
def test_kill_writers_of_large_values(
    kills: int, nbytes: int, store: memstore.Store, server: ForkServer, chance: random.Random
) -> None:
    stamp = 1
    store.put("k", stamped(stamp, nbytes))
    readers = [server.start(workers.read_on, store.root, "k") for _ in range(READERS)]
    paces: list[float] = []  # seconds a put
    interrupted = published = 0
    try:
        for number in range(kills):
            with server.start(workers.write_on, store.root, "k", nbytes, stamp + 1) as writer:
                assert writer.recv() == ("begun", stamp + 1)
                if number % 4 == 0:  # killed in its second put
                    started = time.monotonic()
                    assert writer.recv() == ("done", stamp + 1)
                    paces.append(time.monotonic() - started)
                    assert writer.recv() == ("begun", stamp + 2)
                time.sleep(chance.uniform(0, 1.1 * statistics.median(paces)))
                writer.kill()
                assert writer.wait() == KILLED
                begun, done = _journal(writer, stamp + 1 + (number % 4 == 0), stamp + (number % 4 == 0))
            found = stamp_of(store.get("k"), every=4093)
            assert done <= found <= begun, f"{done} was acknowledged, {begun} begun, and {found} is there"
            interrupted += begun > done
            published += found > done
            stamp = begun + 1
            store.put("k", stamped(stamp, nbytes))  # the next put works
            _check(store, readers, stamp)
        for reader in readers:
            reader.send("end")
            reader.join()
    finally:
        for reader in readers:
            reader.close()
    print(f"{kills} kills, {interrupted} in a put, {published} of which had published already")
    assert interrupted > kills // 3, "few kills fell into a put: this tests nothing"


def _journal(writer: Worker, begun: int, done: int) -> tuple[int, int]:
    """The last put that a dead writer began, and the last that was acknowledged."""
    while True:
        try:
            word, stamp = writer.channel.recv()
        except (EOFError, ConnectionResetError):
            return begun, done
        begun, done = (stamp, done) if word == "begun" else (begun, stamp)


def _check(store: memstore.Store, readers: list[Worker], stamp: int) -> None:
    """The readers go on, and have found nothing torn; once they let go, only what is live has a file."""
    for reader in readers:
        reader.send("rest")
    for reader in readers:
        assert reader.recv()[1] <= stamp
    assert left_after_gc(store) == []
    assert headers_not_live(store) == []
    for reader in readers:
        reader.send("go on")


# --- readers: they owe nothing, and what they held is given back (get-many is among the steps above) ------------------


def test_what_a_killed_reader_held_is_given_back(store: memstore.Store, server: ForkServer) -> None:
    store.put("k", stamped(1, LARGE))
    with server.start(workers.hold, store.root, "k") as reader:
        assert reader.recv() == 1
        store.put("k", stamped(2, LARGE))
        store.gc()
        assert len(leftovers(store)) == 3, "its file, its place among the retired, and its row"
        assert store.stats().pinned_by == (reader.pid,)
        reader.kill()
        assert reader.wait() == KILLED
    assert left_after_gc(store) == []


def test_readers_that_died_reading_make_the_catalog_no_larger(store: memstore.Store, server: ForkServer) -> None:
    """LMDB keeps the pages that a reader saw, until somebody notices that it is dead."""
    size = store.stats().catalog_bytes
    for _ in range(2):
        with server.start(workers.die_reading, store.root) as reader:
            assert reader.wait() == KILLED
        for number in range(4000):  # each takes fresh pages as long as the old ones are kept
            store.put(str(number % 50), stamped(number, 8 * INLINE))
    assert store.stats().catalog_bytes == size


# --- at each return from the kernel -----------------------------------------------------------------------------------
# So falls the axe mostly: a SIGKILL that arrives during a system call takes effect when that is done.


FULL = pytest.mark.full


@pytest.mark.parametrize("first", [pytest.param(first, marks=() if first in FIRST[2:] else FULL) for first in FIRST])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "overwrite-small" else FULL) for name in OPERATIONS]
)
@pytest.mark.parametrize("durability", ["process", pytest.param("disk", marks=FULL)])
def test_kill_at_each_system_call(
    name: str, durability: str, first: First, request: pytest.FixtureRequest, server: ForkServer
) -> None:
    store: memstore.Store = request.getfixturevalue("store" if durability == "process" else "disk_store")
    operation = OPERATIONS[name]
    outcomes: list[str] = []
    returns = ended = 0
    while ended < 4:  # LMDB makes a few calls more or less, depending on which pages are free
        returns += 1
        what = f"{name}, killed at return {returns} from the kernel, then {first.__name__}"
        operation.reset(store)
        if not _killed_at_return(server, store.root, name, returns):
            ended += 1
            continue
        first(store, server)
        seen = operation.outcome(store)
        store.put("other", stamped(7, SMALL))
        outcomes.append(operation.outcome(store))
        # Where the kill fell into LMDB's commit, readers see it when the next writer has been. Never the other way.
        assert seen == outcomes[-1] or (seen, first) == ("old", FIRST[0]), f"{what}: {seen}, then {outcomes[-1]}"
        check_goes_on(store, min(operation.keys), what)
    assert set(outcomes) == ({"old", "new"} if operation.changes else {"new"}), outcomes


def _killed_at_return(server: ForkServer, path: str, name: str, returns: int) -> bool:
    with server.start(workers.perform, path, name) as worker:
        worker.recv()  # it is ready, and waits for a word
        try:
            tracer = Tracer(worker.pid)
        except PermissionError as error:
            pytest.skip(f"no tracing on this machine: {error}")
        worker.send("go")
        killed = tracer.run(returns)
        assert worker.wait() == (KILLED if killed else 0)
        return killed
