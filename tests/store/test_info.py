"""info, stats, gc: what a store tells, and what it gives back."""

from __future__ import annotations

import os
import select
import time

import pytest
import torch
from tensordict import TensorDict

import memstore
from tests.children import Child, Wire, hold_key, in_child
from tests.huge_pages import require_huge_pages
from tests.store.backends import open_store


@pytest.mark.embedded
def test_info_describes_an_entry(store: memstore.Store) -> None:
    value = {"model": {"w": torch.zeros(30, 40, dtype=torch.bfloat16)}, "state": {3: {"exp_avg": torch.ones(500)}}}
    before = time.time()
    version = store.put("key", value)
    info = store.info("key")
    assert (info.key, info.version, info.kind) == ("key", version, "segment")
    assert before - 1 <= info.created <= time.time() + 1
    assert {(leaf.name, leaf.dtype, leaf.shape, leaf.nbytes) for leaf in info.leaves} == {
        (("model", "w"), torch.bfloat16, (30, 40), 2400),
        (("state", 3, "exp_avg"), torch.float32, (500,), 2000),
    }
    assert 4400 <= info.nbytes < 4600
    assert "2 leaves" in info.structure and "dict" in info.structure
    (path,) = info.files
    assert os.path.getsize(path) >= info.nbytes


@pytest.mark.embedded
def test_info_of_an_inline_entry_names_no_file(store: memstore.Store) -> None:
    store.put("key", torch.arange(3))
    info = store.info("key")
    assert (info.kind, info.nbytes, info.files) == ("inline", 24, ())
    assert info.leaves == (memstore.LeafInfo((), torch.int64, (3,), 24),)
    assert info.structure == "Tensor"


def test_info_of_a_tensordict(store: memstore.Store) -> None:
    store.put("key", TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3)}}, [3]))
    info = store.info("key")
    assert [leaf.name for leaf in info.leaves] == [("a",), ("b", "c")]
    assert "TensorDict" in info.structure


def test_infos_are_values(store: memstore.Store) -> None:
    store.put("key", torch.arange(3))
    assert store.info("key") == store.info("key")
    with pytest.raises(AttributeError):
        store.info("key").version = 3  # type: ignore[misc]


@pytest.mark.embedded
def test_stats_add_up(store: memstore.Store) -> None:
    empty = store.stats()
    assert (empty.keys, empty.live_bytes, empty.pinned_bytes, empty.filling_bytes) == (0, 0, 0, 0)
    assert empty.capacity is None and empty.catalog_bytes > 0
    store.put_many({"a": torch.zeros(100_000), "b": torch.zeros(50_000), "c": 1})
    assert store.stats().keys == 3
    sizes = [os.path.getsize(f"{store.root}/segments/{name}") for name in os.listdir(f"{store.root}/segments")]
    assert store.stats().live_bytes == sum(sizes)
    assert (store.stats().puts, store.stats().gets) == (3, 0)
    store.get("a")
    store.get_many(["a", "b"])
    assert store.stats().gets == 3


@pytest.mark.embedded
def test_stats_tell_who_holds_what_was_replaced(store: memstore.Store) -> None:
    store.put("key", torch.zeros(100_000))
    with Child(hold_key, store.root) as child:
        child.receive()
        held = store.get("key")  # after the fork: the child would hold it too
        assert store.stats().pinned_bytes == 0  # it is live
        store.delete("key")
        stats = store.stats()
        assert 400_000 < stats.pinned_bytes < 450_000
        assert set(stats.pinned_by) == {os.getpid(), child.pid}
        del held
        assert store.stats().pinned_by == (child.pid,)
        assert store.gc() == 0
    assert store.stats().reusable_bytes == stats.pinned_bytes
    assert store.gc() == stats.pinned_bytes
    assert store.stats().reusable_bytes == store.stats().pinned_bytes == 0
    assert os.listdir(f"{store.root}/segments") == []


@pytest.mark.embedded
def test_a_child_that_keeps_what_its_dead_parent_got_is_named(store: memstore.Store) -> None:
    """The kernel lists the lock under the pid of the dead."""
    store.put("key", torch.zeros(100_000))
    reading, writing = os.pipe()
    try:
        child = in_child(_get_and_leave_to_a_child, store.root, reading, writing)
        end = os.pidfd_open(child)
        assert store.stats().pinned_by == ()  # it is live
        store.put("key", torch.ones(100_000))
        assert store.stats().pinned_by == (child,)
        with open_store(store.root, capacity=1_000_000), pytest.raises(memstore.StoreFullError) as caught:
            store.put("key", torch.zeros(200_000))
        assert f"held by pid {child}, 0 B being written" in str(caught.value)
    finally:
        os.close(writing)  # the child's end
        os.close(reading)
    assert select.select([end], [], [], 30)[0]
    os.close(end)
    assert store.stats().pinned_by == ()
    store.gc()


def _get_and_leave_to_a_child(root: str, reading: int, writing: int) -> int:
    value = open_store(root).get("key")
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(int(value.sum()))
    return child


@pytest.mark.embedded
def test_a_parent_that_let_go_is_not_named_for_its_child(store: memstore.Store) -> None:
    store.put("key", torch.zeros(100_000))
    value = store.get("key")
    with Child(_wait_to_end, value) as child:
        del value
        store.put("key", torch.ones(100_000))
        assert store.stats().pinned_by == (child.pid,)
    store.gc()


def _wait_to_end(wire: Wire, value: torch.Tensor) -> None:
    wire.receive()


@pytest.mark.embedded
def test_gc_gives_back_all_at_once(store: memstore.Store) -> None:
    names = [f"{number}" for number in range(300)]
    store.put_many({name: torch.zeros(1000) for name in names})
    held = store.get_many(names)
    store.delete_many(names)
    pinned = store.stats().pinned_bytes
    assert pinned > 300 * 4000
    assert store.gc() == 0
    held.clear()
    assert store.gc() == pinned
    assert os.listdir(f"{store.root}/segments") == []


@pytest.mark.embedded
def test_huge_pages_are_counted_where_there_are_any(store: memstore.Store) -> None:
    require_huge_pages(store.root)
    size = 8 << 20
    store.put("key", torch.ones(size, dtype=torch.uint8))
    kept = store.stats().huge_page_bytes  # of the mapping that this process wrote it through
    value = store.get("key")
    assert value.sum() == size
    assert store.stats().huge_page_bytes == kept + size
    del value
    assert store.stats().huge_page_bytes == kept


@pytest.mark.embedded
def test_info_of_a_sharded_entry_tells_its_shards(store: memstore.Store) -> None:
    def part(rank: int) -> dict[str, object]:
        w = memstore.TensorShard(torch.full((3, 5), rank), (6, 5), (3 * rank, 0))
        tied = torch.ones(7) if rank else None
        return {"w": w, "b": torch.ones(4), "empty": torch.zeros(0), **({"x": tied, "y": tied} if rank else {})}

    for rank in range(2):
        store.put_sharded("key", part(rank), attempt="1", rank=rank, world_size=2, wait=False)
    info = store.info("key")
    assert info.kind == "sharded" and len(info.files) == 2
    one, two = info.files
    shards = {leaf.name[0]: leaf.shards for leaf in info.leaves}
    assert shards["w"] == (memstore.ShardInfo((0, 0), (3, 5), 0, one), memstore.ShardInfo((3, 0), (3, 5), 1, two))
    assert shards["b"] == (memstore.ShardInfo((0,), (4,), 0, one),)
    assert shards["x"] == shards["y"] == (memstore.ShardInfo((0,), (7,), 1, two),)
    assert shards["empty"] == ()
    assert info.nbytes == 6 * 5 * 8 + 4 * 4 + 7 * 4
    assert ">ranks<" in info._repr_html_() and ">0-1<" in info._repr_html_()
    store.put("key", torch.ones(3000))
    assert store.info("key").leaves[0].shards == () and "ranks" not in store.info("key")._repr_html_()
