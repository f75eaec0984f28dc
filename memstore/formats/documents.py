"""Documents beside the tensors of others' formats: read whole, parsed strictly, and named in errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec

from memstore.engine import HEADER_LIMIT, opened, syscalls
from memstore.errors import CorruptionError
from memstore.strict_json import Document, read_texts, read_value, split_object, split_object_of_python

_Text = TypeVar("_Text")
_Result = TypeVar("_Result")


def damaged(path: str, detail: str) -> NoReturn:
    raise CorruptionError(path=path, detail=detail)


def read_whole(path: str) -> bytes:
    """A file that is no tensors, of up to 100 MB."""
    with opened(path) as (fd, found):
        if found.st_size > HEADER_LIMIT:
            damaged(path, f"{found.st_size:,} bytes beside the tensors, and {HEADER_LIMIT:,} are the limit")
        return syscalls.read_at(fd, found.st_size, 0)


def parse_object(path: str, text: bytes | msgspec.Raw) -> Document:
    return _located(path, split_object, text)


def parse_object_of_python(path: str, text: bytes) -> Document:
    return _located(path, split_object_of_python, text)


def parse_texts(path: str, text: msgspec.Raw) -> dict[str, str]:
    return _located(path, read_texts, text)


def parse_value(path: str, text: bytes | msgspec.Raw | None) -> Any:
    return _located(path, read_value, text)


def _located(path: str, parse: Callable[[_Text], _Result], text: _Text) -> _Result:
    """Damage names the file that the text is from."""
    try:
        return parse(text)
    except CorruptionError as error:
        damaged(path, error.detail)


def are_sizes(value: Any, most: int = 64) -> bool:
    """Whether this is a list of up to `most` integers that may be sizes or offsets."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
