"""The rooms of structure/ have floors: a room imports rooms below it, and by their doors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.structure import tree
from memstore.structure.refusals import MalformedError

HOME = Path(__file__).parent.parent.parent / "memstore/structure"
PREFIX = "memstore.structure."
FLOORS = (  # from the bottom
    *("refusals", "traits", "memory", "tree", "classes", "objects", "plans", "walk", "containers", "tensors"),
    *("tensordicts", "flattening", "deltas", "rebuilding", "targets"),
)


def imported(path: Path) -> Iterator[str]:
    """The modules of structure/ that a file imports, as they stand in it, without the package's name."""
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.ImportFrom) and found.module == PREFIX.rstrip("."):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom) and found.module:
            yield from [found.module.removeprefix(PREFIX)] * found.module.startswith(PREFIX)
        elif isinstance(found, ast.Import):
            yield from (alias.name.removeprefix(PREFIX) for alias in found.names if alias.name.startswith(PREFIX))


def wrong_imports(home: Path, floors: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for path in sorted(home.rglob("*.py")):
        room = path.relative_to(home).parts[0].removesuffix(".py")
        for name in imported(path):
            other, _, inside = name.partition(".")
            if room != "__init__" and other != room and (inside or floors.index(other) >= floors.index(room)):
                found.append(f"{path.relative_to(home)} imports {name}")
    return found


def test_rooms_import_the_doors_of_rooms_below() -> None:
    assert wrong_imports(HOME, FLOORS) == []
    assert {path.name.removesuffix(".py") for path in HOME.iterdir()} - {"__init__", "__pycache__"} <= set(FLOORS)


def test_that_test_can_fail(tmp_path: Path) -> None:
    for room, line in {
        "below": "from memstore.structure.above import a",
        "above": "import memstore.structure.below.b",
        "top": "from memstore.structure import top, higher",
    }.items():
        (tmp_path / room).mkdir()
        (tmp_path / room / "b.py").write_text(line)
    assert wrong_imports(tmp_path, ("below", "above", "top", "higher")) == [
        "above/b.py imports below.b",
        "below/b.py imports above",
        "top/b.py imports higher",
    ]


def test_containers_that_come_late_are_asked_for_before_a_kind_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        monkeypatch.setitem(tree.KINDS, "late", tree.KINDS["list"])

    monkeypatch.setattr(tree, "load_late_containers", load)
    assert tree.find_kind("late") is tree.KINDS["list"]
    with pytest.raises(MalformedError, match="no container is called 'later'"):
        tree.find_kind("later")
