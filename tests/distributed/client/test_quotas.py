"""A quota of a prefix holds for what all hosts put together: the owner of the group counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

import memstore
from memstore.distributed.catalog import CatalogTables
from memstore.distributed.rules.nouns import Quota
from memstore.engine import index
from memstore.errors import QuotaExceededError
from tests.distributed.client.hosts import Cluster, hand_over
from tests.inside import root_of

SIZE, ROOM = 100_000, 8  # bytes of a value, and how many of them there is room for
VALUE = torch.zeros(SIZE, dtype=torch.uint8)


def limit(cluster: Cluster, *quotas: tuple[str, int]) -> None:
    """Has all hosts hear of quotas, as of a seed that has noted them."""
    rows = tuple(Quota(prefix.encode(), nbytes) for prefix, nbytes in quotas)
    cluster.roster = msgspec.structs.replace(cluster.roster, epoch=cluster.roster.epoch + 1, quotas=rows)
    for home in cluster.homes:
        home.adopt(cluster.roster)


def bytes_of(store: memstore.Store, key: str) -> int:
    """What a value takes, with the slack of its file."""
    record = index.find(root_of(store), key.encode())
    return 0 if record is None else record.held_bytes


def used(cluster: Cluster) -> list[int]:
    """What each host says that the keys take: the owner has counted it, and others ask for it."""
    return [store.quotas()[0].used for store in cluster.stores]


@pytest.fixture
def prefix(homes: Cluster) -> str:
    """A prefix in a group of the first host, with room for so many values."""
    group = homes.key_at(0).partition("/")[0]
    homes.stores[1].put(f"{group}/other", VALUE)
    limit(homes, (f"{group}/a/", ROOM * bytes_of(homes.stores[1], f"{group}/other")))
    return f"{group}/a/"


def put_until_refused(store: memstore.Store, prefix: str) -> tuple[int, QuotaExceededError]:
    for number in range(100):
        try:
            store.put(f"{prefix}{number}", VALUE)
        except QuotaExceededError as error:
            return number, error
    raise AssertionError("nothing was refused")


def test_two_hosts_that_reach_it_at_once_never_exceed_it_together(homes: Cluster, prefix: str) -> None:
    one = bytes_of(homes.stores[0], prefix.replace("/a/", "/other"))
    with ThreadPoolExecutor(2) as threads:
        names = [f"{prefix}{number}/" for number in range(2)]
        ends = list(threads.map(put_until_refused, homes.stores, names))
    assert sum(count for count, _ in ends) == ROOM == len(list(homes.stores[1].keys(prefix)))
    for _, error in ends:
        assert (error.prefix, error.quota, error.requested) == (prefix, ROOM * one, one)
        assert error.used == ROOM * one and repr(prefix) in str(error) and error.key is not None
    assert used(homes) == [ROOM * one] * 2
    homes.stores[1].put(prefix.replace("/a/", "/other"), VALUE)  # another prefix of the same group
    key = next(iter(homes.stores[0].keys(prefix)))
    homes.stores[1].put(key, VALUE)  # it takes no more than what it replaces
    homes.stores[1].delete(key)
    assert used(homes) == [(ROOM - 1) * one] * 2
    homes.stores[0].put(f"{prefix}again", VALUE)
    with pytest.raises(QuotaExceededError):
        homes.stores[1].put(f"{prefix}once-more", 1)
    for store in homes.stores:
        assert store.verify().ok
    assert not homes.homes[0].failed


def test_without_the_count_of_the_owner_other_hosts_exceed_it(
    homes: Cluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CatalogTables, "hold_to_quotas", lambda self, keys: None)
    for number in range(ROOM + 2):
        homes.stores[1].put(f"{prefix}{number}", VALUE)
    assert used(homes)[0] > ROOM * SIZE * 1.1


def test_a_batch_and_ranks_are_refused_as_a_whole(homes: Cluster, prefix: str) -> None:
    store = homes.stores[1]
    with pytest.raises(QuotaExceededError):
        store.put_many({f"{prefix}{number}": VALUE for number in range(ROOM + 1)})
    assert used(homes) == [0, 0] and not list(store.keys(prefix))
    store.put_many({f"{prefix}{number}": VALUE for number in range(ROOM)})
    whole = torch.zeros(2, SIZE)

    def put_part(rank: int) -> int:
        part = memstore.TensorShard(whole[rank : rank + 1], global_shape=(2, SIZE), offsets=(rank, 0))
        return homes.stores[rank].put_sharded(
            f"{prefix}w", {"w": part}, attempt="1", rank=rank, world_size=2, timeout=10.0
        )

    with ThreadPoolExecutor(2) as threads:
        for end in [threads.submit(put_part, rank) for rank in range(2)]:
            with pytest.raises(memstore.MemstoreError):
                end.result()
    assert f"{prefix}w" not in store and used(homes)[0] <= ROOM * 1.2 * SIZE


def test_it_goes_with_its_group_which_is_never_refused(homes: Cluster, prefix: str) -> None:
    here, there = homes.stores
    for number in range(ROOM):
        there.put(f"{prefix}{number}", VALUE)
    before = used(homes)
    limit(homes, (prefix, SIZE))  # less than is there
    hand_over(homes, f"{prefix}0", 1)
    assert used(homes) == before
    assert torch.equal(here.get(f"{prefix}0"), VALUE)
    for store in homes.stores:
        with pytest.raises(QuotaExceededError):
            store.put(f"{prefix}more", VALUE)
        assert len(list(store.keys(prefix))) == ROOM
    there.delete_many([f"{prefix}{number}" for number in range(ROOM)])
    assert used(homes) == [0, 0]
    limit(homes)
    for number in range(2 * ROOM):
        here.put(f"{prefix}{number}", VALUE)
    assert here.quotas() == ()


def test_versions_that_were_replaced_count_and_go_before_a_put_is_refused(homes: Cluster, prefix: str) -> None:
    """Those that other hosts have put, too; and they count at the next owner."""
    one, key = bytes_of(homes.stores[0], prefix.replace("/a/", "/other")), f"{prefix}k"
    for number in range(ROOM):
        homes.stores[number % 2].put(key, VALUE, history=ROOM)
    assert used(homes) == [ROOM * one] * 2 and len(homes.stores[1].versions(key)) == ROOM
    homes.stores[0].put(f"{prefix}more", VALUE)
    kept = homes.stores[1].versions(key)
    assert 1 < len(kept) < ROOM and used(homes) == [(len(kept) + 1) * one] * 2
    hand_over(homes, key, 1)
    assert homes.stores[0].versions(key) == kept and used(homes) == [(len(kept) + 1) * one] * 2
    homes.stores[0].delete(key)
    assert used(homes) == [one] * 2
    for store in homes.stores:
        assert store.verify().ok
    assert not homes.homes[0].failed
