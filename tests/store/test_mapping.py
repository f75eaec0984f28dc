"""A Store as a mapping, a context, a pickle, a text."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch

import memstore
from tests.children import in_child
from tests.store.backends import open_store


def test_it_is_used_like_a_dict(store: memstore.Store) -> None:
    assert len(store) == 0 and not list(store) and "a" not in store
    assert store, "`store or open(...)` opens another only where there is none"
    store["b"] = torch.arange(3)
    store["a"] = 1
    assert len(store) == 2 and list(store) == ["a", "b"]
    assert "a" in store and store["a"] == 1
    store["a"] = 2
    assert [(key, value if key == "a" else value.tolist()) for key, value in store.items()] == [
        ("a", 2), ("b", [0, 1, 2]),
    ]  # fmt: skip
    assert next(store.values()) == 2
    store.update({"c": 3, "a": 4})
    assert (store["a"], store["c"]) == (4, 3)
    del store["b"]
    assert list(store.keys()) == ["a", "c"]


def test_it_is_no_mapping(store: memstore.Store) -> None:
    """A Mapping's get doesn't raise, and its equality compares contents."""
    assert not isinstance(store, Mapping)
    with open_store(store.root) as other:
        assert store != other and store == store
        assert len({store, other}) == 2


def test_items_leave_out_what_goes_meanwhile(store: memstore.Store) -> None:
    store.put_many({"a": 1, "b": 2, "c": 3})
    items = store.items()
    assert next(items) == ("a", 1)
    store.delete("b")
    assert list(items) == [("c", 3)]


@pytest.mark.parametrize("key", [None, 3, b"a", ("a",)])
def test_what_is_no_key_is_refused_everywhere(store: memstore.Store, key: object) -> None:
    for call in (store.__getitem__, store.__delitem__, store.__contains__, store.get, store.version):
        with pytest.raises(memstore.InvalidKeyError):
            call(key)  # type: ignore[operator]


def test_it_closes_at_the_end_of_a_with(root: str) -> None:
    with open_store(root) as store:
        value = store.get("missing", None)
        store.put("key", torch.arange(1000))
        value = store.get("key")
    assert (value == torch.arange(1000)).all()
    with pytest.raises(memstore.StoreClosedError):
        store.get("key")
    with pytest.raises(memstore.StoreClosedError), store:
        pass


def test_it_is_pickled_by_its_root(store: memstore.Store) -> None:
    store.put("key", 1)
    sent = pickle.dumps(store)
    assert len(sent) < 400
    with pickle.loads(sent) as copy:
        assert copy is not store and copy.root == store.root
        copy.put("key", 2)
    assert store.get("key") == 2
    assert in_child(_use_pickled, sent) == 3
    assert store.get("key") == 3


def _use_pickled(sent: bytes) -> int:
    with pickle.loads(sent) as store:
        store.put("key", store.get("key") + 1)
        return store.get("key")


def test_a_pickle_keeps_mode_and_options(root: str) -> None:
    open_store(root, checksum=True).close()
    with open_store(root, "r", verify=True, allow_pickle=True, timeout=3.0) as store:
        sent = pickle.dumps(store)
    with pickle.loads(sent) as copy:
        assert (copy._mode, copy._verify, copy._allow_pickle, copy._timeout) == ("r", True, True, 3.0)
        with pytest.raises(memstore.ReadOnlyError):
            copy.put("key", 1)


@pytest.mark.embedded
def test_a_pickle_never_creates_a_store(scratch: str) -> None:
    import shutil

    with open_store(scratch, "a") as store:
        sent = pickle.dumps(store)
    shutil.rmtree(scratch)
    with pytest.raises(memstore.NotAStoreError):
        pickle.loads(sent)


def test_its_text_says_where_and_how(root: str) -> None:
    store = open_store(root)
    assert root in repr(store) and "mode 'a'" in repr(store)
    store.close()
    assert "closed" in repr(store)
    for mode in ("r", "r+", "a"):
        with open_store(root, mode) as again:
            assert f"mode {mode!r}" in repr(again)


def test_copies_of_errors_cross_processes(store: memstore.Store) -> None:
    with pytest.raises(memstore.VersionConflictError) as caught:
        in_child(_conflict, store.root)
    assert (caught.value.key, caught.value.expected, caught.value.found) == ("key", 5, 0)
    with pytest.raises(memstore.KeyNotFoundError) as missing:
        in_child(_get_missing, store.root)
    assert missing.value.key == "missing" and str(missing.value).startswith("no key 'missing': ")


def _conflict(root: str) -> None:
    with open_store(root) as store:
        store.put("key", 1, expect_version=5)


def _get_missing(root: str) -> None:
    with open_store(root) as store:
        store.get("missing")


def test_pop_returns_what_it_deletes(store: memstore.Store) -> None:
    store.put("key", torch.arange(1000))
    value = store.pop("key")
    assert (value == torch.arange(1000)).all() and "key" not in store
    assert store.pop("key", None) is None
    with pytest.raises(memstore.KeyNotFoundError):
        store.pop("key")


def test_of_several_that_pop_one_value_one_gets_it(store: memstore.Store) -> None:
    store.put_many({f"{number}": number for number in range(40)})
    with ThreadPoolExecutor(4) as pool:
        taken = pool.map(lambda _: [store.pop(f"{number}", None) for number in range(40)], range(4))
    assert sorted(one for some in taken for one in some if one is not None) == list(range(40))
    assert len(store) == 0


def test_pop_takes_the_version_that_it_returns(store: memstore.Store) -> None:
    """What is put between its get and its delete is not lost."""
    store.put("key", 1)
    others = iter([2])  # what another process puts, in between

    def delete(*arguments: Any, **options: Any) -> bool:
        for number in others:
            store.put("key", number)
        return type(store).delete(store, *arguments, **options)

    store.delete = delete  # type: ignore[method-assign]
    assert store.pop("key") == 2
    assert "key" not in store


def test_setdefault_puts_what_is_missing(store: memstore.Store) -> None:
    assert store.setdefault("key", {"w": torch.ones(3)})["w"].sum() == 3
    version = store.version("key")
    assert store.setdefault("key", {"w": torch.zeros(3)})["w"].sum() == 3
    assert store.version("key") == version


def test_of_several_that_set_a_default_one_does(store: memstore.Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: store.setdefault("key", number), range(16)))
    assert set(found) == {store.get("key")}


def test_the_default_may_be_anything(store: memstore.Store) -> None:
    for default in (None, NotImplemented, "cpu text", 0):
        assert store.get("missing", default) is default
        assert store.pop("missing", default) is default
    for get in (store.get, store.pop):
        with pytest.raises(memstore.KeyNotFoundError):
            get("missing", ...)  # as if none were given


def test_items_of_another_store_are_put(store: memstore.Store, tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_store(str(tmp_path_factory.mktemp("other"))) as other:
        other.put_many({"a": 1, "b": torch.ones(3)})
        store.update(other)  # type: ignore[arg-type]
    assert store.get("a") == 1 and store.get("b").sum() == 3


def test_keys_can_be_given_to_a_pool(store: memstore.Store) -> None:
    """Which takes the length of what has one."""
    store.put_many({"b": 2, "a": 1})
    with ThreadPool(1) as pool:
        assert pool.map(str.upper, store.keys()) == ["A", "B"]
