"""What `keys()` returns: an iterator that says what it is where a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterator

from memstore.wording import short


class Keys(Iterator[str]):
    """The keys of a store, read while they are iterated over. A loop takes them from `found`, at its speed.

    Args:
        found: the keys.
        prefix: what was asked for.
        root: the store's folder.
    """

    __slots__ = ("_call", "_found", "_root")

    def __init__(self, found: Iterator[str], prefix: str, root: str) -> None:
        self._found, self._root = found, root
        self._call = f"keys({short(prefix) if prefix else ''})"

    def __iter__(self) -> Iterator[str]:
        return self._found

    def __next__(self) -> str:
        return next(self._found)

    def __repr__(self) -> str:
        return f"<{self._call} of {self._root}, read while they are iterated over: list(store.{self._call}) has them>"
