"""`get(as_type=)` and `view(as_type=)`: a check when they are called. What type checkers say: `tests/typing`."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

import memstore
import memstore.aio
from tests.store.backends import open_store


class Policy(TypedDict):
    w: torch.Tensor
    step: int


VALUES: dict[str, Any] = {
    "tensor": torch.ones(3),
    "policy": {"w": torch.ones(2), "step": 7},
    "tensordict": TensorDict({"x": torch.ones(2)}, [2]),
    "large": {"w": torch.ones(100_000), "step": 1},
}
FITS = [
    ("tensor", torch.Tensor),
    ("policy", dict),
    ("policy", dict[str, Any]),
    ("policy", Policy),
    ("large", Policy),
    ("tensordict", TensorDict),
    ("tensordict", TensorDictBase),
]


@pytest.fixture
def store(root: str) -> Any:
    with open_store(root) as made:
        made.put_many(VALUES)
        yield made


@pytest.mark.parametrize(("key", "kind"), FITS)
def test_what_fits_is_returned_as_without_it(store: memstore.Store, key: str, kind: Any) -> None:
    version = store.version(key)
    for found in (
        store.get(key, as_type=kind),
        store.get(key, None, as_type=kind),
        store.get(key, as_type=kind, version=version),
        store.ref(key).get(as_type=kind),
    ):
        assert type(found) is type(store.get(key))


class Other(TypedDict):
    bias: torch.Tensor


MISFITS = [
    ("tensor", dict, "is a Tensor, and as_type=dict"),
    ("policy", torch.Tensor, "is a dict, and as_type=Tensor"),
    ("policy", list[int], "is a dict, and as_type=list"),
    ("policy", Other, "lacks 'bias', and as_type=Other"),
    ("tensor", Policy, "is a Tensor, and as_type=Policy"),
]


@pytest.mark.parametrize(("key", "kind", "words"), MISFITS)
def test_what_does_not_fit_is_told(store: memstore.Store, key: str, kind: Any, words: str) -> None:
    version = store.version(key)
    for call in (
        lambda: store.get(key, as_type=kind),
        lambda: store.get(key, 5, as_type=kind),
        lambda: store.get(key, as_type=kind, version=version),
        lambda: store.ref(key).get(as_type=kind),
    ):
        with pytest.raises(memstore.StructureMismatchError, match=words) as caught:
            call()
        assert caught.value.key == key


def test_a_default_is_returned_unchecked(store: memstore.Store) -> None:
    assert store.get("nothing", 5, as_type=torch.Tensor) == 5


def test_views_are_checked_as_what_they_are(store: memstore.Store) -> None:
    assert isinstance(store.view("tensor", as_type=memstore.StoredTensor), memstore.StoredTensor)
    assert store.view("policy", as_type=dict[str, Any])["step"] == 7
    with pytest.raises(memstore.StructureMismatchError, match="is a StoredTensor, and as_type=dict"):
        store.view("tensor", as_type=dict)


@pytest.mark.embedded
def test_tasks_get_the_same(root: str) -> None:
    async def use() -> None:
        async with memstore.aio.open(root) as store:
            await store.put("tensor", torch.ones(3))
            assert (await store.get("tensor", as_type=torch.Tensor)).sum() == 3
            assert isinstance(await store.view("tensor", as_type=memstore.StoredTensor), memstore.StoredTensor)
            with pytest.raises(memstore.StructureMismatchError):
                await store.get("tensor", as_type=dict)

    asyncio.run(use())


def test_what_is_no_class_is_refused(store: memstore.Store) -> None:
    with pytest.raises(TypeError, match="as_type is a class"):
        store.get("tensor", as_type="Tensor")  # type: ignore[call-overload]
