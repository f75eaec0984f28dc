"""Numbers as people read them."""

from __future__ import annotations

import inspect
import pickle
import time

import pytest

import memstore
from memstore._wording import age, first_of, listed, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.7, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1023.9 * 1024, "1023.9 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (3 << 50, "3.0 PiB"),
        (5000 << 50, "5000.0 PiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_sizes_have_the_unit_that_they_are_rounded_to(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (90, "2 min"),
        (59.4 * 60, "59 min"),
        (59.6 * 60, "1 h"),
        (23.4 * 3600, "23 h"),
        (23.6 * 3600, "1 d"),
        (400 * 86400, "400 d"),
    ],
)
def test_ages_have_the_unit_that_they_are_rounded_to(
    seconds: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert age(1e9 - seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (2, "0, 1"), (3, "0, 1 and 1 more"), (2002, "0, 1 and 2,000 more")]
)
def test_of_many_names_the_first_are_told_and_how_many_more_there_are(count: int, text: str) -> None:
    assert first_of(list(map(str, range(count))), 2) == text


@pytest.mark.parametrize(("count", "last"), [(1, "0"), (20, "19"), (21, "and 1 more")])
def test_of_many_lines_too(count: int, last: str) -> None:
    lines = listed(list(map(str, range(count)))).split("\n")
    assert lines[0] == "" and lines[1] == "  0" and lines[-1] == f"  {last}" and len(lines) == 1 + min(count, 21)


@pytest.mark.parametrize("kind", [memstore.Store, memstore.ReplayBuffer, memstore.aio.AsyncStore])
def test_inherited_methods_are_called_by_the_class_that_users_know(kind: type) -> None:
    for name in dir(kind):
        method = getattr(kind, name)
        if not name.startswith("_") and inspect.isfunction(method):
            assert method.__qualname__ == f"{kind.__name__}.{name}"
            assert pickle.loads(pickle.dumps(method)) is method
            assert inspect.getsource(method)
