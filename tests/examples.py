"""What is tried in the fast run: a part of the examples and of the cases. `make test-full` tries all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

IS_FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
_FAST_PART = 3
_LEAST = 10


def examples(full: int) -> int:
    """The fast run tries a third of `full`, the same ones each time; new ones are looked for by `make test-full`."""
    return full if IS_FULL else max(min(full, _LEAST), full // _FAST_PART)


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases that are alike, for `pytest.mark.parametrize`: the fast run tries the first of each `count`."""
    return [
        case if number % count == 0 else pytest.param(*_values(case), marks=pytest.mark.full)
        for number, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
