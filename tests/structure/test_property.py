"""Any nested value comes back as it was put."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore.structure import flatten, plan_of, rebuild, structure_text
from tests.examples import examples
from tests.structure.roundtrip import Mapping, filled, round_trip, stored
from tests.support import strategies
from tests.support.equality import assert_same

slow = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, on prototype dtypes


@pytest.mark.parametrize(("inline_limit", "mapping"), [(1536, None), (0, Mapping())], ids=["inline", "mapped"])
@slow
@given(value=strategies.values())
def test_values_come_back(inline_limit: int, mapping: Any, value: Any) -> None:
    plan, objects, memory = stored(value, inline_limit=inline_limit)
    assert_same(value, rebuild(plan, objects, memory, mapping))
    assert structure_text(plan)


@slow
@given(strategies.tensordicts())
def test_tensordicts_come_back(value: Any) -> None:
    assert_same(value, round_trip(value))


@settings(slow, max_examples=examples(60))
@given(strategies.tied_tensors(), strategies.tied_tensors())
def test_ties_come_back(one: Any, two: Any) -> None:
    assert_same([one, two], round_trip([one, two]))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4))
def test_no_strides_make_a_put_store_what_is_not_the_tensors(sides: list[tuple[int, int]]) -> None:
    value = torch.arange(200, dtype=torch.uint8).as_strided([size for size, _ in sides], [step for _, step in sides], 5)
    plan, objects, memory = stored(value)
    elements = set(value.flatten().tolist())
    assert set(memory.tolist()) == elements
    assert plan.nbytes <= value.numel()
    assert torch.equal(rebuild(plan, objects, memory, None), value)


@slow
@given(strategies.objects())
def test_objects_come_back(value: Any) -> None:
    assert_same(value, round_trip({"x": value})["x"])


@slow
@given(strategies.values())
def test_the_same_value_has_the_same_bytes(value: Any) -> None:
    one, two = flatten(value), flatten(value)
    assert one.plan is two.plan
    assert one.objects == two.objects
    assert (filled(one) == filled(two)).all()
    assert plan_of(one.plan.description) is plan_of(two.plan.description)
    assert one.plan.header == two.plan.header
