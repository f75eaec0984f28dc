"""Checks of what was read from bytes that may come from a hostile file."""

from __future__ import annotations

from typing import Any


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
    """The payload, once it is known to have exactly these types."""
    require(
        len(payload) == len(types)
        and all(
            type(item) in (kind if type(kind) is tuple else (kind,)) for item, kind in zip(payload, types, strict=True)
        ),
        "a node whose fields are not those of its kind",
    )
    return payload


def sizes(value: Any) -> tuple[int, ...]:
    """A shape: integers from 0 to 2**63 - 1."""
    require(
        type(value) is list and all(type(item) is int and 0 <= item < 1 << 63 for item in value), "a malformed shape"
    )
    return tuple(value)
