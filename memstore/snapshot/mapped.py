"""The files of a snapshot, mapped into one range of addresses, as the source of lazy leaves.

A source is pickled as a reference: the path, and what its files were. Who unpickles it maps them, if they still are.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from memstore.engine import ExternalFiles, Leaf, decode_external, map_external, opened
from memstore.errors import CorruptionError, VersionGoneError
from memstore.sharding import Box, StoredBox
from memstore.snapshot.manifest import StoredTensor
from memstore.snapshot.stored import Stored
from memstore.structure import DTYPES, count
from memstore.view import Memory, Source


class Places:
    """Where the tensors of a snapshot lie in the range of addresses that their files are mapped to.

    Args:
        tensors: whose files are needed.

    Attributes:
        files: these files, encoded.
    """

    def __init__(self, stored: Stored, tensors: Iterable[StoredTensor]) -> None:
        found = ExternalFiles()
        self._bases: dict[int, int] = {}
        for index in sorted({box.file for tensor in tensors for box in tensor.boxes}):
            file = stored.manifest.files[index]
            stored.check_size(file)
            path = f"{os.path.realpath(stored.path)}/{file.name}"
            with opened(path) as (_, status):
                self._bases[index] = found.add(path, status)
        self.files = found.encode()

    def of(self, tensor: StoredTensor) -> Place:
        if not tensor.boxes:
            return Place(0, ())
        boxes = sorted(tensor.boxes, key=lambda box: box.offsets)
        first = self._bases[boxes[0].file] + boxes[0].offset
        end = first
        for box in boxes:
            has_rows = not box.shape or (not any(box.offsets[1:]) and box.shape[1:] == tensor.shape[1:])
            if self._bases[box.file] + box.offset != end or not has_rows:
                break
            end += box.nbytes
        else:
            return Place(first, ())
        return Place(
            first,
            tuple(StoredBox(Box(box.offsets, box.shape), self._bases[box.file] + box.offset, 0, None) for box in boxes),
        )


class Place(NamedTuple):
    """Where a tensor lies: whole, in C order, from `start` on; or in boxes, if there are any."""

    start: int
    boxes: tuple[StoredBox, ...]


def leaf_at(tensor: StoredTensor, start: int) -> Leaf:
    nbytes = count(tensor.shape) * DTYPES[tensor.dtype].itemsize
    return Leaf((), tensor.dtype, tensor.shape, None, start, nbytes)


class MappedFiles(Source):
    """Files of a snapshot, mapped.

    Args:
        path: of the snapshot.
        files: which, and as they were when it was opened, encoded.
    """

    __slots__ = ("_files",)

    def __init__(self, path: str, files: bytes) -> None:
        mapping = map_external(decode_external(files))
        memory: Memory = np.zeros(0, np.uint8) if mapping is None else np.asarray(mapping)
        super().__init__(memory, mapping, path, is_on_disk=mapping is not None)
        self._files = files

    @property
    def title(self) -> str:
        return f"snapshot={self.key!r}"

    def damaged(self, detail: str, place: int = 0) -> CorruptionError:
        files = decode_external(self._files)
        path = files[bisect_right([file.base for file in files], place) - 1].path if files else self.key
        return CorruptionError(path=path, detail=detail)

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (self.key, self._files)


def receive(path: str, files: bytes) -> MappedFiles:
    """Unpickles a source. Raises VersionGoneError if its files are gone, or others by now."""
    try:
        return MappedFiles(path, files)
    except CorruptionError as error:
        raise VersionGoneError(
            f"a reference to a part of the snapshot {path} came when that was gone, or another one: {error.detail}",
            key=path,
        ) from None
