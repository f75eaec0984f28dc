"""Checksums: with verify=True a flipped bit is an error that names the leaf, and never wrong data."""

from __future__ import annotations

import json
import os

import pytest
import torch

import memstore
from tests.support.equality import assert_same

pytestmark = pytest.mark.embedded


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def places_of(path: str) -> dict[str, tuple[int, int]]:
    """Where each tensor lies in a segment's file, as its header says."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    del header["__metadata__"]
    return {name: tuple(8 + size + offset for offset in entry["data_offsets"]) for name, entry in header.items()}


@pytest.mark.parametrize("size", [5000, 3 << 20])
def test_a_flipped_bit_is_found(scratch: str, size: int) -> None:
    with memstore.open(scratch, checksum=True) as store:
        value = {"a": torch.arange(size, dtype=torch.uint8), "deep": {"b": torch.ones(1000)}}
        store.put("key", value)
        (path,) = store.info("key").files
    with memstore.open(scratch, verify=True) as store:
        assert_same(value, store.get("key"))
        places = places_of(path)
        for offset, name in ((places["a"][0], "a"), (places["a"][1] - 1, "a"), (places["deep.b"][1] - 1, "b")):
            flip(path, offset)
            for call in (
                lambda: store.get("key"),
                lambda: store.get_many(["key"]),
                lambda: store.get("key", dtype=torch.float64),
                lambda: store.get("key", out={"a": torch.zeros_like(value["a"]), "deep": {"b": torch.zeros(1000)}}),
                lambda: store.ref("key").get(),
            ):
                with pytest.raises(memstore.CorruptionError, match=rf"'key': .*{name}'") as caught:
                    call()
                assert (caught.value.key, caught.value.path) == ("key", path)
                assert "checksum" in caught.value.detail
            flip(path, offset)
            assert_same(value, store.get("key"))
        flip(path, places["a"][0])
    with memstore.open(scratch) as careless:
        assert not torch.equal(careless.get("key")["a"], value["a"])


def test_an_out_is_not_written_before_all_is_checked(scratch: str) -> None:
    with memstore.open(scratch, checksum=True, verify=True) as store:
        store.put("key", {"a": torch.ones(1000), "b": torch.ones(1000)})
        (path,) = store.info("key").files
        flip(path, max(stop for name, (_, stop) in places_of(path).items() if name in "ab") - 1)
        out = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
        with pytest.raises(memstore.CorruptionError):
            store.get("key", out=out)
        assert not out["a"].any() and not out["b"].any()


def test_pads_and_headers_are_not_data(root: str) -> None:
    with memstore.open(root, checksum=True, verify=True) as store:
        value = {"a": torch.ones(999, dtype=torch.uint8), "b": torch.ones(901, dtype=torch.uint8)}
        store.put("key", value)
        (path,) = store.info("key").files
        flip(path, places_of(path)["__pad__"][0])
        flip(path, os.path.getsize(path) - 1)  # slack
        flip(path, min(start for start, _ in places_of(path).values()) - 1)  # a space at the header's end
        assert_same(value, store.get("key"))


@pytest.mark.parametrize("checksum", [True, False, None])
def test_verify_asks_for_nothing_that_isnt_there(root: str, checksum: bool | None) -> None:
    values = {"inline": torch.arange(3), "segment": torch.arange(5000), "empty": torch.zeros(0), "none": None}
    with memstore.open(root, checksum=checksum, verify=True) as store:
        store.put_many(values)
        assert_same(values, store.get_many(list(values)))


def test_inline_values_are_always_checked(scratch: str) -> None:
    """By their record's checksum; no option turns it off."""
    from pathlib import Path

    with memstore.open(scratch) as store:
        store.put("key", torch.full((200,), 0x5A, dtype=torch.uint8))
    path = Path(scratch, "catalog/local/data.mdb")
    stored = path.read_bytes()
    flip(str(path), stored.index(b"\x5a" * 200) + 100)
    with memstore.open(scratch) as store, pytest.raises(memstore.CorruptionError, match="'key'"):
        store.get("key")


def test_ties_are_checked_once_and_all(scratch: str) -> None:
    base = torch.arange(5000)
    with memstore.open(scratch, checksum=True, verify=True) as store:
        store.put("key", {"whole": base, "part": base[100:200], "same": base})
        assert_same({"whole": base, "part": base[100:200], "same": base}, store.get("key"))
        (path,) = store.info("key").files
        flip(path, os.path.getsize(path) - 5000 * 8 + 8 * 150)
        with pytest.raises(memstore.CorruptionError):
            store.get("key")
