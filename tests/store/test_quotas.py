"""Keys with a prefix take no more bytes than its quota lets them, whoever puts them; and these are counted right."""

from __future__ import annotations

import errno
import os
import pickle
from typing import Any

import pytest
import torch

import memstore
from memstore.engine.catalog import tables
from memstore.engine.protocols.history import used_by
from memstore.errors import CrossHostError, NotServedError, QuotaExceededError, StoreFullError
from tests.children import Child, Wire
from tests.inside import root_of

pytestmark = pytest.mark.embedded

SMALL, LARGE = 1000, 20_000  # float32s: in the catalog, and in a file of some 80 KiB


def used(store: memstore.Store, prefix: str = "a/") -> int:
    """What the quota says, which is what a count says."""
    (row,) = [one for one in store.quotas() if one.prefix == prefix]
    root = root_of(store)
    with root.guard:
        assert root.catalog.view(used_by, prefix.encode()) == row.used
    return row.used


def test_puts_beyond_it_fail(store: memstore.Store) -> None:
    store.put("a/before", torch.zeros(LARGE))
    quota = store.set_quota("a/", "300KiB")
    assert quota == memstore.QuotaInfo("a/", 300 << 10, used(store)) and 80_000 < quota.used < 100_000
    store.put("a/1", torch.zeros(LARGE))
    store.put("a/2", torch.zeros(LARGE))
    before = used(store)
    with pytest.raises(QuotaExceededError) as raised:
        store.put("a/3", torch.zeros(LARGE))
    error = raised.value
    assert (error.key, error.prefix, error.quota, error.used) == ("a/3", "a/", 300 << 10, before)
    assert 80_000 < error.requested < 100_000 and error.errno == errno.EDQUOT and isinstance(error, StoreFullError)
    assert "'a/3'" in str(error) and "'a/'" in str(error) and "300" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.prefix, again.used) == (QuotaExceededError, "a/", before)
    assert "a/3" not in store and used(store) == before
    store.put("other", torch.zeros(LARGE))
    store.put("a/3", torch.zeros(SMALL))
    store.delete("a/1")
    store.put("a/4", torch.zeros(LARGE))
    store.clear("a/")
    assert used(store) == 0
    assert store.verify().ok


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_replaced_counts_no_more(store: memstore.Store, size: int) -> None:
    store.set_quota("a/", "100KiB")
    for number in range(5):
        store.put("a/k", torch.full((size,), float(number)))
    before = used(store)
    store.put("a/k", torch.zeros(10))
    assert used(store) < before
    store.put_many({"a/k": torch.zeros(size), "a/l": 1})
    store.delete_many(["a/k", "a/l"])
    assert used(store) == 0


def test_a_batch_is_put_wholly_or_not_at_all(store: memstore.Store) -> None:
    store.set_quota("a/", "200KiB")
    with pytest.raises(QuotaExceededError, match="3 keys take"):
        store.put_many({f"a/{number}": torch.zeros(LARGE) for number in range(3)} | {"b": 1})
    assert list(store) == [] and used(store) == 0
    store.put_many({f"a/{number}": torch.zeros(LARGE) for number in range(2)} | {"b": 1})
    store.put_many({"a/0": 1, "a/2": torch.zeros(LARGE)})
    assert used(store) > 150_000


def test_each_prefix_of_a_key_holds(store: memstore.Store) -> None:
    store.set_quota("", "250KiB")
    store.set_quota("a/", "100KiB")
    store.put("a/1", torch.zeros(LARGE))
    with pytest.raises(QuotaExceededError) as raised:
        store.put("a/2", torch.zeros(LARGE))
    assert raised.value.prefix == "a/"
    store.put("b", torch.zeros(LARGE))
    with pytest.raises(QuotaExceededError) as raised:
        store.put("c", torch.zeros(LARGE))
    assert raised.value.prefix == ""
    assert used(store, "") > used(store, "a/")
    assert store.set_quota("", None) is None
    store.put("c", torch.zeros(LARGE))
    assert [one.prefix for one in store.quotas()] == ["a/"]


def test_a_quota_below_what_is_taken(store: memstore.Store) -> None:
    """Nothing goes, and what takes no more is put."""
    store.put_many({"a/1": torch.zeros(LARGE), "a/2": torch.zeros(LARGE)})
    store.set_quota("a/", "10KiB")
    store.put("a/1", torch.ones(LARGE))
    with pytest.raises(QuotaExceededError):
        store.put("a/3", 1)
    store.delete("a/1")
    store.put("a/2", torch.zeros(SMALL))
    store.put("a/3", 1)
    assert used(store) < 10 << 10


def test_replaced_versions_count_and_go_first(store: memstore.Store) -> None:
    store.set_quota("a/", "400KiB")
    store.put("b/k", torch.zeros(LARGE), history=3)
    store.put("b/k", torch.zeros(LARGE))
    for number in range(10):
        store.put("a/k", torch.full((LARGE,), float(number)), history=10)
        assert used(store) <= 400 << 10
    assert len(store.versions("a/k")) in (3, 4) and len(store.versions("b/k")) == 2
    with store.pin("a/k", version=store.versions("a/k")[0]) as pin:
        store.put("a/l", torch.zeros(2 * LARGE))
        assert pin.version in store.versions("a/k")
        kept = store.versions("a/k")
        with pytest.raises(QuotaExceededError):
            store.put("a/m", torch.zeros(4 * LARGE))
        assert store.versions("a/k") == kept, "it would not have fitted anyway"
        store.put("a/k", 1, history=1)
        assert store.versions("a/k") == (pin.version, store.version("a/k"))
        before = used(store)
    assert used(store) < before
    store.clear("a/")
    assert used(store) == 0


def test_datasets_and_sharded_puts(store: memstore.Store) -> None:
    store.set_quota("a/", "100KiB")
    with pytest.raises(QuotaExceededError):
        store.create_dataset("a/rows", ((1000,), torch.float32), capacity=100)
    data = store.create_dataset("a/rows", ((1000,), torch.float32), capacity=10)
    data.extend(torch.zeros(5, 1000))
    assert 40_000 < used(store) < 60_000
    data.seal()
    del data
    assert used(store) > 20_000

    def put_shards(key: str) -> int:
        for rank in range(2):
            shard = memstore.TensorShard(torch.zeros(1, LARGE), global_shape=(2, LARGE), offsets=(rank, 0))
            pending = store.put_sharded(key, shard, attempt="one", rank=rank, world_size=2, wait=False)
        return pending.wait(5)

    with pytest.raises(QuotaExceededError):
        put_shards("a/sharded")
    for one in store.pending():
        store.abort(one.key, one.attempt)
    assert "a/sharded" not in store
    store.set_quota("a/", "1MiB")
    put_shards("a/sharded2")
    assert used(store) > 160_000
    store.clear("a/")
    assert used(store) == 0
    store.gc()
    assert os.listdir(f"{store.root}/segments") == []


def put_on(wire: Wire, path: str, name: str) -> None:
    with memstore.open(path) as store:
        wire.send()
        wire.receive()
        done = 0
        for number in range(40):
            try:
                store.put(f"a/{name}/{number}", torch.zeros(LARGE if number % 2 else SMALL))
                done += 1
            except QuotaExceededError:
                break
        wire.send(done)


def test_processes_never_exceed_it_together(store: memstore.Store) -> None:
    store.set_quota("a/", "1MiB")
    with Child(put_on, store.root, "x") as one, Child(put_on, store.root, "y") as other:
        for child in (one, other):
            child.receive()
        for child in (one, other):
            child.send()
        done = one.receive() + other.receive()
    assert len(store) == done > 10
    assert (1 << 20) - 90_000 < used(store) <= 1 << 20


def test_it_holds_after_a_reopening_and_a_repair(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.set_quota("a/", "200KiB")
        store.put_many({"a/1": torch.zeros(LARGE), "a/2": torch.zeros(SMALL), "b": torch.zeros(LARGE)})
        before = store.quotas()
    for repairs in range(2):
        with memstore.open(scratch) as store:
            assert store.quotas() == before
            used(store)
            with pytest.raises(QuotaExceededError):
                store.put("a/3", torch.zeros(2 * LARGE))
            assert store.verify().ok
        if not repairs:
            memstore.repair(scratch)


def test_the_put_of_a_killed_process_counts_if_it_is_there(store: memstore.Store) -> None:
    store.set_quota("a/", "1MiB")
    with Child(put_on, store.root, "x") as child:
        child.receive()
        child.send()
        while len(store) < 3:
            pass
        child.process.kill()
        child.process.join()
    store.put("a/next", 1)
    assert used(store) > 0


def test_what_is_no_quota_is_refused(store: memstore.Store) -> None:
    for quota in (0, -1, "much", 1.5):
        with pytest.raises(ValueError, match="a size is"):
            store.set_quota("a/", quota)  # type: ignore[arg-type]
    with pytest.raises(memstore.InvalidKeyError):
        store.set_quota("a" * 501, 10)
    with pytest.raises(memstore.InvalidKeyError):
        store.set_quota(7, 10)  # type: ignore[arg-type]
    assert store.quotas() == ()
    with memstore.open(store.root, "r") as reader, pytest.raises(memstore.ReadOnlyError):
        reader.set_quota("a/", 10)


def test_stores_of_several_hosts_have_none(root: str, scratch: str) -> None:
    from memstore.engine import deadline_after, need_cluster

    with memstore.open(root) as store:
        need_cluster(root_of(store), deadline_after(10))
        with pytest.raises(CrossHostError, match="prefixes have quotas in a store of one host only"):
            store.set_quota("a/", 100)


def test_a_store_with_quotas_isnt_served(root: str) -> None:
    from memstore.engine import deadline_after, need_cluster

    with memstore.open(root) as store:
        store.set_quota("a/", 100)
        with pytest.raises(NotServedError, match="prefixes have quotas"):
            need_cluster(root_of(store), deadline_after(10))
        assert not root_of(store).catalog.has_membership()
        store.set_quota("a/", None)
        root = root_of(store)
        with root.guard:
            counters: Any = root.catalog.view(tables.Transaction.counters)
        assert counters.quotas == 0
