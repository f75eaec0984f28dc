"""The disk of a key's home is full: an error that says so, and nothing has changed, here or there."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

import memstore
from memstore.distributed.catalog import CatalogTables, look
from memstore.engine import deadline_after
from memstore.engine.root.roots import Root
from tests.distributed.serving.homes import answering, join
from tests.inside import root_of
from tests.small_tmpfs import fill, on_small_tmpfs

BIG = torch.ones(5000)


def test_puts_at_a_home_that_is_full_say_so_and_deletes_make_room() -> None:
    on_small_tmpfs(16, _full_home)


def _full_home(full: str) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        answering(f"{full}/home") as home,
        memstore.open(f"{folder}/here", timeout=20.0) as here,
    ):
        join(home, root_of(here))
        here.put("big", BIG)
        ballast = fill(full)
        put = _fill_the_catalog(f"{full}/home")
        for key, value in (("more", 1), ("big", 2), ("large", 3 * BIG), ("one/k", 4)):
            with pytest.raises(memstore.StoreFullError, match="room"):
                here.put(key, value)
        with pytest.raises(memstore.StoreFullError):
            here.put_many({"more": 1, "big": 2})
        assert torch.equal(here.get("big"), BIG)
        assert here.get(put[0]) == b"v" * 1400 and "more" not in here
        assert _lent(root_of(here)) == [b"big"], "what was filled in vain is given back"

        assert all(here.delete(key) for key in put)
        here.put("more", 1)
        os.unlink(ballast)
        here.put("large", 3 * BIG)
        assert sorted(here) == ["big", "large", "more"]


def _fill_the_catalog(home: str) -> list[str]:
    """Keys with values in their records, until there is no room for another."""
    keys: list[str] = []
    with memstore.open(home) as store, pytest.raises(memstore.StoreFullError, match="catalog"):
        while True:
            store.put(f"{len(keys)}/k", b"v" * 1400)
            keys.append(f"{len(keys)}/k")
    return keys


def _lent(root: Root) -> list[bytes]:
    def keys(tables: CatalogTables) -> list[bytes]:
        return [lent.key for _, lent in tables.all_lent(0, 100)]

    return look(root, keys, deadline_after(10))
