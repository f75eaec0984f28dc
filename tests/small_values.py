"""The inline limit of stores that tests make: a value of some KiB lies in a segment.

Most tests are about segments, and 5,000 elements are enough for one, where users have 65,536 bytes in the catalog. What
is tested at their limit takes `USERS_LIMIT`, or runs in a process that doesn't import this.
"""

from __future__ import annotations

from memstore.engine.root import folder

USERS_LIMIT = folder.INLINE_LIMIT


def lie_in_segments() -> None:
    """Makes stores of this process and its children, unless they say what they want, as `SMALL` allows."""
    folder.INLINE_LIMIT = 1536


lie_in_segments()
