"""The files of all ranks as one snapshot, which takes the place of an earlier one of its kind at one moment.

    1. each rank leaves a trace of the save (`leftovers.begin`), and writes its file: no manifest names it
    2. one rank, alone in the folder: all files are there, and of the size that was said
    3. the earlier snapshot gets a trace: from the next step on no manifest names its files either
    4. the manifest is renamed to its name: the moment of publication. Until then the earlier snapshot is whole
    5. a checkpoint that torch's own writer has left goes: its metadata first, by which torch would read it
    6. files of the earlier snapshot go, and those of saves that have left traces, which died or can't be published

A kill before 4 leaves the earlier snapshot, one after it the new one; both leave files that the next save removes
before it writes (`leftovers.sweep`). A kill in 5 leaves two checkpoints, both whole: memstore's readers refuse
them, and the next save replaces both. Of two saves at once, the one that is published last wins; the other's error, if
its files are gone, comes in 2.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memstore.engine import syscalls
from memstore.errors import AlreadyExistsError, MemstoreError, UnknownOutcomeError
from memstore.sharding import Box, TensorShard
from memstore.snapshot.cover import check_cover
from memstore.snapshot.format import (
    CLAIM,
    INDEX,
    MANIFEST,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    StoredValue,
    encode_manifest,
    id_of,
    is_torch_data,
    others_in,
    read_manifest,
    save_name,
    take_of,
    trace_of,
)
from memstore.snapshot.planned.leftovers import leave_trace, read_present
from memstore.snapshot.planned.writing import WrittenFile
from memstore.snapshot.storage import FileStorage, is_unfinished
from memstore.snapshot.take import StateWalker
from memstore.structure import DTYPE_NAMES


class Whole(NamedTuple):
    """A tensor of the snapshot, and all its parts: which file has each, and where."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[tuple[int, StoredBox]]


class Planned(NamedTuple):
    """What a snapshot is to have.

    Attributes:
        tensors: by the name of the value, and by their own.
        objects: values without tensors.
    """

    files: Sequence[WrittenFile]
    tensors: Mapping[str, Mapping[str, Whole]]
    objects: Mapping[str, Any]


def new_save() -> str:
    """The id of a save."""
    return uuid.uuid4().hex[:16]


def publish_planned(path: str, planned: Planned, *, kind: str, save: str, durable: bool, overwrite: bool) -> Manifest:
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
        earlier = read_present(storage, path)
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
        _check_place(path, read_present(FileStorage(path), path), kind, overwrite=overwrite)
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


def _manifest(planned: Planned, save: str) -> Manifest:
    files: list[StoredFile] = []
    numbers: dict[int, int] = {}  # of the files that there are
    for i, written in enumerate(planned.files):
        if written.file is not None:
            numbers[i] = len(files)
            files.append(written.file)
    walker = StateWalker(allow_pickle=False)
    stored: list[StoredTensor] = []
    values: list[StoredValue] = []
    for key, tensors in planned.tensors.items():
        state = walker.add(key, {name: _stand_in(one) for name, one in tensors.items()})
        for place, one in zip(state.tensors, tensors.values(), strict=True):
            path = walker.tensors[place].path
            check_cover(path, one.shape, [Box(box.offsets, box.shape) for _, box in one.boxes])
            boxes = tuple(_moved(box, numbers[file]) for file, box in one.boxes)
            stored.append(StoredTensor(path, DTYPE_NAMES[one.dtype], one.shape, boxes))
        values.append(StoredValue(*state))
    for key, value in planned.objects.items():
        values.append(StoredValue(*walker.add(key, value)))
    writer = f"memstore {importlib.import_module('memstore').__version__}"  # which is a layer above this one
    by_key = {value.key: number for number, value in enumerate(values)}
    return Manifest(save, time.time(), writer, 1, tuple(files), tuple(stored), tuple(values), (by_key,))


def _stand_in(one: Whole) -> TensorShard:
    """A tensor of which nothing is here."""
    local = torch.empty((0,) * len(one.shape) if one.shape else (), dtype=one.dtype)
    return TensorShard(local, one.shape, (0,) * len(one.shape))


def _moved(box: StoredBox, file: int) -> StoredBox:
    return StoredBox(file, box.offset, box.nbytes, box.offsets, box.shape)


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
