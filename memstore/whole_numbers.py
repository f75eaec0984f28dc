"""What may be a whole number among the arguments of a call, and a version: they may have to be sent to another host.

Also numbers of seconds that are no timeouts: leases, and how old an answer may be.
"""

from __future__ import annotations

import operator
from typing import Any

LARGEST_VERSION = 2**63 - 1


def whole_number(name: str, value: Any) -> int:
    """Raises TypeError for what is none: a bool, a float, a text."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a whole number, and not {value!r}") from None


def expected_version(value: Any) -> int:
    """Returns `expect_version`. Raises TypeError, and ValueError for what no key ever has as its version."""
    version = whole_number("expect_version", value)
    if not 0 <= version <= LARGEST_VERSION:
        raise ValueError(f"expect_version is a version, as put returns it, or 0, and not {version}")
    return version


def older_version(value: Any) -> int:
    """Returns `newer_than`. Raises TypeError."""
    return min(whole_number("newer_than", value), LARGEST_VERSION)


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
        except (TypeError, ValueError):
            pass
    raise kind(f"{name} is seconds, 0 or more{otherwise}, and not {value!r:.100}")
