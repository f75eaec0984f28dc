"""What a REPL and a notebook show: short, escaped, and without reading a tensor."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import memstore


@pytest.fixture
def filled(store: memstore.Store) -> memstore.Store:
    store.put("policy", TensorDict({"w": torch.ones(300, 7), "deep": {"b": torch.zeros(300)}}, [300]))
    store.put("<script>alert(1)</script>", 3)
    return store


def test_an_entry_is_a_line(filled: memstore.Store) -> None:
    info = filled.info("policy")
    said = f"'policy' version {info.version}: TensorDict[300] of 2 leaves, segment, 9.4 KiB"
    assert repr(info) == f"<memstore.EntryInfo {said}>"
    assert repr(filled) == f"<memstore.Store {filled.root} (mode 'r+')>"


def test_a_notebook_shows_tables(filled: memstore.Store) -> None:
    shown = filled._repr_html_()
    assert shown.startswith("<table>") and "policy" in shown and "2 keys" in shown
    assert "<script>" not in shown and "&lt;script&gt;" in shown
    entry = filled.info("policy")._repr_html_()
    assert "deep.b" in entry and "[300, 7]" in entry and "float32" in entry


def test_many_keys_and_leaves_are_cut(store: memstore.Store) -> None:
    store.put_many({f"{number:03}": number for number in range(100)})
    store.put("leaves", [torch.ones(1) for _ in range(100)])
    assert store._repr_html_().count("<tr>") == 31 and "101 keys, the first 30 shown" in store._repr_html_()
    assert store.info("leaves")._repr_html_().count("<tr>") == 31


def test_a_closed_store_says_so(store: memstore.Store) -> None:
    store.close()
    assert store._repr_html_() == repr(store) == f"<memstore.Store {store.root} (closed)>"


def test_views_show_shapes_and_read_nothing(filled: memstore.Store) -> None:
    view = filled.view("policy")
    before = memstore.bytes_read()
    assert "f32" in repr(view) or "float32" in repr(view)
    assert "StoredTensor" in repr(view["w"]) and "(300, 7)" in repr(view["w"])
    assert memstore.bytes_read() == before
