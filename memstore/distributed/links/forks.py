"""What a forked child does with its parent's connections: it closes its copies, and never sends or reads a byte there.

A copy that stayed open would keep the connection alive after the parent's end, and its waits at the server with it.
Sockets are made under a lock that forks take, so that none is between its making and its entry in the list.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from memstore._threads import Hooks, around_forks


class LeftInFork(Protocol):
    def leave_to_parent(self) -> None:
        """In the child: gives up sockets, locks and threads, which are the parent's."""
        ...


_making = threading.RLock()  # a signal handler that interrupts us may fork
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_owners: weakref.WeakSet[LeftInFork] = weakref.WeakSet()


def made(make: Callable[[], socket.socket]) -> socket.socket:
    """A new socket, which forked children close. `make` must not wait."""
    with _making:
        made = make()
        _sockets.add(made)
    return made


def leave_in_forks(owner: LeftInFork) -> None:
    """From now on, for as long as it lives, forked children call its `leave_to_parent`."""
    with _making:
        _owners.add(owner)


def _before_fork() -> None:
    _making.acquire()


def _after_fork_in_parent() -> None:
    _making.release()


def _after_fork_in_child() -> None:
    global _making
    _making = threading.RLock()
    for owner in list(_owners):
        owner.leave_to_parent()
    for one in list(_sockets):
        one.close()


around_forks(Hooks(_before_fork, _after_fork_in_parent, _after_fork_in_child))
