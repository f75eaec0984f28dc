"""A store in a container's own folders: on overlay, where a mapping keeps no lock once its file is closed."""

from __future__ import annotations

import fcntl
import os
import resource
from importlib import import_module
from pathlib import Path

import pytest
import torch

import memstore
from memstore.engine.root.filesystem import mappings_keep_locks
from tests.children import Child, Wire, hold_key, in_child
from tests.leaks import find_leaks, mapped_files, open_files
from tests.overlay import on_overlay
from tests.segments import of_size

pytestmark = pytest.mark.embedded

SMALL, LARGE = 5000, 3 << 20  # bytes of segments; the large one is mapped to be filled


def files_open(root: str) -> list[str]:
    """Beside the catalog's, which LMDB keeps."""
    return [path for path in open_files(root) if "/catalog/" not in path]


def segments_open(root: str) -> list[str]:
    return [path for path in open_files(root) if "/segments/" in path]


# --- the probe --------------------------------------------------------------------------------------------------------


def test_where_mappings_keep_locks_no_file_stays_open(store: memstore.Store) -> None:
    store.put("key", of_size(SMALL, 1))
    held = store.get("key")
    assert mappings_keep_locks(f"{store.root}/doorbell")
    assert files_open(store.root) == []
    assert (held == 1).all()


def test_what_is_found_out_on_a_disk(disk_store: memstore.Store) -> None:
    keeps = mappings_keep_locks(f"{disk_store.root}/doorbell")
    assert files_open(disk_store.root) == [f"{disk_store.root}/lock"] * (not keeps)


def test_a_lock_of_somebody_elses_tells_nothing(tmp_path: Path) -> None:
    """So each mapping gets its file: what is needless there costs a file descriptor, what is missing an old value."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with Child(_hold_lock, str(path)) as child:
        child.receive()
        assert not mappings_keep_locks(str(path))
    assert open_files(str(tmp_path)) == mapped_files(str(tmp_path)) == []


def _hold_lock(wire: Wire, path: str) -> None:
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        wire.send()
        wire.receive()


def test_on_overlay_they_keep_none() -> None:
    on_overlay(_they_keep_none)


def _they_keep_none(root: str) -> None:
    with memstore.open(root) as store:
        assert not mappings_keep_locks(f"{root}/doorbell")
        store.put("key", of_size(SMALL, 1))
        assert files_open(root) == [f"{root}/lock"]
        held = [store.get("key") for _ in range(3)]
        assert len(segments_open(root)) == 3  # one file a held value
        del held
        assert segments_open(root) == []
    assert find_leaks(root) == []


# --- what locks hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "one_file_system"), [(SMALL, True), (SMALL, False), (LARGE, True)])
def test_a_held_value_stays(nbytes: int, one_file_system: bool) -> None:
    on_overlay(_it_stays, nbytes, one_file_system=one_file_system)


def _it_stays(root: str, nbytes: int) -> None:
    with memstore.open(root) as store:
        store.put("key", of_size(nbytes, 0))
        held, untouched = store.get("key"), store.get("key")
        view, ref = store.view("key"), store.ref("key")
        for number in range(1, 9):
            store.put("key", of_size(nbytes, number))
            in_child(_put, root, nbytes, 100 + number)
        assert not held.any() and not untouched.any()
        assert not view[:].any() and not ref.get().any()
        stats = store.stats()
        assert nbytes <= stats.pinned_bytes < 2 * nbytes + 8192
        assert stats.pinned_by == (os.getpid(),)
        del held, untouched, view, ref
        assert store.stats().pinned_bytes == 0
        store.gc()
        assert len(os.listdir(f"{root}/segments")) == 1
    assert find_leaks(root) == []


def _put(root: str, nbytes: int, number: int) -> None:
    with memstore.open(root, "r+") as store:
        store.put("key", of_size(nbytes, number))


def test_a_reader_that_is_killed_pins_nothing() -> None:
    on_overlay(_killed_reader)


def _killed_reader(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", of_size(SMALL, 0))
        with Child(hold_key, root) as child:
            child.receive()
            store.put("key", of_size(SMALL, 1))
            assert store.stats().pinned_by == (child.pid,)
            child.kill()
        assert store.stats().pinned_bytes == 0


def test_repair_is_refused_while_it_is_open() -> None:
    on_overlay(_repair_is_refused)


def _repair_is_refused(root: str) -> None:
    with memstore.open(root, timeout=10.0) as store:
        store.put("key", of_size(SMALL, 1))
        with pytest.raises(memstore.StoreTimeoutError, match=f"waited for pid {os.getpid()} to close the store"):
            in_child(_repair_with_nothing_open, root)
        assert store.put("key", of_size(SMALL, 2)) == 2
    assert in_child(memstore.repair, root).recovered == ("key",)


def _repair_with_nothing_open(root: str) -> None:
    """A forked child has its parent's files."""
    for fd in range(3, 256):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == f"{root}/lock":
                os.close(fd)
        except OSError:
            continue
    memstore.repair(root, timeout=0.2)


@pytest.mark.parametrize("nbytes", [SMALL, pytest.param(LARGE, marks=pytest.mark.full)])
def test_put_many_of_40(nbytes: int) -> None:
    on_overlay(_put_many, nbytes)


def _put_many(root: str, nbytes: int) -> None:
    """All are locked until they are published: neither sweeps of others take them, nor does a child keep them."""
    names = [f"key{number}" for number in range(40)]
    with memstore.open(root, timeout=10.0) as store:
        found: list[list[str]] = []
        put = import_module("memstore.engine.protocols.put")
        publish = put.publish

        def look_first(*arguments: object) -> object:
            found.append(in_child(_sweep, root))
            return publish(*arguments)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(put, "publish", look_first)
            store.put_many({name: of_size(nbytes, number) for number, name in enumerate(names)})
        assert found == [[]]
        assert segments_open(root) == []
        for number, name in enumerate(names):
            assert (store.get(name) == number).all()
    assert find_leaks(root) == []


def _sweep(root: str) -> list[str]:
    with memstore.open(root, "r+", timeout=10.0) as store:
        store.gc()
        return segments_open(root) + [path for path in mapped_files(root) if "/segments/" in path]


def test_a_child_holds_what_its_parent_held() -> None:
    on_overlay(_child_holds)


def _child_holds(root: str) -> None:
    with memstore.open(root, timeout=10.0) as store:
        store.put("key", of_size(SMALL, 0))
        held = [store.get("key")]
        with Child(_look_when_told, held) as child:
            child.receive()
            held.clear()
            assert segments_open(root) == []
            for number in range(1, 8):
                store.put("key", of_size(SMALL, number))
            assert store.stats().pinned_bytes > 0
            child.send()
            assert child.receive() is True
            assert child.receive() is None
            assert store.stats().pinned_bytes == 0


def _look_when_told(wire: Wire, held: list[torch.Tensor]) -> None:
    wire.send()
    wire.receive()
    wire.send(not held[0].any())
    held.clear()


def test_no_file_left_for_another_value() -> None:
    on_overlay(_no_file_left)


def _no_file_left(root: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with memstore.open(root) as store:
        store.put("key", of_size(SMALL, 7))
        held: list[torch.Tensor] = []
        with pytest.raises(memstore.ResourceLimitError, match="ulimit -n.*drop held values"):
            while len(held) < 300:
                held.append(store.get("key"))
        assert len(held) > 100
        held.clear()
        assert (store.get("key") == 7).all()
    assert find_leaks(root) == []
