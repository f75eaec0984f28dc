"""What may be a flag, a whole number, a version or a number of seconds among the arguments of a call."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

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
