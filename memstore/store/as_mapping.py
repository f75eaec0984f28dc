"""A store as a mapping: `store[key]`, `items` and the like, which are get, put and delete by other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

_ABSENT = object()


class AsMapping:
    """For Store. No MutableMapping: its `get` never raises, and it compares by contents."""

    __slots__ = ()

    if TYPE_CHECKING:

        def get(self, key: str, default: Any = ...) -> Any: ...
        def put(self, key: str, value: Any) -> int: ...
        def put_many(self, items: Mapping[str, Any]) -> dict[str, int]: ...
        def delete(self, key: str) -> bool: ...
        def keys(self) -> Iterator[str]: ...

    def __iter__(self) -> Iterator[str]:
        return self.keys()

    def __getitem__(self, key: str) -> Any:
        return self.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: str) -> None:
        self.delete(key)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Iterates over keys and values; keys that are deleted meanwhile are left out."""
        for key in self.keys():
            value = self.get(key, _ABSENT)
            if value is not _ABSENT:
                yield key, value

    def values(self) -> Iterator[Any]:
        """Iterates over the values, as `items`."""
        return (value for _, value in self.items())

    def update(self, items: Mapping[str, Any]) -> dict[str, int]:
        """As `put_many`."""
        return self.put_many(items)
