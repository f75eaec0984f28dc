"""What may be a key: text of 1 to 500 bytes of UTF-8. Keys never become paths, so any other text is fine."""

from __future__ import annotations

from collections.abc import Iterable

from memstore.errors import InvalidKeyError

KEY_LIMIT = 500  # bytes; LMDB takes 511


def encode_key(key: object) -> bytes:
    """Returns the key's UTF-8 bytes. Raises InvalidKeyError, saying what is wrong with it."""
    if not isinstance(key, str):
        raise InvalidKeyError(f"a key is a str, and {key!r} is {type(key).__name__}")
    encoded = _encode(key)
    if not encoded:
        raise InvalidKeyError("a key has at least one character, and this one has none", key=key)
    if len(encoded) > KEY_LIMIT:
        raise InvalidKeyError(f"a key has at most {KEY_LIMIT} bytes, and {key[:40]!r}... has {len(encoded)}", key=key)
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
        raise InvalidKeyError(f"a prefix of keys is a str, and {prefix!r} is {type(prefix).__name__}")
    return _encode(prefix)


def several(keys: Iterable[str]) -> Iterable[str]:
    """One str is an iterable of its characters, and nearly always a mistake."""
    if isinstance(keys, str):
        raise TypeError(f"several keys are a list or another iterable of str, and {keys!r} is one str")
    return keys


def _encode(key: str) -> bytes:
    if "\0" in key:
        raise InvalidKeyError(f"a key has no NUL, and {key!r} has one", key=key)
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidKeyError(
            f"a key is valid text, and {key!r} has a lone surrogate at {error.start}", key=key
        ) from None
