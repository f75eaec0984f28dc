"""What lazy leaves read from: one version, pinned, with its bytes mapped; and the count of what was read.

A source pins its version as a Ref does: the mapping keeps the segment's lock, pickling takes a lease, and who unpickles
it has the version mapped, and checked, at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from memstore import contents
from memstore.engine import (
    HEAD_SIZE,
    Mapping,
    Record,
    Root,
    abandon_root,
    arrive,
    belongs,
    close_root,
    decode_record,
    encode_record,
    files_of,
    gone,
    map_entry,
    retain_root,
    segment_path,
    syscalls,
    take_lease,
)
from memstore.errors import CorruptionError, StoreClosedError
from memstore.late_imports import between_forks

Memory = np.ndarray[Any, np.dtype[np.uint8]]

_lock = threading.Lock()
_total = 0


def count_read(nbytes: int) -> None:
    global _total
    with _lock:
        _total += nbytes


def bytes_read() -> int:
    """Returns how many bytes this process has read through lazy leaves and `read_rows` so far.

    It counts the elements that were used, each time they are; what slicing, printing or sending a view touches is none.
    """
    return _total


@functools.cache
def _prepare_torch() -> None:
    """Imports what torch's C++ imports at the first operator on a lazy leaf: there, a fork would not wait for it."""
    with between_forks(), contextlib.suppress(ImportError):  # a torch without distributed
        importlib.import_module("torch.distributed.tensor")


class Source:
    """A version of a key and its data section in memory.

    Attributes:
        memory: the data section. Never written: nobody else may hold this mapping.
        is_on_disk: whether its bytes may have to come from a disk.
    """

    __slots__ = ("__weakref__", "_options", "_record", "is_on_disk", "key", "mapping", "memory", "root")

    def __init__(
        self,
        root: Root,
        key: str,
        record: Record,
        mapping: Mapping | None,
        memory: Memory,
        options: dict[str, Any],
    ) -> None:
        """`options`: the sender's mode, timeout, verify and lease, for references to it."""
        _prepare_torch()
        retain_root(root)
        self.root, self.key, self.mapping, self.memory = root, key, mapping, memory
        self._record, self._options = record, options
        self.is_on_disk = mapping is not None and (not root.on_tmpfs or record.adopted is not None)

    @property
    def address(self) -> int:
        """Where its memory lies."""
        return int(self.memory.__array_interface__["data"][0])

    @property
    def version(self) -> int:
        return self._record.version

    @property
    def segment(self) -> int:
        """The store's file that holds it, 0 for inline values and files of others."""
        return self._record.segment

    @property
    def start(self) -> int:
        """Of the data section, in its file."""
        return self._record.start

    def open_file(self) -> int | None:
        """The file that is mapped, opened once more; None if its name has it no longer, or there is no room for one.

        A folder may be removed while its values are held, and a name be given to another put.
        """
        root = self.root
        try:
            fd = syscalls.open_file(segment_path(root.segments, self.segment), os.O_RDONLY, 0, root.segments_fd)
        except (OSError, StoreClosedError):
            return None
        with contextlib.suppress(OSError):  # a FIFO has no offsets
            if belongs(syscalls.read_at(fd, HEAD_SIZE, 0), self._record.put_id, root.settings.store):
                return fd
        syscalls.close(fd)
        return None

    def damaged(self, detail: str) -> CorruptionError:
        root, record = self.root, self._record
        path = next(iter(files_of(root, record)), f"{root.path} (inline)")
        return CorruptionError(f"{self.key!r}: {path}: {detail}", key=self.key, path=path, detail=detail)

    def __reduce__(self) -> tuple[Any, ...]:
        root = self.root
        options = {name: self._options[name] for name in ("mode", "timeout", "lease")}
        take_lease(root, self.key, self._record, options["lease"], options)
        # what the leaves know is left out: a reference to one leaf of many shall be small
        record = msgspec.structs.replace(
            self._record, description=b"", objects=b"", checksums=None, objects_checksum=None
        )
        stored = encode_record(self.key.encode(), record)
        return receive, (root.path, root.settings.store, self.key, stored, options)

    def __del__(self) -> None:
        root = getattr(self, "root", None)
        if root is not None:
            abandon_root(root)


def receive(path: str, store: str, key: str, stored: bytes, options: dict[str, Any]) -> Source:
    """Unpickles a source: opens its store, and maps the version while the lease holds.

    Raises:
        NotAStoreError: there is no such store here.
        VersionGoneError: the version was replaced, and the lease is over.
    """
    name = key.encode()
    record = decode_record(name, stored)
    root = arrive(path, store, key, record.version, options)
    try:
        with root.guard:
            held = map_entry(root, name, record)
        if held is None:
            raise gone(root, key, record.version, options["lease"])
        return Source(root, key, record, held.mapping, contents.memory_of(held), options)
    finally:
        close_root(root)


class Span:
    """The bytes of one stored leaf, in their source, and their checksum until somebody has checked it.

    Attributes:
        start: where the storages of its lazy leaves start, in the source: others may share them.
        base: a tensor over the storage that operators read from; None until the first one does.
        populated: how many bytes, from the first on, are mapped without a fault: see pages.py.
    """

    __slots__ = ("base", "checksum", "nbytes", "offset", "populated", "source", "start")

    def __init__(self, source: Source, offset: int, nbytes: int, checksum: bytes | None, start: int) -> None:
        self.source, self.offset, self.nbytes, self.checksum, self.start = source, offset, nbytes, checksum, start
        self.base: torch.Tensor | None = None
        self.populated = 0

    def check(self) -> None:
        """Reads the whole leaf, the first time. Raises CorruptionError."""
        data = self.source.memory[self.offset : self.offset + self.nbytes]
        count_read(data.nbytes)
        if xxhash.xxh3_64_digest(data.data) != self.checksum:
            raise self.source.damaged(f"the bytes of the leaf at {self.offset:,} don't fit their checksum")
        self.checksum = None
