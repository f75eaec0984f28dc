"""The JSON that others' formats have beside their tensors, and how damage in it is told.

It may be of 100 MB, and made to be slow to refuse. So an object is split into its values first, and each is parsed when
it is looked at: that makes no containers that Python's garbage collector would walk again and again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from memstore.depth import nests_too_deeply
from memstore.engine import HEADER_LIMIT, opened, syscalls
from memstore.errors import CorruptionError

Document = dict[str, msgspec.Raw]  # the names of an object, and the JSON of each value

_SHOWN = 100  # characters of a name in an error
_split = msgspec.json.Decoder(Document).decode
_read_texts = msgspec.json.Decoder(dict[str, str]).decode
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def damaged(path: str, detail: str) -> NoReturn:
    raise CorruptionError(path=path, detail=detail)


def short(value: object) -> str:
    """What a file says, for an error: it may be of 100 MB."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def read_whole(path: str) -> bytes:
    """A file that is no tensors, of up to 100 MB."""
    with opened(path) as (fd, found):
        if found.st_size > HEADER_LIMIT:
            damaged(path, f"{found.st_size:,} bytes beside the tensors, and {HEADER_LIMIT:,} are the limit")
        return syscalls.read_at(fd, found.st_size, 0)


def parse_object(path: str, text: bytes | msgspec.Raw) -> Document:
    """The JSON object that is `text`, in which no name comes twice. `path` is for the errors."""
    content = bytes(text)
    try:
        content.decode()
        found = _split(content)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        _refuse(path, error, lambda: _split(content))
    if _has_twice(content, found):
        damaged(path, "its JSON can't be read: a name stands there twice")
    return found


def _has_twice(text: bytes, found: Document) -> bool:
    """The second of a name replaces the value of the first, so colons are missing: each name has one behind it."""
    values = b"".join(found.values())  # pyright: ignore[reportArgumentType, reportCallIssue]
    if b"\\" in text:
        return _count_names(text) != len(found) + _count_names(values)
    return text.count(b":") != len(found) + "".join(found).count(":") + values.count(b":")


def _count_names(text: bytes) -> int:
    """In all objects of some JSON."""
    return _STRING.sub(b"", text).count(b":")


def parse_texts(path: str, text: msgspec.Raw) -> dict[str, str]:
    """As `parse_object`, of an object whose values are texts."""
    content = bytes(text)
    try:
        found = _read_texts(content)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        _refuse(path, error, lambda: _read_texts(content))
    if _count_names(content) != len(found):
        damaged(path, "its JSON can't be read: a name stands there twice")
    return found


def parse_object_of_python(path: str, text: bytes) -> Document:
    """As `parse_object`, where Python's json may have written NaN and Infinity, which no JSON has."""
    if b"NaN" not in text and b"Infinity" not in text:
        return parse_object(path, text)
    found = parse_value(path, text)
    if not isinstance(found, dict):
        damaged(path, "its JSON is no object")
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in found.items()}


def parse_value(path: str, text: bytes | msgspec.Raw | None) -> Any:
    """Any JSON, of one value; None where there is none. No name comes twice in any object of it."""
    if text is None:
        return None
    content = bytes(text)
    try:
        value = json.loads(content, object_pairs_hook=_unique)
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates, which json reads
        return value
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        _refuse(path, error, lambda: json.loads(content))


def _refuse(path: str, error: Exception, parse: Callable[[], Any]) -> NoReturn:
    """JSON that can't be parsed is damaged, unless it is this thread's stack that is too short."""
    if isinstance(error, RecursionError) and not nests_too_deeply(parse):
        raise error
    damaged(path, f"its JSON can't be read: {error}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def are_sizes(value: Any, most: int = 64) -> bool:
    """Whether this is a list of up to `most` integers that may be sizes or offsets."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
