"""A process is stopped, as by SIGSTOP, while it holds a lock: others say so, in time, and go on when it does."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import memstore
from memstore.listing import Mode
from tests.children import Child, Wire, in_child
from tests.crash import blockers
from tests.crash.leftovers import leftovers
from tests.crash.values import INLINE, LARGE, SMALL, stamp_at, stamp_of, stamped
from tests.engine.bytes_store import get, opened
from tests.inside import lmdb_of, root_of
from tests.patience import least_seconds
from tests.support.equality import assert_same
from tests.support.fork_server import ForkServer, Worker

TIMEOUT = 0.3  # of what must not be had
PLENTY = 60.0  # of what must be, on a busy machine too
SLACK = 0.5
VALUE = torch.zeros(8, dtype=torch.int64)

CALLS: dict[str, Callable[[memstore.Store, float], object]] = {
    "put": lambda store, timeout: store.put("k", VALUE, timeout=timeout),
    "put-large": lambda store, timeout: store.put("k", stamped(1, SMALL), timeout=timeout),
    "put-many": lambda store, timeout: store.put_many({"k": VALUE, "l": VALUE}, timeout=timeout),
    "delete": lambda store, timeout: store.delete("held", timeout=timeout),
    "delete-many": lambda store, timeout: store.delete_many(["held"], timeout=timeout),
    "gc": lambda store, timeout: store.gc(timeout=timeout),
    "pickle-ref": lambda store, timeout: _pickle(store.root, timeout),
}


def _pickle(root: str, timeout: float) -> None:
    with memstore.open(root, "r+", timeout=timeout) as store:
        ForkingPickler(io.BytesIO()).dump(store.ref("held"))


def until_stopped(worker: Worker) -> None:
    deadline = time.monotonic() + 20
    with open(f"/proc/{worker.pid}/stat") as file:
        while file.read().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            file.seek(0)
            time.sleep(0.001)


@contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    worker.kill(signal.SIGSTOP)
    until_stopped(worker)
    try:
        yield
    finally:
        worker.kill(signal.SIGCONT)


@pytest.fixture
def owner(store: memstore.Store, server: ForkServer) -> Iterator[Worker]:
    """A stopped process that holds the mutex of `store`."""
    with server.start(blockers.hold_mutex, store.root) as worker:
        assert worker.recv() == "held"
        with stopped(worker):
            yield worker


@pytest.mark.parametrize("name", CALLS)
def test_timeout_names_the_stopped_owner(name: str, store: memstore.Store, owner: Worker) -> None:
    _times_out(rf"held by pid {owner.pid}\b.*stopped", lambda: CALLS[name](store, TIMEOUT))
    owner.kill(signal.SIGCONT)
    owner.send("release")
    assert owner.recv() == "released"
    assert "k" not in store
    CALLS[name](store, PLENTY)


LATE_BY = 1.0  # seconds, at most

# Calls that need the store's mutex later than at their first step, or several times, or that end an attempt after it.
OTHERS: dict[str, Callable[[memstore.Store, float], object]] = {
    "put-sharded": lambda store, timeout: _shard(store, "mine", 1, timeout),
    "put-sharded-of-two": lambda store, timeout: _shard(store, "mine", 2, timeout),
    "put-sharded-unwaited": lambda store, timeout: _shard(store, "mine", 2, timeout, wait=False),
    "abort": lambda store, timeout: store.abort("parts", "waiting", timeout=timeout),
    "create-dataset": lambda store, timeout: store.create_dataset(
        "d", ((3,), torch.float32), capacity=9, timeout=timeout
    ),
    "create-dataset-from": lambda store, timeout: store.create_dataset_from("d", torch.zeros(3, 2), timeout=timeout),
    "seal": lambda store, timeout: store.open_dataset("rows").seal(timeout=timeout),
    "put-seldom-kept": lambda store, timeout: store.put("parts", stamped(1, LARGE), timeout=timeout),
    "clear": lambda store, timeout: store.clear(timeout=timeout),
    **{
        f"{name}-in-a-forked-child": lambda store, timeout, call=call: _in_a_child(store, lambda: call(store, timeout))
        for name, call in {
            "put": CALLS["put"],
            "put-sharded": lambda store, timeout: _shard(store, "mine", 1, timeout),
            "abort": lambda store, timeout: store.abort("parts", "waiting", timeout=timeout),
            "save-model": lambda store, timeout: store.save_model("m", torch.nn.Linear(2, 2), timeout=timeout),
            "load-model": lambda store, timeout: store.load_model("model", torch.nn.Linear(2, 2), timeout=timeout),
            "get": lambda store, timeout: store.get("held", timeout=timeout),
            "get-many": lambda store, timeout: store.get_many(["held"], timeout=timeout),
            "delete-many": lambda store, timeout: store.delete_many(["held"], atomic=False, timeout=timeout),
            "clear": lambda store, timeout: store.clear(timeout=timeout),
        }.items()
    },
}


def _shard(store: memstore.Store, attempt: str, world: int, timeout: float, *, wait: bool = True) -> object:
    value = memstore.TensorShard(torch.zeros(2000), (2000 * world,), (0,))
    return store.put_sharded("parts", value, attempt=attempt, rank=0, world_size=world, wait=wait, timeout=timeout)


def _in_a_child(store: memstore.Store, call: Callable[[], object]) -> None:
    """Calls in a child that was forked, which has to open the catalog anew."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            call()
        except BaseException as error:
            os.write(write, f"{type(error).__name__} {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:
        name, _, text = file.read().partition(" ")
    os.wait()
    if name:
        raise {kind.__name__: kind for kind in (memstore.StoreTimeoutError, memstore.UnknownOutcomeError)}[name](text)


FAST = ("put-sharded", "abort", "clear", "save-model-in-a-forked-child")


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FAST else pytest.mark.full) for one in OTHERS])
def test_each_call_ends_within_its_timeout_and_names_who_it_waited_for(
    name: str, store: memstore.Store, server: ForkServer
) -> None:
    _shard(store, "waiting", 2, PLENTY, wait=False)
    if name == "seal":
        store.create_dataset("rows", ((3,), torch.float32), capacity=9)
    with server.start(blockers.hold_mutex, store.root) as owner:
        assert owner.recv() == "held"

        def refused() -> None:
            kinds = memstore.StoreTimeoutError, memstore.UnknownOutcomeError
            with pytest.raises(kinds, match=rf"held by pid {owner.pid}\b.*stopped"):
                OTHERS[name](store, TIMEOUT)

        with stopped(owner):
            assert TIMEOUT <= least_seconds(refused, TIMEOUT + LATE_BY) < TIMEOUT + LATE_BY


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: Any, store: memstore.Store) -> None:
    for call in (*CALLS.values(), OTHERS["put-sharded"], OTHERS["abort"], OTHERS["create-dataset"]):
        with pytest.raises((ValueError, TypeError), match="a timeout is a number of seconds"):
            call(store, timeout)
    assert not list(store)


def test_reads_need_no_mutex(store: memstore.Store, owner: Worker) -> None:
    assert stamp_of(store.get("held", timeout=PLENTY)) == 1  # the owner keeps the mutex for as long
    assert list(store.get_many(["held"], timeout=PLENTY)) == ["held"]
    assert list(store) == ["held"]
    assert store.info("held").nbytes == SMALL
    assert store.stats().keys == 1
    assert stamp_of(store.ref("held").get()) == 1
    with memstore.open(store.root, "r", timeout=PLENTY) as reader:
        assert stamp_of(reader.get("held")) == 1


def test_killed_while_stopped(store: memstore.Store, owner: Worker) -> None:
    owner.kill()
    assert owner.wait() == -9
    assert store.put("k", VALUE, timeout=PLENTY) > 0


def test_interrupt_ends_a_wait_for_the_mutex(store: memstore.Store, server: ForkServer) -> None:
    with server.start(blockers.be_interrupted_in_put, store.root) as worker:
        assert worker.recv() == "opened"
        with server.start(blockers.hold_mutex, store.root) as owner:
            assert owner.recv() == "held"
            worker.send("put")
            assert worker.recv() < SLACK
            owner.send("release")
            assert owner.recv() == "released"
            store.put("k", VALUE, timeout=PLENTY)


def test_an_open_that_timed_out_can_be_repeated(store: memstore.Store, owner: Worker, server: ForkServer) -> None:
    with server.start(blockers.open_and_retry, store.root) as worker:
        assert f"held by pid {owner.pid}" in worker.recv()[0]
        owner.kill(signal.SIGCONT)
        owner.send("release")
        assert owner.recv() == "released"
        worker.send("again")
        assert worker.recv() == store.version("k")


def test_open_behind_a_stopped_opener_times_out(store: memstore.Store, server: ForkServer) -> None:
    with server.start(blockers.hold_folder, store.root) as worker:
        assert worker.recv() == "held"
        with stopped(worker):
            _times_out(f"pid {worker.pid} .*to finish opening", lambda: memstore.open(store.root, timeout=TIMEOUT))
            store.put("k", VALUE, timeout=PLENTY)  # who has it open is not concerned
        worker.send("release")
        memstore.open(store.root, timeout=PLENTY).close()


@pytest.mark.parametrize("nbytes", [INLINE, SMALL, LARGE])
def test_stopped_in_a_commit(nbytes: int, store: memstore.Store, server: ForkServer) -> None:
    """It holds the mutex, and LMDB's transaction is open: reads go on, writes and openings say who it is."""
    with server.start(blockers.stop_in_put, store.root, nbytes, "committing") as worker:
        until_stopped(worker)
        who = rf"held by pid {worker.pid}\b.*stopped"
        assert stamp_at(store, "k") == 0
        for name in ("put-large", "gc"):
            _times_out(who, lambda name=name: CALLS[name](store, TIMEOUT))
        with server.start(blockers.open_and_retry, store.root) as other:
            assert f"held by pid {worker.pid}" in other.recv()[0]
            worker.kill(signal.SIGCONT)
            version = worker.recv()
            other.send("again")
            other.recv()
        assert store.wait("k", newer_than=version, timeout=PLENTY) > version


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_stopped_while_it_fills(nbytes: int, store: memstore.Store, server: ForkServer) -> None:
    """It holds a file and no mutex: nobody waits for it, and nobody takes what it fills for a dead one's."""
    with server.start(blockers.stop_in_put, store.root, nbytes, "filling") as worker:
        until_stopped(worker)
        filling = store.stats().filling_bytes
        assert filling >= nbytes
        for stamp in range(2, 12):
            store.put("k", stamped(stamp, nbytes), timeout=PLENTY)  # it stays stopped for as long
            memstore.open(store.root, timeout=PLENTY).close()
            store.gc(timeout=PLENTY)
            assert stamp_at(store, "k") == stamp
        assert store.stats().filling_bytes == filling
        worker.kill(signal.SIGCONT)
        assert worker.recv() == store.version("k")
        assert stamp_at(store, "k") == 1
    store.gc()
    assert leftovers(store) == []


def test_a_second_opener_is_not_late(store: memstore.Store, owner: Worker, server: ForkServer) -> None:
    """The first one waits for the stopped process, and has locked the folder meanwhile."""
    with ExitStack() as stack:
        openers = [stack.enter_context(server.start(blockers.open_and_retry, store.root)) for _ in range(3)]
        for _ in range(blockers.TRIES):
            errors, seconds = zip(*(opener.recv() for opener in openers), strict=True)
            if max(seconds) < 2 * blockers.OPENING:  # the last of three, one after the other, takes three of them
                break
            for opener in openers:
                opener.send("try")
        else:
            pytest.fail(f"they are late each time: {seconds}")
        waited_for = {int(pid) for error in errors for pid in re.findall(r"pid (\d+)", error)}
        assert owner.pid in waited_for <= {owner.pid, *(opener.pid for opener in openers)}, errors
        owner.kill(signal.SIGCONT)
        owner.send("release")
        assert owner.recv() == "released"
        for opener in openers:
            opener.send("again")
            opener.recv()


def test_threads_that_wait_stand_in_nobodys_way(scratch: str, server: ForkServer) -> None:
    """One waits in an opening, one in a put: forks, and other stores' openings and closes, don't wait for them."""
    with ExitStack() as stack:
        worker = stack.enter_context(server.start(blockers.live_beside_stopped_owners, scratch))
        assert worker.recv() == "opened"
        owners = [stack.enter_context(server.start(blockers.hold_mutex, f"{scratch}{number}")) for number in range(2)]
        for owner in owners:
            assert owner.recv() == "held"
            stack.enter_context(stopped(owner))
        worker.send("go")
        errors, done_meanwhile = worker.recv()
        assert done_meanwhile
        for owner, error in zip(owners, errors, strict=True):
            assert f"held by pid {owner.pid}" in error


def _times_out(who: str, call: Callable[[], object]) -> None:
    def refused() -> None:
        with pytest.raises(memstore.StoreTimeoutError, match=who):
            call()

    assert TIMEOUT <= least_seconds(refused, TIMEOUT + SLACK) < TIMEOUT + SLACK


# --- a reader that holds the mutex of LMDB's table of readers: who reads already goes on (P6) -------------------------
# The table's mutex lies in lock.mdb, where LMDB 0.9 has it. A child that has the store not open takes it and keeps it,
# as a process does that is stopped (SIGSTOP) in the middle of its first look.


_MUTEX_AT = 8  # behind magic and format
_libc = ctypes.CDLL(None)


def _hold_the_table(wire: Wire, root: str) -> None:
    with open(f"{root}/catalog/local/lock.mdb", "r+b") as file:
        page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page)) + _MUTEX_AT
    if _libc.pthread_mutex_lock(ctypes.c_void_p(address)) == errno.EOWNERDEAD:  # the last one was killed
        _libc.pthread_mutex_consistent(ctypes.c_void_p(address))
    wire.send()
    while True:  # until it is killed: an orderly end would unmap the mutex, and nobody could tell that its owner died
        signal.pause()


@contextlib.contextmanager
def table_is_held(root: str) -> Iterator[None]:
    with Child(_hold_the_table, root) as child:
        child.receive()
        yield


def beside_a_held_table(scene: Callable[..., None], *arguments: object, rounds: int = 1) -> None:
    """Runs `scene(wire, *arguments)` in a child, since what waits for LMDB's mutex holds the interpreter's lock too.

    In each round the scene says when the table is to be held, is told that it is, and says when it has done its work.
    """
    with Child(scene, *arguments) as child:
        for _ in range(rounds):
            child.receive()
            with table_is_held(str(arguments[0])):
                child.send()
                child.receive(20)


@contextlib.contextmanager
def held(wire: Wire) -> Iterator[None]:
    """Within a scene: the table is held meanwhile."""
    wire.send()
    wire.receive()
    yield
    wire.send()


@pytest.mark.parametrize("mode", ["r+", "r"])
def test_a_store_that_is_open_needs_no_lock_of_the_table(root: str, mode: Mode) -> None:
    memstore.open(root).close()
    beside_a_held_table(_use if mode == "r+" else _read, root)


def _use(wire: Wire, root: str) -> None:
    """Every call that looks into the catalog."""
    with memstore.open(root) as store, held(wire):
        small, large = torch.rand(4), torch.rand(5000)
        version = store.put("small", small)
        store.put("large", large)
        assert store.wait("small", newer_than=version - 1, timeout=2) == version
        assert_same(store.get("small", timeout=2), small)
        assert_same(store.get("large"), large)
        assert_same(store.get_many(["small", "large"])["large"], large)
        assert_same(store.view("large")[:10].clone(), large[:10])
        assert store.version("small") == version and "small" in store and len(store) == 2
        assert list(store.keys()) == ["large", "small"]
        assert store.info("small").version == version
        assert store.ref("large").get().shape == large.shape
        assert store.stats().keys == 2
        store.gc()
        assert store.delete("small")


def _read(wire: Wire, root: str) -> None:
    with memstore.open(root) as writer, memstore.open(root, "r") as store:
        writer.put("key", torch.arange(4))
        with held(wire):
            read_once(store)
            assert store.wait("key") == store.version("key")


def read_once(store: memstore.Store) -> None:
    assert store.get("key").tolist() == [0, 1, 2, 3]


def test_an_error_that_is_kept_keeps_no_slot(root: str) -> None:
    """Its traceback refers to the frames of the look, and those to LMDB's transaction."""
    beside_a_held_table(_fail_and_read, root)


def _fail_and_read(wire: Wire, path: str) -> None:
    with opened(path) as root, held(wire):
        errors: list[BaseException] = []
        for _ in range(3):
            try:
                with root.guard:
                    root.catalog.view(_raise)
            except ZeroDivisionError as error:
                errors.append(error)
        get(root, b"key")
        assert len(errors) == 3


def _raise(transaction: object) -> None:
    raise ZeroDivisionError


def test_forked_children_leave_their_parents_slot_alone(root: str) -> None:
    """Each child opens the catalog anew, reads, and closes it, or ends at once, or is killed."""
    beside_a_held_table(_fork_and_read, root, rounds=9)


def _fork_and_read(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.arange(4))
        for end in (_read_and_close, _leave, _read_and_die) * 3:
            pid = os.fork()
            if pid == 0:
                end(store)
            os.waitpid(pid, 0)
            with held(wire):
                read_once(store)


def _read_and_close(store: memstore.Store) -> None:
    read_once(store)
    store.close()
    os._exit(0)


def _leave(store: memstore.Store) -> None:
    os._exit(0)


def _read_and_die(store: memstore.Store) -> None:
    read_once(store)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_copy_of_the_folder_by_who_has_it_open_takes_slots_away_and_nothing_fails(root: str) -> None:
    """Closing lock.mdb drops LMDB's locks of this process: others take it for dead, and its slot for theirs."""
    with memstore.open(root) as store:
        store.put("key", torch.arange(4))
        for number in range(3):
            shutil.copytree(root, f"{root}-copy{number}")
            with Child(_read_on, root) as child:  # its opening looks for the dead
                child.receive()
                for _ in range(3):
                    read_once(store)
                    child.send()
                    assert child.receive() == [0, 1, 2, 3]
        assert store.put("key", torch.arange(3)) > 0


def test_nor_does_a_put_that_looks_for_room(root: str) -> None:
    """The look reads the catalog, which opens it anew; then it asks who else reads there."""
    with memstore.open(root) as store:
        for count in (1700, 1700, 600):  # the map is nearly full, but with pages that are used again
            store.put_many({f"{number}": torch.zeros(1200, dtype=torch.uint8) for number in range(count)})
        info = lmdb_of(root_of(store)).info()
        assert info["last_pgno"] > 0.9 * info["map_size"] / 4096
        for _ in range(24):
            store.put("small", torch.zeros(4))
        shutil.copytree(root, f"{root}-copy")
        with Child(_read_on, root) as child:
            child.receive()
            child.send()
            for number in range(20):
                assert store.put("small", torch.full((4,), number)) > 0


def _read_on(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        wire.send()
        while True:
            wire.receive()
            wire.send(store.get("key", torch.zeros(0)).tolist())


def test_growth_by_others_is_followed(root: str) -> None:
    """The map of the catalog is made anew, and with it the slot."""
    beside_a_held_table(_read_what_has_grown, root)


def _read_what_has_grown(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.arange(4))
        in_child(_grow, root)
        read_once(store)
        with held(wire):
            read_once(store)


def _grow(root: str) -> None:
    with memstore.open(root) as store:
        for start in range(0, 8000, 1000):
            store.put_many({f"{start + i}": torch.rand(300) for i in range(1000)})


@pytest.mark.full
def test_stops_at_any_moment_hold_nobody_up(root: str) -> None:
    """750 stops of a process in a tight loop of looks; without kept slots, one in 150 held the table's mutex."""
    memstore.open(root).close()
    with Child(_read_on, root) as reader, Child(_look, root) as looker:
        with memstore.open(root) as store:
            store.put("key", torch.arange(4))
        reader.receive(), looker.receive()
        for _ in range(750):
            os.kill(looker.pid, signal.SIGSTOP)
            _wait_until_stopped(looker.pid)
            reader.send()
            assert reader.receive(20) == [0, 1, 2, 3]
            os.kill(looker.pid, signal.SIGCONT)


def _wait_until_stopped(pid: int) -> None:
    while True:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rsplit(")", 1)[1].split()[0] == "T":
                return


def _look(wire: Wire, root: str) -> None:
    with memstore.open(root, "r") as store:
        wire.send()
        while True:
            "key" in store  # noqa: B015
