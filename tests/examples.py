"""How many examples a property is tried with: all of them by `make test-full`, a part of them in the fast run."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
_FAST_PART = 3
_LEAST = 10


def examples(full: int) -> int:
    """The fast run tries a third of `full`, the same ones each time; new ones are looked for by `make test-full`."""
    return full if IS_FULL else max(min(full, _LEAST), full // _FAST_PART)
