"""A view of a snapshot in a bucket with a cache: a host reads each range once, and never mixes two snapshots."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from memstore.errors import ReadOnlyError
from memstore.snapshot.cache import BLOCK, GROUP, PREFIX
from tests.support.buckets import FaultProxy, Request
from tests.support.fork_server import ForkServer

ROWS, WIDTH = 1536, 1024  # of float32: 6 MiB


@pytest.fixture
def options(s3_options: dict[str, Any]) -> dict[str, Any]:
    return s3_options


def table(fill: int = 0) -> torch.Tensor:
    return (torch.arange(ROWS * WIDTH, dtype=torch.float32) + fill).reshape(ROWS, WIDTH)


@pytest.fixture
def taken(url: str, options: dict[str, Any], s3_proxy: FaultProxy) -> Iterator[str]:
    Snapshot.take(url, {"state": StateDict(weight=table(), small=torch.arange(5))}, storage_options=options)
    s3_proxy.clear()
    yield url


def is_fetch(request: Request) -> bool:
    return request.method == "GET" and ".safetensors." in request.name


def weight_of(url: str, options: dict[str, Any], store: memstore.Store) -> Any:
    return Snapshot(url, storage_options=options).view(cache=store)["state"]["weight"]


def read_in_process(_: object, url: str, options: dict[str, Any], root: str, rows: slice) -> None:
    """Reads rows with a cache, and ends with 0 if they are right."""
    with memstore.open(root, "r+") as store:
        found = weight_of(url, options, store)[rows]
        os._exit(0 if torch.equal(found + 0, table()[rows]) else 1)


def test_what_one_view_has_fetched_another_one_reads_from_the_store(
    taken: str, options: dict[str, Any], store: memstore.Store, s3_proxy: FaultProxy
) -> None:
    rows = weight_of(taken, options, store)[100:164] + 0
    assert torch.equal(rows, table()[100:164])
    fetched = s3_proxy.fetched
    assert 64 * 4096 <= fetched < 64 * 4096 + (1 << 18)
    assert torch.equal(weight_of(taken, options, store)[100:164] + 0, rows)
    assert torch.equal(weight_of(taken, options, store)[[163, 100]] + 0, table()[[163, 100]])
    assert s3_proxy.fetched < fetched + 8192  # of manifests
    everything = weight_of(taken, options, store)
    assert torch.equal(everything + 0, table())  # the rest
    assert s3_proxy.fetched < everything.nbytes + (1 << 18)
    sent = pickle.dumps(everything)
    before = [one for one in s3_proxy.requests if is_fetch(one)]
    assert torch.equal(pickle.loads(sent) + 0, table())
    assert [one for one in s3_proxy.requests if is_fetch(one)] == before
    # whole groups are one value each
    assert len(list(store.keys(PREFIX))) < 6 + 3 * GROUP


def test_two_processes_that_need_the_same_at_once_fetch_it_once(
    taken: str, options: dict[str, Any], store: memstore.Store, s3_proxy: FaultProxy, rank_server: ForkServer
) -> None:
    """The first one's fetch is held up until the other one has come to the same place."""
    s3_proxy.delay(is_fetch, 2.0)
    both = [rank_server.start(read_in_process, taken, options, store.root, slice(first, 1024)) for first in (0, 512)]
    assert [one.wait(timeout=100.0) for one in both] == [0, 0]
    fetched = sum(one.answered for one in s3_proxy.requests if is_fetch(one))
    assert 1024 * 4096 <= fetched < 1024 * 4096 + 8 * BLOCK


def test_a_process_that_dies_while_it_fetches_keeps_nobody_waiting(
    taken: str, options: dict[str, Any], store: memstore.Store, s3_proxy: FaultProxy, rank_server: ForkServer
) -> None:
    s3_proxy.delay(is_fetch, 30.0)
    first = rank_server.start(read_in_process, taken, options, store.root, slice(0, 512))
    deadline = time.monotonic() + 60
    while not any(is_fetch(one) for one in s3_proxy.requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    began = time.monotonic()
    assert torch.equal(weight_of(taken, options, store)[:512] + 0, table()[:512])
    assert time.monotonic() - began < 20


def test_a_snapshot_that_takes_the_place_of_another_one_is_never_mixed_with_it(
    taken: str, options: dict[str, Any], store: memstore.Store
) -> None:
    old = weight_of(taken, options, store)
    assert torch.equal(old[:64] + 0, table()[:64])
    storage = memstore.snapshot.objects.storage_at(taken, options)
    storage.remove_all(storage.names())
    Snapshot.take(taken, {"state": StateDict(weight=table(7), small=torch.arange(5))}, storage_options=options)
    assert torch.equal(weight_of(taken, options, store) + 0, table(7))
    assert torch.equal(old[:64] + 0, table()[:64])
    with pytest.raises(memstore.VersionGoneError):
        old[1000:1064] + 0


@pytest.mark.full
def test_a_full_store_makes_room_by_other_snapshots_and_then_keeps_no_more(
    taken: str, options: dict[str, Any], store: memstore.Store, s3_proxy: FaultProxy
) -> None:
    store.set_quota(PREFIX, 4 << 20)
    store.put("policy", torch.zeros(10))
    assert torch.equal(weight_of(taken, options, store)[:512] + 0, table()[:512])  # 2 MiB
    other = taken + "-other"
    Snapshot.take(other, {"state": StateDict(weight=table(3))}, storage_options=options)
    assert torch.equal(weight_of(other, options, store)[:768] + 0, table(3)[:768])  # 3 MiB, in the place of the 2
    assert len({key.split("/")[1] for key in store.keys(PREFIX)}) == 1
    assert torch.equal(weight_of(other, options, store) + 0, table(3))  # 6 MiB don't fit, and come all the same
    assert store.stats().live_bytes < 5 << 20
    s3_proxy.clear()
    assert torch.equal(weight_of(other, options, store)[:768] + 0, table(3)[:768])
    assert not any(is_fetch(one) for one in s3_proxy.requests)
    assert "policy" in store


def test_values_of_others_under_its_keys_are_not_read(
    taken: str, options: dict[str, Any], store: memstore.Store
) -> None:
    assert torch.equal(weight_of(taken, options, store)[:64] + 0, table()[:64])
    for number, key in enumerate(list(store.keys(PREFIX))):
        store.put(key, torch.zeros(3) if number % 2 else {"x": 1})
    assert torch.equal(weight_of(taken, options, store)[:64] + 0, table()[:64])


def test_a_cache_is_a_store_that_can_be_written(taken: str, options: dict[str, Any], store: memstore.Store) -> None:
    with memstore.open(store.root, "r") as reader, pytest.raises(ReadOnlyError):
        weight_of(taken, options, reader)
    with pytest.raises(TypeError, match="cache is a store"):
        Snapshot(taken, storage_options=options).view(cache=store.root)  # pyright: ignore[reportArgumentType]


def test_a_folder_needs_no_cache(path: str, store: memstore.Store) -> None:
    Snapshot.take(path, {"state": StateDict(weight=table())})
    assert torch.equal(weight_of(path, {}, store) + 0, table())
    assert not list(store.keys(PREFIX))
