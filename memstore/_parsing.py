"""Parsing of documents that anybody may have written: strict JSON, and what parsers raise for what they can't read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import msgspec

from memstore.errors import CorruptionError

# --- What msgspec raises for bytes that it can't decode --------------------------------------------------------------
# Text that is no UTF-8 is a UnicodeDecodeError in MessagePack, which is no MsgspecError, and what nests too deeply a
# RecursionError.


UNDECODABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)


# --- Documents that nest too deeply ----------------------------------------------------------------------------------


def nests_too_deeply(parse: Callable[[], object]) -> bool:
    """Returns whether `parse`, which has just raised RecursionError, raises it on the empty stack of a thread too."""
    too_deep: list[bool] = []

    def try_again() -> None:
        try:
            parse()
        except RecursionError:
            too_deep.append(True)
        except Exception:  # other errors are the caller's to report
            pass

    thread = threading.Thread(target=try_again, name="memstore: a document again")
    thread.start()
    thread.join()
    return bool(too_deep)


# --- Strict JSON, for headers and indexes that anybody may have written: no name twice, no lone surrogates -----------
# It may be of 100 MB, and made to be slow to refuse. So an object is split into its values first, and each is parsed
# when it is looked at: that makes no containers that Python's garbage collector would walk again and again.


Document = dict[str, msgspec.Raw]  # the names of an object, and the JSON of each value

_split = msgspec.json.Decoder(Document).decode
_read_texts = msgspec.json.Decoder(dict[str, str]).decode


def split_object(text: bytes | msgspec.Raw) -> Document:
    """Returns the values of a JSON object by name. Raises CorruptionError, as all functions here do."""
    content = bytes(text)
    try:
        content.decode()
        found = _split(content)
    except UNDECODABLE as error:
        _refuse(error, lambda: _split(content))
    if _has_twice(content, found):
        raise CorruptionError("its JSON can't be read: a name stands there twice")
    return found


def _has_twice(text: bytes, found: Document) -> bool:
    """Returns whether an object has a name twice.

    The second value of a name replaces the first, so colons are missing: each name has one behind it.
    """
    values = b"".join(found.values())  # pyright: ignore[reportArgumentType, reportCallIssue]
    return _count_colons(text) != len(found) + "".join(found).count(":") + _count_colons(values)


def _count_colons(text: bytes | bytearray) -> int:
    """Counts the colons of some JSON, also those that a text has as an escape."""
    count = text.count(b":")
    if b"\\" in text:
        text = text.replace(rb"\\", b"")  # an escaped backslash starts no other escape
        count += text.count(rb"\u003a") + text.count(rb"\u003A")
    return count


def count_names(text: bytes | bytearray, texts: Iterable[str]) -> int:
    """Counts the names that the objects of some JSON have, each as often as it stands there: colons outside of texts.

    Args:
        texts: all texts and names in it that may have colons.
    """
    return _count_colons(text) - "".join(texts).count(":")


def read_texts(text: msgspec.Raw) -> dict[str, str]:
    """Returns an object whose values are texts."""
    content = bytes(text)
    try:
        found = _read_texts(content)
    except UNDECODABLE as error:
        _refuse(error, lambda: _read_texts(content))
    if _count_colons(content) != len(found) + sum(text.count(":") for pair in found.items() for text in pair):
        raise CorruptionError("its JSON can't be read: a name stands there twice")
    return found


def split_object_of_python(text: bytes) -> Document:
    """Returns the same as `split_object`. Python's json may have written NaN and Infinity, which no JSON has."""
    if b"NaN" not in text and b"Infinity" not in text:
        return split_object(text)
    values: Any = read_value(text)
    if not isinstance(values, dict):
        raise CorruptionError("its JSON is no object")
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in cast("dict[str, Any]", values).items()}


def read_value(text: bytes | msgspec.Raw | None) -> Any:
    """Returns a value of any JSON; None where there is none. No name comes twice in any object of it."""
    if text is None:
        return None
    content = bytes(text)
    try:
        value = json.loads(content, object_pairs_hook=_unique)
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates, which json reads
        return value
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        _refuse(error, lambda: json.loads(content))


def _refuse(error: Exception, parse: Callable[[], Any]) -> NoReturn:
    """Raises CorruptionError for JSON that can't be parsed, unless it is this thread's stack that is too short."""
    if isinstance(error, RecursionError) and not nests_too_deeply(parse):
        raise error
    raise CorruptionError(f"its JSON can't be read: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found
