"""Publication: the parts of all ranks become a snapshot. Removal of what takes and saves leave behind.

`publish` has the steps. A take's snapshot never takes the place of another one: of two takes to one path, one links the
manifest; the other gets AlreadyExistsError, and removes its own files. A planned snapshot (`Replacing`) takes the place
of an earlier one of its kind: of two saves at once, the one that is published last wins.

`remove_others` is the cleaner of both. `abandon` removes what a take has written that failed, `sweep_saves` what saves
of planned snapshots have left. This file imports no torch: the writer's process publishes, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from memstore._parsing import UNDECODABLE
from memstore._threads import collect_later
from memstore._version import __version__
from memstore.engine import OwnedFile, syscalls
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatVersionError,
    KeyNotFoundError,
    MemstoreError,
    StoreTimeoutError,
    UnknownOutcomeError,
)
from memstore.snapshot.buckets import is_url
from memstore.snapshot.chunks import FilePart, PieceSums
from memstore.snapshot.increments import BoxSums, encode_box_sums, sums_of_boxes
from memstore.snapshot.manifest import (
    CLAIM,
    INDEX,
    LIMIT,
    MANIFEST,
    Manifest,
    ManifestBox,
    ManifestFile,
    ManifestTensor,
    ManifestValue,
    check_length,
    claim_name,
    encode_manifest,
    id_of,
    is_file_name,
    is_id,
    is_torch_data,
    others_among,
    others_at,
    others_in,
    part_name,
    read_manifest,
    save_name,
    sums_name,
    take_of,
    trace_of,
)
from memstore.snapshot.objects import ObjectStorage, Pruned, Storage, file_of, storage_at
from memstore.snapshot.storage import FileStorage, is_unfinished

# --- Parts: what each rank wrote, as it travels between ranks and to the writer --------------------------------------


def new_id() -> str:
    """Returns an id for a take or a save: 16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]


class Take(msgspec.Struct, frozen=True):
    """A take, as all of its ranks know it.

    Attributes:
        id: of this attempt to take a snapshot.
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


def new_take(path: str, world_size: int, *, id: str = "", durable: bool, checksum: bool = True) -> Take:
    """Returns a take that begins now; its files don't have the plain names."""
    writer = f"memstore {__version__}"
    return Take(id or new_id(), path, world_size, time.time(), writer, False, durable, checksum)


class PartTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a rank's values.

    Attributes:
        shared: other ranks may have the same tensor: it is the one of the same path.
        index_name: its name in the index for transformers; "" if it isn't in there.
        boxes: the boxes that the rank wrote, in this part's files.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    shared: bool
    index_name: str
    boxes: tuple[ManifestBox, ...]


class SnapshotPart(msgspec.Struct, frozen=True):
    """The share of a snapshot that one rank wrote.

    Attributes:
        files: their sums come from who writes them.
        values: their tensors are this part's, by number.
        box_sums: for each file the sums of its boxes, as far as there are any.
        shares: whether it shares files with an earlier snapshot.
    """

    take: Take
    rank: int
    files: tuple[ManifestFile, ...]
    tensors: tuple[PartTensor, ...]
    values: tuple[ManifestValue, ...]
    box_sums: tuple[BoxSums, ...] = ()
    shares: bool = False


# --- The beginning: what is there, and who may use the plain names ----------------------------------------------------


def refuse_what_is_there(path: str) -> None:
    """Raises AlreadyExistsError if a snapshot, a store or another library's checkpoint is at a path."""
    if os.path.lexists(f"{path}/{MANIFEST}"):
        raise AlreadyExistsError(f"{path} has a snapshot: take to another path, or remove it first")
    if os.path.lexists(f"{path}/memstore.json"):
        raise AlreadyExistsError(f"{path} is a store: take to a folder of its own, such as {path}-step-1")
    for other in others_in(path):
        raise AlreadyExistsError(f"{path} has {other.kind} ({other.name}): take to another path, or remove it first")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise AlreadyExistsError(f"{path} is there, and is no folder: take to another path")


def begin_in_bucket(storage: ObjectStorage, world_size: int, *, durable: bool) -> Take:
    """Begins a take to a URL: looks what is there, and leaves a claim, by which `prune` knows that it may go on.

    All takes have the plain names there: what they put under one name is the same.

    Raises:
        AlreadyExistsError: a snapshot, or another library's checkpoint is there.
        ValueError: several ranks take to the memory of one process.
    """
    path = storage.path
    if storage.is_here and world_size > 1:
        raise ValueError(f"{path} is memory of one process, and {world_size:,} ranks take this snapshot")
    names = storage.names()
    if MANIFEST in names:
        raise AlreadyExistsError(f"{path} has a snapshot: take to another path, or remove it first")
    for other in others_among(names):
        raise AlreadyExistsError(f"{path} has {other.kind} ({other.name}): take to another path, or remove it first")
    take = msgspec.structs.replace(new_take(path, world_size, durable=durable), plain=True)
    storage.publish(claim_name(take.id), b"", durable=durable)
    return take


def claim(take: Take, plain: bool, storage: FileStorage) -> tuple[Take, FileStorage]:
    """Claims the plain names of the folder, or names with the take's id where another take has those."""
    try:
        if plain and not any(name.endswith(".safetensors") or name in (INDEX, CLAIM) for name in storage.names()):
            with contextlib.suppress(AlreadyExistsError):  # another take is first
                storage.publish(CLAIM, take.id.encode(), durable=False)
                return msgspec.structs.replace(take, plain=True), storage
        storage.publish(claim_name(take.id), b"", durable=False)
        return take, storage
    except BaseException:
        abandon(storage, take, [], 0, all_ended=True)
        raise


# --- Publication -----------------------------------------------------------------------------------------------------


class Replacing(NamedTuple):
    """The right of a planned snapshot to take the place of an earlier one.

    Attributes:
        kind: the name of a value that all snapshots of this kind have, and others have not.
        overwrite: whether an earlier snapshot of this kind, or a checkpoint of torch's own writer, may be replaced.
    """

    kind: str
    overwrite: bool

    def check(self, path: str, options: Mapping[str, Any] | None = None) -> Manifest | None:
        """Returns the manifest that is to be replaced; None if there is none, or it is damaged and may be replaced.

        Raises:
            AlreadyExistsError: what is at `path` may not be replaced.
        """
        if is_url(path):
            return self.check_at(storage_at(path, options))
        if not os.path.isdir(path):
            if os.path.lexists(path):
                raise AlreadyExistsError(f"{path} is there, and is no folder: save to another path")
            return None
        return self.check_at(FileStorage(path))

    def check_at(self, storage: Storage) -> Manifest | None:
        """Returns and raises as `check`, of a place that is there."""
        path = storage.path
        earlier, is_there = None, True
        try:
            earlier = present_manifest(storage)
            is_there = earlier is not None
        except (CorruptionError, FormatVersionError):
            pass
        if earlier is not None and not any(value.key == self.kind for value in earlier.values):
            raise AlreadyExistsError(f"{path} has a snapshot that is no checkpoint: save to another path, or remove it")
        if is_there and not self.overwrite:
            raise AlreadyExistsError(
                f"Checkpoint already exists in {path}, and overwrite is False: save to another path, or remove it"
            )
        self.check_others(storage)
        return earlier

    def check_others(self, storage: Storage) -> None:
        """Raises AlreadyExistsError for another library's checkpoint that may not be replaced."""
        path = storage.path
        for other in others_at(storage):
            if not other.is_torchs:
                raise AlreadyExistsError(f"{path} has {other.kind} ({other.name}): save to another path, or remove it")
            if not self.overwrite:
                raise AlreadyExistsError(
                    f"Checkpoint already exists in {path}: {other.kind} ({other.name}), and overwrite is False: "
                    "save to another path, or remove it"
                )


class Published(NamedTuple):
    """A manifest that is published, and its text."""

    manifest: Manifest
    text: bytes


def publish(storage: Storage, parts: Sequence[SnapshotPart], replacing: Replacing | None = None) -> Published:
    """Makes the parts of all ranks a snapshot. Returns its manifest.

    Whoever has all parts calls this; for a take that may be several processes at once.

    Args:
        replacing: for a planned snapshot, what it may take the place of. None for a take, which replaces nothing.

    Raises:
        AlreadyExistsError: another take was first, another library has saved to the folder, or what is there may not
            be replaced.
        UnknownOutcomeError: files of a planned snapshot are gone; another save to the folder removed them.
        UnsupportedValueError: the manifest would be too long.
    """
    manifest = merge_parts(parts)
    sums = [one for part in parts for one in part.box_sums or [{}] * len(part.files)]
    index = None if storage.is_remote else index_of(parts, manifest)  # transformers reads no pieces
    return Published(manifest, publish_manifest(storage, parts[0].take, manifest, index, sums, replacing))


def publish_manifest(
    storage: Storage,
    take: Take,
    manifest: Manifest,
    index: bytes | None,
    sums: Sequence[BoxSums],
    replacing: Replacing | None = None,
) -> bytes:
    """Publishes a manifest, whose files are there; see `publish`.

    Args:
        index: that transformers reads, if there is one.
        sums: of the boxes in each file.
    """
    text, box_sums = encode_manifest(manifest), encode_box_sums(manifest, sums)
    storage.know(manifest.files)
    with contextlib.nullcontext() if replacing is None else storage.alone():
        # 1. Look at what is there already. Killed up to here: no manifest names the files; an earlier one is whole.
        earlier = None
        if replacing is not None:
            earlier = replacing.check_at(storage)
            for file in manifest.files:
                if storage.size(file.name) != file.size:
                    raise UnknownOutcomeError(
                        f"{take.path}/{file.name}, which a rank has written, is gone or of another size: another save "
                        "to this checkpoint removed it; save to another path"
                    )
        else:
            names = storage.names()  # in a bucket one listing tells all of this
            if MANIFEST not in names or storage.size(MANIFEST) is None:
                for other in others_at(storage, names):
                    raise AlreadyExistsError(f"{take.path}: {other.kind} ({other.name}) was saved there meanwhile")
                storage.confirm(manifest.files)
        # 2. Write what is read beside the manifest, and traces of the earlier snapshot: from step 3 on no manifest
        #    names its files. Killed: as before, and the next publication removes this too.
        if index and take.plain:
            with contextlib.suppress(AlreadyExistsError):  # this take's, by another rank's writer
                storage.publish(INDEX, index, durable=take.durable)
        if box_sums is not None:
            with contextlib.suppress(AlreadyExistsError):  # as the index. It is a hint, so it may be torn
                if isinstance(storage, ObjectStorage):
                    storage.publish(sums_name(take.id), box_sums, durable=False)
                else:
                    storage.write(sums_name(take.id), len(box_sums), [FilePart(0, box_sums)], durable=False)
        for save in {id_of(file.name) for file in earlier.files} if earlier is not None else ():
            if save is not None and not storage.is_remote:
                leave_trace(storage, save)
        # 3. The manifest gets its name: the moment of publication. Killed after it: the snapshot, with leftovers.
        if replacing is not None:
            storage.replace(MANIFEST, text, durable=take.durable)
        else:
            try:
                storage.publish(MANIFEST, text, durable=take.durable)
            except AlreadyExistsError:
                found = present_manifest(storage)  # this take's, if another rank's writer has published it
                if found is None:
                    gone = "it is gone by now: take it again"
                    raise AlreadyExistsError(f"{take.path}: another take to this path was first, and {gone}") from None
                if found.id != take.id:
                    raise AlreadyExistsError(f"{take.path}: another take to this path was first") from None
        # 4. A checkpoint of torch's own writer goes. Killed before that: two whole ones, which memstore's readers
        #    refuse, and the next save replaces both.
        if replacing is not None:
            remove_torchs(storage, durable=take.durable)
        # 5. The files of the earlier snapshot go, and those of takes and saves that can't be published any more. Killed
        #    before that: the next publication, or save, removes them.
        keep = {name for file in manifest.files for name in storage.names_of(file)} | {sums_name(take.id)}
        if take.plain:
            keep.add(INDEX)
        also = (
            {sums_name(earlier.id), *(name for file in earlier.files for name in storage.names_of(file))}
            if earlier is not None
            else set[str]()
        )
        if not storage.is_remote:
            remove_others(storage, keep, also, owner=claimant(storage) if replacing is None else None)
        elif replacing is None:
            remove_others(storage, keep, also, owner=take.id)  # no other take can be published here any more
        else:  # another save may go on, whose files nothing locks: what it leaves if it dies, `prune` removes
            storage.remove_all(sorted(also - keep))
        # 6. The index, where the plain name may have been another take's until now.
        if index and not take.plain:
            with contextlib.suppress(AlreadyExistsError):
                storage.publish(INDEX, index, durable=take.durable)
    return text


def present_manifest(storage: Storage) -> Manifest | None:
    """Reads the manifest that is in a folder, or at a place in a bucket. Returns None if there is none.

    Raises as `read_manifest`.
    """
    try:
        return read_manifest(storage.path, storage.read_bytes(MANIFEST, LIMIT))
    except KeyNotFoundError:
        return None


def claimant(storage: Storage) -> str | None:
    """Returns the id in the folder's claim, if there is one."""
    try:
        text = storage.read_bytes(CLAIM, 64).decode("ascii", "replace")
    except (KeyNotFoundError, CorruptionError):
        return None
    return text if is_id(text) else None


def remove_others(storage: Storage, keep: Collection[str], also: Collection[str], *, owner: str | None) -> None:
    """Removes the files of all takes and saves, but those of the snapshot. Files of others stay, whatever their names.

    Called where the snapshot's manifest is there. No take can be published beside it, and a save whose files are gone
    is told so: so a file that another process is about to publish goes, too: a part, a claim or a manifest.

    Args:
        keep: the files of the snapshot, or its objects.
        also: files that go too.
        owner: whose the files with plain names are.
    """
    names = storage.names()
    traced = {id for id in map(trace_of, names) if id is not None}
    gone = [
        name
        for name in names
        if name in also
        or is_unfinished(name)
        or (_is_left(name) if storage.is_remote else take_of(file_of(name), owner, traced) is not None)
    ]
    # Claims, parts and failures say whose the other files are: so they go after them.
    with contextlib.suppress(MemstoreError, OSError):  # the snapshot is there, whatever stays beside it
        last = sorted(set(gone).difference(keep), key=lambda name: name == CLAIM or trace_of(name) is not None)
        storage.remove_all(last)


def remove_torchs(storage: Storage, *, durable: bool) -> None:
    """Removes a checkpoint of torch's own writer: its metadata first, by which torch would read it.

    An error says that torch would still do. A kill between the two loops leaves files with tensors that nothing names.
    """
    marks = [other.name for other in others_at(storage) if other.is_torchs]
    if not marks:
        return
    for name in marks:
        storage.remove(name)
    if durable and not storage.is_remote:
        syscalls.sync_folder(storage.path)
    storage.remove_all([name for name in storage.names() if is_torch_data(name)])


def _remove(storage: Storage, name: str) -> None:
    """Removes a file, if that is possible: one that stays harms nobody."""
    with contextlib.suppress(OSError, *([MemstoreError] if storage.is_remote else [])):
        storage.remove(name)


# --- The last step of a rank's writer --------------------------------------------------------------------------------


PUBLISHED = b"published"


def finish_part(
    storage: Storage,
    text: bytes,
    sums: Mapping[str, bytes],
    durable: bool,
    pieces: Mapping[str, PieceSums] = MappingProxyType({}),
) -> bytes:
    """Leaves the part of a rank whose files are written, and publishes the snapshot if it is the last one.

    Args:
        text: the part, encoded.
        sums: of the files that were written, by name.
        pieces: the sums of the pieces of these files, by name.

    Returns:
        PUBLISHED, or nothing if other ranks' parts are missing. (The manifest itself may be too long for a message.)
    """
    part = msgspec.msgpack.decode(text, type=SnapshotPart)
    part = with_sums(part, sums, pieces)
    own = part_name(part.take.id, part.rank)
    try:
        text = msgspec.msgpack.encode(part)
        check_length(len(text), part.values)
        storage.publish(own, text, durable=durable)
        parts = read_parts(storage, part.take)
        if parts is None:
            return b""
        publish(storage, parts)
        return PUBLISHED
    except BaseException as error:
        # Where the part is there, another rank's writer may be publishing, and count on these files.
        if isinstance(error, AlreadyExistsError) or not _is_there(storage, own):
            for name in (own,) if storage.is_remote else (own, *[file.name for file in part.files]):
                _remove(storage, name)
        raise


def _is_there(storage: Storage, name: str) -> bool:
    """Returns whether a file is there, or may be: a service that doesn't answer can't say it."""
    if not storage.is_remote:
        return storage.size(name) is not None
    try:
        return name in storage.present([name])
    except MemstoreError:
        return True


def with_sums(part: SnapshotPart, sums: Mapping[str, bytes], pieces: Mapping[str, PieceSums]) -> SnapshotPart:
    """Returns a part with the sums of the files that were written; those that it shares have theirs already."""
    boxes: list[list[ManifestBox]] = [[] for _ in part.files]
    for tensor in part.tensors:
        for box in tensor.boxes:
            boxes[box.file].append(box)
    files: list[ManifestFile] = []
    box_sums: list[BoxSums] = []
    for i, file in enumerate(part.files):
        if file.name in sums:
            file = msgspec.structs.replace(file, sums=sums[file.name])
            box_sums.append(sums_of_boxes(boxes[i], pieces.get(file.name, {})))
        else:
            box_sums.append(part.box_sums[i] if part.box_sums else {})
        files.append(file)
    return msgspec.structs.replace(part, files=tuple(files), box_sums=tuple(box_sums))


def read_parts(storage: Storage, take: Take) -> list[SnapshotPart] | None:
    """Reads the parts of all ranks. Returns None if some are missing."""
    names = [part_name(take.id, rank) for rank in range(take.world_size)]
    if storage.present(names) != set(names):
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


# --- All parts as one manifest, and as the index that transformers reads ---------------------------------------------


@collect_later()
def merge_parts(parts: Sequence[SnapshotPart]) -> Manifest:
    """Returns the manifest of all parts.

    Shared tensors of one path become one, with the boxes that all ranks wrote; values that are equal become one.
    """
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
            boxes = tensor.boxes
            if files:  # their numbers are those in the part
                boxes = tuple([ManifestBox(b.file + len(files), b.offset, b.nbytes, b.offsets, b.shape) for b in boxes])
            index = shared.setdefault(tensor.path, len(tensors)) if tensor.shared else len(tensors)
            if index == len(tensors):
                tensors.append(ManifestTensor(tensor.path, tensor.dtype, tensor.shape, boxes))
            else:
                tensors[index] = msgspec.structs.replace(tensors[index], boxes=tensors[index].boxes + boxes)
            places.append(index)
        files += part.files
        found: dict[str, int] = {}
        for value in part.values:
            same = (value.key, value.structure, value.objects, tuple([places[i] for i in value.tensors]))
            found[value.key] = known.setdefault(same, len(values))
            if found[value.key] == len(values):
                values.append(ManifestValue(*same))
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


def index_of(parts: Sequence[SnapshotPart], manifest: Manifest) -> bytes | None:
    """Returns the index by which transformers reads a model's files.

    Returns None if it needs none, or a tensor is in several boxes. An increment has none: transformers reads all that
    is in a file, and what an increment shares also has earlier values.
    """
    if any(part.shares for part in parts):
        return None
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
    return index_text(places, total)


def index_text(places: Mapping[str, str], total: int) -> bytes | None:
    """Returns the index by which transformers reads a model's files; None if it needs none.

    Args:
        places: the file of each tensor, by the tensor's name.
        total: bytes of all.
    """
    if not places or set(places.values()) == {"model.safetensors"}:
        return None
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(document, indent=2).encode()


# --- Files of a take that failed -------------------------------------------------------------------------------------


def published(storage: Storage, take: Take) -> Manifest | None:
    """Returns the manifest of this take, if it is there, and can be read."""
    with contextlib.suppress(MemstoreError, OSError):
        found = present_manifest(storage)
        return found if found is not None and found.id == take.id else None
    return None


def abandon(storage: Storage, take: Take, written: Sequence[str], rank: int, *, all_ended: bool) -> None:
    """Removes what a take has written that failed; what is published stays, and so does what can't be removed.

    In a bucket the pieces of its files stay: the next take to this path uses them.

    Args:
        written: this rank's files.
        all_ended: whether every other rank writes no more, and removes its files. Else (one may have died) the claim
            stays: by that the next take that is published in the folder knows whose they are.
    """
    if published(storage, take) is not None:
        return
    for name in (*written, sums_name(take.id)):
        if not storage.is_remote or trace_of(name) is not None:
            _remove(storage, name)
    if rank == 0 and storage.is_remote:
        if all_ended or take.world_size == 1:
            _remove(storage, claim_name(take.id))
    elif rank == 0:
        with contextlib.suppress(OSError):
            own = claimant(storage) == take.id
            if own:
                storage.remove(INDEX)  # first: while the claim is there, it is known whose it is
            if all_ended or take.world_size == 1:
                storage.remove(claim_name(take.id))
                if own:
                    storage.remove(CLAIM)
        storage.remove_place()


OLD = 86400.0  # seconds after which nobody goes on with a take, unless somebody says otherwise


def prune(url: str, options: Mapping[str, Any] | None = None, *, older_than: float = OLD) -> Pruned:
    """Removes what takes and saves at a URL have left that died. The snapshot, and files of others, stay.

    Args:
        older_than: seconds; nothing is removed while some of it is younger than that.

    Raises:
        CorruptionError, FormatVersionError: the manifest can't be read, so it isn't known what it names.
    """
    storage = ObjectStorage(url, options)
    manifest = present_manifest(storage)
    named: list[str] = []
    if manifest is not None:
        named = [sums_name(manifest.id), *(name for file in manifest.files for name in storage.names_of(file))]
    return storage.prune(named, _is_left, older_than)


def _is_left(name: str) -> bool:
    return trace_of(name) is not None or (file_of(name) != name and is_file_name(file_of(name)))


# --- Leftovers of saves ----------------------------------------------------------------------------------------------
# Each rank that takes part in a save leaves a trace of it before it writes, if no other rank has, and keeps that open
# under a shared lock until the save is over for it. So a trace that nobody keeps is that of a save whose processes have
# died, or have given it up; or of an earlier snapshot, by step 2 of the publication that was to replace it. A file is a
# leftover if it has the id of such a save in its name and isn't named by the manifest. A kill in between leaves
# leftovers with their trace, which goes last.


_PATIENCE, _PAUSE = 60.0, 0.01  # seconds until somebody else has removed a trace, and between two looks


def begin_save(path: str, save: str, *, durable: bool) -> OwnedFile:
    """Makes the folder, if it isn't there, and takes part in the save: the first step of a rank.

    Returns:
        The trace. Close it when the save is over: its files are leftovers then, unless it was published.
    """

    def leave_and_keep(storage: FileStorage) -> OwnedFile | None:
        leave_trace(storage, save)
        return storage.keep(save_name(save))

    deadline = time.monotonic() + _PATIENCE
    while True:
        kept = FileStorage.create_for(path, leave_and_keep, durable=durable)
        if kept is not None:
            return kept
        if time.monotonic() > deadline:
            raise StoreTimeoutError(f"{path}: other processes hold {save_name(save)} for {_PATIENCE:g} s")
        time.sleep(_PAUSE)  # a sweep is just about to remove what this save has left, which is nothing


def leave_trace(storage: Storage, save: str) -> None:
    """Leaves the file that says that files with the id of this save are its own."""
    with contextlib.suppress(AlreadyExistsError):
        storage.publish(save_name(save), b"", durable=False)


def abandon_save(storage: Storage, save: str) -> None:
    """Removes what a save has put into a bucket, and its trace. Best effort: `prune` removes what stays."""
    with contextlib.suppress(MemstoreError, OSError):
        present = present_manifest(storage)
        if present is None or present.id != save:
            names = storage.names()
            storage.remove_all([name for name in names if id_of(file_of(name)) == save or name == sums_name(save)])
        _remove(storage, save_name(save))


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
            present = present_manifest(storage)  # raises if it can't be read: then it isn't known which files it names
            named = {file.name for file in present.files} if present is not None else set[str]()
            for save in _traced_saves(storage):
                with storage.unless_kept(save_name(save)) as is_free:
                    if is_free:
                        for name in storage.names():
                            if (id_of(name) == save and name not in named) or (
                                name == sums_name(save) and (present is None or present.id != save)
                            ):
                                storage.remove(name)
                        storage.remove(save_name(save))


def _traced_saves(storage: FileStorage) -> list[str]:
    found = [(trace_of(name), name) for name in storage.names()]
    return [save for save, name in found if save is not None and name == save_name(save)]
