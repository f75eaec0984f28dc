"""Arguments of calls: keys, flags, whole numbers, versions and numbers of seconds. What is none is refused here.

A key is text of 1 to 500 bytes of UTF-8. Keys never become paths, so any other text is fine.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

from memstore._wording import an, parse_size
from memstore.errors import InvalidKeyError

# --- Keys ------------------------------------------------------------------------------------------------------------


KEY_LIMIT = 500  # bytes; LMDB takes 511


def encode_key(key: object) -> bytes:
    """Returns the key's UTF-8 bytes. Raises InvalidKeyError, saying what is wrong with it."""
    if not isinstance(key, str):
        raise InvalidKeyError(_no_text("a key", key))
    if "\0" in key:
        raise _has_nul(key)
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise _has_surrogate(key, error) from None
    if not encoded:
        raise InvalidKeyError("a key has at least one character, and this one has none: give the value a name", key=key)
    if len(encoded) > KEY_LIMIT:
        raise InvalidKeyError(
            f"a key has at most {KEY_LIMIT} bytes, and {key[:40]!r}... has {len(encoded)}: shorten it, or hash it",
            key=key,
        )
    return encoded


def check_encoded(key: bytes) -> None:
    """Raises InvalidKeyError unless `encode_key` may have made this key, which another host sent."""
    try:
        name = key.decode()
    except UnicodeDecodeError as error:
        raise InvalidKeyError(f"a key is UTF-8, and {key[:40]!r} is not, at byte {error.start}") from None
    encode_key(name)


def encode_prefix(prefix: object) -> bytes:
    """Returns the UTF-8 bytes of a prefix of keys, which may be "" and of any length. Raises InvalidKeyError."""
    if not isinstance(prefix, str):
        raise InvalidKeyError(_no_text("a prefix of keys", prefix))
    if "\0" in prefix:
        raise _has_nul(prefix)
    try:
        return prefix.encode()
    except UnicodeEncodeError as error:
        raise _has_surrogate(prefix, error) from None


def several(keys: Iterable[str]) -> Iterable[str]:
    """Returns the argument.

    Raises TypeError for one str, an iterable of its characters, which is nearly always a mistake.
    """
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


def _has_nul(text: str) -> InvalidKeyError:
    return InvalidKeyError(f"a key has no NUL, and {text!r} has one: remove it", key=text)


def _has_surrogate(text: str, error: UnicodeEncodeError) -> InvalidKeyError:
    return InvalidKeyError(
        f"a key is valid text, and {text!r} has a lone surrogate at {error.start}: decode it anew", key=text
    )


def _no_text(what: str, found: object) -> str:
    """Says what is wrong with a key that is no str, and what would be a key."""
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
    """Makes the error of a put, or of such a call, whose key is none: key and value may be swapped."""
    if isinstance(key, str) or not isinstance(value, str):
        return error
    return InvalidKeyError(
        f"{call} takes the key and then {what}, and the key here is {an(type(key))}: {call}({value!r:.60}, ...)"
    )


def check_key(call: str, key: object, value: object, what: str = "the model") -> None:
    """Checks the key of a call that takes a key and, say, a model. Raises InvalidKeyError."""
    try:
        encode_key(key)
    except InvalidKeyError as error:
        raise refused_put(error, key, value, call, what) from None


def as_row_index(error: InvalidKeyError, key: object) -> InvalidKeyError:
    """Makes the error of `store[key]` for a number.

    A DataLoader calls it with numbers, and so does a caller who thinks of one value's rows.
    """
    if not isinstance(key, (int, slice)):
        return error
    return InvalidKeyError(
        f"{error}. Rows are those of one value: store.view(key)[...]; a DataLoader takes "
        "memstore.StoreDataset(store, key)"
    )


# --- Flags, numbers and versions -------------------------------------------------------------------------------------


LARGEST_VERSION = 2**63 - 1


def flag(name: str, value: Any) -> bool:
    """Raises TypeError for what is neither True nor False: any text is true, "no" and "0" from the environment too."""
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's too, without numpy
        raise TypeError(f"{name} is True or False, and not {value!r:.100}")
    return bool(value)


def whole_number(name: str, value: Any) -> int:
    """Raises TypeError for what is none: a bool, a float, a text."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a whole number, and not {value!r}") from None


def expected_version(value: Any, name: str = "expect_version") -> int:
    """Returns `expect_version`. Raises TypeError, and ValueError for what no key ever has as its version."""
    version = whole_number(name, value)
    if not 0 <= version <= LARGEST_VERSION:
        raise ValueError(f"{name} is a version, as put returns it, or 0, and not {version}")
    return version


def expected_versions(value: Any) -> dict[str, int]:
    """Returns `expect_versions` of several keys. Raises TypeError, ValueError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"expect_versions is a dict of versions by key, as {{'key': 0}}, and not {value!r:.100}: give 0 for each "
            "key that must not exist"
        )
    found = cast("Mapping[str, Any]", value)
    return {key: expected_version(version, f"expect_versions[{key!r}]") for key, version in found.items()}


MOST_VERSIONS = 1000  # that a key can keep: each put of it looks at their names


def history_of(history: Any, history_bytes: Any) -> tuple[int, int]:
    """Returns how many versions of a key stay readable, and how many bytes the replaced ones may take, 0 for any.

    Raises TypeError, ValueError.
    """
    if history is None:
        raise ValueError("history_bytes= bounds the versions that history= keeps: give both")
    count = whole_number("history", history)
    if not 1 <= count <= MOST_VERSIONS:
        raise ValueError(
            f"history is how many versions of the key stay readable, the new one among them: 1 to {MOST_VERSIONS:,}, "
            f"and not {count}"
        )
    return count, 0 if history_bytes is None else parse_size(history_bytes)


def version_number(value: Any, name: str = "version") -> int:
    """Returns a version to be read. Raises TypeError, and ValueError for what no key ever has as its version."""
    version = whole_number(name, value)
    if not 1 <= version <= LARGEST_VERSION:
        raise ValueError(f"{name} is one that put returned, or store.versions(key) has, and not {version}")
    return version


def older_version(value: Any) -> int:
    """Returns `newer_than`; of a negative number 0, since the versions of a key begin at 1. Raises TypeError."""
    return max(0, min(whole_number("newer_than", value), LARGEST_VERSION))


def older_versions(value: Any) -> dict[str, int] | int:
    """Returns `newer_than` of several keys: versions by key, or one for all. Raises TypeError."""
    if not isinstance(value, Mapping):
        return older_version(value)
    found = cast("Mapping[str, Any]", value)
    return {key: older_version(version) for key, version in found.items()}


def seconds_of(name: str, value: Any, *, otherwise: str = "") -> float:
    """Returns the number. Raises TypeError for what is none, ValueError for one below 0 and for nan.

    Args:
        otherwise: what else may be given, for the message: " or None".
    """
    kind: type[Exception] = TypeError
    if not isinstance(value, (str, bytes)):
        try:
            number = float(value)
            if number >= 0:
                return number
            kind = ValueError
        except OverflowError:
            return float("inf")
        except (TypeError, ValueError):
            pass
    raise kind(f"{name} is seconds, 0 or more{otherwise}, and not {value!r:.100}")
