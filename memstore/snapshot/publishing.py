"""Publication of a take: the parts of all ranks become a snapshot. Removal of what takes and saves leave behind.

A snapshot is published in these steps, by whoever has all parts (`publish`); a kill between them leaves what stands
behind them:

    1. the index for transformers, where this take has the folder's plain names     no snapshot: there is no manifest
    2. the manifest is linked: the moment of publication                            a snapshot, with leftovers beside it
    3. files of other takes go: they found or will find this manifest               the same, with fewer leftovers
    4. the index, where this take had to choose other names; the parts; the claim   the same

Of two takes to one path, one links the manifest; the other gets AlreadyExistsError, and removes its own files.

`abandon` removes what a take has written that failed, `sweep_saves` what saves of planned snapshots have left. This
file imports no torch: the writer's process publishes, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.engine import OwnedFile
from memstore.errors import AlreadyExistsError, CorruptionError, KeyNotFoundError, MemstoreError, StoreTimeoutError
from memstore.snapshot.file_storage import FileStorage
from memstore.snapshot.manifest import (
    LIMIT,
    Manifest,
    ManifestBox,
    ManifestFile,
    ManifestTensor,
    ManifestValue,
    check_length,
    encode_manifest,
    read_manifest,
)
from memstore.snapshot.names import (
    CLAIM,
    INDEX,
    MANIFEST,
    claim_name,
    id_of,
    is_id,
    others_in,
    part_name,
    save_name,
    take_of,
    trace_of,
)
from memstore.snapshot.storage import Storage, is_unfinished

# --- Parts: what each rank wrote, as it travels between ranks and to the writer --------------------------------------


class Take(msgspec.Struct, frozen=True):
    """What all ranks of one take know of it.

    Attributes:
        id: of this attempt to take a snapshot; 16 hexadecimal digits.
        path: the folder.
        plain: whether its files have the plain names: no other take may have written to the folder.
    """

    id: str
    path: str
    world_size: int
    created: float
    writer: str
    plain: bool
    durable: bool
    checksum: bool


class PartTensor(msgspec.Struct, frozen=True):
    """A tensor of a rank's values. `boxes` are those that the rank wrote; of what others wrote, there are none.

    Attributes:
        shared: other ranks may have the same tensor: it is the one of the same path.
        index_name: what it is called in the index for transformers; "" if it isn't in there.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    shared: bool
    index_name: str
    boxes: tuple[ManifestBox, ...]  # whose files are this part's


class SnapshotPart(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    take: Take
    rank: int
    files: tuple[ManifestFile, ...]  # their sums come from who writes them
    tensors: tuple[PartTensor, ...]
    values: tuple[ManifestValue, ...]  # their tensors are this part's


def with_sums(part: SnapshotPart, sums: Mapping[str, bytes]) -> SnapshotPart:
    """The part once its files are written."""
    files = tuple(msgspec.structs.replace(file, sums=sums[file.name]) for file in part.files)
    return msgspec.structs.replace(part, files=files)


# --- Publication -----------------------------------------------------------------------------------------------------


PUBLISHED = b"published"


def finish_part(storage: Storage, argument: bytes, sums: Mapping[str, bytes], durable: bool) -> bytes:
    """The last step of a rank's writer, once its files are there: leaves the part, and publishes if it is the last one.

    Returns:
        PUBLISHED, or nothing if other ranks' parts are missing. (The manifest itself may be too long for a message.)
    """
    part = with_sums(msgspec.msgpack.decode(argument, type=SnapshotPart), sums)
    take = part.take
    own = part_name(take.id, part.rank)
    try:
        text = msgspec.msgpack.encode(part)
        check_length(len(text), part.values)
        storage.publish(own, text, durable=durable)
        parts = read_parts(storage, take)
        if parts is None:
            return b""
        publish(storage, parts)
        return PUBLISHED
    except BaseException as error:
        # Where the part is there, another rank's writer may be publishing, and count on these files.
        if isinstance(error, AlreadyExistsError) or storage.size(own) is None:
            for name in (own, *sums):
                _remove(storage, name)
        raise


def read_parts(storage: Storage, take: Take) -> list[SnapshotPart] | None:
    """The parts of all ranks; None if some are missing."""
    names = [part_name(take.id, rank) for rank in range(take.world_size)]
    if any(storage.size(name) is None for name in names):
        return None
    parts: list[SnapshotPart] = []
    for name in names:
        try:
            parts.append(msgspec.msgpack.decode(storage.read_bytes(name, LIMIT), type=SnapshotPart))
        except KeyNotFoundError:
            return None  # another rank's writer has published meanwhile, and removes them
        except UNDECODABLE as error:
            raise CorruptionError(path=f"{take.path}/{name}", detail=f"it is no part of a snapshot: {error}") from None
    return parts


def publish(storage: Storage, parts: Sequence[SnapshotPart]) -> bytes:
    """Makes the snapshot of all parts. Returns its manifest.

    Raises:
        AlreadyExistsError: another take was first, or another library has saved to the folder.
    """
    take = parts[0].take
    manifest = merge_parts(parts)
    text = encode_manifest(manifest)
    if storage.size(MANIFEST) is None:
        for other in others_in(take.path):
            raise AlreadyExistsError(f"{take.path}: {other.kind} ({other.name}) was saved there meanwhile")
    index = index_of(parts, manifest)
    if index and take.plain:
        with contextlib.suppress(AlreadyExistsError):  # this take's, by another rank's writer
            storage.publish(INDEX, index, durable=take.durable)
    try:
        storage.publish(MANIFEST, text, durable=take.durable)
    except AlreadyExistsError:
        found = read_manifest(take.path, storage.read_bytes(MANIFEST, LIMIT))
        if found.id != take.id:
            raise AlreadyExistsError(f"{take.path}: another take to this path was first") from None
    remove_other_takes(storage, take.id)
    if index and not take.plain:
        with contextlib.suppress(AlreadyExistsError):
            storage.publish(INDEX, index, durable=take.durable)
    for part in parts:
        storage.remove(part_name(take.id, part.rank))
    storage.remove(CLAIM if take.plain else claim_name(take.id))
    return text


def claimant(storage: Storage) -> str | None:
    """The id in the folder's claim, if there is one."""
    try:
        text = storage.read_bytes(CLAIM, 64).decode("ascii", "replace")
    except (KeyNotFoundError, CorruptionError):
        return None
    return text if is_id(text) else None


def remove_other_takes(storage: Storage, take: str) -> None:
    """Removes the files of all takes but this one. Files of others stay, whatever they are called.

    Called where no manifest names them: with a manifest of one take there, no other can be published any more. So a
    file that another process is about to publish goes, too: a part, a claim or a manifest of another take, or what this
    take has already.
    """
    owner = claimant(storage)
    names = storage.names()
    traced = {id for id in map(trace_of, names) if id is not None}
    theirs = [name for name in names if is_unfinished(name) or take_of(name, owner, traced) not in (None, take)]
    # Claims, parts and failures say whose the other files are: so they go after them.
    for name in sorted(theirs, key=lambda name: name == CLAIM or trace_of(name) is not None):
        _remove(storage, name)


def _remove(storage: Storage, name: str) -> None:
    """Best effort: what can't be removed stays, and harms nobody."""
    with contextlib.suppress(OSError):
        storage.remove(name)


# --- All parts as one manifest, and as the index that transformers reads ---------------------------------------------


def merge_parts(parts: Sequence[SnapshotPart]) -> Manifest:
    """Shared tensors of one path become one, with the boxes that all ranks wrote; values that are equal become one."""
    take = parts[0].take
    files: list[ManifestFile] = []
    tensors: list[ManifestTensor] = []
    values: list[ManifestValue] = []
    shared: dict[str, int] = {}
    known: dict[Any, int] = {}
    ranks: list[dict[str, int]] = []
    for part in parts:
        places: list[int] = []
        for tensor in part.tensors:
            boxes = tuple(_moved_box(box, len(files)) for box in tensor.boxes)
            index = shared.setdefault(tensor.path, len(tensors)) if tensor.shared else len(tensors)
            if index == len(tensors):
                tensors.append(ManifestTensor(tensor.path, tensor.dtype, tensor.shape, boxes))
            else:
                tensors[index] = msgspec.structs.replace(tensors[index], boxes=tensors[index].boxes + boxes)
            places.append(index)
        files += part.files
        found: dict[str, int] = {}
        for value in part.values:
            value = msgspec.structs.replace(value, tensors=tuple(places[i] for i in value.tensors))
            same = (value.key, value.structure, value.objects, value.tensors)
            found[value.key] = known.setdefault(same, len(values))
            if found[value.key] == len(values):
                values.append(value)
        ranks.append(found)
    return Manifest(
        take.id,
        take.created,
        take.writer,
        take.world_size,
        tuple(files),
        tuple(tensors),
        tuple(values),
        tuple(ranks),
    )


def _moved_box(box: ManifestBox, files: int) -> ManifestBox:
    return ManifestBox(box.file + files, box.offset, box.nbytes, box.offsets, box.shape)


def index_of(parts: Iterable[SnapshotPart], manifest: Manifest) -> bytes | None:
    """What transformers reads a model's files by; None if it needs none, or a tensor is in several parts."""
    places: dict[str, str] = {}
    total = 0
    stored = {tensor.path: tensor for tensor in manifest.tensors}
    for part in parts:
        for tensor in part.tensors:
            if not tensor.index_name or tensor.index_name in places:
                continue
            boxes = stored[tensor.path].boxes if tensor.shared else tensor.boxes
            if len(boxes) != 1 or boxes[0].shape != tensor.shape:
                return None
            files = manifest.files if tensor.shared else part.files
            places[tensor.index_name] = files[boxes[0].file].name
            total += boxes[0].nbytes
    if not places or set(places.values()) == {"model.safetensors"}:
        return None
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(document, indent=2).encode()


# --- Files of a take that failed -------------------------------------------------------------------------------------


def published(storage: FileStorage, take: Take) -> Manifest | None:
    """The manifest of this take, if it is there, and can be read."""
    with contextlib.suppress(MemstoreError, OSError):
        if storage.size(MANIFEST) is not None:
            found = read_manifest(take.path, storage.read_bytes(MANIFEST, LIMIT))
            return found if found.id == take.id else None
    return None


def abandon(storage: FileStorage, take: Take, written: Sequence[str], rank: int, *, all_ended: bool) -> None:
    """Removes what a take has written that failed; what is published stays, and so does what can't be removed.

    Args:
        written: this rank's files.
        all_ended: whether every other rank writes no more, and removes its files. Else (one may have died) the claim
            stays: by that the next take that is published in the folder knows whose they are.
    """
    if published(storage, take) is not None:
        return
    for name in written:
        with contextlib.suppress(OSError):
            storage.remove(name)
    if rank == 0:
        with contextlib.suppress(OSError):
            own = claimant(storage) == take.id
            if own:
                storage.remove(INDEX)  # first: while the claim is there, it is known whose it is
            if all_ended or take.world_size == 1:
                storage.remove(claim_name(take.id))
                if own:
                    storage.remove(CLAIM)
        with contextlib.suppress(OSError):
            os.rmdir(take.path)  # only if it is empty; to look takes a descriptor, and there may be none


# --- Leftovers of saves ----------------------------------------------------------------------------------------------
# What saves leave behind that die or fail, and whose it is.
#
# Each rank that takes part in a save leaves a trace of it before it writes, if no other rank has, and keeps that open
# under a shared lock until the save is over for it. So a trace that nobody keeps is that of a save whose processes have
# died, or have given it up; or of an earlier snapshot, by the publication that was to replace it (see `planned`).
# What has the id of such a save in its name, and isn't named by the manifest, is a leftover. A kill in between leaves
# leftovers with their trace, which goes last.


_PATIENCE, _PAUSE = 60.0, 0.01  # seconds until somebody else has removed a trace, and between two looks


def begin_save(path: str, save: str, *, durable: bool) -> OwnedFile:
    """The first step of a rank: makes the folder, if it isn't there, and takes part in the save.

    Returns:
        The trace. Close it when the save is over: its files are leftovers then, unless it was published.
    """
    storage = FileStorage.create(path, durable=durable)
    deadline = time.monotonic() + _PATIENCE
    while True:
        leave_trace(storage, save)
        kept = storage.keep(save_name(save))
        if kept is not None:
            return kept
        if time.monotonic() > deadline:
            raise StoreTimeoutError(f"{path}: other processes hold {save_name(save)} for {_PATIENCE:g} s")
        time.sleep(_PAUSE)  # a sweep is just about to remove what this save has left, which is nothing


def leave_trace(storage: FileStorage, save: str) -> None:
    with contextlib.suppress(AlreadyExistsError):
        storage.publish(save_name(save), b"", durable=False)


def sweep_saves(path: str) -> None:
    """Removes the leftovers in a folder. Saves that live, takes of snapshots, and files of others aren't touched.

    Best effort: what can't be removed stays, and harms nobody.
    """
    if not os.path.isdir(path):
        return
    with contextlib.suppress(MemstoreError, OSError):
        storage = FileStorage(path)
        if not _traced_saves(storage):
            return
        with storage.alone():
            present = read_present_manifest(storage, path)
            if isinstance(present, MemstoreError):
                return  # it can't be read, so it isn't known which files it names
            named = {file.name for file in present.files} if present is not None else set[str]()
            for save in _traced_saves(storage):
                with storage.unless_kept(save_name(save)) as is_free:
                    if is_free:
                        _remove_save(storage, save, named)


def _traced_saves(storage: FileStorage) -> list[str]:
    found = [(trace_of(name), name) for name in storage.names()]
    return [save for save, name in found if save is not None and name == save_name(save)]


def _remove_save(storage: FileStorage, save: str, named: set[str]) -> None:
    for name in storage.names():
        if id_of(name) == save and name not in named:
            storage.remove(name)
    storage.remove(save_name(save))


def read_present_manifest(storage: FileStorage, path: str) -> Manifest | MemstoreError | None:
    """The manifest that is there; or why it can't be read."""
    try:
        return read_manifest(path, storage.read_bytes(MANIFEST, LIMIT))
    except KeyNotFoundError:
        return None
    except MemstoreError as error:
        return error
