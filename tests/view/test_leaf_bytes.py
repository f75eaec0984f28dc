"""LeafBytes: what lazy leaves read, asked for by boxes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memstore


def test_a_box_is_read_where_it_lies(any_store: memstore.Store, reads: Any) -> None:
    value = torch.arange(120.0).reshape(10, 12)
    any_store.put("key", {"a": torch.zeros(3), "b": value})
    leaf = any_store.view("key")["b"]
    box = leaf.shown[2:8:3, 5:].T
    with reads() as count:
        assert torch.equal(leaf.stored.tensor(box), value[2:8:3, 5:].T)
        assert count() == 0
        assert torch.equal(leaf.stored.read(box), value[2:8:3, 5:].T)
        assert count() == 2 * 7 * 4
        assert leaf.stored.read(box).data_ptr() == leaf.stored.tensor(leaf.shown).data_ptr() + (2 * 12 + 5) * 4


def test_the_checksum_is_compared_once(root: str, reads: Any) -> None:
    with memstore.open(root, checksum=True, verify=True, inline_limit=0) as store:
        store.put("key", torch.rand(1000))
        leaf = store.view("key")
        with reads() as count:
            leaf.stored.use(4)
            assert count() == 4004
            leaf.stored.use(4)
            assert count() == 4008
        damaged = store.view("key")
        damaged.stored.checksum = b"12345678"
        for read in (lambda: damaged.stored.use(4), lambda: damaged.stored.read(damaged.shown)):
            with pytest.raises(memstore.CorruptionError, match="'key'.*checksum"):
                read()


def test_a_leaf_is_mapped_piece_by_piece(store: memstore.Store) -> None:
    store.put("key", torch.zeros(5 << 20, dtype=torch.uint8))
    leaf = store.view("key")
    assert [leaf.stored.populate(1 << 20) for _ in range(4)] == [False, False, False, True]
