"""Blocks of snapshots in buckets, kept in a store of this host: each is fetched once, by the process that is first.

    snapshot-cache/SNAPSHOT/FILE/NUMBER      a whole group: 1 MiB of a file, or what is left at its end
    snapshot-cache/SNAPSHOT/FILE/NUMBER.N    the block N of a group, 64 KiB, where not all of the group was needed

SNAPSHOT is a hash of the manifest's id, of the URL and of the files' checksums: a snapshot that takes the place of
another one has keys of its own. What is fetched is put when all of it has come, so a process that dies leaves no half.

Who fetches blocks of a group holds a lock of one byte of the store's settings file (`fcntl`, far behind the file's
end), and looks again whether they are there by now. A dead process holds no lock. Without the lock, because the file
system has none or the holder takes minutes, two processes fetch the same: both are right.

The store's capacity, or a quota of "snapshot-cache/", is the limit. Where it is reached, the blocks of other snapshots
go; if there are none, this one's reader goes on without keeping more. This file imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from memstore.engine import LockFile, syscalls
from memstore.errors import KeyNotFoundError, MemstoreError, StoreFullError
from memstore.snapshot.manifest import Manifest

_log = logging.getLogger("memstore")

PREFIX = "snapshot-cache/"
BLOCK = 64 << 10  # bytes that are fetched at least, and that are there or not
GROUP = 16  # blocks that are one value, where all are needed: a value costs 50 to 500 µs
_AT_ONCE = 64  # groups that are fetched under one lock, and put as one
_PATIENCE = 150.0  # seconds for another process that fetches the same: more than one request may take
_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks
_SETTINGS = "memstore.json"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CacheStore(Protocol):
    """A store, as far as a cache needs it."""

    root: str

    def __reduce__(self) -> Any: ...
    def __contains__(self, key: object) -> bool: ...
    def get_many(self, keys: Iterable[str]) -> dict[str, Any]: ...
    def put_many(self, items: Mapping[str, Any]) -> dict[str, int]: ...
    def keys(self, prefix: str = "") -> Iterable[str]: ...
    def clear(self, prefix: str = "") -> int: ...
    def delete(self, key: str, *, missing_ok: bool = False) -> bool: ...


class CachedFile(NamedTuple):
    """A file of a snapshot, in memory.

    Attributes:
        number: in the manifest.
        memory: of its size. What was fetched lies there.
    """

    number: int
    memory: Bytes

    def block(self, number: int) -> Bytes:
        return self.memory[number * BLOCK : (number + 1) * BLOCK]

    def group(self, number: int) -> Bytes:
        return self.memory[number * BLOCK * GROUP : (number + 1) * BLOCK * GROUP]


class BlockCache:
    """The blocks of one snapshot in a store.

    Args:
        store: of this host, opened for writing.
        path: the snapshot's URL.
        manifest: of the snapshot.

    Raises:
        TypeError: `store` is no store.
        ReadOnlyError: it was opened with mode "r".
    """

    def __init__(self, store: CacheStore, path: str, manifest: Manifest) -> None:
        given: Any = store
        if not hasattr(given, "put_many") or not isinstance(getattr(given, "root", None), str):
            raise TypeError(f"cache is a store, as memstore.open returns it, and not {given!r:.100}")
        found = xxhash.xxh3_128(f"{manifest.id} {path}".encode())
        for file in manifest.files:
            found.update(f"{file.name} {file.size} ".encode() + file.sums)
        self.store, self._of = store, f"{PREFIX}{found.hexdigest()}/"
        store.delete(self._of + "-", missing_ok=True)  # which isn't there: it tells a store that can't be written
        self._lock_at = found.intdigest() % (1 << 41) << 20
        self._settings: LockFile | None = None
        with contextlib.suppress(OSError):
            self._settings = LockFile(f"{store.root}/{_SETTINGS}", os.O_RDWR)  # a forked child closes its copy
        self._is_full = False

    def bring(
        self, file: CachedFile, blocks: Sequence[int], fetch: Callable[[Sequence[tuple[int, int]]], None]
    ) -> None:
        """Fills blocks of a file, from the store as far as they are there. The others are fetched, and put there.

        Args:
            blocks: their numbers in the file, in order.
            fetch: fills ranges of the file, by their first bytes and the ends.
        """
        groups: dict[int, list[int]] = defaultdict(list)
        for block in blocks:
            groups[block // GROUP].append(block)
        numbers = list(groups)
        for first in range(0, len(numbers), _AT_ONCE):
            wanted = {number: groups[number] for number in numbers[first : first + _AT_ONCE]}
            missing = self._read(file, wanted)
            if missing:
                with self._alone(file, list(missing)) as has_waited:
                    if has_waited:
                        missing = self._read(file, missing)
                    if missing:
                        fetch(ranges_of([block for found in missing.values() for block in found], len(file.memory)))
                        self._keep(file, missing)

    def _read(self, file: CachedFile, wanted: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Copies what is in the store. Returns the blocks that aren't, by their groups."""
        places: dict[str, tuple[int, int | None]] = {}
        missing: dict[int, Sequence[int]] = {}
        for number, blocks in wanted.items():
            if (key := self._key(file, number)) in self.store:
                places[key] = number, None
                continue
            keys = {block: self._key(file, number, block) for block in blocks}
            places.update({key: (number, block) for block, key in keys.items() if key in self.store})
            if absent := [block for block, key in keys.items() if key not in places]:
                missing[number] = absent
        if places:
            try:
                values = self.store.get_many(places)
            except KeyNotFoundError:  # somebody needed their room in this moment
                return dict(wanted)
            for key, (number, block) in places.items():
                target = file.group(number) if block is None else file.block(block)
                value: Any = values[key]
                if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape == target.shape:
                    target[:] = value
                else:
                    missing[number] = wanted[number]  # a value of somebody else
        return missing

    def _keep(self, file: CachedFile, fetched: Mapping[int, Sequence[int]]) -> None:
        """Puts what was fetched, if there is room."""
        if self._is_full:
            return
        items: dict[str, Bytes] = {}
        for number, blocks in fetched.items():
            if len(blocks) * BLOCK >= len(file.group(number)):
                items[self._key(file, number)] = file.group(number)
            else:
                items.update({self._key(file, number, block): file.block(block) for block in blocks})
        try:
            try:
                self.store.put_many(items)
            except StoreFullError:
                if not self._make_room():
                    raise
                self.store.put_many(items)
        except MemstoreError as error:
            self._is_full = True
            _log.warning("%s has no room for more of a snapshot's cache: %s", self.store.root, str(error))

    def _make_room(self) -> int:
        """Removes what is kept of other snapshots. Returns how many values that were."""
        others = {key[: key.index("/", len(PREFIX)) + 1] for key in self.store.keys(PREFIX) if key.count("/") > 1}
        return sum(self.store.clear(prefix) for prefix in others - {self._of})

    @contextlib.contextmanager
    def _alone(self, file: CachedFile, groups: Sequence[int]) -> Generator[bool]:
        """Lets no other process fetch blocks of these groups. Gives whether another one may have done so just now.

        Groups are locked in order, so processes that need several of them don't wait for each other in a circle.
        """
        if self._settings is None:
            yield False
            return
        base = self._lock_at ^ file.number << 20
        places = sorted({base + number for number in groups})
        locked: list[int] = []
        deadline = time.monotonic() + _PATIENCE
        try:
            with contextlib.suppress(OSError, TimeoutError):  # no such locks, or a holder that is stopped
                for place in places:
                    pause = _PAUSE
                    while not syscalls.lock_byte(self._settings.fd, place):
                        if time.monotonic() > deadline:
                            raise TimeoutError
                        time.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE)
                    locked.append(place)
            yield True
        finally:
            for place in locked:
                with contextlib.suppress(OSError):
                    syscalls.unlock_byte(self._settings.fd, place)

    def _key(self, file: CachedFile, group: int, block: int | None = None) -> str:
        return f"{self._of}{file.number}/{group}" + ("" if block is None else f".{block % GROUP}")


def ranges_of(blocks: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Returns the ranges of bytes that blocks are, those that touch as one."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        start, stop = block * BLOCK, min((block + 1) * BLOCK, size)
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
