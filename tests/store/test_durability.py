"""durability="disk": what a creation or a put makes is on the disk before anything names it.

No test cuts the power. These see which files and folders have been synced since they last changed, each time that
something is about to be named: a file by its rename, a segment by the catalog's commit.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.engine import folder, syscalls
from memstore.testing import faults

VALUES = {
    "inline": torch.arange(3),
    "small": torch.arange(1000),
    "large": torch.zeros(3 << 20, dtype=torch.uint8),
}


class Disk:
    """What has been synced since it changed: files by inode, folders with the names that they had."""

    def __init__(self) -> None:
        self._files: set[int] = set()
        self._folders: dict[str, set[str]] = {}

    def write_at(self, fd: int, *_: Any) -> None:
        self._files.discard(os.fstat(fd).st_ino)

    truncate = allocate = write_at

    def sync(self, fd: int) -> None:
        self._files.add(os.fstat(fd).st_ino)

    sync_data = sync

    def sync_folder(self, path: str) -> None:
        self._folders[path] = set(os.listdir(path))

    def has_content(self, path: str) -> bool:
        return os.stat(path).st_ino in self._files

    def has_name(self, path: str) -> bool:
        return os.path.basename(path) in self._folders.get(os.path.dirname(path), set())


CALLS = ("write_at", "truncate", "allocate", "sync", "sync_data", "sync_folder")


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
        failure = faults.raising(OSError(errno.EIO, "injected"))
        with pytest.raises(OSError, match="injected"), faults.at_step(3, failure, names=frozenset({"rename"})):
            memstore.open(disk_root)
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


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_the_catalogs_commits_are_synced_if_asked(disk_root: str, durability: Any) -> None:
    with memstore.open(disk_root, durability=durability) as store:
        assert store._root is not None
        flags = store._root.catalog._env.flags()
    assert (flags["sync"], flags["metasync"]) == (durability == "disk", durability == "disk")
