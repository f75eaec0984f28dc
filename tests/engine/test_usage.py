"""What a store takes: told without a transaction that lasts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import memstore
from memstore.engine import usage
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.catalog.tables import Transaction


def test_it_adds_up_over_pages_of_rows(store: memstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that reads the rows of a hundred thousand files would keep what is replaced meanwhile."""
    names = [f"{number}" for number in range(12)]
    store.put_many({name: torch.zeros(1000 + 2000 * number) for number, name in enumerate(names)})
    held = store.get_many(names[:5])
    refs = [pickle.dumps(store.ref(name)) for name in names[3:7]]
    store.delete_many(names)
    store.put_many({"claims": torch.zeros(1000), "inline": 1})  # it sets aside what is held
    expected = store.stats()
    assert 0 < expected.pinned_bytes < expected.pinned_bytes + expected.reusable_bytes
    assert expected.pinned_by and refs
    views: list[int] = []
    view, segment = Catalog.view, Transaction.segment

    def counted_view(*arguments: Any, **keywords: Any) -> Any:
        views.append(0)
        return view(*arguments, **keywords)

    def counted_segment(*arguments: Any) -> Any:
        views[-1] += 1
        return segment(*arguments)

    monkeypatch.setattr(Catalog, "view", counted_view)
    monkeypatch.setattr(Transaction, "segment", counted_segment)
    for rows in (1, 3, 1024):
        views.clear()
        monkeypatch.setattr(usage, "_ROWS_A_PAGE", rows)
        assert store.stats() == expected
        assert sum(views) == 12 and max(views) <= rows
    held.clear()
    assert store.stats().pinned_bytes < expected.pinned_bytes
