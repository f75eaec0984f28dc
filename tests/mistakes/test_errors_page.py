"""What memstore raises is one of its errors, or one of Python's that the page on errors names."""

from __future__ import annotations

import builtins
import inspect
import re
from pathlib import Path

import pytest

import memstore
from memstore import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/errors.md").read_text()
# Of what no caller sees: hooks that Python calls, and what a caller in memstore turns into another error.
INTERNAL = {"BlockingIOError", "TimeoutError"}


def named_on_the_page() -> set[str]:
    table = PAGE[PAGE.index("## Python's own") : PAGE.index("## Warnings")]
    return {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+?)s?`", row)}


def raised_in(path: Path) -> set[str]:
    """The names of the builtin exceptions that a file raises."""
    return {name for name in re.findall(r"\braise (\w+)", path.read_text()) if is_builtin_error(name)}


def is_builtin_error(name: str) -> bool:
    found = getattr(builtins, name, None)
    return inspect.isclass(found) and issubclass(found, BaseException)


def sources() -> list[Path]:
    """But for what raises for commands, and for those who turn the errors of sockets into memstore's."""
    package = ROOT / "memstore"
    inner = ("cli", "distributed")
    return [path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] not in inner]


def test_what_python_has_a_word_for_is_on_the_page() -> None:
    allowed = named_on_the_page() | INTERNAL
    found = {path.relative_to(ROOT).as_posix(): raised_in(path) - allowed for path in sources()}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_page_names_no_others() -> None:
    raised = set().union(*map(raised_in, sources()))
    named = named_on_the_page()
    assert {"TypeError", "ValueError", "IndexError"} <= named
    assert named - {"OSError", "KeyError", "RuntimeError"} <= raised


def public_names() -> list[str]:
    return [name for name in memstore.__all__ if inspect.isclass(getattr(memstore, name))]


@pytest.mark.parametrize("name", public_names())
def test_docstrings_name_errors_that_are_there(name: str) -> None:
    """Each name in a "Raises:" is memstore's, or one of Python's that the page has."""
    kind = getattr(memstore, name)
    allowed = {*memstore.__all__, *vars(errors), *named_on_the_page(), "KeyError", "OSError"}
    for method in vars(kind).values():
        text = inspect.getdoc(method) or "" if inspect.isfunction(method) else ""
        raises = re.search(r"^Raises:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
        for word in re.findall(r"\b\w+Error\b", raises[1] if raises else ""):
            assert word in allowed, f"{name}.{getattr(method, '__name__', '')} names {word}"
