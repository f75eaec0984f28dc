"""Small stores to be damaged: values of every kind that lies in a place of its own, and how they are to be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch

import memstore
from tests.support.equality import is_same

CATALOG = "catalog/local/data.mdb"


def values() -> dict[str, Any]:
    """Fresh ones each time; equal each time."""
    numbers = torch.Generator().manual_seed(7)
    segments = {f"segment/{i}": torch.randint(0, 256, (5000 + i,), generator=numbers).byte() for i in range(4)}
    return {
        **segments,
        "nested": {"a": torch.rand(1001, generator=numbers), "b": {"c": torch.ones(33, dtype=torch.complex128)}},
        "objects": ["text " * 1000, torch.arange(5000)],  # too large for the record: the header alone has them
        **{f"inline/{i}": {"x": torch.full((3,), i), "name": f"value {i}"} for i in range(4)},
    }


INLINE = {f"inline/{i}" for i in range(4)}


def make(root: str, *, checksum: bool = True) -> dict[str, int]:
    """A store with `values()`, some put together, after overwrites and deletes. Returns the versions."""
    with memstore.open(root, checksum=checksum) as store:
        for key in ("segment/0", "nested", "inline/0", "deleted", "deleted/inline"):
            store.put(key, torch.zeros(3 if "inline" in key else 6000))
        store.delete_many(["deleted", "deleted/inline"])
        found = values()
        together = {key: found.pop(key) for key in ("segment/2", "segment/3", "inline/3")}
        for key, value in found.items():
            store.put(key, value)
        store.put_many(together)
        return versions(store)


def versions(store: memstore.Store) -> dict[str, int]:
    return {key: store.version(key) for key in store}


def copy(source: str, target: str) -> str:
    """With holes as holes; nobody may use the source."""
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


def flip(path: str, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def overwrite(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def content_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def header_size(path: str) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def files_of(root: str) -> set[str]:
    return set(os.listdir(f"{root}/segments"))


def paths(root: str) -> dict[str, str]:
    """The files of the keys that have one."""
    with memstore.open(root) as store:
        return {key: files[0] for key in store if (files := store.info(key).files)}


def read_all(store: memstore.Store, expected: Mapping[str, Any]) -> dict[str, str]:
    """Gets each key: "same", or the name of its error. Another value fails."""
    found: dict[str, str] = {}
    for key, value in expected.items():
        try:
            got = store.get(key)
        except memstore.MemstoreError as error:
            assert isinstance(error, (memstore.CorruptionError, memstore.KeyNotFoundError)), repr(error)
            assert error.key == key
            found[key] = type(error).__name__
        else:
            assert is_same(value, got), f"{key!r} has another value"
            found[key] = "same"
    return found


def check_repaired(root: str, lost: set[str] | None = None) -> None:
    """The store has every value but `lost`, as it was put; all of it is in order, and it can be used."""
    expected = {key: value for key, value in values().items() if key not in (lost or set())}
    with memstore.open(root, verify=True) as store:
        assert set(store) == set(expected)
        assert set(read_all(store, expected).values()) == {"same"}
        report = store.verify()
        assert report.ok, report
        version = store.put("new", torch.ones(5000))
        assert version > 1 << 32
        assert store.put("new", 2, expect_version=version) > version
        store.delete("new")
