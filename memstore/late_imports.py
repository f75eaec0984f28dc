"""Imports that come late, when a value first needs them, and forks that wait for them.

A module that another thread is importing in the moment of a fork stays half imported in the child, under a lock that
nobody there gives back: the child's own import of it waits for ever. So what everybody needs is imported before a store
can be opened; and what only some need, since it takes a second, is imported `between_forks`.

What is imported runs any code, finalizers and signal handlers too, which may wait for whoever forks. So each of the two
goes on without the other when it has waited long: an import may be split then, as it would be without this module.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator

PATIENCE = 30.0  # seconds

_lock = threading.RLock()
_waited_for: list[bool] = []  # of the forks that are being made, one in another: whether the import's end was


@contextlib.contextmanager
def between_forks() -> Generator[None]:
    """For the import statements inside. Not for hot paths: it takes a microsecond."""
    lock = _lock
    is_ours = lock.acquire(timeout=PATIENCE)
    try:
        yield
    finally:
        if is_ours:
            lock.release()


def _before_fork() -> None:
    _waited_for.append(_lock.acquire(timeout=PATIENCE))


def _after_fork_in_parent() -> None:
    if _waited_for.pop():
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _waited_for.clear()


def register() -> None:
    """Who registers last is asked first, before a fork: call it again after those whom it shall not hold up."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


register()
