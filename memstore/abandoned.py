"""Calls that nobody waits for any more: who awaited them was cancelled, and may change the tensors at any time.

A call runs in a thread, and nothing ends a thread from outside. So who gives a call up notes its thread in ABANDONED,
and the call asks:

- a put, when it has copied its last byte: what was given up before is not published, and what was not is whole;
- a sample that takes rows from all others, under the mutex, before it takes them; and whoever waits there in a line;
- a load of a model, before it writes into the module, and while it waits for other ranks.

Whoever gives a load up has to know whether it writes by then. So the load first notes its thread in WRITING, **then**
asks; and the other notes it in ABANDONED, **then** looks into WRITING. One of them sees the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

ABANDONED: dict[int, object] = {}  # by thread; empty but for moments, so that a call looks at a dict that is empty
WRITING: set[int] = set()  # threads that write into what is their callers', and say so


class AbandonedError(Exception):
    """The call is not made. Nobody sees it: nobody waits."""


def is_abandoned() -> bool:
    """Call it if ABANDONED has anything. Whether this thread is named there."""
    return threading.get_ident() in ABANDONED


def check_abandoned() -> None:
    """Call it if ABANDONED has anything. Raises AbandonedError in a thread that is named there."""
    if is_abandoned():
        raise AbandonedError("whoever awaited this was cancelled")


@contextlib.contextmanager
def writing() -> Generator[None]:
    """Around what writes into memory of the caller's. Raises AbandonedError before anything is written."""
    me = threading.get_ident()
    WRITING.add(me)
    try:
        if ABANDONED:
            check_abandoned()
        yield
    finally:
        WRITING.discard(me)
