"""What a command says of a ROOT where there is no store: what is there, which stores are near, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from memstore.listing import near

_NONE = re.compile(  # the library's messages
    r"(?P<path>.+) (?:doesn't exist: memstore\.open with mode 'a' creates it"
    r"|is no store: it has no memstore\.json; mode 'a' creates one in an empty folder"
    r"|is no store: it has neither memstore\.json nor segments)"
)
_LOOKED_AT = 1000  # names of a folder
_NAMED = 3

# What makes a store that a command could then look into. The others are for stores that have been used.
_MAKERS = {
    **dict.fromkeys(("ls", "watch", "top", "stats"), "`memstore put`, or a program that opens it, makes one"),
    "status": "`memstore serve` makes one, and serves it",
}


def told(text: str, command: str | None) -> str | None:
    """The message in the place of the library's, which advises to make a store; None: it is about something else."""
    found = _NONE.fullmatch(text)
    if found is None:
        return None
    path = found["path"]
    what = _what(path)
    stores = _stores_near(path)
    if stores:
        advice = f"did you mean {' or '.join(stores)}?"
    else:
        advice = _MAKERS.get(command or "", f"`memstore {command}` needs one: check the path" if command else "")
    return f"there is no store at {path}: {what}; {advice}"


def _what(path: str) -> str:
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        return "the folder doesn't exist" if os.path.isdir(parent) else f"its parent {parent} doesn't exist"
    names = list(_names(path))
    some = ", ".join(map(repr, sorted(names)[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
    return f"the folder has {some}, and no memstore.json" if names else "the folder is empty"


def _stores_near(path: str) -> list[str]:
    """Stores in the folder; or beside it, under names that are like its own."""
    inside = [f"{path}/{name}" for name in sorted(_names(path)) if _is_store(f"{path}/{name}")]
    if inside:
        return inside[:_NAMED]
    parent, own = os.path.split(path)
    return [f"{parent}/{name}" for name in near(own, set(_names(parent)) - {own}) if _is_store(f"{parent}/{name}")]


def _names(folder: str) -> Iterator[str]:
    """The first names in a folder; none, if it can't be read."""
    try:
        with os.scandir(folder) as found:
            for entry, _ in zip(found, range(_LOOKED_AT), strict=False):
                yield entry.name
    except OSError:
        return


def _is_store(path: str) -> bool:
    return os.path.lexists(f"{path}/memstore.json")
