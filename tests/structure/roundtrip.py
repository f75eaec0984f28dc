"""What the tests of structure share: a value through bytes and back, or through a store; a mapping's stand-in."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memstore
from memstore.structure import FlatValue, Plan, fill, flatten, plan_of, rebuild
from tests.support.equality import assert_same


def stored(value: Any, **options: Any) -> tuple[Plan, bytes, np.ndarray[Any, Any]]:
    """The value as a store holds it: plan (from its description), objects, bytes."""
    flat = flatten(value, **options)
    return plan_of(flat.plan.description), flat.objects, filled(flat)


def filled(flat: FlatValue) -> np.ndarray[Any, Any]:
    memory = np.full(flat.plan.nbytes, 0xA5, np.uint8)
    fill(flat, memory)
    return memory


def round_trip(value: Any, *, allow_pickle: bool = False, mapping: object = None, **options: Any) -> Any:
    plan, objects, memory = stored(value, allow_pickle=allow_pickle)
    return rebuild(plan, objects, memory, mapping, allow_pickle=allow_pickle, **options)


class Mapping:
    """As the engine's: pickled and copied as nothing."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return OrderedDict, ()

    def __deepcopy__(self, memo: object) -> None:
        return None


def serve(store: memstore.Store, key: str, value: Any, like: Any, path: Path, *, saved_by_torch: bool = True) -> None:
    """Puts a value, and checks what a store gives of it in every way."""
    store.put(key, value)
    assert_same(value, store.get(key))
    assert_same(value, store.get(key, device="cpu"))
    assert_same(value, pickle.loads(pickle.dumps(store.ref(key))).get())
    store.put("again", store.view(key))
    assert_same(value, store.get("again"), ties=False)
    assert_same(value, store.get(key, like=like))
    store.export(key, path, format="torch")
    if saved_by_torch:
        assert_same(value, torch.load(path, weights_only=False), ties=False)
