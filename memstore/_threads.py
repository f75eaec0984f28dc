"""Threads: calls that nobody awaits any more, forks, which wait for the imports of other threads, and collections."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from memstore.errors import MissingPackageError, error_of_lack

# --- Imports that come late, when a value first needs them, and forks that wait for them -----------------------------
# A module that another thread is importing in the moment of a fork stays half imported in the child, under a lock that
# nobody there gives back: the child's own import of it waits for ever. So what everybody needs is imported before a
# store can be opened; and what only some need, since it takes a second, is imported `between_forks`.
#
# What is imported runs any code, finalizers and signal handlers too, which may wait for whoever forks. So each of the
# two goes on without the other when it has waited long: an import may be split then, as it would be without this
# module.


PATIENCE = 30.0  # seconds

_lock = threading.RLock()


def call_late(module: str, name: str, *arguments: Any) -> Any:
    """Imports a module between forks, and calls what it has under `name`.

    For `__reduce__`: of a function of its own, pickle would import the module itself, and at any time.
    """
    with between_forks():
        found = importlib.import_module(module)
    return getattr(found, name)(*arguments)


def late_names(door: str, modules: Mapping[str, str], needs: str = "") -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package whose names come with their modules, once somebody asks for one.

    Args:
        door: the package.
        modules: the module of each name.
        needs: the package that they need, as pip is told; empty: none. Without it MissingPackageError is raised.
    """
    package = needs.partition(">")[0]

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        try:
            with between_forks():
                value = getattr(importlib.import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            if not needs or error.name is None or error.name.partition(".")[0] != package:
                raise
            raise MissingPackageError(
                f"{name} needs the package {package}, which isn't installed: pip install '{needs}'"
            ) from None
        setattr(sys.modules[door], name, value)
        return value

    return get


def _do_nothing() -> None:
    """Stands for a hook that a module doesn't have."""


class Hooks(NamedTuple):
    """Functions to be called around a fork, by the thread that forks."""

    before: Callable[[], None] = _do_nothing
    after_in_parent: Callable[[], None] = _do_nothing
    after_in_child: Callable[[], None] = _do_nothing


_hooks: list[Hooks] = []
# Of this thread, one in another: whether the import's end was waited for, and whose `before` ran.
_forks = threading.local()


@contextlib.contextmanager
def between_forks() -> Generator[None]:
    """Keeps forks away while the import statements inside run. It takes a microsecond, so it isn't for hot paths."""
    lock = _lock
    is_ours = lock.acquire(timeout=PATIENCE)
    try:
        yield
    except (OSError, MemoryError, ImportError) as error:
        typed = error_of_lack(error, "a part of memstore, or of a package that it needs, can't be imported now")
        if typed is None:
            raise
        raise typed from error
    finally:
        if is_ours:
            lock.release()


def around_forks(hooks: Hooks) -> None:
    """Registers hooks of a module that may come late.

    Of `os.register_at_fork`, a hook that is registered while a fork waits for the import of its module is called after
    the fork, and was not before: what it was to keep whole is split then. Here all are called, or none.
    """
    _hooks.append(hooks)


def _before_fork() -> None:
    is_ours = _lock.acquire(timeout=PATIENCE)
    ready = list(_hooks)  # those too that came meanwhile
    _forks.__dict__.setdefault("stack", []).append((is_ours, ready))
    for hooks in reversed(ready):
        hooks.before()


def _after_fork_in_parent() -> None:
    is_ours, ready = _forks.stack.pop()
    for hooks in ready:
        hooks.after_in_parent()
    if is_ours:
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _, ready = _forks.stack.pop()
    _lock = threading.RLock()
    for hooks in ready:
        hooks.after_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# --- Collections of garbage ------------------------------------------------------------------------------------------
# A full collection looks at all objects of the process, and a process with torch has half a million of them. Whoever
# makes many objects that stay, such as a take some dozen for each tensor, causes several of them.


_putting_off = 0  # how many bodies of `collect_later` run
_putting_off_lock = threading.RLock()  # a signal may come inside


@contextlib.contextmanager
def collect_later() -> Generator[None]:
    """Puts off collections of cyclic garbage while the body makes many objects. It computes, and waits for nobody."""
    global _putting_off
    with _putting_off_lock:
        is_ours = _putting_off > 0 or gc.isenabled()  # else it is somebody else who doesn't want any
        _putting_off += is_ours
        gc.disable()
    try:
        yield
    finally:
        with _putting_off_lock:
            _putting_off -= is_ours and _putting_off > 0  # 0 in a child that was forked inside
            if is_ours and not _putting_off:
                gc.enable()


def _collect_in_child() -> None:
    global _putting_off, _putting_off_lock
    if _putting_off:
        gc.enable()
    _putting_off, _putting_off_lock = 0, threading.RLock()


around_forks(Hooks(after_in_child=_collect_in_child))


# --- Calls that nobody awaits any more -------------------------------------------------------------------------------
# Calls that nobody waits for any more: who awaited them was cancelled, and may change the tensors at any time.
#
# A call runs in a thread, and nothing ends a thread from outside. So who gives a call up notes its thread in ABANDONED,
# and the call asks:
#
# - a put, when it has copied its last byte: what was given up before is not published, and what was not is whole;
# - a sample that takes rows from all others, under the mutex, before it takes them; and whoever waits there in a line;
# - a load of a model, before it writes into the module, and while it waits for other ranks.
#
# Whoever gives a load up has to know whether it writes by then. So the load first notes its thread in WRITING, **then**
# asks; and the other notes it in ABANDONED, **then** looks into WRITING. One of them sees the other.


ABANDONED: dict[int, object] = {}  # by thread; empty but for moments, so that a call looks at a dict that is empty
WRITING: set[int] = set()  # threads that write into what is their callers', and say so


class AbandonedError(Exception):
    """Refusal of a call that nobody awaits any more: so nobody sees it."""


def is_abandoned() -> bool:
    """Returns whether this thread is named in ABANDONED. Call it if ABANDONED has anything."""
    return threading.get_ident() in ABANDONED


def check_abandoned() -> None:
    """Raises AbandonedError in a thread that is named in ABANDONED. Call it if ABANDONED has anything."""
    if is_abandoned():
        raise AbandonedError("whoever awaited this was cancelled")


@contextlib.contextmanager
def writing() -> Generator[None]:
    """Marks this thread as one that writes into memory of its caller.

    Raises AbandonedError before anything is written.
    """
    me = threading.get_ident()
    WRITING.add(me)
    try:
        if ABANDONED:
            check_abandoned()
        yield
    finally:
        WRITING.discard(me)
