"""Mapped snapshots: files that are mapped into one range of addresses, for views and for entries of a store.

A `MappedFiles` is the source of lazy leaves (`view`). It is pickled as a reference: the path, and what its files were.
Who unpickles it maps them, if they still are. `describe_snapshot` makes the record of a store's key whose value lies
in the files of a snapshot.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore import _modes as modes
from memstore import structure
from memstore.contents import encode_boxes
from memstore.engine import (
    ALIGNMENT,
    Content,
    ExternalFiles,
    Leaf,
    base_after,
    check_header,
    decode_external,
    end_of,
    map_external,
    opened,
)
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError, VersionGoneError
from memstore.sharding import Box, StoredBox
from memstore.snapshot.manifest import ManifestTensor
from memstore.snapshot.names import rank_of
from memstore.snapshot.reading import ReadRequest, new_target, read_into, state_dict_of
from memstore.snapshot.storage import SILENT
from memstore.snapshot.stored import Stored, Value
from memstore.structure import DTYPES, ExternalValue, count, over, traits
from memstore.view import Memory, Source, StoredTensor, lazy_leaf

# --- Views, and entries of a store -----------------------------------------------------------------------------------


def describe_snapshot(key: str, path: str | os.PathLike[str], format: object, *, allow_pickle: bool) -> Content:
    """Describes rank 0's state dicts, which lie in the files of a snapshot, for a record.

    Args:
        key: for errors.
        format: not used: the arguments are those of `formats.describe_files`.
    """
    try:
        stored = Stored(os.path.abspath(path))
        values = stored.values(0)
        places = MappedPlaces(stored, [tensor for value in values for tensor in value.tensors])
        starts, boxes = places.with_room([tensor for value in values for tensor in value.tensors])
        keys = [value.key for value in values]
        try:
            joined = structure.join_external(keys, [ExternalValue(one.plan, one.objects) for one in values], starts)
        except CorruptionError as error:
            raise stored.damaged(error.detail) from error
        boxes = {leaf: found for leaf, found in boxes.items() if leaf not in joined.plan.same}
        check_header(key, len(joined.plan.description) + len(joined.objects))
    except MemstoreError as error:
        error.key = key
        raise
    return Content(
        joined.plan.description,
        joined.objects,
        joined.plan.nbytes,
        adopted=places.files,
        boxes=encode_boxes(boxes, {}) if boxes else None,
    )


def load_snapshot(key: str, path: str | os.PathLike[str], format: object, *, allow_pickle: bool) -> Any:
    """Reads rank 0's state dicts into new memory, and compares them with their checksums."""
    try:
        stored = Stored(os.path.abspath(path))
        values = stored.values(0)
        return {value.key: state_dict_of(stored, value, allow_pickle=allow_pickle) for value in values}
    except MemstoreError as error:
        error.key = key
        raise


@modes.put_aside()
def view(stored: Stored, rank: int, *, allow_pickle: bool) -> dict[str, Any]:
    """Returns the state dicts of a rank with lazy leaves; see `Snapshot.view`."""
    values = stored.values(rank)
    places = MappedPlaces(stored, [tensor for value in values for tensor in value.tensors])
    source = MappedFiles(stored.path, places.files)
    with torch.inference_mode(False):
        return {
            value.key: stored.build(value, _lazy_leaves(stored, value, places, source), allow_pickle=allow_pickle)
            for value in values
        }


def _lazy_leaves(stored: Stored, value: Value, places: MappedPlaces, source: MappedFiles) -> list[torch.Tensor]:
    """Returns lazy leaves, and plain ones where a container looks into them (jagged, quantized, numpy arrays)."""
    leaves: list[torch.Tensor] = []
    plan, loaded = value.plan, value.plan.loaded
    for i, (tensor, leaf, kind) in enumerate(zip(value.tensors, plan.leaves, plan.traits, strict=True)):
        start, boxes = places.of(tensor)
        if i in plan.same:
            leaves.append(leaves[plan.same[i]])
        elif i in loaded and boxes:
            made = new_target(tensor)
            read_into(stored, [ReadRequest(tensor, made.shards)], SILENT)
            leaves.append(traits.with_traits(made.value, kind))
        elif i in loaded:
            leaves.append(traits.with_traits(_over_mapping(source, leaf, start), kind))
        else:
            leaves.append(lazy_leaf(StoredTensor, source, leaf, start, boxes, kind))
    return leaves


def _over_mapping(source: MappedFiles, leaf: Leaf, start: int) -> torch.Tensor:
    part = source.memory[start : start + leaf.nbytes]
    if start % DTYPES[leaf.dtype].itemsize:
        part = part.copy()
    storage = torch.from_numpy(part).untyped_storage()
    storage._memstore_mapping = source.mapping  # pyright: ignore[reportAttributeAccessIssue] - as structure's own leaves
    return over(storage, DTYPES[leaf.dtype], 0, leaf.shape, traits.contiguous_stride(leaf.shape))


# --- Files, mapped ---------------------------------------------------------------------------------------------------


class MappedPlaces:
    """The places of tensors in the range of addresses that the files of a snapshot are mapped to.

    Args:
        tensors: whose files are needed.

    Attributes:
        files: these files, encoded.
    """

    def __init__(self, stored: Stored, tensors: Iterable[ManifestTensor]) -> None:
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

    def of(self, tensor: ManifestTensor) -> MappedPlace:
        if len(tensor.boxes) == 1:
            (box,) = tensor.boxes
            return MappedPlace(self._bases[box.file] + box.offset, ())
        if not tensor.boxes:
            return MappedPlace(0, ())
        boxes = sorted(tensor.boxes, key=lambda box: box.offsets)
        starts = [self._bases[box.file] + box.offset for box in boxes]
        end = starts[0]
        for box, start in zip(boxes, starts, strict=True):
            if start != end or box.shape[1:] != tensor.shape[1:]:
                break
            end += box.nbytes
        else:
            return MappedPlace(starts[0], ())
        return MappedPlace(
            starts[0],
            tuple(
                StoredBox(Box(box.offsets, box.shape), start, self._ranks[box.file], None)
                for box, start in zip(boxes, starts, strict=True)
            ),
        )

    def with_room(self, tensors: Sequence[ManifestTensor]) -> tuple[list[int], dict[int, tuple[StoredBox, ...]]]:
        """Returns where tensors start, and the boxes of those in boxes, which start in room behind the files.

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


class MappedPlace(NamedTuple):
    """The place of a tensor: whole, in C order, from `start` on; or in boxes, if there are any."""

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
        return receive_mapped_files, (self.key, self._files)


def receive_mapped_files(path: str, files: bytes) -> MappedFiles:
    """Unpickles a source. Raises VersionGoneError if its files are gone, or others by now."""
    try:
        return MappedFiles(path, files)
    except CorruptionError as error:
        raise VersionGoneError(
            f"a reference to a part of the snapshot {path} came when that was gone, or another one: {error.detail}",
            key=path,
        ) from None
