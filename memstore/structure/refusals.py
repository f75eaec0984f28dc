"""Refusals on the way through a value: the reason, and the path of the leaf, which grows on the way up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class RefusedError(Exception):
    """A part of the value can't be stored. `path` grows on the way up, so that the message names the leaf.

    Becomes an UnsupportedValueError where the value is known.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[Any] = []  # innermost first

    def message(self) -> str:
        return f"{render_path(reversed(self.path))}: {self.reason}"


class TooDeepError(RefusedError):
    """More levels than allowed; on the way up the containers are collected, to tell a cycle from mere depth."""

    def __init__(self, levels: int) -> None:
        super().__init__(f"more than {levels} levels of containers")
        self.containers: list[Any] = []

    def message(self) -> str:
        containers, path = self.containers[::-1], self.path[::-1]  # outermost first
        seen: dict[int, int] = {}
        for level, container in enumerate(containers):
            first = seen.setdefault(id(container), level)
            if first != level:
                return f"{render_path(path[:level])}: a container that contains itself: {render_path(path[:first])}"
        return f"{render_path(path[:3])}...: {self.reason}"


class SharedTooOftenError(RefusedError):
    """Containers that stand in so many places that the tree of all of them has no end: a few lines can make it."""

    def __init__(self, entries: int) -> None:
        super().__init__(
            f"containers that stand in so many places that their entries, which each place has for itself, are more "
            f"than {entries:,}; put what is shared once, under a key of its own, and what stands for it instead"
        )

    def message(self) -> str:
        return f"{render_path(self.path[::-1][:3])}{'...' if len(self.path) > 3 else ''}: {self.reason}"


def render_path(path: Iterable[Any]) -> str:
    return "value" + "".join(f"[{key!r}]" for key in path)
