"""Damaged segments: an error that names the key and the file; never a crash, never another key's bytes."""

from __future__ import annotations

import base64
import os
import shutil
import time
from collections.abc import Callable

import pytest
import torch

import memstore
from tests.children import in_child
from tests.damage.stores import flip
from tests.support.equality import assert_same

SIZES = [5000, 1 << 20]  # elements of 8 bytes: a small segment and a large one


def make(root: str, size: int, number: int = 7) -> tuple[str, str]:
    """A store with two keys; returns the paths of their segments."""
    with memstore.open(root) as store:
        store.put_many({"key": torch.full((size,), number), "other": torch.full((size,), number + 1)})
        return store.info("key").files[0], store.info("other").files[0]


def fails(root: str, path: str, mode: str = "r+") -> memstore.CorruptionError:
    """Every way to read "key" is refused; "other" is as it was, and "key" can be put again."""
    with memstore.open(root, mode, timeout=0.3 if mode == "r" else 10.0) as store:
        for call in (
            lambda: store.get("key"),
            lambda: store.get_many(["other", "key"]),
            lambda: store.get("key", None),
            lambda: list(store.items()),
            lambda: store.ref("key"),
            lambda: dict(memstore.iter_weights(store, "key")),
        ):
            with pytest.raises(memstore.CorruptionError) as caught:
                call()
            error = caught.value
            assert error.key == "key" and error.path == path
            assert "'key'" in str(error) and path in str(error) and error.detail
        assert (store.get("other") == 8).all()
        if mode != "r":
            store.put("key", torch.zeros(5000))
            assert not store.get("key").any()
            store.gc()
            assert not os.path.lexists(path)
    return error


CUTS: dict[str, Callable[[int], int]] = {
    "empty": lambda size: 0,
    "7 bytes": lambda size: 7,
    "within the slots": lambda size: 60,
    "the header": lambda size: 4096,
    "half": lambda size: size // 2,
    "a page less": lambda size: size - 4096,
    "a byte less": lambda size: size - 1,
    "a byte more": lambda size: size + 1,
    "a page more": lambda size: size + 4096,
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("size", SIZES)
def test_another_length(scratch: str, size: int, cut: str) -> None:
    path, _ = make(scratch, size)
    os.truncate(path, CUTS[cut](os.path.getsize(path)))
    in_child(fails, scratch, path)  # a SIGBUS would be the child's


def test_a_deleted_file(scratch: str) -> None:
    path, _ = make(scratch, 5000)
    os.unlink(path)
    assert "missing" in str(fails(scratch, path))


def test_damage_is_told_to_readers_too(scratch: str) -> None:
    path, _ = make(scratch, 5000)
    aside = f"{scratch}.aside"
    shutil.copy(path, aside)
    os.unlink(path)
    started = time.monotonic()
    fails(scratch, path, "r")
    shutil.copy(aside, path)
    os.truncate(path, 6000)
    fails(scratch, path, "r")
    assert time.monotonic() - started < 20


def test_swapped_files(scratch: str) -> None:
    path, other = make(scratch, 5000)
    os.rename(path, f"{scratch}.aside")
    os.rename(other, path)
    os.rename(f"{scratch}.aside", other)
    with memstore.open(scratch) as store:
        for key, where in (("key", path), ("other", other)):
            with pytest.raises(memstore.CorruptionError, match="is not that of put") as caught:
                store.get(key)
            assert (caught.value.key, caught.value.path) == (key, where)


def test_a_copy_of_another_keys_file(scratch: str) -> None:
    path, other = make(scratch, 5000)
    shutil.copy(other, path)
    fails(scratch, path)


def test_an_older_version_of_the_file(scratch: str) -> None:
    """As a backup of the segments alone would bring back."""
    path, _ = make(scratch, 5000)
    shutil.copy(path, f"{scratch}.old")
    with memstore.open(scratch) as store:
        store.put("key", torch.full((5000,), 9))
        (path,) = store.info("key").files
    shutil.copy(f"{scratch}.old", path)
    fails(scratch, path)


def test_the_file_of_another_store_with_the_same_numbers(scratch: str) -> None:
    path, _ = make(scratch, 5000)
    others, _ = make(f"{scratch}2", 5000, 77)
    assert os.path.basename(path) == os.path.basename(others)
    shutil.copy(others, path)
    fails(scratch, path)


@pytest.mark.parametrize("kind", ["noise", "zeros", "text"])
def test_garbage(scratch: str, kind: str) -> None:
    path, _ = make(scratch, 5000)
    size = os.path.getsize(path)
    garbage = {"noise": os.urandom(size), "zeros": bytes(size), "text": (b"not a segment\n" * size)[:size]}
    with open(path, "r+b") as file:
        file.write(garbage[kind])
    fails(scratch, path)


def test_every_flipped_bit_that_readers_rely_on(scratch: str) -> None:
    """The header's length, the beginning and the put id. (The rest of the header is for others to read.)"""
    path, _ = make(scratch, 5000)
    with memstore.open(scratch) as store:
        for position in range(8 * 57):
            flip(path, position)
            with pytest.raises(memstore.CorruptionError) as caught:
                store.get("key")
            assert (caught.value.key, caught.value.path) == ("key", path)
            flip(path, position)
        assert (store.get("key") == 7).all()


def test_a_file_that_somebody_keeps_locked(scratch: str) -> None:
    import fcntl

    path, _ = make(scratch, 5000)
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with memstore.open(scratch, timeout=1.0) as store:
        with pytest.raises(memstore.MemstoreError, match="'key'") as caught:
            store.get("key")
        assert "lock" in str(caught.value)  # and nothing of damage, repair or a missing file
        os.close(fd)
        assert (store.get("key") == 7).all()


def test_a_missing_folder_of_segments(scratch: str) -> None:
    make(scratch, 5000)
    with memstore.open(scratch) as store:
        shutil.rmtree(f"{scratch}/segments")
        for call in (
            lambda: store.get("key"),
            lambda: store.put("key", torch.zeros(5000)),
            lambda: store.put("small", 1),
        ):
            with pytest.raises(memstore.NotAStoreError, match=f"{scratch}/segments was removed or moved"):
                call()
    with pytest.raises(memstore.CorruptionError, match="segments is missing"):
        memstore.open(scratch)


def test_a_store_that_was_deleted_under_its_users(scratch: str) -> None:
    make(scratch, 5000)
    with memstore.open(scratch) as store:
        held = store.get("key")
        shutil.rmtree(scratch)
        for call in (lambda: store.get("key"), lambda: store.put("key", torch.zeros(5000)), lambda: store.stats()):
            with pytest.raises(memstore.NotAStoreError, match=scratch):
                call()
        assert (held == 7).all()
    with memstore.open(scratch) as store:
        assert list(store) == []


# --- objects that are too many for a record: they lie in the header ---------------------------------------------------

OBJECTS = {"w": torch.arange(1000), "words": [f"word {number}" for number in range(400)], "deep": [{"a": (1, None)}]}


def make_with_objects(root: str) -> tuple[str, int, bytes]:
    """A store with such a value under "key"; returns its segment, and where in it the objects' base64 lies."""
    with memstore.open(root) as store:
        store.put("key", OBJECTS)
        assert_same(OBJECTS, store.get("key"))
        (path,) = store.info("key").files
    with open(path, "rb") as file:
        header = file.read()
    start = header.index(b'"objects":"') + len(b'"objects":"')
    text = header[start : header.index(b'"', start)]
    assert len(text) > 2000
    return path, start, text


def objects_fail(store: memstore.Store, path: str) -> None:
    out = {**OBJECTS, "w": torch.zeros(1000, dtype=torch.int64)}
    for call in (
        lambda: store.get("key"),
        lambda: store.get_many(["key"]),
        lambda: store.ref("key").get(),
        lambda: store.get("key", out=out),
    ):
        with pytest.raises(memstore.CorruptionError, match="'key'") as caught:
            call()
        assert (caught.value.key, caught.value.path) == ("key", path)
        assert path in str(caught.value) and "header" in caught.value.detail
    assert not out["w"].any()


def test_flipped_bits_of_objects_in_a_header(scratch: str) -> None:
    path, start, text = make_with_objects(scratch)
    with memstore.open(scratch) as store:
        for place in [*range(0, len(text) - 4, 61), len(text) - 5]:  # the last ones may carry bits that mean nothing
            for bit in (0, 1, 5, 7):
                flip(path, 8 * (start + place) + bit)
                objects_fail(store, path)
                flip(path, 8 * (start + place) + bit)
        flip(path, 8 * (start - 4))  # in the name
        objects_fail(store, path)
        flip(path, 8 * (start - 4))
        assert_same(OBJECTS, store.get("key"))


def test_other_objects_in_a_header(scratch: str) -> None:
    """Well-formed, of the same length and structure, as a restored copy may have them."""
    path, start, text = make_with_objects(scratch)
    others = base64.b64encode(base64.b64decode(text).replace(b"word 7", b"word 8"))
    assert others != text and len(others) == len(text)
    with memstore.open(scratch) as store, open(path, "r+b") as file:
        for written in (others, text[:4] * (len(text) // 4)):
            file.seek(start)
            file.write(written)
            file.flush()
            objects_fail(store, path)
        file.seek(start)
        file.write(text)
        file.flush()
        assert_same(OBJECTS, store.get("key"))
