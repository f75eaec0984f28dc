"""Private views of files, mapped as long as anything refers to them.

Arrays made of a `Mapping` keep it alive, and so do slices of them and tensors made of slices. With it lives the file's
shared lock; where mappings keep no locks (overlay: see `filesystem.mappings_keep_locks`), by the open file, which is
closed with it. It is unmapped when the last of them goes. Nothing is unmapped because the interpreter exits: finalizers
of others may still read tensors then.

A signal handler that raises, at whatever point, must not lose a mapping, for the lock would be lost with it. So what
unmaps it is ready before it is made, and both are single calls in C: see `syscalls.map_into` and `syscalls.Cleanup`.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import msgspec

from memstore.engine import syscalls
from memstore.engine.syscalls import Cleanup

_live: dict[int, int] = {}  # size by address, of this process's mappings
_watched: dict[int, weakref.ref[Any]] = {}  # other bytes, by address; dead ones too, until they are many
_MOST_WATCHED = 1024  # before those that are dead are looked for
_look_at = [_MOST_WATCHED]


class Mapping(msgspec.Struct, gc=False):
    """The bytes of a file, for numpy: `np.asarray(mapping)`.

    The garbage collector doesn't see it, nor what it refers to. So it never unmaps what another object of the same
    dead cycle brings back to life: the mapping goes with the last reference, and not before.
    """

    address: int
    size: int
    _cleanup: Cleanup
    _file: Cleanup | None  # after it: the lock goes when the bytes are gone

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}

    def view(self) -> memoryview:
        """The bytes without numpy. It does not keep the mapping alive."""
        return syscalls.memory_at(self.address, self.size)


def map_file(fd: int | None, size: int, file: Cleanup | None = None, *, shared: bool = False) -> Mapping:
    """Maps `size` bytes of a file copy-on-write; without one, zeros: room for `syscalls.map_over`.

    `file` closes what is to stay open as long as it is mapped. With `shared`, the file is what is written to.
    """
    place = [syscalls.NOT_MAPPED]
    sizes = map(_live.pop, place, itertools.repeat(size))  # taken out first: once unmapped, another may lie there
    cleanup = Cleanup(syscalls.unmap, place, sizes)
    if fd is None:
        syscalls.map_room_into(place, size)
    else:
        syscalls.map_into(place, fd, size, shared=shared)
    address = place[0]
    _live[address] = size
    return Mapping(address, size, cleanup, file)


def watch(address: int, memory: Any) -> None:
    """Counts other bytes of a value, those of an inline one, among the mappings, as long as `memory` lives.

    It is an array. (A WeakValueDictionary takes a microsecond a value.)
    """
    _watched[address] = weakref.ref(memory)
    if len(_watched) > _look_at[0]:
        for place, found in list(_watched.items()):
            if found() is None and _watched.get(place) is found:
                del _watched[place]
        _look_at[0] = 2 * len(_watched) + _MOST_WATCHED


def lies_in_mapping(address: int) -> bool:
    """Whether `address` is in a live mapping of this process."""
    if any(start <= address < start + size for start, size in list(_live.items())):
        return True
    others = ((start, found()) for start, found in list(_watched.items()))
    return any(memory is not None and start <= address < start + memory.nbytes for start, memory in others)
