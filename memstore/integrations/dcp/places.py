"""Places of checkpoints: folders, and keys of stores. What the writer and the reader ask of either.

Checkpoint, CheckpointPlace         the interface: a checkpoint that is there, and where one is or is to be
FolderPlace, FolderCheckpoint       a folder: a snapshot, whose manifest takes the place of an earlier one's at one
                                    moment
BucketPlace                         a URL: the same, of objects; FolderCheckpoint reads it
EntryPlace, EntryCheckpoint         a key of a store: a sharded entry, whose last part has what torch says of it. With
                                    N ranks a save is an attempt of N + 1 parts: each rank puts what it writes, and
                                    returns; the rank that finishes the checkpoint puts the last part, which publishes
                                    all of them. Until then, and if that never comes, the key has its earlier version
GivenPlace                          which of the two a user means; a store is opened when it is first used
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import msgspec
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from memstore import _modes as modes
from memstore._arguments import encode_key
from memstore._threads import between_forks
from memstore._wording import an, refuse_url
from memstore.engine import OwnedFile, has_settings
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    KeyNotFoundError,
    MemstoreError,
    NotAStoreError,
    VersionGoneError,
)
from memstore.listing import may_write, opened
from memstore.sharding import Box, Shard, TensorShards, whole
from memstore.snapshot.buckets import bucket_options, is_url, path_or_url
from memstore.snapshot.drafts import PlannedBox, PlannedTensor, Sharing, WrittenFiles, publish_planned, write_boxes
from memstore.snapshot.increments import LATEST, Base, BoxToWrite, SharedFiles, latest_beside
from memstore.snapshot.manifest import ManifestTensor, path_of, refuse_two, save_name
from memstore.snapshot.objects import ObjectStorage, Storage
from memstore.snapshot.publishing import (
    Replacing,
    abandon_save,
    begin_save,
    leave_trace,
    new_id,
    remove_torchs,
    sweep_saves,
)
from memstore.snapshot.reading import ReadRequest, in_batches, new_memory, read_into
from memstore.snapshot.storage import SILENT, FileStorage
from memstore.snapshot.stored import Stored, Value
from memstore.structure import DTYPES, copy_into
from memstore.view import StoredTensor

if TYPE_CHECKING:
    from memstore.store.store import Store
    from memstore.store.values import Ref


_log = logging.getLogger("memstore")

# The values of a checkpoint: tensors, bytes items, tensors that are made of several (each chunk as bytes; only where
# there are any), and what torch says.
STATE, BYTES, WRAPPED, DCP = "state", "bytes", "wrapped", "dcp"


def wrapped_name(index: MetadataIndex) -> str:
    """Returns the name in WRAPPED of a chunk of a tensor that is made of several."""
    return f"{text_of(index.fqn)}@{','.join(map(str, index.offset or ()))}"


class SaveTicket(msgspec.Struct, frozen=True):
    """The knowledge that a rank needs to write its part: the `storage_data` of its plan.

    A planner that caches plans hands out that of an earlier save.
    """

    save: str
    rank: int
    world_size: int


class WrittenItem(msgspec.Struct, frozen=True):
    """An item that a rank has written: the `storage_data` of its result.

    Attributes:
        item: its place among the rank's items.
        key: STATE, BYTES or WRAPPED.
        dtype: its name; what was stored.
        shape: of the whole tensor.
        files: what the rank has written in all; said with its first item only.
    """

    item: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    files: WrittenFiles | None = None


class CheckpointTensor(NamedTuple):
    """A tensor of a checkpoint: what is known of it before it is written, or once it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Box]


class TensorRead(NamedTuple):
    """A part of a tensor, and the tensor of just its elements that it is read into, of any dtype, on any device."""

    key: str  # STATE, BYTES or WRAPPED
    name: str
    box: Box
    target: torch.Tensor


class FinishedSave(NamedTuple):
    """A save that all ranks have written.

    Attributes:
        files: of each rank that has written an item.
        tensors: by STATE, BYTES or WRAPPED and by name.
        objects: for DCP.
    """

    save: str
    world_size: int
    files: Sequence[WrittenFiles]
    tensors: Mapping[str, Mapping[str, PlannedTensor]]
    objects: Any


class Checkpoint(Protocol):
    """A checkpoint that is there.

    Attributes:
        id: tells it from any other that is or was in this place.
    """

    @property
    def id(self) -> str: ...

    def tensors(self, key: str) -> Mapping[str, CheckpointTensor]:
        """Returns the tensors of STATE, or the items of BYTES or WRAPPED as tensors of uint8."""
        ...

    def objects(self) -> Any:
        """Returns the value of DCP."""
        ...

    def read(self, parts: Sequence[TensorRead]) -> None:
        """Fills the targets. Raises CorruptionError where bytes are damaged, VersionGoneError if it was overwritten."""
        ...

    def damaged(self, detail: str) -> CorruptionError: ...

    @property
    def can_be_sent(self) -> bool:
        """Returns whether it can be pickled."""
        ...

    def share(self) -> Any:
        """Returns what other ranks need to read this very checkpoint; it pickles."""
        ...

    def shared(self, said: Any) -> Checkpoint:
        """Returns the checkpoint that another rank shares, if it is not this one. Raises if it is gone."""
        ...


class CheckpointPlace(Protocol):
    """The place where a checkpoint is, or is to be."""

    @property
    def id(self) -> str:
        """Returns torch's checkpoint_id."""
        ...

    def of_rank(self, rank: int) -> CheckpointPlace:
        """Returns the place of a rank's own checkpoint, which knows of no other rank."""
        ...

    def check(self) -> None:
        """Raises AlreadyExistsError if nothing may be written here."""
        ...

    def missing(self) -> list[str]:
        """Returns the folders that a save will make here, the innermost first."""
        ...

    def announce(self, ticket: SaveTicket) -> None:
        """Tells ranks whose plans are cached which save they write for; called before `current`."""
        ...

    def current(self, ticket: SaveTicket) -> SaveTicket:
        """Returns the ticket of the present save, for a rank that has one of an earlier save."""
        ...

    def take_part(self, ticket: SaveTicket) -> Callable[[], None]:
        """Makes this process a part of the save, before `write`, until it calls what is returned."""
        ...

    def write(self, ticket: SaveTicket, boxes: Sequence[tuple[str, PlannedBox]]) -> WrittenFiles:
        """Writes a rank's part. Each box comes with STATE, BYTES or WRAPPED."""
        ...

    def publish(self, finished: FinishedSave) -> None:
        """Makes the parts of all ranks a checkpoint, in the place of an earlier one."""
        ...

    def abandon(self, save: str) -> None:
        """Gives back what the ranks have written for a save that failed."""
        ...

    def sweep(self) -> None:
        """Gives back what earlier saves of any process have left here, and nobody takes part in, before a save."""
        ...

    def open(self) -> Checkpoint:
        """Returns the checkpoint that is there. Raises NotAStoreError or KeyNotFoundError if there is none."""
        ...


class WriteOptions(NamedTuple):
    """The arguments of StorageWriter that say how."""

    overwrite: bool = True
    durability: str = "disk"
    checksum: bool = True
    base: str | None = None  # a path, a URL, or LATEST
    bucket: Mapping[str, Any] | None = None  # options for a bucket


def text_of(checkpoint_id: str | os.PathLike[str]) -> str:
    found = os.fspath(checkpoint_id)
    if not isinstance(found, str):  # pyright: ignore[reportUnnecessaryIsInstance] - bytes
        raise TypeError(f"a checkpoint id is a text or a path, and not {checkpoint_id!r}")
    return found


def folder_of(checkpoint_id: str | os.PathLike[str]) -> str:
    """Returns the absolute path, or the URL, that a checkpoint id is. Raises ValueError for a URL of another kind."""
    found = text_of(checkpoint_id)
    if not found or "\0" in found:
        raise ValueError(
            f"{found!r} is no path of a folder: memstore's checkpoints are folders, URLs or keys of a store"
        )
    return path_or_url(checkpoint_id)


# --- Increments ------------------------------------------------------------------------------------------------------


def _sharing(
    path: str, ticket: SaveTicket, options: WriteOptions, inner: str, claim: Callable[[str], str] | None
) -> Sharing | None:
    """Returns what links into a folder, or copies in a bucket, what its base has already; None if there is no base.

    Args:
        path: of the checkpoint.
        inner: what follows the path of a base, where each rank has a checkpoint of its own.
        claim: as of `Base.share`.

    Raises:
        NotAStoreError, CorruptionError, FormatVersionError: the base that was given can't be read. (One that was found
            may be gone by now.)
    """
    base = options.base
    if base is None:
        return None
    if base != LATEST and is_url(base) != is_url(path):
        raise ValueError(
            f"base= is a checkpoint in a folder for a save to a folder, and one in a bucket for a save to a bucket: "
            f"{base} can't share files with {path}"
        )
    found = latest_beside(path, options.bucket, or_there=True, inner=inner) if base == LATEST else base
    if found is None:
        return None
    try:
        opened = Base(found + inner, options.bucket)
    except (MemstoreError, OSError) as error:
        if base != LATEST:
            raise
        _log.warning("%s can't be the base of an increment, which is written whole: %s", found, error)
        return None
    durable = options.durability == "disk"

    def share(storage: Storage, wanted: Sequence[BoxToWrite]) -> SharedFiles:
        return opened.share(storage, ticket.save, ticket.rank, ticket.world_size, durable, wanted, claim)

    return share


# --- Folders ---------------------------------------------------------------------------------------------------------


_BATCH = 1 << 28  # bytes of memory for what is stored in another dtype than that of its target
_ATTEMPTS = 10  # to publish in a bucket, while others publish there too


class FolderPlace:
    """A folder that is, or is to be, a checkpoint.

    Args:
        path: absolute.
        around: of the checkpoint that a rank saves by itself: the folder of all of them, where torch's writer would
            have put its own.
    """

    def __init__(self, path: str, options: WriteOptions, around: str | None = None) -> None:
        self.path, self._options, self._around = path, options, around
        self._replacing = Replacing(DCP, options.overwrite)
        self._kept: list[OwnedFile] = []  # traces of what is linked here, in a save

    @property
    def id(self) -> str:
        return self.path

    def of_rank(self, rank: int) -> FolderPlace:
        return FolderPlace(f"{self.path}/rank-{rank}", self._options, self.path)

    def check(self) -> None:
        if self._around is not None and os.path.isdir(self._around):
            self._replacing.check_others(FileStorage(self._around))
        self._replacing.check(self.path)

    def missing(self) -> list[str]:
        found: list[str] = []
        path = self.path
        while not os.path.lexists(path):
            found.append(path)
            path = os.path.dirname(path)
        return found

    def announce(self, ticket: SaveTicket) -> None:
        """Does nothing: each rank has an id of its own for its files, and says it with them."""

    def current(self, ticket: SaveTicket) -> SaveTicket:
        return SaveTicket(new_id(), ticket.rank, ticket.world_size)

    def take_part(self, ticket: SaveTicket) -> Callable[[], None]:
        self._kept = kept = [self._begin(ticket.save)]

        def end() -> None:
            for one in kept:
                one.close()

        return end

    def _begin(self, save: str) -> OwnedFile:
        return begin_save(self.path, save, durable=self._options.durability == "disk")

    def write(self, ticket: SaveTicket, boxes: Sequence[tuple[str, PlannedBox]]) -> WrittenFiles:
        def claim(id: str) -> str:
            self._kept.append(self._begin(id))
            return save_name(id)

        inner = "" if self._around is None else self.path[len(self._around) :]
        return write_boxes(
            self.path,
            [box for _, box in boxes],
            save=ticket.save,
            rank=ticket.rank,
            world_size=ticket.world_size,
            durable=self._options.durability == "disk",
            checksum=self._options.checksum,
            paths=_paths_of(boxes),
            sharing=_sharing(self._around or self.path, ticket, self._options, inner, claim),
        )

    def publish(self, finished: FinishedSave) -> None:
        publish_planned(
            self.path,
            finished.files,
            finished.tensors,
            {DCP: finished.objects},
            self._replacing,
            save=finished.save,
            durable=self._options.durability == "disk",
        )
        if self._around is not None:
            remove_torchs(FileStorage(self._around), durable=self._options.durability == "disk")

    def abandon(self, save: str) -> None:
        self.sweep()

    def sweep(self) -> None:
        sweep_saves(self.path)

    def open(self) -> FolderCheckpoint:
        found = FolderCheckpoint(self.path)
        if self._around is not None:
            refuse_two(self.path, self._around)
        return found


def _paths_of(boxes: Sequence[tuple[str, PlannedBox]]) -> list[str]:
    """Returns the paths in the snapshot of the boxes' tensors."""
    return [path_of((key, box.path)) for key, box in boxes]


class BucketPlace:
    """A place in a bucket that has, or is to have, a checkpoint.

    There are no locks: the manifest takes the place of an earlier one only if that is still there, so of two saves the
    later one wins. A save that dies leaves objects, which `memstore snapshot prune` removes.

    Args:
        url: of the checkpoint.
        around: as of FolderPlace.
    """

    def __init__(self, url: str, options: WriteOptions, around: str | None = None) -> None:
        self.path, self._options, self._around = url, options, around
        self._replacing = Replacing(DCP, options.overwrite)
        self._storage = ObjectStorage(url, options.bucket)

    @property
    def id(self) -> str:
        return self.path

    def of_rank(self, rank: int) -> BucketPlace:
        return BucketPlace(f"{self.path}/rank-{rank}", self._options, self.path)

    def check(self) -> None:
        self._replacing.check_at(self._storage)

    def missing(self) -> list[str]:
        return []

    def announce(self, ticket: SaveTicket) -> None:
        """Does nothing: each rank has an id of its own for its files, and says it with them."""

    def current(self, ticket: SaveTicket) -> SaveTicket:
        return SaveTicket(new_id(), ticket.rank, ticket.world_size)

    def take_part(self, ticket: SaveTicket) -> Callable[[], None]:
        leave_trace(self._storage, ticket.save)  # by which `prune` knows that a save goes on
        return lambda: None

    def write(self, ticket: SaveTicket, boxes: Sequence[tuple[str, PlannedBox]]) -> WrittenFiles:
        inner = "" if self._around is None else self.path[len(self._around) :]
        return write_boxes(
            self.path,
            [box for _, box in boxes],
            save=ticket.save,
            rank=ticket.rank,
            world_size=ticket.world_size,
            durable=True,
            checksum=True,
            options=self._options.bucket,
            paths=_paths_of(boxes),
            sharing=_sharing(self._around or self.path, ticket, self._options, inner, None),
        )

    def publish(self, finished: FinishedSave) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                publish_planned(
                    self.path,
                    finished.files,
                    finished.tensors,
                    {DCP: finished.objects},
                    self._replacing,
                    save=finished.save,
                    durable=True,
                    options=self._options.bucket,
                )
                break
            except AlreadyExistsError:  # another save was published in between: this one is the later one
                if not self._options.overwrite or attempt == _ATTEMPTS - 1:
                    raise
        saves = {finished.save, *(one.save for one in finished.files)}
        self._storage.remove_all([save_name(save) for save in saves])

    def abandon(self, save: str) -> None:
        abandon_save(self._storage, save)

    def sweep(self) -> None:
        """Does nothing: nobody can see which saves live."""

    def open(self) -> FolderCheckpoint:
        return FolderCheckpoint(self.path, options=self._options.bucket)


class FolderCheckpoint:
    """A checkpoint in a folder. It is pickled as a reference, which opens the folder when it is first used.

    Args:
        save: of a reference: the id of the checkpoint that the folder must still have.
        options: for a bucket.
    """

    def __init__(self, path: str, save: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._path, self._save, self._options = path, save, options
        self.id: str = self.opened.snapshot.manifest.id if save is None else save

    @cached_property
    def opened(self) -> OpenedFolder:
        snapshot = Stored(path_or_url(self._path), options=self._options)
        if self._save is not None and self._save != snapshot.manifest.id:
            raise VersionGoneError(f"{self._path} was overwritten while it was about to be read: load it again")
        tensors: dict[str, Mapping[str, ManifestTensor]] = {WRAPPED: {}}
        for key in (STATE, BYTES) if snapshot.value(0, WRAPPED) is None else (STATE, BYTES, WRAPPED):
            value = _value_of(snapshot, key)
            named = zip(value.plan.leaves, value.tensors, strict=True)
            tensors[key] = {str(leaf.name[0]): tensor for leaf, tensor in named}
        return OpenedFolder(snapshot, tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderCheckpoint, (self._path, self.id, self._options)

    @property
    def can_be_sent(self) -> bool:
        return True

    def tensors(self, key: str) -> Mapping[str, CheckpointTensor]:
        found: dict[str, CheckpointTensor] = {}
        for name, tensor in self.opened.tensors[key].items():
            chunks = [Box(box.offsets, box.shape) for box in tensor.boxes] or [whole(tensor.shape)]
            found[name] = CheckpointTensor(DTYPES[tensor.dtype], tensor.shape, chunks)
        return found

    def objects(self) -> Any:
        value = _value_of(self.opened.snapshot, DCP)
        if value.tensors:
            raise self.damaged(f"the value {DCP!r} has tensors")
        return self.opened.snapshot.build(value, [], allow_pickle=False)

    @modes.put_aside()
    def read(self, parts: Sequence[TensorRead]) -> None:
        """Compares bytes with their checksums where most of a chunk of 16 MiB is read."""
        snapshot, tensors = self.opened
        straight: list[ReadRequest] = []
        casts: list[tuple[ManifestTensor, TensorRead]] = []
        for part in parts:
            tensor = tensors[part.key][part.name]
            if part.box.is_empty:
                continue
            if part.target.dtype == DTYPES[tensor.dtype]:
                straight.append(ReadRequest(tensor, [Shard(part.box, part.target)]))
            else:
                casts.append((tensor, part))
        snapshot.check_files([tensors[part.key][part.name] for part in parts])
        read_into(snapshot, straight, SILENT, check_narrow=False)
        for batch in in_batches(casts, _BATCH, lambda one: one[1].target.numel() * DTYPES[one[0].dtype].itemsize):
            made = [new_memory(tensor.path, part.box.shape, DTYPES[tensor.dtype], "cpu") for tensor, part in batch]
            wants = [
                ReadRequest(tensor, [Shard(part.box, memory)])
                for (tensor, part), memory in zip(batch, made, strict=True)
            ]
            read_into(snapshot, wants, SILENT, check_narrow=False)
            for (_, part), memory in zip(batch, made, strict=True):
                copy_into(part.target, memory)

    def damaged(self, detail: str) -> CorruptionError:
        return self.opened.snapshot.damaged(detail)

    def share(self) -> Any:
        return self.id

    def shared(self, said: Any) -> FolderCheckpoint:
        return self if said == self.id else FolderCheckpoint(self._path, said, self._options)


class OpenedFolder(NamedTuple):
    """A checkpoint, and its tensors by STATE, BYTES or WRAPPED and by name."""

    snapshot: Stored
    tensors: Mapping[str, Mapping[str, ManifestTensor]]


def _value_of(snapshot: Stored, key: str) -> Value:
    value = snapshot.value(0, key)
    if value is None:
        raise NotAStoreError(
            f"{snapshot.path} has a snapshot that is no checkpoint, as it has no {key!r}: memstore.Snapshot reads it"
        )
    return value


# --- Keys of stores --------------------------------------------------------------------------------------------------


_LEASE = 1800.0  # seconds that a part waits for the other ranks


class EntryPlace:
    """A key that has, or is to have, a checkpoint."""

    def __init__(self, store: Store, key: str, options: WriteOptions) -> None:
        self._store, self._key, self._options = store, key, options

    @property
    def id(self) -> str:
        return self._key

    def of_rank(self, rank: int) -> EntryPlace:
        return EntryPlace(self._store, f"{self._key}/rank-{rank}", self._options)

    def check(self) -> None:
        if not self._options.overwrite and self._key in self._store:
            raise AlreadyExistsError(
                f"Checkpoint already exists under {self._key!r}, and overwrite is False: save to another key, or "
                "delete it",
                key=self._key,
            )

    def missing(self) -> list[str]:
        return []

    def announce(self, ticket: SaveTicket) -> None:
        self._store.put(self._note, {"save": ticket.save, "world_size": ticket.world_size})

    def current(self, ticket: SaveTicket) -> SaveTicket:
        said = self._store.get(self._note)
        return SaveTicket(said["save"], ticket.rank, said["world_size"])

    @property
    def _note(self) -> str:
        """Returns a key beside the checkpoint's, while a save runs whose planner caches plans."""
        return f"{self._key}/dcp-save"

    def take_part(self, ticket: SaveTicket) -> Callable[[], None]:
        return lambda: None  # the store keeps parts for a time, whoever lives

    def write(self, ticket: SaveTicket, boxes: Sequence[tuple[str, PlannedBox]]) -> WrittenFiles:
        parts: dict[tuple[str, str], list[PlannedBox]] = defaultdict(list)
        for key, box in boxes:
            parts[key, box.path].append(box)
        value: dict[str, dict[str, Any]] = {STATE: {}, BYTES: {}}
        for (key, name), found in parts.items():
            value.setdefault(key, {})
            made: list[tuple[tuple[int, ...], torch.Tensor]] = []
            for box in found:
                local = torch.empty(box.box.shape, dtype=box.dtype) if box.box.is_empty else box.make().detach()
                made.append((box.box.offsets, local if local.dtype == box.dtype else local.to(box.dtype)))
            value[key][name] = TensorShards(found[0].dtype, found[0].shape, tuple(made))
        self._store.put_sharded(
            self._key,
            value,
            attempt=ticket.save,
            rank=ticket.rank,
            world_size=ticket.world_size + 1,
            expect_version=self._expected,
            wait=False,
            lease=_LEASE,
        )
        return WrittenFiles(ticket.save, (), (None,) * len(boxes))

    def publish(self, finished: FinishedSave) -> None:
        self._store.put_sharded(
            self._key,
            {DCP: finished.objects},
            attempt=finished.save,
            rank=finished.world_size,
            world_size=finished.world_size + 1,
            expect_version=self._expected,
        )
        self._store.delete(self._note, missing_ok=True)

    def abandon(self, save: str) -> None:
        with contextlib.suppress(MemstoreError):  # the store is closed or gone, or the attempt has ended
            self._store.abort(self._key, save)
        with contextlib.suppress(MemstoreError):
            said = self._store.get(self._note)
            if isinstance(said, dict) and cast("dict[Any, Any]", said).get("save") == save:
                self._store.delete(self._note, missing_ok=True)

    def sweep(self) -> None:
        """Does nothing: the store frees what dead processes have left."""

    @property
    def _expected(self) -> int | None:
        return None if self._options.overwrite else 0

    def open(self) -> EntryCheckpoint:
        return EntryCheckpoint(self._store.ref(self._key), can_be_sent=may_write(self._store))


class EntryCheckpoint:
    """A checkpoint in a store: a version of a key, which stays readable as long as this lives.

    Args:
        can_be_sent: whether the reference can: from a store that was only opened to read it can't, for want of a lease.
    """

    def __init__(self, ref: Ref, *, can_be_sent: bool = True) -> None:
        self._ref, self.can_be_sent = ref, can_be_sent
        self._view: Any = ref.view()
        if not (isinstance(self._view, dict) and DCP in self._view):
            raise KeyNotFoundError(f"{ref.key!r} has a value that is no checkpoint: store.get reads it", key=ref.key)

    @property
    def id(self) -> str:
        return f"{self._ref.key} version {self._ref.version}"

    def tensors(self, key: str) -> Mapping[str, CheckpointTensor]:
        value = self._view.get(key, {})
        if not isinstance(value, dict):
            raise self.damaged(f"its {key!r} is {an(type(value))}, and no dict of tensors")
        found: dict[str, CheckpointTensor] = {}
        for name, leaf in cast("dict[Any, Any]", value).items():
            if not (isinstance(name, str) and isinstance(leaf, StoredTensor)):
                raise self.damaged(f"its {key!r} has {an(type(leaf))} at {name!r:.100}, and no tensor with a name")
            shape = tuple(leaf.shape)
            found[name] = CheckpointTensor(leaf.dtype, shape, [whole(shape)])
        return found

    def objects(self) -> Any:
        return self._view[DCP]

    def read(self, parts: Sequence[TensorRead]) -> None:
        for part in parts:
            if not part.box.is_empty:
                copy_into(part.target, self._view[part.key][part.name][part.box.slices])

    def damaged(self, detail: str) -> CorruptionError:
        return CorruptionError(key=self._ref.key, detail=detail)

    def share(self) -> Any:
        return self._ref if self.can_be_sent else (self._ref.key, self._ref.version)

    def shared(self, said: Any) -> EntryCheckpoint:
        if said in (self._ref, (self._ref.key, self._ref.version)):
            return self
        key, version = said if isinstance(said, tuple) else (said.key, said.version)
        if key != self._ref.key:
            raise VersionGoneError(f"the ranks read {self._ref.key!r} and {key!r}: give all of them one key")
        if isinstance(said, tuple):
            versions = f"{version} and {self._ref.version}"
            raise VersionGoneError(
                f"{key!r} was overwritten while the ranks opened it; they have versions {versions}: load again", key=key
            )
        return EntryCheckpoint(said)


# --- What a user gives -----------------------------------------------------------------------------------------------


class GivenPlace:
    """The place that a writer or a reader was given. It can be pickled.

    Args:
        path_or_store, key: as for StorageWriter.
        mode: in which a store is opened.
        options: for a bucket.

    Attributes:
        in_store: whether it is a key of a store.
    """

    def __init__(
        self,
        path_or_store: str | os.PathLike[str] | Store,
        key: str | None,
        mode: Literal["a", "r"],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._store: Store | None = None
        self._bucket = bucket_options(options)
        self._path: str | None = None
        self._mode: Literal["a", "r"] = mode
        if isinstance(path_or_store, str | os.PathLike):
            self._path = folder_of(path_or_store)
        elif hasattr(path_or_store, "put_sharded"):
            self._store = path_or_store
            opened(self._store)  # torch would tell of a closed one, or of a bad key, late and in an error of its own
        else:
            raise TypeError(f"path_or_store is a path or an open store, and not {an(type(path_or_store))}")
        if key is not None:
            encode_key(key)
            refuse_url(self._path, "a store", "give the folder of a store with key=, or a URL without key=")
        if self._bucket and not is_url(self._path):
            raise TypeError(f"storage_options has {sorted(self._bucket)}, which are for a URL, and this is none")
        self._key = key
        self.in_store = self._path is None or key is not None

    def __str__(self) -> str:
        if not self.in_store:
            return repr(self.id)
        store = self._path if self._store is None else self._store.root
        return f"{self._key!r} in {store}" if self._key is not None else f"in {store}"

    def move(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """Moves to another checkpoint: a key, where there is a store."""
        if self.in_store:
            key = text_of(checkpoint_id)
            encode_key(key)
            self._key = key
        else:
            self._path = folder_of(checkpoint_id)

    @property
    def id(self) -> str:
        return (self._key or "") if self.in_store else (self._path or "")

    def place(self, options: WriteOptions) -> CheckpointPlace:
        """Raises ValueError if there is a store, and no key."""
        if not self.in_store:
            assert self._path is not None
            if is_url(self._path):
                return BucketPlace(self._path, options._replace(bucket=self._bucket))
            if has_settings(self._path):
                raise ValueError(f"{self._path} is a store: give key=, that of the checkpoint in it, or another path")
            return FolderPlace(self._path, options)
        if self._key is None:
            raise ValueError("which key of the store? Give key=, or the checkpoint_id of the save or the load")
        return EntryPlace(self._opened(), self._key, options)

    def _opened(self) -> Store:
        if self._store is None:
            with between_forks():
                from memstore.store.opening import open as open_store
            assert self._path is not None
            self._store = open_store(self._path, self._mode)
        return self._store

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without a store that this has opened: who unpickles it opens it again."""
        return self.__dict__ | ({} if self._path is None else {"_store": None})


def is_possible(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Tells torch whether a checkpoint id is for this storage."""
    try:
        path = folder_of(checkpoint_id)
    except (TypeError, ValueError):
        return False
    if is_url(path):
        return True  # whether it may be written there, a service says when it is
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK)
