"""Planted links: none is followed, none of their targets is read, written or cut short."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import memstore
from memstore.engine.root import folder
from tests.children import in_child

PARTS = [
    folder.SETTINGS,
    folder.LOCK,
    folder.DOORBELL,
    "catalog",
    folder.CATALOG,
    f"{folder.CATALOG}/data.mdb",
    f"{folder.CATALOG}/lock.mdb",
    folder.SEGMENTS,
]


def make(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.arange(1000))


def use(root: str) -> None:
    with memstore.open(root, timeout=5.0) as store:
        store.put("key", torch.zeros(1000))
        store.put("other", torch.zeros(1000))


@pytest.mark.parametrize("target", ["a copy", "nothing"])
@pytest.mark.parametrize("name", PARTS)
def test_a_link_in_a_store_is_refused(scratch: str, name: str, target: str) -> None:
    make(scratch)
    path, aside = f"{scratch}/{name}", f"{scratch}.aside"
    os.rename(path, aside)
    before = contents(aside)
    os.symlink(aside if target == "a copy" else "/nowhere/at/all", path)
    for mode in ("r", "r+", "a"):
        with pytest.raises(
            memstore.PermissionDeniedError, match=rf"{name} should be a (file|folder) and is l"
        ) as caught:
            memstore.open(scratch, mode, timeout=5.0)
        assert isinstance(caught.value, PermissionError)
    assert contents(aside) == before
    os.unlink(path)
    os.rename(aside, path)
    use(scratch)


@pytest.mark.parametrize("name", PARTS)
def test_a_link_that_waits_for_a_creator_is_refused(scratch: str, name: str) -> None:
    victim = f"{scratch}.victim"
    if name in ("catalog", folder.CATALOG, folder.SEGMENTS):
        os.mkdir(victim)
    else:
        Path(victim).write_bytes(b"precious" * 512)
    before = contents(victim)
    path = f"{scratch}/{name}"
    os.makedirs(os.path.dirname(path), mode=0o700)
    os.chmod(scratch, 0o700)
    os.symlink(victim, path)
    with pytest.raises(memstore.MemstoreError):
        memstore.open(scratch, timeout=5.0)
    assert contents(victim) == before


@pytest.mark.parametrize("name", [folder.SETTINGS, folder.LOCK, folder.DOORBELL])
def test_a_link_in_place_of_a_temporary_file_is_not_written_through(scratch: str, name: str) -> None:
    victim = f"{scratch}.victim"
    Path(victim).write_bytes(b"precious")
    os.mkdir(scratch, 0o700)
    os.symlink(victim, f"{scratch}/.{name}.new")
    make(scratch)
    assert Path(victim).read_bytes() == b"precious"
    assert not [found for found in os.listdir(scratch) if found.endswith(".new")]


@pytest.mark.parametrize("kind", ["a copy", "nothing", "a folder", "itself"])
def test_a_link_in_place_of_a_segment_is_not_followed(scratch: str, kind: str) -> None:
    make(scratch)
    with memstore.open(scratch, timeout=5.0) as store:
        (path,) = store.info("key").files
        aside = f"{scratch}.aside"
        os.rename(path, aside)
        os.symlink({"a copy": aside, "nothing": "/nowhere", "a folder": "/tmp", "itself": path}[kind], path)
        with pytest.raises(memstore.CorruptionError, match="'key'") as caught:
            store.get("key")
        assert (caught.value.key, caught.value.path) == ("key", path)
        store.put("key", torch.ones(1000))
        assert store.get("key").sum() == 1000
        store.put("key", torch.ones(1000))
        store.gc()
    assert os.path.getsize(aside) > 8000


@pytest.mark.parametrize("kind", ["link", "file", "folder", "fifo"])
def test_what_lies_where_the_next_segment_goes_is_not_written_over(scratch: str, kind: str) -> None:
    victim = f"{scratch}.victim"
    Path(victim).write_bytes(b"precious")
    make(scratch)
    with memstore.open(scratch, timeout=5.0) as store:
        planted = f"{scratch}/segments/{3:016x}.safetensors"  # numbers 1 and 2 were the first put's
        {
            "link": lambda: os.symlink(victim, planted),
            "file": lambda: shutil.copy(victim, planted),
            "folder": lambda: os.mkdir(planted),
            "fifo": lambda: os.mkfifo(planted),
        }[kind]()
        try:
            store.put("key", torch.ones(1000))
        except memstore.MemstoreError as error:
            assert planted in str(error)
        store.put("key", torch.ones(1000))  # the next one goes elsewhere
        store.put("key", torch.ones(1000))
        assert store.get("key").sum() == 1000
        store.gc()
        store.put("key", torch.zeros(1000))
    assert Path(victim).read_bytes() == b"precious"


def test_a_fifo_in_place_of_a_segment_hangs_nobody(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        (path,) = store.info("key").files
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(memstore.CorruptionError):
        in_child(_get, scratch, timeout=100)


def _get(root: str) -> None:
    with memstore.open(root, timeout=5.0) as store:
        store.get("key")


def contents(path: str) -> object:
    if os.path.isdir(path):
        return {str(found): found.read_bytes() for found in Path(path).rglob("*") if found.is_file()}
    return Path(path).read_bytes()
