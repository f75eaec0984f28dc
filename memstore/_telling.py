"""Reports of calls on themselves: a debug line of the logger, and a `Call` for who observes this process.

A call asks once, where it begins, whether anybody wants to know (`is_wanted`); if nobody does, it reads no clock.
Stores ask when they are opened, and not in each get. `memstore.metrics` observes, for counters and spans.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from time import perf_counter
from typing import NamedTuple, Protocol
from weakref import WeakSet

_log = logging.getLogger("memstore")


class Call(NamedTuple):
    """A call that has ended without an error, or a thing that happened in one.

    Attributes:
        name: "put", "get", and the others that `memstore.metrics.count_calls` names.
        root: the store's folder, or the path of a snapshot.
        keys: that it was about.
        nbytes: of the values, or of what went.
        began: the time of `perf_counter`.
        seconds: that it took.
        times: how many of them there were: rows, for "replay retry".
    """

    name: str
    root: str
    keys: tuple[str, ...]
    nbytes: int
    began: float
    seconds: float
    times: int = 1


class Observer(Protocol):
    """The part of `memstore.metrics` to which each call of this process is told."""

    def observe(self, call: Call) -> None:
        """Takes a call that has ended. It must not raise, and must not call memstore."""


class _Listening:
    """The observer of this process; None: there is none. Read on hot paths: `listening.observer is not None`."""

    __slots__ = ("observer",)

    def __init__(self) -> None:
        self.observer: Observer | None = None


listening = _Listening()


class Followed(Protocol):
    """A follower of this process, as `memstore.metrics` sees it.

    Attributes:
        root: the path of the store.
        key: that it follows.
        is_ended: whether it was closed.
    """

    root: str
    key: str
    is_ended: bool

    @property
    def version(self) -> int:
        """Returns the version that its module has; 0 if none was loaded yet."""
        ...


followers: WeakSet[Followed] = WeakSet()


def is_wanted() -> bool:
    """Returns whether calls are to be told: to an observer, or to the log at the level DEBUG."""
    return listening.observer is not None or _log.isEnabledFor(logging.DEBUG)


def tell(name: str, root: str, keys: tuple[str, ...], nbytes: int, began: float, times: int = 1) -> None:
    """Tells the observer of a call that began at this time of `perf_counter`, and ends now. Without one, does nothing.

    The arguments are those of `Call`.
    """
    observer = listening.observer
    if observer is not None:
        observer.observe(Call(name, root, keys, nbytes, began, perf_counter() - began, times))


@contextlib.contextmanager
def told(name: str, root: str, keys: tuple[str, ...] = (), nbytes: int = 0) -> Generator[None]:
    """Tells of what is done inside, if it ends without an error. It is for what takes milliseconds: see `is_wanted`."""
    began = perf_counter()
    yield
    tell(name, root, keys, nbytes, began)
