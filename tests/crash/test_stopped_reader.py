"""A reader that is stopped or dies while it holds the mutex of LMDB's table of readers: who reads already goes on (P6).

The table's mutex lies in lock.mdb, where LMDB 0.9 has it. A child that has the store not open takes it and keeps it, as
a process does that is stopped (SIGSTOP) in the middle of its first look.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

import memstore
from memstore.listing import Mode
from tests.children import Child, Wire, in_child
from tests.engine.bytes_store import get, opened
from tests.inside import lmdb_of, root_of
from tests.support.equality import assert_same

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
