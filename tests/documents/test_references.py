"""Documents lead somewhere: links, files, names and tests that are there; docstrings say what there is."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import runpy
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MemberDescriptorType
from typing import Any

import pytest

from tests.documents.pages import FENCE, PAGES, ROOT, relative
from tests.documents.test_site import ELSEWHERE, public_doors


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", prose):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), f"{relative(page)} links to {target}"
            assert not anchor or anchor in anchors(there), f"{relative(page)} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_tests_exist(page: Path) -> None:
    """A promise that names a test which is gone is worse than none."""
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`", page.read_text()):
        path = ROOT / file
        assert path.exists(), f"{relative(page)} names {file}"
        if name:
            missing = [word for word in name.split("::") if word not in defined_in(path)]
            assert not missing, f"{relative(page)} names {file}::{name}"


@cache
def defined_in(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


# --- docs/internals.md: the files and names that it sends developers to are there -------------------------------------


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
        files = re.findall(r"`((?:\w+/)*\w+\.py)`", where)
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


# --- docstrings of public names say what there is, in a form that the site and `help` both show well ------------------


SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):(.*)$")
JOINT = re.compile(r"^    [*\w]+(?:, [*\w]+)+:")


NEEDS = {  # packages, by the door in `memstore.integrations`
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "torchrl": ("torchrl",),
    "torchtitan": ("torchtitan",),
    "transformers": ("transformers",),
    "vllm": ("vllm",),
}


@cache
def public_names() -> dict[str, Any]:
    """What users import, by full name, without the names that need a package which is missing here."""
    found: dict[str, Any] = {}
    for door, module in public_doors().items():
        if any(find_spec(package) is None for package in NEEDS.get(door.rpartition(".")[2], ())):
            continue
        imported = importlib.import_module(door)
        offered = module.offered or {name for name, value in vars(imported).items() if is_of(value, door)}
        found |= {f"{door}.{name}": getattr(imported, name) for name in offered if not name.startswith("_")}
    return found | {name: pkgutil.resolve_name(name) for name in ELSEWHERE}


def is_of(value: object, module: str) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module


def docstrings() -> Iterator[tuple[str, str]]:
    """Those of public names, and of the public members that memstore gives them."""
    for name, value in public_names().items():
        if is_ours(value):
            yield name, inspect.getdoc(value) or ""
        if inspect.isclass(value):
            for base in filter(is_ours, value.__mro__):
                for member, one in vars(base).items():
                    if not member.startswith("_") and not isinstance(one, MemberDescriptorType):
                        yield f"{name}.{member}", inspect.getdoc(one) or ""


def is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "").startswith("memstore")


def sections(docstring: str) -> dict[str, list[str]]:
    """The lines of each section of a docstring, as Google's style has them."""
    found: dict[str, list[str]] = {}
    inside: list[str] | None = None
    for line in docstring.splitlines():
        begins = SECTION.match(line)
        if begins:
            inside = found.setdefault(begins[1], [])
        elif line and not line.startswith(" "):
            inside = None
        elif inside is not None:
            inside.append(line)
    return found


def entries(lines: list[str]) -> set[str]:
    """The names that a section of Args or Attributes describes."""
    return {match[1] for match in map(re.compile(r"^    \*{0,2}(\w+)[^:]*:").match, lines) if match}


def fields_of(value: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return getattr(value, "_fields", ())  # of a NamedTuple


RECORDS = sorted(name for name, value in public_names().items() if inspect.isclass(value) and fields_of(value))


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_a_record_is_described(name: str) -> None:
    value = public_names()[name]
    said = sections(inspect.getdoc(value) or "")
    described = entries(said.get("Attributes", [])) | entries(said.get("Args", []))
    assert {field for field in fields_of(value) if not field.startswith("_")} - described == set()


def test_each_line_of_a_section_describes_one_name() -> None:
    """Of `first, second: ...` the site makes a field `first` of the type `second`."""
    found = [
        f"{name}: {line.strip()}"
        for name, text in docstrings()
        for section in ("Args", "Attributes")
        for line in sections(text).get(section, [])
        if JOINT.match(line)
    ]
    assert found == []


def test_sections_stand_on_lines_of_their_own() -> None:
    found = [
        f"{name}: {line.strip()}"
        for name, text in docstrings()
        for line in text.splitlines()
        if (begins := SECTION.match(line)) and begins[2] or re.search(r"\. (?:Args|Returns): ", line)
    ]
    assert found == []


def test_what_is_returned_is_not_taken_for_a_type() -> None:
    """The site takes what stands before a colon, in the first sentence of Returns or of a property, for a type."""
    found = [f"{name}: {text}" for name, text in first_lines() if re.match(r"(?:[^:`.\"]|`[^`]*`|\"[^\"]*\")+: ", text)]
    assert found == []


def first_lines() -> Iterator[tuple[str, str]]:
    for name, text in docstrings():
        returned = sections(text).get("Returns", [])
        if returned:
            yield name, " ".join(line.strip() for line in returned)
    for name, value in public_names().items():
        for member, one in inspect.getmembers(value, lambda one: isinstance(one, property) and is_ours(one.fget)):
            yield f"{name}.{member}", (inspect.getdoc(one) or "").partition("\n\n")[0]


def test_each_error_of_a_section_has_a_line() -> None:
    error = re.compile(r"^    (?:\w+(?:Error|Exception)|Exception|Fault)(?:, (?:\w+Error|Fault))*: ")
    found = [
        f"{name}: {line.strip()}"
        for name, text in docstrings()
        for line in sections(text).get("Raises", [])
        if re.match(r"^    \S", line) and not error.match(line) or re.search(r"\. \w+Error: ", line)
    ]
    assert found == []
    assert sum("Raises" in sections(text) for _, text in docstrings()) > 80, "this tests nothing"
