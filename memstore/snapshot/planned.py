"""Planned snapshots: others say who writes which boxes, as torch.distributed.checkpoint does.

A planned save is a take whose ranks don't know of each other, and whose snapshot takes the place of an earlier one:

    1. each rank leaves a trace of the save (`publishing.begin_save`), and writes its file (`drafts.write_boxes`), which
       no manifest names
    2. one rank, alone in the folder, makes one part of all files, and publishes it (`publish_planned`)

A kill before the publication leaves the earlier snapshot, one after it the new one; both leave files that the next
save removes before it writes (`publishing.sweep_saves`). `write_values` takes a snapshot of values whose tensors lie in
files of others. `PlannedSnapshot` reads a planned snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from memstore import _modes as modes
from memstore.errors import CorruptionError, NotAStoreError
from memstore.sharding import Box, Shard, TensorShard
from memstore.snapshot.drafts import DraftPiece, WrittenFile, draft_file, label_of, part_of
from memstore.snapshot.file_storage import FileStorage
from memstore.snapshot.manifest import ManifestBox, ManifestFile, ManifestTensor, ManifestValue
from memstore.snapshot.names import file_name
from memstore.snapshot.publishing import PartTensor, Replacing, SnapshotPart, new_take, publish
from memstore.snapshot.reading import ReadRequest, new_memory, read_into
from memstore.snapshot.stateful import StateWalker
from memstore.snapshot.storage import SILENT, Done
from memstore.snapshot.stored import Stored, Value, check_cover
from memstore.structure import DTYPE_NAMES, DTYPES, copy_into

# --- Writing ---------------------------------------------------------------------------------------------------------


class PlannedTensor(NamedTuple):
    """A tensor of the snapshot, and all its parts.

    Attributes:
        parts: the number of the file that has each, and which of its boxes that is.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[tuple[int, int]]


class SnapshotPlan(NamedTuple):
    """The content of a snapshot.

    Attributes:
        tensors: by the name of the value, and by their own.
        objects: values without tensors.
    """

    files: Sequence[WrittenFile]
    tensors: Mapping[str, Mapping[str, PlannedTensor]]
    objects: Mapping[str, Any]


def publish_planned(path: str, planned: SnapshotPlan, replacing: Replacing, *, save: str, durable: bool) -> None:
    """Makes the files of all ranks a snapshot, as one part.

    Args:
        save: the id of the new snapshot.

    Raises:
        ShardMismatchError: the parts of a tensor don't cover it, or overlap.
        UnsupportedValueError: an object can't be stored, or the manifest would be too long.
        AlreadyExistsError, UnknownOutcomeError: as `publish`.
    """
    files: list[ManifestFile] = []
    numbers: dict[int, int] = {}  # in `files`, of the files that there are
    for i, written in enumerate(planned.files):
        if written.file is not None:
            numbers[i] = len(files)
            files.append(written.file)
    walker = StateWalker(allow_pickle=False)
    tensors: list[PartTensor] = []
    values: list[ManifestValue] = []
    for key, found in planned.tensors.items():
        values.append(walker.add(key, {name: _stand_in(one) for name, one in found.items()}))
        for place, one in zip(values[-1].tensors, found.values(), strict=True):
            boxes: list[ManifestBox] = []
            for file, part in one.parts:
                box = planned.files[file].boxes[part]
                if box is not None:
                    boxes.append(ManifestBox(numbers[file], box.offset, box.nbytes, box.offsets, box.shape))
            name = walker.tensors[place].path
            check_cover(name, one.shape, [Box(box.offsets, box.shape) for box in boxes])
            tensors.append(PartTensor(name, DTYPE_NAMES[one.dtype], one.shape, False, "", tuple(boxes)))
    values += [walker.add(key, value) for key, value in planned.objects.items()]
    whole = SnapshotPart(new_take(path, 1, id=save, durable=durable), 0, tuple(files), tuple(tensors), tuple(values))
    publish(FileStorage(path), [whole], replacing)


def _stand_in(one: PlannedTensor) -> TensorShard:
    """Returns a shard of the tensor that has none of its elements."""
    local = torch.empty((0,) * len(one.shape) if one.shape else (), dtype=one.dtype)
    return TensorShard(local, one.shape, (0,) * len(one.shape))


def write_values(
    path: str,
    values: Mapping[str, Any],
    boxes_of: Callable[[torch.Tensor], Sequence[tuple[Box, torch.Tensor]]],
    *,
    durable: bool,
    allow_pickle: bool,
    done: Done | None,
) -> None:
    """Takes a snapshot of one rank in a folder, which is there and is empty.

    Args:
        values: by their names in the app state.
        boxes_of: gives the boxes of a tensor of a value, each with the tensor that has its elements.
        done: told the bytes that are written.

    Raises:
        UnsupportedValueError: a leaf can't be stored, or the manifest would be too long. Nothing was written.
        StoreFullError, OSError: as `Storage.write`.
    """
    walker = StateWalker(allow_pickle=allow_pickle)
    stored = [walker.add(key, value) for key, value in values.items()]
    found = [
        (label_of(held.path, held.shape, box), DraftPiece(i, box, elements))
        for i, held in enumerate(walker.tensors)
        for shard in held.shards
        for box, elements in boxes_of(shard.local)
    ]
    storage = FileStorage(path, file_mode=0o666)
    files = [draft_file(file_name("state", 0, 1, None), 0, found)] if found else []
    take = new_take(path, 1, durable=durable)
    part = part_of(take, 0, stored, walker.tensors, files, set(), [""] * len(walker.tensors))
    written = [file.write(storage, durable=durable, checksum=True, done=done) for file in files]
    publish(storage, [msgspec.structs.replace(part, files=tuple(written))])


# --- Reading ---------------------------------------------------------------------------------------------------------


_BATCH = 1 << 28  # bytes of memory for what is stored in another dtype than that of its target


class PlannedRead(NamedTuple):
    """A part of a stored tensor, and where it goes: a tensor of just these elements, on any device, of any dtype."""

    tensor: ManifestTensor
    box: Box
    target: torch.Tensor


class PlannedSnapshot:
    """A snapshot in a folder.

    Attributes:
        stored: what is read.

    Raises:
        NotAStoreError: there is none.
        CorruptionError, FormatVersionError: its manifest is damaged, or of a newer memstore.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.stored = Stored(os.path.abspath(path))

    @property
    def id(self) -> str:
        """Returns the id of the save that wrote it."""
        return self.stored.manifest.id

    def has(self, key: str) -> bool:
        """Returns whether there is a value of this name."""
        return self.stored.value(0, key) is not None

    def tensors(self, key: str) -> Mapping[str, ManifestTensor]:
        """Returns the tensors of a value, by name."""
        value = self._value(key)
        return {str(leaf.name[0]): tensor for leaf, tensor in zip(value.plan.leaves, value.tensors, strict=True)}

    def objects(self, key: str) -> Any:
        """Returns a value that has no tensors."""
        value = self._value(key)
        if value.tensors:
            raise self.stored.damaged(f"the value {key!r} has tensors")
        return self.stored.build(value, [], allow_pickle=False)

    def _value(self, key: str) -> Value:
        value = self.stored.value(0, key)
        if value is None:
            raise NotAStoreError(
                f"{self.stored.path} has a snapshot that is no checkpoint, as it has no {key!r}: "
                "memstore.Snapshot reads it"
            )
        return value

    def damaged(self, detail: str) -> CorruptionError:
        """Returns an error that names the manifest."""
        return self.stored.damaged(detail)

    @modes.put_aside()
    def read(self, wanted: Sequence[PlannedRead]) -> None:
        """Fills the targets. Bytes are compared with their checksums, where most of a chunk of 16 MiB is read.

        Raises:
            CorruptionError: bytes are damaged, or missing. The targets then have any content.
            VersionGoneError: a later snapshot has taken the place of this one.
        """
        straight: list[ReadRequest] = []
        others: list[PlannedRead] = []
        for one in wanted:
            if one.box.is_empty:
                continue
            if one.target.dtype == DTYPES[one.tensor.dtype]:
                straight.append(ReadRequest(one.tensor, [Shard(one.box, one.target)]))
            else:
                others.append(one)
        self.stored.check_files([one.tensor for one in wanted])
        if straight:
            read_into(self.stored, straight, SILENT, check_narrow=False)
        batch: list[tuple[PlannedRead, torch.Tensor]] = []
        nbytes = 0
        for one in others:
            made = new_memory(one.tensor.path, one.box.shape, DTYPES[one.tensor.dtype], "cpu")
            if batch and nbytes + made.nbytes > _BATCH:
                self._read_and_cast(batch)
                batch, nbytes = [], 0
            batch.append((one, made))
            nbytes += made.nbytes
        if batch:
            self._read_and_cast(batch)

    def _read_and_cast(self, batch: Sequence[tuple[PlannedRead, torch.Tensor]]) -> None:
        wants = [ReadRequest(one.tensor, [Shard(one.box, made)]) for one, made in batch]
        read_into(self.stored, wants, SILENT, check_narrow=False)
        for one, made in batch:
            copy_into(one.target, made)
