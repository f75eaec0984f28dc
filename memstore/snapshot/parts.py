"""What each rank says of what it wrote, and how these parts become a snapshot. Imports no torch.

A snapshot is published in these steps, by whoever has all parts; a kill between them leaves what stands behind them:

    1. the index for transformers, where this take has the folder's plain names     no snapshot: there is no manifest
    2. the manifest is linked: the moment of publication                            a snapshot, with leftovers beside it
    3. files of other takes go: they found or will find this manifest               the same, with fewer leftovers
    4. the index, where this take had to choose other names; the parts; the claim   the same

Of two takes to one path, one links the manifest; the other gets AlreadyExistsError, and removes its own files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from memstore.errors import AlreadyExistsError, CorruptionError, KeyNotFoundError
from memstore.snapshot.manifest import (
    LIMIT,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    StoredValue,
    encode_manifest,
    read_manifest,
)
from memstore.snapshot.names import CLAIM, INDEX, MANIFEST, is_id, part_name, take_of
from memstore.snapshot.storage import Storage


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
    boxes: tuple[StoredBox, ...]  # whose files are this part's


class Part(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    take: Take
    rank: int
    files: tuple[StoredFile, ...]  # their sums come from who writes them
    tensors: tuple[PartTensor, ...]
    values: tuple[StoredValue, ...]  # their tensors are this part's


def with_sums(part: Part, sums: Mapping[str, bytes]) -> Part:
    """The part once its files are written."""
    files = tuple(msgspec.structs.replace(file, sums=sums[file.name]) for file in part.files)
    return msgspec.structs.replace(part, files=files)


def finish_part(storage: Storage, argument: bytes, sums: Mapping[str, bytes], durable: bool) -> bytes:
    """The last step of a rank's writer, once its files are there: leaves the part, and publishes if it is the last one.

    Returns:
        The manifest, or nothing if other ranks' parts are missing.
    """
    part = with_sums(msgspec.msgpack.decode(argument, type=Part), sums)
    take = part.take
    own = part_name(take.id, part.rank)
    try:
        storage.publish(own, msgspec.msgpack.encode(part), durable=durable)
        parts = read_parts(storage, take)
        return b"" if parts is None else publish(storage, parts)
    except BaseException as error:
        # Where the part is there, another rank's writer may be publishing, and count on these files.
        if isinstance(error, AlreadyExistsError) or storage.size(own) is None:
            for name in (own, *sums):
                _remove(storage, name)
        raise


def read_parts(storage: Storage, take: Take) -> list[Part] | None:
    """The parts of all ranks; None if some are missing."""
    names = [part_name(take.id, rank) for rank in range(take.world_size)]
    if any(storage.size(name) is None for name in names):
        return None
    parts: list[Part] = []
    for name in names:
        try:
            parts.append(msgspec.msgpack.decode(storage.read_bytes(name, LIMIT), type=Part))
        except KeyNotFoundError:
            return None  # another rank's writer has published meanwhile, and removes them
        except msgspec.MsgspecError as error:
            raise CorruptionError(path=f"{take.path}/{name}", detail=f"it is no part of a snapshot: {error}") from None
    return parts


def publish(storage: Storage, parts: Sequence[Part]) -> bytes:
    """Makes the snapshot of all parts. Returns its manifest.

    Raises:
        AlreadyExistsError: another take was first.
    """
    take = parts[0].take
    manifest = merge(parts)
    text = encode_manifest(manifest)
    index = index_of(parts, manifest)
    if index and take.plain:
        with contextlib.suppress(AlreadyExistsError):  # this take's, by another rank's writer
            storage.publish(INDEX, index, durable=False)
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
    if take.plain:
        storage.remove(CLAIM)
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

    Called where no manifest names them: with a manifest of one take there, no other can be published any more.
    """
    owner = claimant(storage)
    last: list[str] = []
    for name in storage.names():
        id = take_of(name, owner)
        if id is None or id == take:
            continue
        if name == CLAIM:
            last.append(name)  # it says whose the plain names are: so it goes after them
        else:
            _remove(storage, name)
    for name in last:
        _remove(storage, name)


def _remove(storage: Storage, name: str) -> None:
    """Best effort: what can't be removed stays, and harms nobody."""
    with contextlib.suppress(OSError):
        storage.remove(name)


# --- the parts as one manifest ----------------------------------------------------------------------------------------


def merge(parts: Sequence[Part]) -> Manifest:
    """Shared tensors of one path become one, with the boxes that all ranks wrote; values that are equal become one."""
    take = parts[0].take
    files: list[StoredFile] = []
    tensors: list[StoredTensor] = []
    values: list[StoredValue] = []
    shared: dict[str, int] = {}
    known: dict[Any, int] = {}
    ranks: list[dict[str, int]] = []
    for part in parts:
        places: list[int] = []
        for tensor in part.tensors:
            boxes = tuple(_moved(box, len(files)) for box in tensor.boxes)
            index = shared.setdefault(tensor.path, len(tensors)) if tensor.shared else len(tensors)
            if index == len(tensors):
                tensors.append(StoredTensor(tensor.path, tensor.dtype, tensor.shape, boxes))
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


def _moved(box: StoredBox, files: int) -> StoredBox:
    return StoredBox(box.file + files, box.offset, box.nbytes, box.offsets, box.shape)


def index_of(parts: Iterable[Part], manifest: Manifest) -> bytes | None:
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
