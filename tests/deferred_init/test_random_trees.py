"""Random trees of torch's own modules: deferred as made eagerly, in any order of their parts."""

from __future__ import annotations

import os
import warnings

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.deferred_init.modules import assert_made_as, deferred, eager, in_any_order
from tests.deferred_init.trees import NOT_COPIED, Plan, build, kinds, plans


@given(plans, st.lists(st.integers(0, 20), max_size=3))
@settings(max_examples=300 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 30)
def test_a_tree_of_modules_is_made_as_without_deferral(plan: Plan, order: list[int]) -> None:
    assume("copied" not in kinds(plan) or not kinds(plan) & NOT_COPIED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the hooks of old are deprecated; empty tensors are not initialised
        try:
            expected = eager(lambda: build(plan))
        except (RuntimeError, ValueError, NotImplementedError, TypeError):
            assume(False)  # no such module, deferred or not
        made = deferred(lambda: build(plan))
        in_any_order(made, order)
    assert_made_as(expected, made)
