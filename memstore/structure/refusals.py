"""Refusals: stored bytes that no put wrote (MalformedError), and values that can't be stored (RefusedError)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# --- Checks of bytes that may come from a hostile file ---------------------------------------------------------------


class MalformedError(Exception):
    """A description or an object that no put wrote. It becomes a CorruptionError where the bytes are known."""


def require(condition: bool, complaint: str) -> None:
    """Raises MalformedError unless the condition holds. No assert statement: those go away under -O."""
    if not condition:
        raise MalformedError(complaint)


def as_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise MalformedError("an array is expected, but something else is there")
    return value


def unpack(payload: list[Any], *types: type | tuple[type, ...]) -> list[Any]:
    """Returns the payload, once it is known to have exactly these types."""
    require(
        len(payload) == len(types)
        and all(
            type(item) in (kind if type(kind) is tuple else (kind,)) for item, kind in zip(payload, types, strict=True)
        ),
        "a node whose fields are not those of its kind",
    )
    return payload


def sizes(value: Any) -> tuple[int, ...]:
    """Reads a shape: integers from 0 to 2**63 - 1."""
    require(
        type(value) is list and all(type(item) is int and 0 <= item < 1 << 63 for item in value), "a malformed shape"
    )
    return tuple(value)


# --- Values that can't be stored: the reason, and the path of the part -----------------------------------------------


class RefusedError(Exception):
    """A part of the value can't be stored. Each container above adds its key to `path`: so the message names the leaf.

    Becomes an UnsupportedValueError where the value is known.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[Any] = []  # innermost first

    def message(self) -> str:
        return f"{render_path(reversed(self.path))}: {self.reason}"


class TooDeepError(RefusedError):
    """More levels than allowed. The containers above are collected, so that the message can tell a cycle from depth."""

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
    """Containers that are shared on level after level: a value of a few lines, whose tree has almost no end."""

    def __init__(self, entries: int) -> None:
        super().__init__(
            f"containers that stand in so many places that their entries, counted for each place, are more than "
            f"{entries:,}; put what is shared under a key of its own, and store that key in the places"
        )

    def message(self) -> str:
        return f"{render_path(self.path[::-1][:3])}{'...' if len(self.path) > 3 else ''}: {self.reason}"


def render_path(path: Iterable[Any]) -> str:
    return "value" + "".join(f"[{key!r}]" for key in path)
