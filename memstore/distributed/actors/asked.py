"""A request, for whoever answers it: what both doors of an index process bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Asked(Protocol):
    """The listener's requests are such (`links.Asked`), and those of an index actor.

    Attributes:
        message: as it was sent.
        deadline: monotonic; nobody waits for the answer after it.
        connection: a number that no other connection of the listener has, or had; None: it came by none.
    """

    @property
    def message(self) -> bytes: ...
    @property
    def deadline(self) -> float: ...
    @property
    def connection(self) -> int | None: ...

    def reply(self, message: bytes) -> None:
        """Answers it. From any thread; it never waits. Nothing happens after the first time, or once nobody listens."""
        ...

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls it once nobody listens any more, if that is before the answer."""
        ...
