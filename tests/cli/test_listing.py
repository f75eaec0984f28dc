"""What is told of a value without torch agrees with what torch tells."""

from __future__ import annotations

import datetime
import uuid
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from memstore import structure
from memstore.listing import UnknownKindError, outline
from tests.examples import examples
from tests.support.strategies import values


@given(value=values())
@settings(max_examples=examples(150), deadline=None)
def test_outlines_agree_with_the_plan(value: Any) -> None:
    plan = structure.flatten(value).plan
    try:
        name, leaves = outline(plan.description)
    except UnknownKindError:
        return
    assert [leaf.name for leaf in leaves if leaf.dtype] == [row[0] for row in structure.leaf_table(plan)]
    assert [leaf.shape for leaf in leaves if leaf.dtype] == [row[2] for row in structure.leaf_table(plan)]
    assert sum(leaf.dtype is None for leaf in leaves) == plan.object_count
    assert structure.structure_text(plan).removeprefix("empty ").startswith(name)


@pytest.mark.parametrize("value", [{}, [], None, 3, {"a": {"b": 1}}])
def test_values_without_tensors(value: Any) -> None:
    _, leaves = outline(structure.flatten(value).plan.description)
    assert all(leaf.dtype is None for leaf in leaves)


OBJECTS = {
    "int": [3, 2**70],
    "bool": [True],
    "float": [2.5],
    "complex": [1j],
    "str": ["text"],
    "bytes": [b"x"],
    "bytearray": [bytearray(b"x")],
    "None": [None],
    "tuple": [(1, 2)],
    "list": [[1, "a"]],
    "dict": [{"a": 1}, {1.5: 2}],
    "OrderedDict": [OrderedDict(a=1)],
    "set": [{1}],
    "frozenset": [frozenset({1})],
    "range": [range(3)],
    "slice": [slice(1)],
    "numpy scalar": [np.float32(1)],
    "Size": [torch.Size([3])],
    "device": [torch.device("cpu")],
    "datetime": [datetime.datetime(2026, 1, 1)],
    "date": [datetime.date(2026, 1, 1)],
    "timedelta": [datetime.timedelta(1)],
    "Decimal": [Decimal(1)],
    "UUID": [uuid.UUID(int=1)],
}


def test_types_of_objects_are_told_without_building_them() -> None:
    entries = [(kind, value) for kind, values in OBJECTS.items() for value in values]
    flat = structure.flatten({"w": torch.ones(2), **{str(i): value for i, (_, value) in enumerate(entries)}})
    _, leaves = outline(flat.plan.description, flat.objects)
    assert {leaf.name[-1]: leaf.type for leaf in leaves if leaf.dtype is None} == {
        str(i): kind for i, (kind, _) in enumerate(entries)
    }
