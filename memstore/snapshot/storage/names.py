"""Which names files of a snapshot may have: they are read from manifests, which anybody may have written."""

from __future__ import annotations

import re
import uuid

from memstore.errors import InvalidKeyError

_MOST_BYTES = 255  # NAME_MAX of Linux's file systems
_UNFINISHED = re.compile(r"\.memstore_snapshot\.[0-9a-f]{32}\.new")


def new_unfinished_name() -> str:
    """Of a file that is about to be published under another name."""
    return f".memstore_snapshot.{uuid.uuid4().hex}.new"


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is about to be published, or was by a process that died."""
    return _UNFINISHED.fullmatch(name) is not None


def check_name(name: str) -> str:
    """The name, if it is that of a file in the folder itself. Raises InvalidKeyError."""
    problem = _problem(name)
    if problem:
        raise InvalidKeyError(f"{name!r:.300} is no name of a file of a snapshot: {problem}")
    return name


def _problem(name: str) -> str | None:
    if name in ("", ".", ".."):
        return "it names a folder"
    if "/" in name:
        return "it has a '/', and all files of a snapshot lie in one folder"
    if "\0" in name:
        return "it has a NUL"
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        return "it can't be written as UTF-8"
    return None if nbytes <= _MOST_BYTES else f"it has {nbytes:,} bytes, and {_MOST_BYTES} are the most"
