"""Puts that nobody waits for any more: who awaited them was cancelled, and may change the tensors at any time.

A put runs in a thread, and nothing ends a thread from outside. So who gives a put up notes its thread in ABANDONED, and
the put asks when it has copied its last byte: what was given up before is not published, and what was not is whole.
"""

from __future__ import annotations

import threading

ABANDONED: dict[int, object] = {}  # by thread; empty but for moments, so that a put looks at a dict that is empty


class AbandonedError(Exception):
    """The put is not made. Nobody sees it: nobody waits."""


def check_abandoned() -> None:
    """Call it if ABANDONED has anything. Raises AbandonedError in a thread that is named there."""
    if threading.get_ident() in ABANDONED:
        raise AbandonedError("whoever awaited this was cancelled")
