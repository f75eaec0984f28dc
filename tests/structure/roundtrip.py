"""What the tests of structure share: a value through bytes and back, and a mapping's stand-in."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from memstore.structure import FlatValue, Plan, fill, flatten, plan_of, rebuild


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
