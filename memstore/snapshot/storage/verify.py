"""A file of any storage, compared with its sums."""

from __future__ import annotations

from memstore.snapshot.storage.interface import CHUNK, Done, FilePart, Storage

_AT_ONCE = 4 * CHUNK  # bytes, read in parallel


def verify_file(storage: Storage, name: str, size: int, sums: bytes, done: Done | None = None) -> None:
    """Reads all of a file that should have `size` bytes. Raises CorruptionError, which says where it is damaged."""
    memory = memoryview(bytearray(min(size, _AT_ONCE)))
    if not size:
        storage.read(name, [], sums=sums)
    for start in range(0, size, _AT_ONCE):
        storage.read(name, [FilePart(start, memory[: size - start])], sums=sums, done=done)
