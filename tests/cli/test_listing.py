"""What is told of a value without torch agrees with what torch tells."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from memstore import structure
from memstore.listing import UnknownKindError, outline
from memstore.testing.strategies import values
from tests.examples import examples


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
