"""durability="disk": what a creation or a put makes is on the disk before anything names it.

No test cuts the power. These see which files and folders have been synced since they last changed, each time that
something is about to be named, a file by its rename, a segment by the catalog's commit; or to be forgotten.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.engine import syscalls
from memstore.engine.root import folder
from tests.children import in_child
from tests.inside import lmdb_of, root_of
from tests.support import faults

pytestmark = pytest.mark.embedded

VALUES = {"inline": torch.arange(3), "small": torch.arange(1000), "large": torch.zeros(3 << 20, dtype=torch.uint8)}


class Disk:
    """What has been synced since it changed: files by inode, folders with the names that they had."""

    def __init__(self) -> None:
        self._files: set[int] = set()
        self._folders: dict[str, set[str]] = {}
        self.unlinked: list[str] = []
        self.may_come_back: set[str] = set()  # of those

    def write_at(self, fd: int, *_: Any) -> None:
        self._files.discard(os.fstat(fd).st_ino)

    truncate = allocate = write_at

    def sync(self, fd: int) -> None:
        self._files.add(os.fstat(fd).st_ino)
        self._remember_unlinks(os.fstat(fd))

    sync_data = sync

    def sync_folder(self, path: str) -> None:
        self._folders[path] = set(os.listdir(path))
        self._remember_unlinks(os.stat(path))

    def unlink(self, path: str, *_: Any) -> None:
        self.unlinked.append(path)
        self.may_come_back.add(path)

    def _remember_unlinks(self, synced: os.stat_result) -> None:
        gone = {path for path in self.may_come_back if os.path.samestat(os.stat(os.path.dirname(path)), synced)}
        self.may_come_back -= gone

    def has_content(self, path: str) -> bool:
        return os.stat(path).st_ino in self._files

    def has_name(self, path: str) -> bool:
        return os.path.basename(path) in self._folders.get(os.path.dirname(path), set())


CALLS = ("write_at", "truncate", "allocate", "sync", "sync_data", "sync_folder", "unlink")


@contextmanager
def watched() -> Iterator[Disk]:
    disk = Disk()

    def replacement(name: str) -> Any:
        real, note = getattr(syscalls, name), getattr(disk, name)

        def call(*arguments: Any) -> None:
            real(*arguments)
            note(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(syscalls, name, replacement(name))
        yield disk


@pytest.mark.parametrize("half_made", [False, True])
def test_a_creation_is_synced_before_its_memstore_json_says_that_it_is_whole(disk_root: str, half_made: bool) -> None:
    """Also what is there already: whoever made it and died may have asked for a store that needs no disk."""
    names = ["", "/catalog", "/catalog/local", "/catalog/local/data.mdb", "/segments", "/lock", "/doorbell"]
    renamed: list[str] = []
    if half_made:
        pid = os.fork()
        if pid == 0:
            with faults.at_step(3, faults.die, names=frozenset({"rename"})):
                memstore.open(disk_root)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        assert sorted(os.listdir(disk_root)) == [f".{folder.SETTINGS}.new", "catalog", "doorbell", "lock", "segments"]

    def before_rename(*_: object) -> None:
        (new,) = Path(disk_root).glob(".*.new")
        assert disk.has_content(str(new)), new
        renamed.append(new.name)
        if new.name == f".{folder.SETTINGS}.new":
            assert [name for name in names if not disk.has_name(disk_root + name)] == []
            assert disk.has_content(f"{disk_root}/lock") and disk.has_content(f"{disk_root}/doorbell")

    with watched() as disk, faults.watching(before_rename, lambda *_: None, names=frozenset({"rename"})):
        memstore.open(disk_root, durability="disk").close()
    assert renamed == [f".{name}.new" for name in (folder.LOCK, folder.DOORBELL, folder.SETTINGS)][2 * half_made :]
    assert disk.has_name(f"{disk_root}/{folder.SETTINGS}")


def test_a_segment_is_synced_before_the_catalog_says_that_it_is_live(disk_store: memstore.Store) -> None:
    checked = 0

    def before_commit(*_: object) -> None:
        nonlocal checked
        for path in Path(disk_store.root, folder.SEGMENTS).iterdir():
            with path.open("rb") as file:
                is_live = b" state=live " in file.read(128)
            if is_live:
                assert disk.has_content(str(path)) and disk.has_name(str(path))
                checked += 1

    with watched() as disk, faults.watching(before_commit, lambda *_: None, names=frozenset({faults.COMMIT})):
        for key, value in VALUES.items():
            before = checked
            disk_store.put(key, value)
            assert checked > before or key == "inline"
        disk_store.put_many(VALUES)
        disk_store.delete("small")
    assert checked > 5


def put_and_fail(store: memstore.Store) -> None:
    failure = faults.raising(OSError(errno.EIO, "injected"))
    with pytest.raises(OSError, match="injected"), faults.at_step(1, failure, names=frozenset({"sync"})):
        store.put("small", torch.zeros(1000))


def put_and_die(root: str) -> None:
    with memstore.open(root) as store, faults.at_step(1, faults.die, names=frozenset({"sync"})):
        store.put("small", torch.zeros(1000))


def collect_after_a_death(store: memstore.Store) -> None:
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_child(put_and_die, store.root)
    store.gc()


def collect_twice(store: memstore.Store) -> None:
    """What is unlinked, and not yet synced, when the first time fails, has no file that the second could unlink."""
    failure = faults.raising(OSError(errno.EIO, "injected"))
    store.delete("large")
    with pytest.raises(OSError, match="injected"), faults.at_step(1, failure, after=True, names=frozenset({"unlink"})):
        store.gc()
    store.gc()


FORGET = {
    "gc": lambda store: (store.delete("large"), store.gc()),
    "gc that failed before": collect_twice,
    "gc after a death": collect_after_a_death,
    "failed put": put_and_fail,
}


@pytest.mark.parametrize("name", FORGET)
def test_an_unlinked_segment_is_gone_before_the_catalog_forgets_it(disk_store: memstore.Store, name: str) -> None:
    """A crash of the host could else bring back a file that nobody gives back."""
    disk_store.put_many(VALUES)
    before: list[tuple[int, set[str]]] = []
    forgot = 0

    def rows() -> int:
        return root_of(disk_store).catalog.view(lambda transaction: transaction.count("segments"))

    def before_commit(*_: object) -> None:
        before.append((rows(), set(disk.may_come_back)))

    def after_commit(*_: object) -> None:
        nonlocal forgot
        count, may_come_back = before[-1]
        if rows() < count:
            forgot += 1
            assert not may_come_back

    with watched() as disk, faults.watching(before_commit, after_commit, names=frozenset({faults.COMMIT})):
        FORGET[name](disk_store)
    assert forgot and disk.unlinked and not disk.may_come_back


def test_a_repair_syncs_what_it_unlinked(disk_root: str) -> None:
    with memstore.open(disk_root, durability="disk") as store:
        store.put("small", VALUES["small"])
        store.delete("small")
    with watched() as disk:
        assert memstore.repair(disk_root).swept_bytes > 0
    segments = f"{disk_root}/{folder.SEGMENTS}"
    assert [path for path in disk.unlinked if os.path.dirname(path) == segments]
    assert not [path for path in disk.may_come_back if os.path.dirname(path) == segments]


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_the_catalogs_commits_are_synced_if_asked(disk_root: str, durability: Any) -> None:
    with memstore.open(disk_root, durability=durability) as store:
        flags = lmdb_of(root_of(store)).flags()
    assert (flags["sync"], flags["metasync"]) == (durability == "disk", durability == "disk")
