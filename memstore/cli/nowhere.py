"""What a command says of a ROOT where there is no store: what is there, which stores are near, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from memstore.listing import near

_NONE = tuple(  # the library's messages: up to what they advise
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"(?P<path>.+): the parent folder .+ doesn't exist: .+",
        r"(?P<path>.+) doesn't exist: .+",
        r"(?P<path>.+) is no store: it has (no memstore\.json|neither memstore\.json nor segments)\b.*",
    )
)
PUT_BACK = "put it back, or write it as docs/format.md has it, and run `memstore repair`"
_LOOKED_AT = 1000  # names of a folder
_NAMED = 3

# What makes a store that a command could then look into. The others are for stores that have been used.
_MAKERS = {
    **dict.fromkeys(("ls", "watch", "top", "stats"), "`memstore put`, or a program that opens it, makes one"),
    "status": "`memstore serve` makes one, and serves it",
    "put": "only a store has a version to expect: check the path",
}
_TWO_STORES = ("cp", "diff")  # of which the second is no mistake
_MAKE = ("put", "attach", "cp", "serve")  # a store, though not the folder that it is to be in


def told(text: str, command: str | None, words: Sequence[str] = ()) -> str | None:
    """The message in the place of the library's, which advises to make a store; None: it is about something else.

    Args:
        text: the library's message.
        command: that which was called.
        words: what the command line has after the command.
    """
    found = next(filter(None, (pattern.fullmatch(text) for pattern in _NONE)), None)
    if found is None:
        return None
    path = found["path"]
    if has_lost_settings(path):
        return f"{path}/memstore.json is missing, though the folder has the rest of a store: {PUT_BACK}"
    above = _store_above(path)
    if above:
        rest = path[len(above) :].lstrip("/")
        key = "" if os.path.lexists(path) else f", and {rest!r} as the KEY"
        return f"there is no store at {path}: it lies within the store {above}: say that as ROOT{key}"
    missing = _first_missing(path)
    stores = _stores_near(path, missing)
    if stores:
        advice = f"did you mean {' or '.join(stores)}?"
    else:
        advice = _of_swapped(path, command, words) or _advice(path, missing, command)
    return f"there is no store at {path}: {_what(path, missing)}; {advice}"


def has_lost_settings(path: str) -> bool:
    """Whether a folder has all of a store but its memstore.json."""
    return not _is_store(path) and all(os.path.isdir(f"{path}/{name}") for name in ("catalog", "segments"))


def _store_above(path: str) -> str:
    """The nearest folder above the path that is a store, or empty."""
    above = os.path.dirname(path)
    while above != os.path.dirname(above) and not _is_store(above):
        above = os.path.dirname(above)
    return above if _is_store(above) else ""


def _first_missing(path: str) -> str:
    """Of the path and the folders above it the uppermost that isn't there; empty: all are."""
    missing = ""
    while path and not os.path.lexists(path):
        missing, path = path, os.path.dirname(path)
    return missing


def _what(path: str, missing: str) -> str:
    if missing:
        return "the folder doesn't exist" if missing == path else f"the folder {missing} doesn't exist"
    names = list(_names(path))
    some = ", ".join(map(repr, sorted(names)[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
    return f"the folder has {some}, and no memstore.json" if names else "the folder is empty"


def _of_swapped(path: str, command: str | None, words: Sequence[str]) -> str:
    """Of arguments in another order: the store is one that isn't the first; empty: there is none."""
    if command in _TWO_STORES or not words or os.path.abspath(words[0]) != path:
        return ""
    others = (word for word in words[1:] if _is_store(word))
    return next((f"{word!r} is a store: say it first, as ROOT" for word in others), "")


def _advice(path: str, missing: str, command: str | None) -> str:
    if os.path.basename(missing).startswith("~"):
        return 'a shell takes "~" as your home folder only outside of quotes'
    if missing not in ("", path):  # nothing can be made there either
        is_maker = command in _MAKE
        return f"check the path{f', or create {os.path.dirname(path)} first' if is_maker else ''}"
    if command is None:
        return "check the path"
    return _MAKERS.get(command, f"`memstore {command}` needs one: check the path")


def _stores_near(path: str, missing: str) -> list[str]:
    """Stores in the folder; or where the path leads if the missing folder is one with a name that is like its own."""
    inside = [f"{path}/{name}" for name in sorted(_names(path)) if _is_store(f"{path}/{name}")]
    if inside:
        return inside[:_NAMED]
    wrong = missing or path
    parent, own = os.path.split(wrong)
    others = (os.path.join(parent, name) + path[len(wrong) :] for name in near(own, set(_names(parent)) - {own}))
    return [other for other in others if _is_store(other)]


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
