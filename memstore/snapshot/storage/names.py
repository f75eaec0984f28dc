"""Which names files of a snapshot may have: they are read from manifests, which anybody may have written."""

from __future__ import annotations

from memstore.errors import InvalidKeyError

_MOST_BYTES = 255  # NAME_MAX of Linux's file systems


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
