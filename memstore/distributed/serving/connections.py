"""Which sessions have a connection to this host: by them it is known whose clients are gone."""

from __future__ import annotations

import threading


class Connections:
    """Thread-safe. Connections are numbers, of which none comes again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[int, set[int]] = {}  # by connection
        self._left: set[int] = set()  # of connections that have ended lately

    def note(self, connection: int | None, session: int) -> None:
        """A call of that session came by that connection. Not after its end: by the thread that calls `end`.

        None: by none that lasts, as those of index actors.
        """
        with self._lock:
            if connection is None:
                self._left.add(session)
                return
            self._sessions.setdefault(connection, set()).add(session)

    def end(self, connection: int) -> None:
        with self._lock:
            self._left |= self._sessions.pop(connection, set())

    def sessions(self) -> set[int]:
        """Those that have a connection, or had one since this was last called."""
        with self._lock:
            found, self._left = self._left.union(*self._sessions.values()), set()
        return found
