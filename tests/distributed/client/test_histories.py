"""Versions that were replaced, of keys that several hosts put and read: the owner keeps them, and bytes stay where they
were put."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from memstore.distributed.rules import Request
from memstore.distributed.rules.messages import FindVersions, Lookup
from memstore.errors import CrossHostError, VersionGoneError
from tests.distributed.client.hosts import Cluster, await_, cluster_of, hand_over
from tests.distributed.client.test_puts import lent, segments
from tests.distributed.client.test_removed_hosts import remove
from tests.distributed.homes import claim

BIG = 5000  # floats: more than a record has room for
LARGE = 600_000  # more than comes with its header, so that a view reads a part of it


def value(number: int, size: int = BIG) -> dict[str, Any]:
    return {"x": torch.full((size,), float(number)), "n": number}


def numbers_of(store: memstore.Store, key: str) -> list[int]:
    """What the versions of a key hold, the present one last."""
    found = [store.get(key, version=version) for version in store.versions(key)]
    assert all((one["x"] == one["n"]).all() for one in found)
    return [one["n"] for one in found]


@pytest.fixture
def three(scratch: str) -> Iterator[Cluster]:
    """Two owners, and a host that is none."""
    with cluster_of(scratch, True, True, False) as made:
        yield made


@pytest.mark.parametrize("seed", range(2))
def test_deltas_of_a_key_with_a_history_are_what_was_put(three: Cluster, seed: int) -> None:
    """Whoever puts and reads, in whatever order: a host takes bytes from the one version of which it has a copy."""
    draw, key = random.Random(seed), three.key_at(1)
    now = {f"w{number}": torch.full((1 << 16 << number % 3,), float(number)) for number in range(8)}
    put: dict[int, dict[str, torch.Tensor]] = {}
    for step in range(20):
        now = now | {name: torch.full_like(now[name], 100.0 + step) for name in draw.sample(sorted(now), 2)}
        put[draw.choice(three.stores).put(key, now, history=4, delta_of=draw.random() < 0.8 or None)] = now
        reader = draw.choice(three.stores)
        versions = reader.versions(key)
        assert versions == tuple(sorted(put))[-4:]
        for version in draw.sample(versions, draw.randrange(len(versions) + 1)):
            found = reader.get(key, version=version)
            assert found.keys() == put[version].keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in put[version].items()), (seed, step, version)


@pytest.mark.parametrize("size", [3, BIG, LARGE])
def test_each_host_reads_the_last_versions_whoever_has_put_them(three: Cluster, size: int) -> None:
    key, stores = three.key_at(1), three.stores
    versions = [stores[0].put(key, value(0, size), history=3)]
    for number in range(1, 6):
        versions.append(stores[number % 3].put(key, value(number, size)))
    for store in stores:
        assert store.versions(key) == tuple(versions[-3:])
        assert numbers_of(store, key) == [3, 4, 5]
        assert store.get(key)["n"] == 5
        assert (store.view(key, version=versions[-2])["x"][7:9] == 4).all()
        assert pickle.loads(pickle.dumps(store.ref(key, version=versions[-3]))).get()["n"] == 3
        with pytest.raises(VersionGoneError, match=f"{key!r} has no version {versions[0]}: it has 3"):
            store.get(key, version=versions[0])
        with pytest.raises(VersionGoneError, match="yet: wait"):
            store.get(key, version=versions[-1] + 1)
        assert store.get(key, None, version=versions[1]) is None
        assert store.verify().ok


def test_bytes_stay_where_they_were_put_until_their_version_goes(pair: Cluster) -> None:
    here, owner = pair.stores
    for number in range(3):
        here.put("k", value(number), history=3)
    for home in pair.homes:
        home.run(lambda tables: None)  # a duty or two later
    assert (len(segments(here)), len(segments(owner)), lent(pair.homes[0])) == (3, 0, 3)
    owner.put("k", value(3))
    await_(lambda: (len(segments(here)), lent(pair.homes[0])) == (2, 2))
    assert len(segments(owner)) == 1 and numbers_of(here, "k") == [1, 2, 3]
    here.put("k", value(4), history=1)
    await_(lambda: lent(pair.homes[0]) == 1 and not segments(owner))
    assert numbers_of(owner, "k") == [4]


def test_a_delete_takes_all_of_it(pair: Cluster) -> None:
    here, owner = pair.stores
    for number in range(4):
        (here, owner)[number % 2].put("k", value(number), history=4)
    held = here.get("k", version=here.versions("k")[1])
    here.delete("k")
    for store in pair.stores:
        with pytest.raises(memstore.KeyNotFoundError):
            store.versions("k")
        with pytest.raises(memstore.KeyNotFoundError):
            store.get("k", version=1)
    await_(lambda: not segments(owner) and not lent(pair.homes[0]))
    assert (held["x"] == 1).all()
    first = here.put("k", value(5))
    assert here.put("k", value(6)) > first
    assert numbers_of(owner, "k") == [6], "a new key has no history"


def test_bytes_bound_it(pair: Cluster) -> None:
    here, owner = pair.stores
    for number in range(5):
        here.put("k", value(number), history=5, history_bytes=50_000)
    assert numbers_of(owner, "k") == [2, 3, 4]
    owner.put("k", 1)
    assert len(owner.versions("k")) == 3


def test_batches_and_sharded_puts_go_on_with_it(pair: Cluster) -> None:
    here, owner = pair.stores
    versions = [here.put("k", value(0), history=3)]
    versions.append(here.put_many({"k": value(1), "other": 1})["k"])
    for rank in range(2):
        shard = memstore.TensorShard(torch.full((1, 9000), 2.0), global_shape=(2, 9000), offsets=(rank, 0))
        store = pair.stores[rank]
        pending = store.put_sharded("k", {"x": shard}, attempt="a", rank=rank, world_size=2, wait=False)
    versions.append(pending.wait())
    assert here.versions("k") == owner.versions("k") == tuple(versions)
    versions.append(owner.put("k", value(3)))
    for store in pair.stores:
        assert store.versions("k") == tuple(versions[1:])
        assert (store.get("k", version=versions[2])["x"] == 2).all()
    owner.delete("k")
    await_(lambda: not segments(owner) and not lent(pair.homes[0]))
    assert not segments(here)


def test_a_version_is_two_messages(pair: Cluster) -> None:
    here, home = pair.stores[0], pair.homes[1]
    versions = [here.put("k", number, history=2) for number in range(2)]
    home.asked.clear()
    assert here.get("k", version=versions[0]) == 0
    assert kinds_of(home.asked) == [Lookup]
    assert here.versions("k") == tuple(versions)
    assert kinds_of(home.asked) == [Lookup, FindVersions]


def kinds_of(asked: list[Request]) -> list[type[Request]]:
    return [type(one) for one in asked if isinstance(one, Lookup | FindVersions)]


def test_a_store_that_has_a_history_may_be_served(scratch: str) -> None:
    with memstore.open(f"{scratch}-1") as before:
        versions = [before.put("k", value(number), history=3) for number in range(4)]
    with cluster_of(scratch, True, True) as cluster:
        claim(cluster.homes[0], cluster.homes[1], b"k")
        here, there = cluster.stores
        assert numbers_of(here, "k") == numbers_of(there, "k") == [1, 2, 3]
        there.put("k", value(4))
        versions.append(here.put("k", value(5)))
        assert numbers_of(here, "k") == numbers_of(there, "k") == [3, 4, 5]
        assert there.verify().ok


def test_a_group_that_is_handed_over_takes_its_replaced_versions_along(homes: Cluster) -> None:
    """And goes on with its history at the new owner."""
    key, stores = homes.key_at(0), homes.stores
    versions = [stores[number % 2].put(key, value(number), history=3) for number in range(4)]
    hand_over(homes, key, 1)
    for store in stores:
        assert store.versions(key) == tuple(versions[-3:]) and numbers_of(store, key) == [1, 2, 3]
        assert store.verify().ok
    assert [lent(home) for home in homes.homes] == [1, 0], "of three versions one lies where the group came from"
    for number in range(4, 8):
        stores[number % 2].put(key, value(number))
    for store in stores:
        assert numbers_of(store, key) == [5, 6, 7]
    await_(lambda: [lent(home) for home in homes.homes] == [1, 0])


def test_versions_whose_bytes_lay_on_a_removed_host_go(three: Cluster) -> None:
    key, (here, owner, leaving) = three.key_at(1), three.stores
    for number in range(4):
        (leaving if number % 2 else here).put(key, value(number), history=4)
    owner.put(key, value(4))
    assert numbers_of(here, key) == [1, 2, 3, 4]
    remove(three, 2)
    await_(lambda: len(owner.versions(key)) == 2)
    assert numbers_of(here, key) == numbers_of(owner, key) == [2, 4]


def test_a_full_owner_gives_up_its_own_bytes_and_no_others(scratch: str) -> None:
    """What lies on other hosts would make no room."""
    memstore.open(f"{scratch}-1", capacity="1MiB", inline_limit=0).close()
    with cluster_of(scratch, False, True) as cluster:
        here, owner = cluster.stores
        for number in range(6):
            (here, owner)[number % 2].put("k", value(number, 30_000), history=6)
        assert numbers_of(here, "k") == [0, 1, 2, 3, 4, 5]
        owner.put("large", torch.zeros(200_000))
        found = numbers_of(here, "k")
        assert {0, 2, 4} <= {*found} < {0, 1, 2, 3, 4, 5}
        assert (here.get("large") == 0).all() and owner.verify().ok


def test_awaited_calls_do_the_same(pair: Cluster) -> None:
    async def use(path: str) -> list[Any]:
        async with memstore.aio.open(path) as store:
            first = await store.put("k", 1, history=2)
            second = await store.put("k", 2)
            assert await store.versions("k") == (first, second)
            return [await store.get("k", version=version) for version in (first, second)]

    for store in pair.stores:
        assert asyncio.run(use(store.root)) == [1, 2]


def test_pins_are_of_one_host(pair: Cluster) -> None:
    for store in pair.stores:
        store.put("k", 1)
        with pytest.raises(CrossHostError, match="pins are of one host only"):
            store.pin("k")
