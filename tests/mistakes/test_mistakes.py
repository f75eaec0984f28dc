"""Mistakes that people make, and what each says: what was found, what was expected, what to do.

The tables beside this file have them by what was called. An error must be of the class that is named there, with that
text, and must leave the stores as they were.
"""

from __future__ import annotations

import builtins
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import memstore
from tests.conftest import SHM
from tests.mistakes import (
    deferred,
    files,
    gets,
    keys,
    opening,
    other_libraries,
    ranks,
    rows,
    snapshots,
    tasks,
    values,
    world,
)
from tests.mistakes.mistake import Mistake

TABLES: tuple[ModuleType, ...] = (
    keys,
    values,
    gets,
    opening,
    rows,
    snapshots,
    ranks,
    files,
    tasks,
    other_libraries,
    deferred,
)
MISTAKES: list[Mistake] = [mistake for table in TABLES for mistake in table.MISTAKES]
BUILTIN = (TypeError, ValueError, IndexError, KeyError, OSError, RuntimeError)


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None, prefix="memstore-mistakes-") as parent:
        made = world.make(f"{parent}/world")
        yield made
        world.close(made)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.code)
def test_a_mistake_says_what_to_do(mistake: Mistake, names: dict[str, Any]) -> None:
    before = versions(names)
    error, said = what_comes_of(mistake.code, names)
    assert public_class(error) is mistake.error, f"{type(error).__name__}: {said}"
    if mistake.says.endswith("..."):
        assert said.startswith(mistake.says[:-3])
    else:
        assert said == mistake.says
    assert versions(names) == before, "it has changed a store"


def what_comes_of(code: str, names: dict[str, Any]) -> tuple[BaseException | None, str]:
    """What code raises, or else warns of, and its text."""
    found: BaseException | None = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            exec(compile(code, "<mistake>", "exec"), {"__name__": "mistakes", **names})
        except Exception as error:
            found = error
    if found is None and told:
        message = told[-1].message
        assert isinstance(message, Warning)
        found = message
    return found, re.sub(re.escape(names["path"]), "PATH", str(found))


def public_class(error: BaseException | None) -> type:
    """What a handler would name: memstore's, or else Python's."""
    kinds = [kind for kind in type(error).__mro__ if kind.__name__ in {*memstore.__all__, *vars(builtins)}]
    return kinds[0]


def versions(names: dict[str, Any]) -> list[dict[str, int]]:
    return [{key: store.version(key) for key in store} for store in (names["store"], names["small"])]


def test_each_is_in_the_tables_once_and_the_page_says_how_many_there_are() -> None:
    assert len({mistake.code for mistake in MISTAKES}) == len(MISTAKES)
    page = (Path(__file__).parents[2] / "docs/errors.md").read_text()
    said = re.search(r"tables of more than (\d+) mistakes", page)
    assert said is not None and int(said[1]) < len(MISTAKES) <= int(said[1]) + 50, f"there are {len(MISTAKES)}"


def test_each_is_an_error_of_ours_or_one_that_python_has() -> None:
    expected = (memstore.MemstoreError, UserWarning, *BUILTIN)
    assert [mistake for mistake in MISTAKES if not issubclass(mistake.error, expected)] == []
