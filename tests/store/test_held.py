"""Values that were got: no copy, private, and never changed by what others do."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import memstore
from tests.children import Child, Wire
from tests.leaks import mapped_files
from tests.segments import of_size
from tests.store.backends import open_store

SIZES = [1000, 100_000, 3 << 20]  # elements: inline at 1 byte each, a small segment, a large one


@pytest.mark.parametrize("size", SIZES)
def test_it_stays_while_its_key_is_overwritten(store: memstore.Store, size: int) -> None:
    store.put("key", of_size(size, 7))
    held = store.get("key")
    untouched = store.get("key")
    for number in range(100):
        store.put("key", of_size(size, number))
        assert held[0] == held[-1] == 7
    assert (held == 7).all()
    store.delete("key")
    store.gc()
    assert (held == 7).all()
    assert (untouched == 7).all()  # first read now


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["get", "get_many", "ref", "loaded leaf of a view"])
def test_an_alias_stays_when_the_tensor_moves_to_shared_memory(store: memstore.Store, size: int, way: str) -> None:
    """torch gives the storage other memory then; for a tensor of its own such an alias is lost."""
    value = of_size(size, 7)
    if way == "loaded leaf of a view":  # jagged tensors are looked into
        value = torch.nested.nested_tensor_from_jagged(value[:, None], torch.tensor([0, size // 2, size]))
    store.put("key", value)
    ways = {"get_many": lambda: store.get_many(["key"])["key"], "ref": lambda: store.ref("key").get()}
    for _ in range(10):
        held = ways.get(way, lambda: store.get("key"))() if way != "loaded leaf of a view" else store.view("key")
        tensor = held.values() if held.is_nested else held
        aliases = [tensor.numpy(), np.from_dlpack(tensor)]
        tensor.share_memory_()
        del held, tensor
        others = [np.full(size, 9, np.uint8) for _ in range(max(100_000 // size, 1))]
        assert all((alias == 7).all() for alias in aliases)
        del others


@pytest.mark.parametrize("size", SIZES)
def test_it_stays_while_another_process_overwrites_deletes_and_dies(store: memstore.Store, size: int) -> None:
    store.put("key", of_size(size, 7))
    held = store.get("key")
    with Child(_overwrite, store.root, size) as child:
        for _ in range(20):
            assert (held == 7).all()
            child.receive()
    assert (held == 7).all()
    newer = store.get("key", None)
    assert newer is None or len(newer.unique()) == 1


def _overwrite(wire: Wire, root: str, size: int) -> None:
    with open_store(root, "r+") as store:
        number = 0
        while True:
            number += 1
            store.put("key", of_size(size, number))
            store.delete("key")
            store.put("key", of_size(size, number))
            store.gc()
            wire.send(number)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_private_to_its_holder(store: memstore.Store, size: int) -> None:
    store.put("key", of_size(size, 7))
    mine, others = store.get("key"), store.get("key")
    mine.fill_(9)
    assert (mine == 9).all()
    assert (others == 7).all()
    assert (store.get("key") == 7).all()
    with open_store(store.root, "r") as reader:
        assert (reader.get("key") == 7).all()
    store.put("key", of_size(size, 3))
    assert (mine == 9).all()


def test_it_outlives_its_store(root: str) -> None:
    with open_store(root) as store:
        store.put("key", {"a": of_size(100_000, 7), "b": of_size(10, 8)})
        held = store.get("key")["a"]
    with open_store(root) as store:
        store.delete("key")
        store.gc()
    assert (held == 7).all()


@pytest.mark.embedded
def test_it_outlives_the_folder(scratch: str) -> None:
    import shutil

    with open_store(scratch) as store:
        store.put("key", of_size(100_000, 7))
        held = store.get("key")
    shutil.rmtree(scratch)
    assert (held == 7).all()


@pytest.mark.embedded
@pytest.mark.parametrize("part", ["leaf", "slice", "numpy", "detached", "viewed"])
def test_any_part_of_it_keeps_it(store: memstore.Store, part: str) -> None:
    store.put("key", {"a": torch.full((50_000,), 7.0), "b": torch.zeros(50_000)})
    value = store.get("key")
    kept = {
        "leaf": lambda leaf: leaf,
        "slice": lambda leaf: leaf[1000:1003],
        "numpy": lambda leaf: leaf.numpy()[5:7],
        "detached": lambda leaf: leaf.detach()[-2:],
        "viewed": lambda leaf: leaf.view(100, 500).T[3],
    }[part](value["a"])
    del value
    store.delete("key")
    assert store.gc() == 0
    assert store.stats().pinned_bytes > 0
    assert (np.asarray(kept) == 7).all()
    del kept
    gc.collect()
    assert store.gc() > 0


# --- no copy ----------------------------------------------------------------------------------------------------------


def ranges_of(path: str) -> list[range]:
    with open("/proc/self/maps") as file:
        lines = [line for line in file if line.rstrip("\n").endswith(path)]
    ends = [[int(end, 16) for end in line.split(" ", 1)[0].split("-")] for line in lines]
    return [range(start, end) for start, end in ends]


@pytest.mark.embedded
def test_every_leaf_lies_in_a_mapping_of_the_segments_file(store: memstore.Store) -> None:
    value = {f"{number}": torch.randn(number + 1, 33) for number in range(50)}
    store.put("key", TensorDict(value, []))
    got = store.get("key")
    (mapped,) = ranges_of(store.info("key").files[0])
    for leaf in got.values():
        assert leaf.data_ptr() in mapped and leaf.data_ptr() + leaf.nbytes <= mapped.stop
        assert leaf.data_ptr() % 64 == 0
    addresses = {leaf.data_ptr() for leaf in got.values()}
    assert len(addresses) == 50
    assert len({leaf.untyped_storage().data_ptr() for leaf in got.values()}) == 50


@pytest.mark.embedded
def test_a_value_takes_one_mapping_and_gives_it_back(store: memstore.Store) -> None:
    store.put("key", {f"{number}": torch.randn(100) for number in range(300)})
    got = [store.get("key") for _ in range(3)]
    assert len([name for name in mapped_files(store.root) if "segments" in name]) == 3
    del got
    assert [name for name in mapped_files(store.root) if "segments" in name] == []


@pytest.mark.embedded
def test_a_get_reads_nothing(store: memstore.Store) -> None:
    store.put("key", torch.ones(64 << 20, dtype=torch.uint8))
    before = resident()
    value = store.get("key")
    assert resident() - before < 4 << 20
    assert value[::4096].sum() == 16384
    del value


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
