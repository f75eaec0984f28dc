"""A host whose lease is over, as processes see it: `memstore serve --remove-after`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch

import memstore
from memstore import aio
from memstore.engine import Root, boot_clock
from memstore.engine.sync.pages import LockPage
from memstore.errors import FencedError, UnknownOutcomeError
from tests.distributed.client.hosts import Cluster, cluster_of
from tests.inside import root_of

LARGE = torch.arange(100_000)
HOUR = 3_600_000_000_000  # nanoseconds


@pytest.fixture
def cluster(scratch: str) -> Iterator[Cluster]:
    with cluster_of(scratch, True, True) as made:
        yield made


def set_lease(store: memstore.Store, until: int) -> None:
    """As this host's index process does."""
    root_of(store).host_lease[0] = until


CALLS: dict[str, Callable[[memstore.Store, str], object]] = {
    "get": lambda store, key: store.get(key),
    "get with a default": lambda store, key: store.get(f"{key}-missing", None),
    "get_many": lambda store, key: store.get_many([key]),
    "view": lambda store, key: store.view(key),
    "in": lambda store, key: key in store,
    "version": lambda store, key: store.version(key),
    "info": lambda store, key: store.info(key),
    "keys": lambda store, key: list(store.keys()),
    "len": lambda store, key: len(store),
    "wait": lambda store, key: store.wait(key, timeout=1.0),
    "wait_any": lambda store, key: store.wait_any([key], timeout=1.0),
    "put": lambda store, key: store.put(key, 1),
    "put of a tensor": lambda store, key: store.put(key, LARGE),
    "put_many": lambda store, key: store.put_many({key: 1, f"{key}-2": LARGE}),
    "put of a new group": lambda store, key: store.put(f"new-{key}", 1),
    "delete": lambda store, key: store.delete(key),
    "pop": lambda store, key: store.pop(key),
    "create_dataset": lambda store, key: store.create_dataset(f"{key}-rows", {"x": LARGE[:2]}, capacity=4),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_a_host_whose_lease_is_over_says_so(cluster: Cluster, name: str) -> None:
    store, key = cluster.stores[0], cluster.key_at(0)
    store.put(key, LARGE)
    set_lease(store, boot_clock() - 2_500_000_000)
    with pytest.raises(FencedError, match=r"host .* has not heard from a majority .* 2\.[5-9] s more.*memstore status"):
        CALLS[name](store, key)
    set_lease(store, boot_clock() + HOUR)
    assert torch.equal(store.get(key), LARGE)  # nothing was done


def test_awaited_calls_too(cluster: Cluster) -> None:
    store, key = cluster.stores[0], cluster.key_at(0)
    store.put(key, 1)
    set_lease(store, 1)

    async def calls() -> None:
        async with aio.open(store.root) as opened:
            await opened.get(key)

    with pytest.raises(FencedError):
        asyncio.run(calls())


def test_rows_that_are_open(cluster: Cluster) -> None:
    store = cluster.stores[0]
    rows = store.create_dataset("rows/x", {"x": LARGE[:2]}, capacity=4)
    rows.extend({"x": LARGE[:4].view(2, 2)})
    set_lease(store, 1)
    with pytest.raises(FencedError):
        rows.extend({"x": LARGE[:4].view(2, 2)})


def test_a_process_that_may_only_read_sees_it_too(scratch: str) -> None:
    with memstore.open(scratch, "a") as store:
        store.put("k", 1)
    with memstore.open(scratch, "r") as reader:
        assert reader.get("k") == 1
        LockPage(f"{scratch}/lock").host_lease[0] = 1
        with pytest.raises(FencedError):
            reader.get("k")


def test_a_change_whose_lease_ran_out_meanwhile_is_of_unknown_outcome(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process that is stopped after its look."""
    store, key = cluster.stores[0], cluster.key_at(0)
    monkeypatch.setattr(Root, "check_lease", lambda root: None)  # pyright: ignore
    set_lease(store, 1)
    for value in (1, LARGE):
        with pytest.raises(UnknownOutcomeError, match="lease") as found:
            store.put(key, value)
        assert found.value.key == key
    with pytest.raises(UnknownOutcomeError):
        store.delete(key)


def test_values_that_are_held_stay(cluster: Cluster) -> None:
    store, key = cluster.stores[0], cluster.key_at(0)
    store.put(key, LARGE)
    value = store.get(key)
    set_lease(store, 1)
    assert torch.equal(value, LARGE)
