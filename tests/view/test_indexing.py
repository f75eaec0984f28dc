"""Lazy leaves index as the tensors that they stand for, and read no more than they must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import memstore
from tests.examples import examples
from tests.view.strategies import indices, tensors

quick = settings(max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture])


def outcome(tensor: Any, index: Any) -> Any:
    try:
        return tensor[index]
    except (IndexError, ValueError, TypeError, RuntimeError) as error:
        return type(error)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, type):
        assert found is expected
        return
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if isinstance(found, memstore.StoredTensor):
        assert found.stride() == expected.stride()
    copy = found.clone()
    assert type(copy) is torch.Tensor
    assert torch.equal(copy, expected)


@quick
@given(data=st.data())
def test_any_index_gives_what_the_tensor_gives(any_store: memstore.Store, data: st.DataObject) -> None:
    any_store.put("key", data.draw(tensors()))
    plain, lazy = any_store.get("key"), any_store.view("key")
    for _ in range(2):
        index = data.draw(indices(tuple(plain.shape)))
        plain, lazy = outcome(plain, index), outcome(lazy, index)
        assert_equal(lazy, plain)
        if not isinstance(lazy, memstore.StoredTensor):
            break


@quick
@given(data=st.data())
def test_an_index_reads_what_it_gives(store: memstore.Store, data: st.DataObject) -> None:
    store.put("key", data.draw(tensors(least=1)).contiguous())
    plain, lazy = store.get("key"), store.view("key")
    index = data.draw(indices(tuple(plain.shape)))
    before = memstore.bytes_read()
    found = outcome(lazy, index)
    if isinstance(found, memstore.StoredTensor):
        assert memstore.bytes_read() == before
        found = found.clone()
    if isinstance(found, torch.Tensor):
        assert memstore.bytes_read() - before == found.nbytes


def test_elements_that_share_their_bytes_are_counted_once(store: memstore.Store) -> None:
    store.put("key", torch.arange(6.0).expand(1000, 6))
    lazy = store.view("key")
    before = memstore.bytes_read()
    assert lazy.sum() == 15_000
    assert memstore.bytes_read() - before == 24


@quick
@given(data=st.data())
def test_a_tensordict_of_lazy_leaves_indexes_as_the_loaded_one(store: memstore.Store, data: st.DataObject) -> None:
    batch = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    value = TensorDict({"a": torch.rand(*batch, 3), "n": TensorDict({"b": torch.rand(batch) > 0.5}, batch)}, batch)
    store.put("key", value)
    plain, lazy = store.get("key"), store.view("key")
    index = data.draw(indices(tuple(batch)))
    plain, lazy = outcome(plain, index), outcome(lazy, index)
    if isinstance(plain, type):
        assert lazy is plain
        return
    assert type(lazy) is TensorDict
    assert lazy.batch_size == plain.batch_size
    assert_equal(lazy["a"], plain["a"])
    assert_equal(lazy["n", "b"], plain["n", "b"])


def test_indices_may_be_lazy_themselves(store: memstore.Store) -> None:
    store.put("key", {"x": torch.rand(5, 3), "i": torch.tensor([4, 0]), "m": torch.tensor([1, 0, 1, 1, 0]).bool()})
    plain, lazy = store.get("key"), store.view("key")
    for name in "im":
        assert torch.equal(lazy["x"][lazy[name]], plain["x"][plain[name]])
        assert torch.equal(plain["x"][lazy[name]], plain["x"][plain[name]])
        assert torch.equal(lazy["x"][lazy[name], 1:], plain["x"][plain[name], 1:])


def test_an_index_out_of_range_names_it_as_torch_does(store: memstore.Store) -> None:
    store.put("key", torch.rand(5, 3))
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 0 with size 5"):
        store.view("key")[7]
