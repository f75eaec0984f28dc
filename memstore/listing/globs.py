"""Prefixes that look like patterns. A key may have a "*" in it, so they are no error; but nearly always a mistake."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

GLOB = frozenset("*?[")
_UP_TO = re.compile(r"[^*?\[]*")


def warned_if_none(keys: Iterator[str], prefix: str) -> Iterator[str]:
    """The keys that start with `prefix`; a warning if there are none."""
    one = None
    for one in keys:
        yield one
    if one is None:
        warnings.warn(no_match(prefix), UserWarning, stacklevel=2)


def no_match(prefix: str, call: str = "keys") -> str:
    """What to say of a prefix that looks like a pattern, and that no key starts with."""
    plain = re.match(_UP_TO, prefix)
    start = plain[0] if plain else ""
    return (
        f"{call}({prefix!r}): no key starts with this text, in which a wildcard has no meaning; "
        f"keys({start!r}) gives all that start with {start!r}, and fnmatch.filter(store.keys(), {prefix!r}) matches"
    )
