"""The documents, their snippets, and what a reader who does as they say has installed."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DISTRIBUTION = "memstore-torch"  # as which memstore is installed
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "examples/README.md",
        ROOT / "tests/benchmarks/README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
)
FENCE = re.compile(r"^(?:<!-- not run: ([^\n]*) -->\n)?```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
KINDS = {"python": "python", "sh": "shell", "console": "shell"}
ANOTHER_PROCESS = "# another process"
SHM = re.compile(r"/dev/shm/([\w-]+)")


@dataclass(frozen=True, slots=True)
class Snippet:
    place: str  # README.md:16
    language: str
    code: str
    not_run: str | None  # why

    @property
    def kind(self) -> str:
        return "another process" if self.code.startswith(ANOTHER_PROCESS) else KINDS[self.language]


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(f"{relative(page)}:{text.count(chr(10), 0, match.start(2)) + 1}", match[2], match[3], match[1])
        for match in FENCE.finditer(text)
    ]


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def installed_by(snippet: Snippet) -> list[str]:
    """What the `pip install` lines of a snippet name. A clone, `.`, is memstore."""
    if snippet.language != "sh":
        return []
    lines = [shlex.split(line, comments=True) for line in snippet.code.splitlines()]
    named = [word for line in lines if line[:2] == ["pip", "install"] for word in line[2:]]
    return [f"memstore{word[1:]}" if word.startswith(".") else word for word in named]


def modules_of(requirements: list[str]) -> set[str]:
    """The top-level modules that installing these, and all that they require, brings."""
    todo, seen = [Requirement(one) for one in requirements], set[tuple[str, str]]()
    found = {"memstore"}  # the one of this checkout
    while todo:
        requirement = todo.pop()
        for extra in ("", *requirement.extras):
            if (entry := (canonicalize_name(requirement.name), extra)) in seen:
                continue
            seen.add(entry)
            modules, needed = installed(requirement.name)
            found |= modules
            todo += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def is_missing(requirement: str) -> bool:
    """Whether what a `pip install` line names, a distribution of its own, isn't here."""
    name = Requirement(requirement).name
    return canonicalize_name(name) != "memstore" and not installed(name)[0]


@cache
def installed(name: str) -> tuple[set[str], list[Requirement]]:
    """The top-level modules of a distribution, and what it requires. None is here: who imports it will be told."""
    try:
        distribution = metadata.distribution(DISTRIBUTION if name == "memstore" else name)
    except metadata.PackageNotFoundError:
        return set(), []
    modules = {file.parts[0].partition(".")[0] for file in distribution.files or ()}
    return modules, [Requirement(one) for one in distribution.requires or ()]
