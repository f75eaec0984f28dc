"""docs/internals.md for developers: the files and names that it sends them to are there."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache

import pytest

from tests.documents.pages import ROOT

PAGE = ROOT / "docs/internals.md"
AGAIN = "run `python docs/tracing/trace.py --write`, and look at the table"


@cache
def names_in(file: str) -> set[str]:
    """Returns the names that a file of memstore defines: functions, classes, their methods, and constants."""
    path = ROOT / "memstore" / file
    assert path.is_file(), f"{PAGE.name} names {file}: {AGAIN}"
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def section(title: str) -> str:
    match = re.search(rf"^#+ {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def test_where_to_change_names_what_is_there() -> None:
    rows = re.findall(r"^\| (?!-|what \|)(.+?) \| (.+) \|$", section("Where to change"), re.MULTILINE)
    assert len(rows) >= 6
    for what, where in rows:
        files = re.findall(r"`((?:\w+/)+\w+\.py)`", where)
        names = re.findall(r"`([\w.]+)`", where)
        assert files, what
        there = set().union(*map(names_in, files))
        missing = [name for name in names if not name.endswith(".py") and name not in there]
        assert not missing, f"{what}: {missing}: {AGAIN}"


@pytest.mark.parametrize("title", ["One put as it runs", "One get as it runs"])
def test_traces_name_what_is_there(title: str) -> None:
    lines = re.findall(r"^ *(?:\d+\. )?((?:\w+/)*\w+\.py: .+)$", section(title), re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        file = ""
        for call in re.split(r" > |; |, ", line):
            before, colon, name = call.rpartition(": ")
            file = before if colon else file
            assert name in names_in(file) or name.rpartition(".")[2] in names_in(file), f"{call} of {line}: {AGAIN}"


def test_a_trace_shows_the_steps_of_a_put() -> None:
    traced = runpy.run_path(str(ROOT / "docs/tracing/trace.py"))["traced"]()
    steps = [int(match[1]) for line in traced["put"] if (match := re.match(r" *(\d+)\. ", line))]
    assert {2, 3, 4, 5} <= set(steps), "comments such as `# 2. Claim` mark the steps"
    assert len(traced["put"]) < 120 and any("format/records.py: decode_record" in line for line in traced["get"])
