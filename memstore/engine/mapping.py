"""Mapping: a private view of a file's bytes, mapped as long as anything refers to it.

It exports its bytes by numpy's array interface, so that an array made of it, every slice of that array and every
tensor made of a slice keep it alive, and the file's shared lock with it. It is unmapped when the last of them goes;
never by a finalizer at exit, when tensors may still be read by others' finalizers.
"""

from __future__ import annotations

import sys
from typing import Any

from memstore.engine import syscalls

_live: dict[int, int] = {}  # start -> end, of every mapping of this process


class Mapping:
    """`size` bytes of the file behind `fd`, copy-on-write. The file's lock lives as long; `fd` may be closed."""

    __slots__ = ("__weakref__", "address", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.size = 0
        self.address = syscalls.map_private(fd, size)
        self.size = size
        _live[self.address] = self.address + size

    def __del__(self) -> None:
        if self.size and not sys.is_finalizing():
            _live.pop(self.address, None)
            syscalls.unmap(self.address, self.size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}


def lies_in_mapping(address: int) -> bool:
    """Whether `address` is in a live mapping of this process."""
    return any(start <= address < end for start, end in tuple(_live.items()))
