"""What can't be stored is refused before anything is written, and the leaf is named."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

import memstore


class Thing:
    """An object that only pickle could store."""

    def __reduce__(self) -> Any:
        raise AssertionError("it was pickled")


def cyclic_list() -> list:
    value: list = [torch.ones(1)]
    value.append(value)
    return value


def cyclic_dict() -> dict:
    value: dict = {"x": torch.ones(1)}
    value["self"] = {"again": value}
    return value


def deep(levels: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(levels):
        value = [value]
    return value


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


BAD_VALUES = {
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), "mkldnn"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "fake": (fake, "[Ff]ake"),
    "an object": (Thing, "Thing.*allow_pickle"),
    "a function": (lambda: test_it_is_refused, "allow_pickle"),
    "a lambda": (lambda: lambda: 1, "found by its name"),
    "a lock": (threading.Lock, "lock: it is a part of this process"),
    "a module": (lambda: torch.nn.Linear(2, 2), r"Linear: put its state_dict\(\)"),
    "a type": (lambda: int, "allow_pickle"),
    "a generator": (lambda: (i for i in range(3)), "generator"),
    "a cyclic list": (cyclic_list, "contains itself"),
    "a cyclic dict": (cyclic_dict, "contains itself"),
    "too deep": (lambda: deep(500), "200 levels"),
    "an object array": (lambda: __import__("numpy").array([Thing()], dtype=object), "allow_pickle"),
    "a surrogate": (lambda: "a\ud800", "surrogate"),
}
PLACES = {
    "alone": (lambda value: value, "value"),
    "in a dict": (lambda value: {"ok": torch.ones(900), "deep": {3: value}}, r"value\['deep'\]\[3\]"),
    "in a list": (lambda value: [torch.ones(900), (1, value)], r"value\[1\]\[1\]"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", BAD_VALUES)
def test_it_is_refused(store: memstore.Store, kind: str, place: str) -> None:
    make, text = BAD_VALUES[kind]
    wrap, name = PLACES[place]
    store.put("key", torch.ones(1000))
    before = contents(store)
    for call in (
        lambda: store.put("key", wrap(make())),
        lambda: store.put("new", wrap(make())),
        lambda: store.put_many({"a": torch.zeros(1000), "key": wrap(make()), "b": 1}),
    ):
        with pytest.raises(memstore.UnsupportedValueError, match=f"{name}.*{text}") as caught:
            call()
        assert isinstance(caught.value, TypeError)
    assert contents(store) == before and store.stats().puts == 1


def contents(store: memstore.Store) -> object:
    return [(key, store.version(key)) for key in store], sorted(os.listdir(f"{store.root}/segments"))


def test_the_deepest_allowed_value_is_stored(store: memstore.Store) -> None:
    store.put("key", deep(200))
    value = store.get("key")
    for _ in range(200):
        (value,) = value
    assert value == 1
    with pytest.raises(memstore.UnsupportedValueError, match="200 levels"):
        store.put("key", deep(201))


def test_a_bad_leaf_of_a_tensordict_is_named(store: memstore.Store) -> None:
    value = TensorDict({"a": torch.ones(3), "b": {"c": torch.eye(3).to_mkldnn()}}, [])
    with pytest.raises(memstore.UnsupportedValueError, match=r"value\['b'\]\['c'\]"):
        store.put("key", value)


def test_the_key_is_in_the_error(store: memstore.Store) -> None:
    with pytest.raises(memstore.UnsupportedValueError) as caught:
        store.put_many({"good": 1, "bad": Thing()})
    assert caught.value.key == "bad"


def test_pickles_are_written_only_where_they_are_allowed(root: str) -> None:
    value = {"x": torch.ones(3), "c": complex, "d": frozenset([("a", 1)])}
    with memstore.open(root) as store, pytest.raises(memstore.UnsupportedValueError, match=r"value\['c'\]"):
        store.put("key", value)
    with memstore.open(root, allow_pickle=True) as store:
        store.put("key", value)
        assert store.get("key")["c"] is complex
    with memstore.open(root) as store:
        with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
            store.get("key")
        with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
            store.get("key", out={"x": torch.zeros(3), "c": None, "d": None})
        assert store.info("key").leaves[0].shape == (3,)


def test_an_object_whose_pickling_fails_is_refused(root: str) -> None:
    with memstore.open(root, allow_pickle=True) as store:
        with pytest.raises(memstore.UnsupportedValueError, match=r"value\['t'\].*Thing.*was pickled"):
            store.put("key", {"t": Thing()})
        with pytest.raises(memstore.UnsupportedValueError, match="lock"):
            store.put("key", threading.Lock())
        assert list(store) == []


def test_a_value_too_large_for_any_machine_is_an_error_not_a_crash(store: memstore.Store) -> None:
    before = contents(store)
    with pytest.raises((memstore.StoreFullError, memstore.ResourceLimitError, memstore.UnsupportedValueError)):
        store.put("key", {"a": torch.zeros(1), "b": torch.empty_strided((1 << 45,), (1,), device="meta")})
    assert contents(store) == before


@pytest.mark.parametrize("value", [
    {"a": torch.empty(0)}, {}, [], (), "", None, {"": torch.ones(1)}, {"": {"": {}}}, TensorDict({}, []),
    {"a" * 100_000: torch.ones(1)}, [[]] * 1000, torch.empty(0, 5, 0), {None: 1, True: 2, 1.5: 3, b"x": 4},
], ids=lambda value: str(type(value).__name__))  # fmt: skip
def test_odd_values_are_values(store: memstore.Store, value: object) -> None:
    from tests.support.equality import assert_same

    store.put("key", value)
    assert_same(value, store.get("key"))


# --- out= -------------------------------------------------------------------------------------------------------------

STORED = {"w": torch.ones(3, 4), "n": torch.ones(1000, dtype=torch.int64), "deep": {"x": torch.ones(2)}, "lr": 0.5}


def zeros() -> dict[str, Any]:
    return {"w": torch.zeros(3, 4), "n": torch.zeros(1000, dtype=torch.int64), "deep": {"x": torch.zeros(2)}, "lr": 0.0}


def changed(**changes: Any) -> dict[str, Any]:
    out = {**zeros(), **changes}
    return {name: value for name, value in out.items() if value is not Thing}


BAD_OUTS = {
    "another shape": (lambda: changed(w=torch.zeros(4, 3)), [r"value\['w'\].*\[3, 4\].*\[4, 3\]"]),
    "another dtype": (lambda: changed(n=torch.zeros(1000)), [r"value\['n'\].*int64.*float32"]),
    "a leaf too many": (lambda: changed(more=torch.zeros(1)), [r"value\['more'\]"]),
    "a leaf too few": (lambda: changed(w=Thing), [r"value\['w'\]"]),
    "another structure": (lambda: changed(deep=torch.zeros(2)), [r"value\['deep'\]"]),
    "a list": (lambda: [torch.zeros(3, 4)], ["value"]),
    "a tensor": (lambda: torch.zeros(3, 4), ["value"]),
    "no tensor": (lambda: changed(w=1.0), [r"value\['w'\]"]),
    "a meta tensor": (lambda: changed(w=torch.zeros(3, 4, device="meta")), ["meta"]),
    "an expanded tensor": (lambda: changed(w=torch.zeros(1, 4).expand(3, 4)), [r"value\['w'\]"]),
    "all at once": (
        lambda: changed(w=torch.zeros(4, 3), n=torch.zeros(1000), deep=Thing, more=torch.zeros(1)),
        [r"\['w'\]", r"\['n'\]", r"\['deep'\]\['x'\]", r"\['more'\]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_OUTS)
def test_an_out_of_another_kind_is_left_alone(store: memstore.Store, kind: str) -> None:
    import re

    make, texts = BAD_OUTS[kind]
    store.put("key", STORED)
    out = make()
    with pytest.raises(memstore.StructureMismatchError) as caught:
        store.get("key", out=out)
    for text in texts:
        assert re.search(text, str(caught.value)), str(caught.value)
    for leaf in torch.utils._pytree.tree_leaves(out):
        assert not isinstance(leaf, torch.Tensor) or leaf.is_meta or not leaf.any()


def test_a_mismatch_of_thousands_of_leaves_is_told_in_short(store: memstore.Store) -> None:
    store.put("key", {f"{number}": torch.zeros(1) for number in range(5000)})
    with pytest.raises(memstore.StructureMismatchError) as caught:
        store.get("key", out={f"{number}": torch.zeros(2) for number in range(5000)})
    assert len(str(caught.value)) < 5000 and "5" in str(caught.value)


def test_an_out_with_gradients_or_in_inference_mode(store: memstore.Store) -> None:
    store.put("key", {"w": torch.ones(1000)})
    parameter = torch.nn.Parameter(torch.zeros(1000))
    store.get("key", out={"w": parameter})
    assert parameter.sum() == 1000 and parameter.requires_grad and parameter.grad_fn is None
    with torch.inference_mode():
        out = torch.zeros(1000)
        store.get("key", out={"w": out})
    assert out.sum() == 1000
