"""Planned snapshots: others say who writes which boxes, as torch.distributed.checkpoint does.

The files of all ranks become one snapshot, which takes the place of an earlier one of its kind at one moment:

    1. each rank leaves a trace of the save (`publishing.begin_save`), and writes its file (`drafts.write_boxes`), which
       no manifest names
    2. one rank, alone in the folder (`publish_planned`): all files are there, and of the size that was said
    3. the earlier snapshot gets a trace: from the next step on no manifest names its files either
    4. the manifest is renamed to its name: the moment of publication. Until then the earlier snapshot is whole
    5. a checkpoint that torch's own writer has left goes: its metadata first, by which torch would read it
    6. files of the earlier snapshot go, and those of saves that have left traces, which died or can't be published

A kill before 4 leaves the earlier snapshot, one after it the new one; both leave files that the next save removes
before it writes (`publishing.sweep_saves`). A kill in 5 leaves two checkpoints, both whole: memstore's readers refuse
them, and the next save replaces both. Of two saves at once, the one that is published last wins; the other's error, if
its files are gone, comes in 2.

`PlannedSnapshot` reads such a snapshot. `write_values` makes a snapshot of values whose tensors lie in files of others.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from memstore import _modes as modes
from memstore.engine import syscalls
from memstore.errors import AlreadyExistsError, CorruptionError, MemstoreError, NotAStoreError, UnknownOutcomeError
from memstore.sharding import Box, Shard, TensorShard
from memstore.snapshot.drafts import DraftPiece, WrittenFile, bytes_of, draft_file, label_of
from memstore.snapshot.file_storage import FileStorage
from memstore.snapshot.manifest import (
    Manifest,
    ManifestBox,
    ManifestFile,
    ManifestTensor,
    ManifestValue,
    encode_manifest,
    read_manifest,
)
from memstore.snapshot.names import (
    CLAIM,
    INDEX,
    MANIFEST,
    file_name,
    id_of,
    is_torch_data,
    others_in,
    save_name,
    take_of,
    trace_of,
)
from memstore.snapshot.progress import SILENT
from memstore.snapshot.publishing import leave_trace, read_present_manifest
from memstore.snapshot.reading import ReadRequest, new_memory, read_into
from memstore.snapshot.stateful import StateWalker
from memstore.snapshot.storage import Done, FilePart, LateBytes, is_unfinished
from memstore.snapshot.stored import Stored, Value, check_cover
from memstore.structure import DTYPE_NAMES, DTYPES, copy_into

# --- Publication -----------------------------------------------------------------------------------------------------


class PlannedTensor(NamedTuple):
    """A tensor of the snapshot, and all its parts: which file has each, and where."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[tuple[int, ManifestBox]]


class SnapshotPlan(NamedTuple):
    """What a snapshot is to have.

    Attributes:
        tensors: by the name of the value, and by their own.
        objects: values without tensors.
    """

    files: Sequence[WrittenFile]
    tensors: Mapping[str, Mapping[str, PlannedTensor]]
    objects: Mapping[str, Any]


def new_save() -> str:
    """The id of a save."""
    return uuid.uuid4().hex[:16]


def publish_planned(
    path: str, planned: SnapshotPlan, *, kind: str, save: str, durable: bool, overwrite: bool
) -> Manifest:
    """Steps 2 to 6.

    Args:
        kind: the name of a value that all snapshots of this kind have, and others have not.
        save: the id of the new snapshot.

    Raises:
        AlreadyExistsError: there is a snapshot of another kind, or of this one and `overwrite` is False.
        UnknownOutcomeError: files that the ranks have written are gone; another save to this folder removed them.
        ShardMismatchError: the parts of a tensor don't cover it, or overlap.
        UnsupportedValueError: an object can't be stored, or the manifest would be too long.
    """
    storage = FileStorage(path)
    manifest = _manifest(planned, save)
    text = encode_manifest(manifest)
    with storage.alone():
        earlier = read_present_manifest(storage, path)
        _check_place(path, earlier, kind, overwrite=overwrite)
        for file in manifest.files:
            if storage.size(file.name) != file.size:
                raise UnknownOutcomeError(
                    f"{path}/{file.name}, which a rank has written, is gone or of another size: another save to this "
                    "checkpoint removed it; save to another path"
                )
        for of_earlier in {id_of(file.name) for file in earlier.files} if isinstance(earlier, Manifest) else ():
            if of_earlier is not None:
                leave_trace(storage, of_earlier)
        storage.replace(MANIFEST, text, durable=durable)
        remove_torchs(path, durable=durable)
        _remove_others(storage, manifest, earlier, {save, *(written.save for written in planned.files)})
    return read_manifest(path, text)


def check_folder(path: str, kind: str, *, overwrite: bool) -> None:
    """Raises AlreadyExistsError if `publish_planned` would, for what is there already; before anything is written."""
    if os.path.isdir(path):
        _check_place(path, read_present_manifest(FileStorage(path), path), kind, overwrite=overwrite)
    elif os.path.lexists(path):
        raise AlreadyExistsError(f"{path} is there, and is no folder: save to another path")


def _check_place(path: str, earlier: Manifest | MemstoreError | None, kind: str, *, overwrite: bool) -> None:
    """Raises AlreadyExistsError. Damaged checkpoints may be replaced, and those of torch's own writer."""
    if isinstance(earlier, Manifest) and not any(value.key == kind for value in earlier.values):
        raise AlreadyExistsError(f"{path} has a snapshot that is no checkpoint: save to another path, or remove it")
    if earlier is not None and not overwrite:
        raise AlreadyExistsError(
            f"Checkpoint already exists in {path}, and overwrite is False: save to another path, or remove it"
        )
    check_others(path, overwrite=overwrite)


def check_others(path: str, *, overwrite: bool) -> None:
    """Raises AlreadyExistsError for another library's checkpoint, unless it is torch's own, and may be overwritten."""
    for other in others_in(path):
        if not other.is_torchs:
            raise AlreadyExistsError(f"{path} has {other.kind} ({other.name}): save to another path, or remove it")
        if not overwrite:
            raise AlreadyExistsError(
                f"Checkpoint already exists in {path}: {other.kind} ({other.name}), and overwrite is False: "
                "save to another path, or remove it"
            )


def remove_torchs(path: str, *, durable: bool) -> None:
    """Step 5. An error says that torch would still read its own checkpoint.

    A kill between the two loops leaves files with tensors that nothing names any more.
    """
    marks = [other.name for other in others_in(path) if other.is_torchs]
    if not marks:
        return
    storage = FileStorage(path)
    for name in marks:
        storage.remove(name)
    if durable:
        syscalls.sync_folder(path)
    for name in storage.names():
        if is_torch_data(name):
            _remove(storage, name)


def _manifest(planned: SnapshotPlan, save: str) -> Manifest:
    files: list[ManifestFile] = []
    numbers: dict[int, int] = {}  # of the files that there are
    for i, written in enumerate(planned.files):
        if written.file is not None:
            numbers[i] = len(files)
            files.append(written.file)
    walker = StateWalker(allow_pickle=False)
    stored: list[ManifestTensor] = []
    values: list[ManifestValue] = []
    for key, tensors in planned.tensors.items():
        state = walker.add(key, {name: _stand_in(one) for name, one in tensors.items()})
        for place, one in zip(state.tensors, tensors.values(), strict=True):
            path = walker.tensors[place].path
            check_cover(path, one.shape, [Box(box.offsets, box.shape) for _, box in one.boxes])
            boxes = tuple(_moved(box, numbers[file]) for file, box in one.boxes)
            stored.append(ManifestTensor(path, DTYPE_NAMES[one.dtype], one.shape, boxes))
        values.append(ManifestValue(*state))
    for key, value in planned.objects.items():
        values.append(ManifestValue(*walker.add(key, value)))
    writer = f"memstore {importlib.import_module('memstore').__version__}"  # which is a layer above this one
    by_key = {value.key: number for number, value in enumerate(values)}
    return Manifest(save, time.time(), writer, 1, tuple(files), tuple(stored), tuple(values), (by_key,))


def _stand_in(one: PlannedTensor) -> TensorShard:
    """A tensor of which nothing is here."""
    local = torch.empty((0,) * len(one.shape) if one.shape else (), dtype=one.dtype)
    return TensorShard(local, one.shape, (0,) * len(one.shape))


def _moved(box: ManifestBox, file: int) -> ManifestBox:
    return ManifestBox(file, box.offset, box.nbytes, box.offsets, box.shape)


def _remove_others(
    storage: FileStorage, manifest: Manifest, earlier: Manifest | MemstoreError | None, saves: set[str]
) -> None:
    """Step 6. Best effort: what can't be removed stays, and harms nobody."""
    keep = {file.name for file in manifest.files}
    theirs = {file.name for file in earlier.files} if isinstance(earlier, Manifest) else set[str]()
    names = storage.names()
    traces = {id for id in map(trace_of, names) if id is not None}
    dead = [name for name in names if take_of(name, None, traces) is not None and name not in (CLAIM, INDEX)]
    # Traces say whose the other files are: so they go after them.
    for name in sorted({*theirs, *dead} - keep, key=lambda name: trace_of(name) is not None):
        _remove(storage, name)
    for name in names:
        if is_unfinished(name):
            _remove(storage, name)
    for save in saves:
        _remove(storage, save_name(save))


def _remove(storage: FileStorage, name: str) -> None:
    with contextlib.suppress(OSError):
        storage.remove(name)


# --- A snapshot of values whose tensors lie somewhere else -----------------------------------------------------------


def write_values(
    path: str,
    values: Mapping[str, Any],
    boxes_of: Callable[[torch.Tensor], Sequence[tuple[Box, torch.Tensor]]],
    *,
    durable: bool,
    allow_pickle: bool,
    done: Done | None,
) -> None:
    """Makes a snapshot in a folder, which is there and is empty.

    Args:
        values: by their names in the app state.
        boxes_of: gives the boxes of a tensor of a value, each with the tensor that has its elements.
        done: told the bytes that are written.

    Raises:
        UnsupportedValueError: a leaf can't be stored, or the manifest would be too long. Nothing was written.
        StoreFullError, OSError: as `FileStorage.write`.
    """
    walker = StateWalker(allow_pickle=allow_pickle)
    stored_values = tuple(ManifestValue(*walker.add(key, value)) for key, value in values.items())
    found: list[tuple[str, DraftPiece]] = []
    for i, held in enumerate(walker.tensors):
        for shard in held.shards:
            for box, elements in boxes_of(shard.local):
                found.append((label_of(held.path, held.shape, box), DraftPiece(i, box, elements)))
    storage = FileStorage(path, file_mode=0o666)
    files: tuple[ManifestFile, ...] = ()
    boxes: list[list[ManifestBox]] = [[] for _ in walker.tensors]
    if found:
        draft = draft_file(file_name("state", 0, 1, None), found)
        parts, at = [FilePart(0, draft.header)], len(draft.header)
        for piece in draft.pieces:
            parts.append(FilePart(at, _memory(piece)))
            boxes[piece.tensor].append(ManifestBox(0, at, piece.nbytes, piece.box.offsets, piece.box.shape))
            at += piece.nbytes
        sums = storage.write(draft.name, draft.size, parts, durable=durable, checksum=True, done=done)
        files = (ManifestFile(draft.name, draft.size, sums),)
    tensors = tuple(
        ManifestTensor(held.path, DTYPE_NAMES[held.dtype], held.shape, tuple(boxes[i]))
        for i, held in enumerate(walker.tensors)
    )
    writer = f"memstore {importlib.import_module('memstore').__version__}"  # which is a layer above this one
    by_key = {value.key: number for number, value in enumerate(stored_values)}
    manifest = Manifest(new_save(), time.time(), writer, 1, files, tensors, stored_values, (by_key,))
    storage.publish(MANIFEST, encode_manifest(manifest), durable=durable)


def _memory(piece: DraftPiece) -> Any:
    """The elements' own memory, or late copies of what lies otherwise."""
    if piece.elements.is_contiguous() and not piece.elements.is_conj() and not piece.elements.is_neg():
        return bytes_of(piece.elements)
    return LateBytes(piece.nbytes, partial(bytes_of, piece.elements))


# --- Reading ---------------------------------------------------------------------------------------------------------


_BATCH = 1 << 28  # bytes of memory for what is stored in another dtype than that of its target


class PlannedRead(NamedTuple):
    """A part of a stored tensor, and where it goes: a tensor of just these elements, on any device, of any dtype."""

    tensor: ManifestTensor
    box: Box
    target: torch.Tensor


class PlannedSnapshot:
    """A snapshot in a folder.

    Raises:
        NotAStoreError: there is none.
        CorruptionError, FormatVersionError: its manifest is damaged, or of a newer memstore.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._stored = Stored(os.path.abspath(path))

    @property
    def id(self) -> str:
        """Of the save that wrote it."""
        return self._stored.manifest.id

    def has(self, key: str) -> bool:
        """Whether there is a value of this name."""
        return self._stored.value(0, key) is not None

    def tensors(self, key: str) -> Mapping[str, ManifestTensor]:
        """Those of a value, by name."""
        value = self._value(key)
        return {str(leaf.name[0]): tensor for leaf, tensor in zip(value.plan.leaves, value.tensors, strict=True)}

    def objects(self, key: str) -> Any:
        """A value without tensors."""
        value = self._value(key)
        if value.tensors:
            raise self._stored.damaged(f"the value {key!r} has tensors")
        return self._stored.build(value, [], allow_pickle=False)

    def _value(self, key: str) -> Value:
        value = self._stored.value(0, key)
        if value is None:
            raise NotAStoreError(
                f"{self._stored.path} has a snapshot that is no checkpoint, as it has no {key!r}: "
                "memstore.Snapshot reads it"
            )
        return value

    def damaged(self, detail: str) -> CorruptionError:
        """An error that names the manifest."""
        return self._stored.damaged(detail)

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
        self._stored.check_files([one.tensor for one in wanted])
        if straight:
            read_into(self._stored, straight, SILENT, check_narrow=False)
        self._read_cast(others)

    def _read_cast(self, wanted: Sequence[PlannedRead]) -> None:
        batch: list[tuple[PlannedRead, torch.Tensor]] = []
        nbytes = 0
        for one in wanted:
            made = new_memory(one.tensor.path, one.box.shape, DTYPES[one.tensor.dtype], "cpu")
            if batch and nbytes + made.nbytes > _BATCH:
                self._read_batch(batch)
                batch, nbytes = [], 0
            batch.append((one, made))
            nbytes += made.nbytes
        self._read_batch(batch)

    def _read_batch(self, batch: Sequence[tuple[PlannedRead, torch.Tensor]]) -> None:
        wants = [ReadRequest(one.tensor, [Shard(one.box, made)]) for one, made in batch]
        if wants:
            read_into(self._stored, wants, SILENT, check_narrow=False)
        for one, made in batch:
            copy_into(one.target, made)
