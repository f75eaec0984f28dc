"""Private views of files, mapped as long as anything refers to them.

A mapping is a `Reservation`: arrays made of its buffer keep it alive, and so do slices of them and tensors made of
slices. With it lives the file's shared lock. It is unmapped when the last of them goes; never by a finalizer at exit,
when tensors may still be read by others' finalizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sized

from memstore.engine import syscalls
from memstore.engine.syscalls import Reservation

_live: weakref.WeakValueDictionary[int, Sized] = weakref.WeakValueDictionary()  # bytes by address, of this process


def map_file(fd: int, size: int) -> tuple[Reservation, int]:
    """Maps `size` bytes of a file copy-on-write. Returns the mapping, and where in it the file starts."""
    mapping, address, start = syscalls.reserve(size)
    syscalls.map_private(address + start, fd, size)
    _live[address] = mapping
    return mapping, start


def watch(address: int, memory: Sized) -> None:
    """Counts other bytes of a value, those of an inline one, among the mappings, as long as `memory` lives."""
    _live[address] = memory


def lies_in_mapping(address: int) -> bool:
    """Whether `address` is in a live mapping of this process."""
    return any(start <= address < start + len(mapping) for start, mapping in list(_live.items()))
