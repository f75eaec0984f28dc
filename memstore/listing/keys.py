"""What `keys()`, `items()` and `values()` return: an iterator that says what it is where a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, TypeVar

from memstore.wording import short

_T = TypeVar("_T")


class WhileRead(Iterator[_T]):
    """What a store has, read while it is iterated over. A loop takes it from `found`, at its speed.

    Args:
        found: the keys, values, or both.
        call: how it was asked for: "keys('a/')".
        root: the store's folder.
        kind: what has all of them at once: "list", "dict".
    """

    __slots__ = ("_call", "_found", "_kind", "_root")

    def __init__(self, found: Iterator[_T], call: str, root: str, kind: str = "list") -> None:
        self._found, self._call, self._root, self._kind = found, call, root, kind

    def __iter__(self) -> Iterator[_T]:
        return self._found

    def __next__(self) -> _T:
        return next(self._found)

    def __repr__(self) -> str:
        return f"<{self._call} of {self._root}, read while they are iterated over: {self._all()} has them>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self._call} is read while it is iterated over: send the store, or {self._all()}")

    def _all(self) -> str:
        return f"{self._kind}(store.{self._call})"


def call_of_keys(prefix: str) -> str:
    """ "keys('a/')"."""
    return f"keys({short(prefix) if prefix else ''})"
