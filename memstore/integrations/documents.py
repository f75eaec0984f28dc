"""The JSON that others' formats have beside their tensors, and how damage in it is told."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from memstore.engine import syscalls
from memstore.engine.adopted import opened
from memstore.engine.depth import nests_too_deeply
from memstore.engine.header import HEADER_LIMIT
from memstore.errors import CorruptionError


def damaged(path: str, detail: str) -> NoReturn:
    raise CorruptionError(f"{path}: {detail}", path=path, detail=detail)


def read_whole(path: str) -> bytes:
    """A file that is no tensors, of up to 100 MB."""
    with opened(path) as (fd, found):
        if found.st_size > HEADER_LIMIT:
            damaged(path, f"{found.st_size:,} bytes beside the tensors, and {HEADER_LIMIT:,} are the limit")
        return syscalls.read_at(fd, found.st_size, 0)


def parse_object(path: str, text: bytes) -> dict[str, Any]:
    """The JSON object that is `text`, in which no name comes twice. `path` is for the errors."""
    try:
        found: Any = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        if isinstance(error, RecursionError) and not nests_too_deeply(lambda: json.loads(text.decode())):
            raise
        damaged(path, f"its JSON can't be read: {error}")
    if not isinstance(found, dict):
        damaged(path, "its JSON is no object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def are_sizes(value: Any, most: int = 64) -> bool:
    """Whether this is a list of up to `most` integers that may be sizes or offsets."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
