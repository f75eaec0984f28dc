"""Mistakes that people make, and what each says: what was found, what was expected, what to do.

The tables beside this file have them by what was called, as in a session of Python: after `>>>` the code, with the
names of `world.make`; below it the class of what is raised (of a Warning, what is warned of) and its text, whole. PATH
stands for the folder of all. What comes after a "..." at the end of a text is another library's, or differs from
machine to machine. An error must be of this class, with this text, and must leave the stores as they were.
"""

from __future__ import annotations

import builtins
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import memstore
from tests.conftest import SHM
from tests.mistakes import world

BUILTIN = (TypeError, ValueError, IndexError, KeyError, OSError, RuntimeError)


class Mistake(NamedTuple):
    code: str
    error: type[BaseException]
    says: str


def read(table: Path) -> Iterator[Mistake]:
    """Yields the mistakes of a table: its first paragraph is a heading."""
    for paragraph in table.read_text().rstrip("\n").split("\n\n")[1:]:
        lines = paragraph.split("\n")
        end = next(number for number, line in enumerate(lines) if not line.startswith((">>>", "...")))
        name, _, says = "\n".join(lines[end:]).partition(": ")
        error = vars(builtins).get(name) or getattr(memstore, name)
        yield Mistake("\n".join(line[4:] for line in lines[:end]), error, says)


MISTAKES = [mistake for table in sorted(Path(__file__).parent.glob("*.txt")) for mistake in read(table)]


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


def test_each_is_in_the_tables_once_and_the_page_of_tests_says_how_many_there_are() -> None:
    assert len({mistake.code for mistake in MISTAKES}) == len(MISTAKES)
    page = (Path(__file__).parents[2] / "docs/project/promise-tests.md").read_text()
    said = re.search(r"tables of more than (\d+) mistakes", page)
    assert said is not None and int(said[1]) < len(MISTAKES) <= int(said[1]) + 50, f"there are {len(MISTAKES)}"


def test_each_is_an_error_of_ours_or_one_that_python_has() -> None:
    expected = (memstore.MemstoreError, UserWarning, *BUILTIN)
    assert [mistake for mistake in MISTAKES if not issubclass(mistake.error, expected)] == []
