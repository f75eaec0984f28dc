"""Readers that hold what they got, one version for ever or a thousand: puts work around them, and nothing piles up."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import memstore
from tests.crash import forks, workers
from tests.crash.leftovers import leftovers
from tests.crash.values import LARGE, SMALL, stamp_of, stamped
from tests.inside import root_of
from tests.support.fork_server import ForkServer


def files(store: memstore.Store) -> int:
    return len(os.listdir(root_of(store).segments))


@pytest.mark.parametrize(
    ("nbytes", "puts"),
    [
        (SMALL, 1_000),
        pytest.param(SMALL, 10_000, marks=pytest.mark.full),
        pytest.param(LARGE, 10_000, marks=pytest.mark.full),
    ],
)
def test_one_idle_reader_for_ever(nbytes: int, puts: int, store: memstore.Store, server: ForkServer) -> None:
    store.put("k", stamped(0, nbytes))
    catalog = store.stats().catalog_bytes
    with server.start(workers.hold_until_told, store.root, "k") as reader:
        assert reader.recv() == 0
        most = 0
        for stamp in range(1, puts + 1):
            store.put("k", stamped(stamp, nbytes))
            most = max(most, files(store)) if stamp % 64 == 0 else most
        assert most <= 4, "the held one, the live one, and what is kept for reuse"
        stats = store.stats()
        assert stats.pinned_by == (reader.pid,)
        assert stats.live_bytes == stats.pinned_bytes > nbytes
        assert 0 < stats.reusable_bytes <= 2 * stats.live_bytes
        assert stats.catalog_bytes == catalog
        reader.send("look")
        assert reader.recv() == 0
        reader.send("end")
        reader.join()
    for stamp in range(4):
        store.put("k", stamped(stamp, nbytes))
    assert store.stats().pinned_bytes == 0
    assert files(store) <= 4
    assert leftovers(store, spares=True) == []


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.full)])
def test_a_reader_of_a_thousand_versions(count: int, store: memstore.Store) -> None:
    held: list[torch.Tensor] = []
    for stamp in range(count):
        store.put("k", stamped(stamp, SMALL))
        held.append(store.get("k"))
    store.put("k", stamped(count, SMALL))
    assert files(store) >= count + 1
    assert [stamp_of(value) for value in held] == list(range(count))
    del held
    gc.collect()
    for stamp in range(count):
        store.put("k", stamped(stamp, SMALL))
    assert files(store) <= 4, "puts give back what a reader let go, a few files each"
    assert leftovers(store, spares=True) == []


def test_gc_gives_a_thousand_versions_back_at_once(store: memstore.Store) -> None:
    held: list[torch.Tensor] = []
    for stamp in range(1000):
        store.put("k", stamped(stamp, SMALL))
        held.append(store.get("k"))
    assert store.gc() == 0
    del held[::2]
    assert store.gc() > 499 * SMALL
    assert [stamp_of(value) for value in held] == list(range(1, 1000, 2))
    del held
    store.gc()
    assert leftovers(store) == []


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_a_child_forked_while_its_parent_fills_pins_nothing(
    nbytes: int, store: memstore.Store, server: ForkServer
) -> None:
    """The child lives on; what the parent put then is replaced, and its file used again."""
    with server.start(forks.fork_while_filling, store.root, nbytes) as worker:
        worker.join()
