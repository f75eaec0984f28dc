"""Which steps the rules keep: told of lists of steps, without any file."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.checkpoints.folders import RankingRule, Retention, SavedStep, current, newest

MAX, MIN = RankingRule(None, "max"), RankingRule(None, "min")


def saved(step: int, save: int | None = None, value: float | None = None, format: Any = "memstore") -> SavedStep:
    save = step if save is None else save
    return SavedStep(step, f"step-{step}.{save}", save, format, metrics={} if value is None else {"m": value})


def numbers(found: list[SavedStep]) -> list[int]:
    return [one.step for one in found]


def test_the_newest_are_kept_by_the_order_of_saves() -> None:
    found = [saved(100, 1), saved(110, 2), saved(80, 3), saved(90, 4)]
    assert newest(found) == found[3]
    assert numbers(Retention(2, None, None, MAX).removable(found)) == [100, 110]
    assert Retention(None, None, None, MAX).removable(found) == []


def test_several_rules_keep_what_one_of_them_keeps() -> None:
    found = [saved(step, value=abs(step - 25)) for step in range(10, 70, 10)]
    assert numbers(Retention(1, 20, 1, MIN).removable(found)) == [10, 50]
    assert numbers(Retention(1, None, 1, MAX).removable(found)) == [10, 20, 30, 40, 50]  # 60 is both


def test_of_a_step_that_was_saved_twice_the_newer_one_counts() -> None:
    found = [saved(10, 1), saved(20, 2), saved(10, 3)]
    assert current(found) == [found[2], found[1]]
    assert Retention(5, None, None, MAX).removable(found) == [found[0]]


def test_steps_without_a_metric_or_with_nan_are_never_the_best() -> None:
    found = [saved(1, value=math.nan), saved(2), saved(3, value=-math.inf), saved(4, value=1.0), saved(5, value=1.0)]
    assert numbers(MAX.ranked(found)) == [5, 4, 3]  # of equal ones the newer one
    assert numbers(MIN.ranked(found)) == [3, 5, 4]
    assert numbers(Retention(1, None, 2, MAX).removable([*found, saved(6)])) == [1, 2, 3]
    assert MAX.ranked([saved(1, value=math.nan)]) == []


def test_of_several_metrics_one_is_named() -> None:
    two = SavedStep(1, "step-1", 1, "memstore", metrics={"loss": 2.0, "accuracy": 0.5})
    assert MAX.value(two) is None
    assert RankingRule("loss", "min").value(two) == 2.0
    assert RankingRule("other", "min").value(two) is None


def test_unfinished_steps_go_and_those_of_others_stay() -> None:
    others = [saved(500, 0, format="dcp"), saved(600, 0, format="orbax")]
    found = [*others, saved(1), saved(2, format=None), saved(3)]
    assert numbers(Retention(1, None, None, MAX).removable(found)) == [1, 2]


steps = st.builds(
    saved,
    st.integers(0, 40),
    st.integers(0, 12),
    st.none() | st.floats(),
    st.sampled_from(["memstore", "memstore", "memstore", "dcp", "orbax", None]),
)
rules = st.builds(
    Retention,
    *[st.none() | st.integers(1, 4)] * 3,
    st.sampled_from([MAX, MIN, RankingRule("m", "min"), RankingRule("other", "max")]),
)


@given(st.lists(steps, max_size=12, unique_by=lambda one: one.name), rules)
def test_what_goes_is_kept_by_no_rule(found: list[SavedStep], rule: Retention) -> None:
    gone = rule.removable(found)
    names = [one.name for one in gone]
    last = newest(found)
    assert last is None or last.name not in names
    assert all(one.format is None or (one.is_managed and one.is_whole) for one in gone)
    assert {one.name for one in found if one.format is None} <= set(names)
    there = [one for one in current(found) if one.is_managed]
    current_names = {one.name for one in there}
    for one in (one for one in found if one.is_managed and one.is_whole):
        newer = sum(other.order > one.order for other in there)
        value = rule.rule.value(one)
        sign = -1 if rule.rule.best == "min" else 1
        better = [
            other
            for other in there
            if value is not None
            and (found_value := rule.rule.value(other)) is not None
            and (sign * found_value, other.order) > (sign * value, one.order)
        ]
        kept = one.name in current_names and (
            rule.keep_last is None
            or newer < rule.keep_last
            or (rule.keep_every is not None and one.step % rule.keep_every == 0)
            or (rule.keep_best is not None and value is not None and len(better) < rule.keep_best)
        )
        assert (one.name in names) == (not kept and one is not last), one


@pytest.mark.parametrize("keep_last", [None, 1])
def test_a_root_without_steps_has_nothing_to_remove(keep_last: int | None) -> None:
    assert newest([]) is None and Retention(keep_last, None, None, MAX).removable([]) == []
