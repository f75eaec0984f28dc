"""The files of a snapshot, mapped into one range of addresses, as the source of lazy leaves.

A source is pickled as a reference: the path, and what its files were. Who unpickles it maps them, if they still are.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memstore.engine import ALIGNMENT, ExternalFiles, base_after, decode_external, end_of, map_external, opened
from memstore.errors import CorruptionError, UnsupportedValueError, VersionGoneError
from memstore.sharding import Box, StoredBox
from memstore.snapshot.format import StoredTensor, rank_of
from memstore.snapshot.read.stored import Stored
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
        with stored.reading():
            for index in sorted({box.file for tensor in tensors for box in tensor.boxes}):
                file = stored.manifest.files[index]
                stored.check_size(file)
                path = f"{os.path.realpath(stored.path)}/{file.name}"
                with opened(path) as (_, status):
                    self._bases[index] = found.add(path, status)
        self.files = found.encode()
        self._ranks = {index: rank_of(stored.manifest.files[index].name) for index in self._bases}

    def of(self, tensor: StoredTensor) -> Place:
        if len(tensor.boxes) == 1:
            (box,) = tensor.boxes
            return Place(self._bases[box.file] + box.offset, ())
        if not tensor.boxes:
            return Place(0, ())
        boxes = sorted(tensor.boxes, key=lambda box: box.offsets)
        starts = [self._bases[box.file] + box.offset for box in boxes]
        end = starts[0]
        for box, start in zip(boxes, starts, strict=True):
            if start != end or box.shape[1:] != tensor.shape[1:]:
                break
            end += box.nbytes
        else:
            return Place(starts[0], ())
        return Place(
            starts[0],
            tuple(
                StoredBox(Box(box.offsets, box.shape), start, self._ranks[box.file], None)
                for box, start in zip(boxes, starts, strict=True)
            ),
        )

    def with_room(self, tensors: Sequence[StoredTensor]) -> tuple[list[int], dict[int, tuple[StoredBox, ...]]]:
        """Where tensors start, and the boxes of those in boxes, by number: these start in room behind the files.

        There a get puts them together (docs/format.md); what is one tensor has one place.
        """
        end = base_after(end_of(decode_external(self.files)), 0)
        room: dict[int, int] = {}
        starts: list[int] = []
        found: dict[int, tuple[StoredBox, ...]] = {}
        for number, tensor in enumerate(tensors):
            start, boxes = self.of(tensor)
            if boxes:
                if any(box.place % DTYPES[tensor.dtype].itemsize for box in boxes):
                    raise UnsupportedValueError(
                        f"the parts of {tensor.path!r:.100} don't start on multiples of its elements: attach it with "
                        "copy=True"
                    )
                found[number] = boxes
                if id(tensor) not in room:
                    room[id(tensor)] = end
                    end = -(-(end + count(tensor.shape) * DTYPES[tensor.dtype].itemsize) // ALIGNMENT) * ALIGNMENT
                start = room[id(tensor)]
            starts.append(start)
        return starts, found


class Place(NamedTuple):
    """Where a tensor lies: whole, in C order, from `start` on; or in boxes, if there are any."""

    start: int
    boxes: tuple[StoredBox, ...]


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

    def again(self) -> MappedFiles | None:
        return None if self.mapping is None else MappedFiles(self.key, self._files)

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
