"""Files made of bytes and of tensors that lie elsewhere: written in parallel, each in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from memstore.convert.leaves import Leaf
from memstore.formats import Meter
from memstore.snapshot.storage import FilePart, FileStorage, LateBytes
from memstore.structure import memory_of


class NewFile:
    """A file, put together from its start on."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[FilePart] = []

    def add(self, data: bytes) -> None:
        self._parts.append(FilePart(self.size, data))
        self.size += len(data)

    def add_leaf(self, leaf: Leaf) -> None:
        """All of a tensor, in C order."""
        for part in leaf_parts(leaf, self.size):
            self._parts.append(part)
        self.size += leaf.nbytes

    def around(self) -> tuple[bytes, bytes]:
        """The bytes before the one tensor of it, and those after; of a file without one, all and none."""
        at = next((i for i, part in enumerate(self._parts) if not isinstance(part.memory, bytes)), len(self._parts))
        after = [part.memory for part in self._parts[at:] if isinstance(part.memory, bytes)]
        return b"".join(part.memory for part in self._parts[:at]), b"".join(after)

    def write(self, folder: str, name: str, meter: Meter) -> None:
        """Makes the file in a folder. Raises StoreFullError, and other errors of the file system."""
        storage = FileStorage(folder, file_mode=0o666)
        storage.write(name, self.size, self._parts, durable=True, done=meter.add)


def leaf_parts(leaf: Leaf, start: int) -> Iterator[FilePart]:
    """Where in a file, from `start` on, the bytes of a tensor come from."""
    if not leaf.nbytes:
        return
    if leaf.lies_in_order:
        yield FilePart(start, memory_of(leaf.boxes[0][1]))
        return
    for piece in leaf.pieces():
        yield FilePart(start + piece.start, LateBytes(piece.nbytes, partial(leaf.read, piece)))
