"""What may be a key: text of 1 to 500 bytes of UTF-8. Keys never become paths, so any other text is fine."""

from __future__ import annotations

import os
from collections.abc import Iterable

from memstore.errors import InvalidKeyError
from memstore.wording import an

KEY_LIMIT = 500  # bytes; LMDB takes 511


def encode_key(key: object) -> bytes:
    """Returns the key's UTF-8 bytes. Raises InvalidKeyError, saying what is wrong with it."""
    if not isinstance(key, str):
        raise InvalidKeyError(_no_text("a key", key))
    encoded = _encode(key)
    if not encoded:
        raise InvalidKeyError("a key has at least one character, and this one has none: give the value a name", key=key)
    if len(encoded) > KEY_LIMIT:
        raise InvalidKeyError(
            f"a key has at most {KEY_LIMIT} bytes, and {key[:40]!r}... has {len(encoded)}: shorten it, or hash it",
            key=key,
        )
    return encoded


def check_encoded(key: bytes) -> None:
    """Of a key that another host sent. Raises InvalidKeyError unless `encode_key` may have made it."""
    try:
        name = key.decode()
    except UnicodeDecodeError as error:
        raise InvalidKeyError(f"a key is UTF-8, and {key[:40]!r} is not, at byte {error.start}") from None
    encode_key(name)


def encode_prefix(prefix: object) -> bytes:
    if not isinstance(prefix, str):
        raise InvalidKeyError(_no_text("a prefix of keys", prefix))
    return _encode(prefix)


def several(keys: Iterable[str]) -> Iterable[str]:
    """One str is an iterable of its characters, and nearly always a mistake. Raises TypeError."""
    if not isinstance(keys, (str, bytes)) and (hasattr(keys, "__iter__") or hasattr(keys, "__getitem__")):  # pyright: ignore[reportUnnecessaryIsInstance]
        return keys
    found: object = keys
    if isinstance(found, str):
        text = f"{found!r:.100} is one str: write [{found!r:.100}]"
    elif isinstance(found, bytes):
        text = f"{found!r:.100} is bytes: write [{found!r:.100}.decode()]"
    else:
        text = f"not {found!r:.100}"
    raise TypeError(f"several keys are a list or another iterable of str, and {text}")


def _encode(key: str) -> bytes:
    if "\0" in key:
        raise InvalidKeyError(f"a key has no NUL, and {key!r} has one: remove it", key=key)
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidKeyError(
            f"a key is valid text, and {key!r} has a lone surrogate at {error.start}: decode it anew", key=key
        ) from None


def _no_text(what: str, found: object) -> str:
    """What is wrong with a key that is no str, and what would be one."""
    kind = type(found).__name__
    shown = (
        f"{found!r:.60} is {kind}"
        if isinstance(found, (bytes, int, float, type(None)))
        else f"this is {an(type(found))}"
    )
    if isinstance(found, bytes):
        shown += ": decode() it"
    elif isinstance(found, int):
        shown += f": write {str(found)!r}"
    elif isinstance(found, tuple):
        shown += ': join its parts, by "/" say'
    elif isinstance(found, list):
        shown += ": name one; get_many and delete_many take several"
    elif isinstance(found, os.PathLike):
        shown += ": os.fspath() of it is one"
    return f"{what} is a str, and {shown}"


def refused_put(
    error: InvalidKeyError, key: object, value: object, call: str = "put", what: str = "the value"
) -> InvalidKeyError:
    """The error of a put, or of such a call, with what is no key; it may be the value, and the value the key."""
    if isinstance(key, str) or not isinstance(value, str):
        return error
    return InvalidKeyError(
        f"{call} takes the key and then {what}, and the key here is {an(type(key))}: {call}({value!r:.60}, ...)"
    )


def check_key(call: str, key: object, value: object, what: str = "the model") -> None:
    """Of a call that takes a key and, say, a model. Raises InvalidKeyError."""
    try:
        encode_key(key)
    except InvalidKeyError as error:
        raise refused_put(error, key, value, call, what) from None


def as_row_index(error: InvalidKeyError, key: object) -> InvalidKeyError:
    """The error of `store[key]`, which a DataLoader calls with numbers, and so does who thinks of one value's rows."""
    if not isinstance(key, (int, slice)):
        return error
    return InvalidKeyError(
        f"{error}. Rows are those of one value: store.view(key)[...]; a DataLoader takes "
        "memstore.StoreDataset(store, key)"
    )
