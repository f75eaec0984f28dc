"""A process is killed before and after each of its steps: what it was doing is then done wholly, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import memstore
from memstore.engine import index as entries
from tests.crash import workers
from tests.crash.blockers import NEVER
from tests.crash.leftovers import headers_not_live, left_after_gc
from tests.crash.operations import MAIN, ON_DISK, OPERATIONS
from tests.crash.values import LARGE, SMALL, stamp_at, stamped
from tests.inside import root_of
from tests.support import faults
from tests.support.fork_server import ForkServer

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
        (
            "mapped-ahead",
            lambda names: "map_shared" not in names and _booked(names) == ["lock_exclusive", "write_at"],
        ),
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


def check_goes_on(store: memstore.Store, key: str, what: str) -> None:
    """The next put works, and nothing is left over."""
    store.put(key, stamped(5, SMALL))
    assert stamp_at(store, key) == 5, what
    assert left_after_gc(store) == [], what
    assert headers_not_live(store) == [], what
    assert root_of(store).mutex.owner() == 0, what
