"""Faults: what becomes of an operation whose n-th step fails, is interrupted, or is the last thing its process does.

Steps are the calls that memstore makes to the kernel, all of which go through `memstore.engine.syscalls`, and the
commits of the catalog. They are counted in the calling thread only, and no garbage is collected meanwhile: finalizers
of what others left would take steps too.

::

    names = record(lambda: store.put("key", value))           # ["mutex_lock", "catalog.commit", "open_file", ...]
    with at_step(2, raising(OSError(errno.EIO, "injected"))):
        store.put("key", value)                               # raises
    with at_step(3, die, after=True):
        store.put("key", value)                               # does not return: the process is killed
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from memstore.engine import Catalog, syscalls

COMMIT = "catalog.commit"

_PURE = {
    "same_bytes",
    "buffer_address",
    "memory_at",
    "long_words",
    "thread_id",
    "words",
}  # compute, and ask the kernel nothing
STEPS = frozenset(
    {
        COMMIT,
        *(
            name
            for name, value in vars(syscalls).items()
            if callable(value)
            and not name.startswith("_")
            and name not in _PURE
            and not isinstance(value, type)
            and (value.__module__ in (syscalls.__name__, "posix") or name.startswith("mutex_"))
        ),
    }
)

# Steps that undo or end something, and can't fail in a way that a caller could answer; finalizers call some of them.
CLEANUPS = frozenset({"close", "close_all", "unlock", "mutex_unlock", "mutex_recovered", "futex_wake", "map_nothing"})

Hook = Callable[[int, str], None]  # called with a step's number, from 1, and its name


@contextmanager
def watching(before: Hook, after: Hook, *, names: frozenset[str] = STEPS) -> Generator[None]:
    """Calls `before` and `after` around each step of this thread.

    Args:
        before: called with the number of the step, from 1, and its name.
        after: called in the same way.
        names: those of the steps that count; by default all.
    """
    owner = threading.get_ident()
    count = 0

    def step(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal count
        if threading.get_ident() != owner or name not in names:
            return call(*arguments, **options)
        count += 1
        number = count
        before(number, name)
        try:
            return call(*arguments, **options)
        finally:  # a call that failed has been made too
            after(number, name)

    def replacement(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: step(name, call, *arguments, **options)

    real = {name: getattr(syscalls, name) for name in STEPS - {COMMIT}}
    commit = Catalog.commit
    collects = gc.isenabled()
    try:
        gc.disable()
        for name, call in real.items():
            setattr(syscalls, name, replacement(name, call))
        Catalog.commit = staticmethod(replacement(COMMIT, commit))
        yield
    finally:
        Catalog.commit = staticmethod(commit)
        for name, call in real.items():
            setattr(syscalls, name, call)
        if collects:
            gc.enable()


def record(operation: Callable[[], object], *, names: frozenset[str] = STEPS) -> list[str]:
    """Runs an operation.

    Args:
        operation: called without arguments.
        names: those of the steps that count; by default all.

    Returns:
        The names of its steps, in order.
    """
    found: list[str] = []
    with watching(lambda _, name: found.append(name), lambda *_: None, names=names):
        operation()
    return found


@contextmanager
def at_step(
    number: int, action: Callable[[], None], *, after: bool = False, names: frozenset[str] = STEPS
) -> Generator[None]:
    """Calls `action` right before one step of this thread, or right after it.

    Args:
        number: which step, from 1.
        action: called without arguments.
        after: call it after the step.
        names: those of the steps that count; by default all.
    """

    def hook(found: int, _: str) -> None:
        if found == number:
            action()

    def nothing(*_: object) -> None:
        pass

    with watching(nothing if after else hook, hook if after else nothing, names=names):
        yield


def die() -> None:
    """Ends the process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def raising(error: BaseException) -> Callable[[], None]:
    """An action that raises a copy of `error`: through its traceback an exception keeps alive what was worked on."""

    def action() -> None:
        raise copy.copy(error)

    return action
