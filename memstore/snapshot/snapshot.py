"""Snapshot and PendingSnapshot, which users call; snapshots as tables, and the differences between two snapshots.

The names and their meaning are torchsnapshot's. The steps stand in `take`, `restore` and `reading`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from time import perf_counter
from typing import Any, Literal, NoReturn

import msgspec
import torch

from memstore._info import Progress
from memstore._telling import tell, told
from memstore._wording import age, shown, size, table_html, table_text
from memstore.engine import deadline_after
from memstore.errors import MemstoreError, NoSuchStateError, lacks_told
from memstore.figures import compare
from memstore.snapshot.buckets import OF_ALL, is_url, path_or_url
from memstore.snapshot.cache import CacheStore
from memstore.snapshot.copying import copy_snapshot
from memstore.snapshot.manifest import Manifest, ManifestTensor, load_manifest, tiers_of
from memstore.snapshot.ranks import RankGroup
from memstore.snapshot.reading import read_tensor, state_dict_of, view
from memstore.snapshot.restore import restore
from memstore.snapshot.stateful import AppState
from memstore.snapshot.stored import (
    SnapshotEntry,
    SnapshotLeaf,
    SnapshotMetadata,
    Stored,
    TensorEntry,
    all_leaves,
    entries_of,
    find_leaf,
    metadata_of,
    open_first,
    verify,
)
from memstore.snapshot.take import (
    PendingTiers,
    StorageOptions,
    TakeOptions,
    TierStatus,
    prepare,
    start,
    take_tiers,
)
from memstore.structure import PICKLED, modes


@modes.uncompiled_methods
class Snapshot:
    """State dicts in a folder of safetensors files. `Snapshot.take` writes a snapshot; `Snapshot(path)` opens one.

    It is pickled by its path and options, and copied by these and its process group. So a copy opens the snapshot that
    is at the path when the copy is first used.

    Args:
        path: of the folder.
        pg: the process group whose ranks restore together; None: the default one, or this process alone.
        storage_options: {"allow_pickle": True} permits reading objects that only pickle could store. This runs code, so
            use it only if you trust whoever took the snapshot. {"timeout": 60.0}: seconds to wait for the other ranks
            in each step (default: half an hour); in the longest step a rank writes, or reads, all of its bytes.
        then: paths of further folders, as they were given to `take`: if there is no snapshot at `path` (it was in
            memory, and the host was started again), the first of these that has one is used.

    Attributes:
        path: of the folder.
        then: the further ones.

    Example:
        >>> import memstore, tempfile, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> progress = memstore.StateDict(step=7)
        >>> path = tempfile.mkdtemp() + "/step-7"
        >>> snapshot = memstore.Snapshot.take(path, {"model": model, "progress": progress})
        >>> other, progress["step"] = torch.nn.Linear(4, 2), 0
        >>> memstore.Snapshot(path).restore({"model": other, "progress": progress})
        >>> torch.equal(model.weight, other.weight), progress["step"]
        (True, 7)
    """

    def __init__(
        self,
        path: str | PathLike[str],
        pg: Any = None,
        storage_options: dict[str, Any] | None = None,
        *,
        then: Sequence[str | PathLike[str]] = (),
    ) -> None:
        self.path: str = path_or_url(path)
        self.then: tuple[str, ...] = tiers_of(then)
        self.pg = pg
        self._allow_pickle, self._timeout, self._bucket = StorageOptions.of(
            storage_options, next(filter(is_url, (self.path, *self.then)), self.path)
        )
        self._stored: Stored | None = None
        self._manifest: Manifest | None = None  # where it is known, before anything is opened

    @classmethod
    def take(
        cls,
        path: str | PathLike[str],
        app_state: AppState,
        pg: Any = None,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        *,
        durability: Literal["process", "disk"] = "disk",
        checksum: bool = True,
        progress: Progress | bool | None = None,
        allow_pickle: bool = False,
        base: Snapshot | str | PathLike[str] | None = None,
        then: Sequence[str | PathLike[str]] = (),
        memory_budget_bytes: int | None = None,
    ) -> Snapshot:
        """Saves the state of some objects. The snapshot becomes visible completely, or not at all.

        Every rank of the process group calls it; each writes a share of the bytes. Sharded tensors (DTensor,
        TensorShard) are written once, and so are those that `DistributedDataParallel` keeps equal.

        Args:
            path: of a folder, which is created. That of rank 0 is used.
            app_state: Statefuls by name: modules, optimizers, schedulers, `StateDict`, `RNGState`.
            pg: the process group; None: the default one, if torch.distributed is initialised.
            replicated: patterns ("model/*", "**") of paths whose values are the same on all ranks.
            storage_options: as of `Snapshot`; "allow_pickle" for the snapshot that is returned.
            durability: "disk": when it returns, all is on the disk. "process": it survives the death of the process.
            checksum: whether to make a checksum for each 16 MiB; they are compared when something is read.
            progress: called with the bytes that this rank has written, and has to write in all; True: a bar on rank 0,
                if standard error is a terminal, else lines of the logger "memstore". If it raises, the take fails on
                all ranks, and nothing is left.
            allow_pickle: store objects that need it with pickle.
            base: an earlier snapshot, or its path. Tensors that are as they were there aren't written: their files get
                a second name in the new folder (a hard link), so that each snapshot is whole, and either can be
                removed. In a bucket the service copies their objects, which costs no upload. "latest": the newest
                snapshot in the folder that `path` lies in, if there is one. All is written where nothing can be shared:
                on another file system, in another bucket, or with checksum=False in the base.
            then: paths of further folders, to which the same is saved after that, each as a snapshot of its own: from
                memory to a disk. `Snapshot(path, then=...)` restores from the first one that is there. One that fails
                is told by a RuntimeWarning, and the error of the last one is raised. With `base`, the further ones
                share files with the newest snapshot beside them.

        Raises:
            AlreadyExistsError: a snapshot, a store or another library's checkpoint is at `path`, or another take
                finished first. It stays as it is.
            ValueError: `path` is an address of other storage, or leads to a folder "~" that isn't there.
            UnsupportedValueError: a leaf can't be saved.
            ShardMismatchError: ranks disagree about a tensor that they share: its shape, its dtype or its parts.
            StoreFullError: no room. Nothing is left.
            UnknownOutcomeError: rank 0 died when all had written; it may have published the snapshot.
            StoreTimeoutError: a rank did not come; the message names it.
            MemstoreError: another rank failed, or died; the message names it, and its reason.
        """
        options = TakeOptions.of(
            path,
            replicated,
            durability,
            checksum,
            allow_pickle,
            storage_options,
            _path_of(base),
            then,
            memory_budget_bytes,
        )
        began = perf_counter()
        with lacks_told(path):
            prepared = prepare(path, app_state, pg, options)
            found = take_tiers(prepared, progress, pg)
        tell("take", found[1], (), sum([one.nbytes for one in prepared]), began)
        return cls._of(*found, pg, {"allow_pickle": allow_pickle, **(storage_options or {})}, then)

    @classmethod
    def async_take(
        cls,
        path: str | PathLike[str],
        app_state: AppState,
        pg: Any = None,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        *,
        durability: Literal["process", "disk"] = "disk",
        checksum: bool = True,
        progress: Progress | bool | None = None,
        allow_pickle: bool = False,
        base: Snapshot | str | PathLike[str] | None = None,
        then: Sequence[str | PathLike[str]] = (),
        memory_budget_bytes: int | None = None,
    ) -> PendingSnapshot:
        """Takes a snapshot like `take`, but returns as soon as the tensors may change: a process writes their copies.

        Several takes may be in progress, with copies of a quarter of the machine's memory in all: a further one waits
        for the oldest. The snapshot is completed even if the training process dies.

        Args:
            path: as of `take`.
            app_state: as of `take`.
            pg: as of `take`.
            replicated: as of `take`.
            storage_options: as of `take`.
            durability: as of `take`.
            checksum: as of `take`.
            progress: as of `take`, called in a thread of its own while the bytes are written, and at last by `wait`.
                What it raises becomes a RuntimeWarning of `wait`, and it is called no more: the snapshot is there.
            allow_pickle: as of `take`.
            base: as of `take`. Tensors are compared before anything is copied, and only what differs is.
            then: as of `take`. There is one copy of the tensors for all folders; `PendingSnapshot.status` tells how
                far each one is.

        Returns:
            A PendingSnapshot; its `wait` returns the snapshot, or raises the error that occurred.

        Raises:
            StoreTimeoutError: too many bytes are still to be written after ten minutes.
            ResourceLimitError: the copies don't fit into the machine's memory.
            AlreadyExistsError, ValueError, UnsupportedValueError, ShardMismatchError, MemstoreError: as of `take`.
        """
        options = TakeOptions.of(
            path,
            replicated,
            durability,
            checksum,
            allow_pickle,
            storage_options,
            _path_of(base),
            then,
            memory_budget_bytes,
        )
        began = perf_counter()
        with lacks_told(path):
            prepared = prepare(path, app_state, pg, options)
            pending = start(prepared, progress, options)
        tell("async_take", prepared[0].part.take.path, (), sum([one.nbytes for one in prepared]), began)
        storage = {"allow_pickle": allow_pickle, **(storage_options or {})}
        return PendingSnapshot(pending, lambda manifest, where: cls._of(manifest, where, pg, storage, then))

    @classmethod
    def _of(
        cls, manifest: Manifest, where: str, pg: Any, storage_options: dict[str, Any], then: Sequence[Any]
    ) -> Snapshot:
        """Returns a snapshot whose manifest is known already, and the folder where it lies."""
        snapshot = cls(where, pg, storage_options, then=[path for path in then if path_or_url(path) != where])
        snapshot._manifest = manifest
        return snapshot

    def restore(self, app_state: AppState, strict: bool = True, *, progress: Progress | bool | None = None) -> None:
        """Restores the state of some objects, in place: stored bytes are read directly into their tensors.

        Every rank of the process group calls it. The ranks may differ from those that took the snapshot: sharded
        tensors are read as the present tensors are sharded; a rank that the snapshot doesn't know gets the values of
        rank 0.

        Args:
            app_state: Statefuls by the names under which they were saved, or some of them. RNGState comes last.
            strict: raise an error for names that only the module or only the snapshot has. False: they are left out.
            progress: called with the bytes that this rank has read, and has to read in all; True: as of `take`. If it
                raises, the restore fails on all ranks, as with damaged bytes.

        Raises:
            StructureMismatchError: names, shapes or dtypes differ; all differences are listed. Nothing was restored.
                (It is a RuntimeError, too, as in torchsnapshot.)
            CorruptionError: stored bytes are damaged. The objects' tensors then have any content.
            VersionGoneError: meanwhile the snapshot was removed, or another one took its place (checkpoints of
                torch.distributed.checkpoint are overwritten). The same holds for the other calls that read bytes.
            NotAStoreError: there is no snapshot at the path. (Where nothing else is there either, it is a
                FileNotFoundError and a RuntimeError, too.)
            AmbiguousCheckpointError: another library has saved to the folder, too.
            StoreTimeoutError, MemstoreError: of other ranks, as of `take`.
        """
        with lacks_told(self.path), told("restore", self.path):
            ranks = RankGroup(self.pg, self._timeout)
            if self.then and ranks.size > 1:
                try:
                    self._choose_tier(ranks)
                except BaseException as error:
                    ranks.leave(error)
                    raise
            restore(self._open, app_state, ranks, progress, strict=strict, allow_pickle=self._allow_pickle)

    def read_object(self, path: str, obj_out: Any = None, memory_budget_bytes: int | None = None) -> Any:
        """Reads one tensor or object, and nothing else of the snapshot.

        Args:
            path: as `get_manifest` has it: "0/model/layer.weight", "0/progress/step".
            obj_out: a tensor to fill in place (a DTensor or TensorShard: its own part), which is returned. Ignored for
                objects that are no tensors.
            memory_budget_bytes: how much memory to use beside the result if the bytes can't be read directly into it:
                with checksums at least a chunk of 16 MiB.

        Raises:
            KeyNotFoundError: there is nothing at `path`. It is a RuntimeError, too.
            StructureMismatchError: `obj_out` has another shape or dtype. It is a RuntimeError, too.
            CorruptionError: the bytes are damaged.
        """
        with lacks_told(self.path):
            stored = self._open()
            leaf = find_leaf(stored, path, allow_pickle=self._allow_pickle)
            if leaf.tensor is None:
                return leaf.object
            return read_tensor(stored, path, leaf.tensor, obj_out, memory_budget_bytes)

    def get_manifest(self) -> dict[str, SnapshotEntry]:
        """Returns all tensors and objects, by rank and path. Each has its dtype, shape and files, or its value."""
        with lacks_told(self.path):
            return entries_of(self._open(), allow_pickle=self._allow_pickle)

    @property
    def metadata(self) -> SnapshotMetadata:
        """Returns by which version, when and by how many ranks the snapshot was written, and its manifest."""
        with lacks_told(self.path):
            return metadata_of(self._open(), allow_pickle=self._allow_pickle)

    def get_state_dict_for_key(self, key: str) -> dict[str, Any]:
        """Returns the state dict that was saved under a name of the app state, in new memory on the CPU.

        Raises:
            KeyNotFoundError: nothing was saved under this name.
        """
        with lacks_told(self.path):
            stored = self._open()
            rank = RankGroup(self.pg).rank
            value = stored.value(rank, key)
            if value is None:
                there = ", ".join(map(repr, stored.keys(rank)))
                raise NoSuchStateError(f"{self.path} has nothing under {key!r}; it has {there}", key=key)
            return state_dict_of(stored, value, allow_pickle=self._allow_pickle)

    def view(self, *, cache: CacheStore | None = None) -> dict[str, Any]:
        """Returns what this rank saved, by the names in its app state, with lazy leaves: no tensor is read yet.

        The leaves are StoredTensors, as those of `Store.view`, over the mapped files: slicing one reads nothing, and an
        operator reads what it needs, even if the parts of a tensor are in several files. Nothing is compared with
        checksums. If a leaf is sent to another process, it is a reference to the folder.

        The view stays valid when the snapshot is removed; unpickling a reference then raises a VersionGoneError.

        Args:
            cache: a store of this host, opened for writing, for the leaves of a snapshot in a bucket: what one process
                has fetched, the others read there, under keys with the prefix "snapshot-cache/". Limit it by the
                store's capacity, or by `store.set_quota("snapshot-cache/", "8GiB")`. A folder needs none.

        Raises:
            CorruptionError: the manifest is damaged, or a file is missing or of another size.
            ReadOnlyError: `cache` was opened with mode "r".
        """
        with lacks_told(self.path):
            return view(self._open(), RankGroup(self.pg).rank, allow_pickle=self._allow_pickle, cache=cache)

    def verify(self, *, progress: Progress | bool | None = None) -> None:
        """Reads all files, and compares them with their checksums and the manifest.

        Args:
            progress: called with the bytes done and those in all; True: as of `take`.

        Raises:
            CorruptionError: something is damaged or missing; the message names the file, and what is wrong with it.
        """
        self._stored = self._manifest = None
        with lacks_told(self.path):
            verify(self._open(), progress, allow_pickle=self._allow_pickle)

    def copy(
        self,
        path: str | PathLike[str],
        *,
        durability: Literal["process", "disk"] = "disk",
        progress: Progress | bool | None = None,
    ) -> Snapshot:
        """Copies the snapshot to another folder or URL, whole: the copy shares no file with any other snapshot.

        One process calls this, for the state of all ranks. What is read is compared with its checksums, if it has any.

        Args:
            path: of a folder, as of `take`.
            durability: as of `take`.
            progress: as of `take`.

        Raises:
            AlreadyExistsError: a snapshot, a store or another library's checkpoint is at `path`.
            CorruptionError: this snapshot is damaged. Nothing is left at `path`.
            StoreFullError: no room. Nothing is left.
        """
        if durability not in ("process", "disk"):
            raise ValueError(f"durability is 'process' or 'disk', and not {durability!r}")
        with lacks_told(path):
            durable, bucket = durability == "disk", self._bucket
            copied = copy_snapshot(self._open(), path, durable=durable, progress=progress, options=bucket)
        options = self._options()
        if not is_url(target := path_or_url(path)):
            options = {key: options[key] for key in OF_ALL}
        return self._of(copied, target, self.pg, options, ())

    def _open(self) -> Stored:
        """Returns what is read of the snapshot; see `stored_of`."""
        if self._stored is None:
            if self.then:
                self._stored = open_first([self.path, *self.then], self._bucket)
            else:
                self._stored = Stored(self.path, self._manifest, self._bucket)
        return self._stored

    def _choose_tier(self, ranks: RankGroup) -> None:
        """Opens the first tier that is the same snapshot on all ranks: another host's memory may lack it."""
        paths = [self.path, *self.then]
        with ranks.together() as step:
            step.said = msgspec.msgpack.encode([_id_at(path, self._bucket) for path in paths])
        said = [msgspec.msgpack.decode(text, type=list[str | None]) for text in step.heard]
        for path, *ids in zip(paths, *said, strict=True):
            if ids[0] is not None and len(set(ids)) == 1:
                self._stored = Stored(path, options=self._bucket)
                return

    def __reduce__(self) -> tuple[Any, ...]:
        if self.pg is not None:
            raise TypeError(
                "a Snapshot with a process group can't be pickled: send its path, and open memstore.Snapshot(path, pg) "
                "with the receiver's own group"
            )
        return _reopened, (type(self), self.path, self._options(), self.then)

    def __copy__(self) -> Snapshot:
        return type(self)(self.path, self.pg, self._options(), then=self.then)

    def __deepcopy__(self, memo: object) -> Snapshot:
        return self.__copy__()  # a process group can't be copied, and is the same one

    def _options(self) -> dict[str, Any]:
        """Returns the storage options that it was opened with."""
        return {**self._bucket, "allow_pickle": self._allow_pickle, "timeout": self._timeout}

    def __str__(self) -> str:
        """Returns a table of its entries; just its path if it can't be read."""
        try:
            found = self.metadata
            return table_text(_COLUMNS, _cells(found), _title(self.path, found))
        except (MemstoreError, OSError):
            return repr(self)

    def _repr_html_(self) -> str:
        try:
            found = self.metadata
            return table_html(_COLUMNS, _cells(found), _title(self.path, found))
        except (MemstoreError, OSError):
            return html.escape(repr(self))

    def __repr__(self) -> str:
        return f"memstore.Snapshot({self.path!r})"


def _id_at(path: str, options: dict[str, Any]) -> str | None:
    try:
        return load_manifest(path, options).id
    except (MemstoreError, OSError):
        return None


def _reopened(kind: type[Snapshot], path: str, options: dict[str, Any], then: tuple[str, ...]) -> Snapshot:
    """Unpickles a snapshot."""
    return kind(path, None, options, then=then)


def _path_of(base: Any) -> Any:
    """Returns the path of a base that was given as a snapshot: where that lies, which may be a further tier."""
    return base._open().path if isinstance(base, Snapshot) else base  # pyright: ignore[reportPrivateUsage]


@modes.uncompiled_methods
class PendingSnapshot:
    """A snapshot that is being written. Made by `Snapshot.async_take`.

    Attributes:
        path: of its folder.
    """

    def __init__(self, take: PendingTiers, snapshot_of: Callable[[Manifest, str], Snapshot]) -> None:
        self.path: str = take.path
        self._take, self._snapshot_of = take, snapshot_of

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Waits until the snapshot of all ranks is there, in all tiers, and returns it.

        Args:
            timeout: seconds; None: as long as this rank's bytes take, and then half an hour, or the `storage_options`'
                "timeout", for the other ranks.

        Raises:
            StoreTimeoutError: it takes longer; the message says which ranks are missing. The take goes on, and `wait`
                can be called again.
            AlreadyExistsError: another take to this path finished first.
            UnknownOutcomeError: the folder has been removed since.
            MemstoreError, OSError: the error of this rank's writer, or of another rank's, which the message names.
        """
        if timeout is not None:
            deadline_after(timeout)  # raises for what is no number of seconds
        return self._snapshot_of(*self._take.wait(timeout))

    def done(self) -> bool:
        """Returns whether `wait` would return, or raise, at once."""
        return self._take.done()

    def status(self) -> tuple[TierStatus, ...]:
        """Returns the states of all tiers, in their order, at this moment: "writing", "whole" or "failed".

        From the first one that is whole, the state can be restored. A tier that fails doesn't end the others.
        """
        return self._take.status()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PendingSnapshot can't be pickled: another process opens memstore.Snapshot(path) when its wait() has "
            "returned here"
        )

    def __repr__(self) -> str:
        return f"memstore.PendingSnapshot({self.path!r}, done={self.done()})"


def stored_of(snapshot: Snapshot) -> Stored:
    """Opens a snapshot for reading, for other parts of memstore. Raises NotAStoreError, CorruptionError."""
    return snapshot._open()  # pyright: ignore[reportPrivateUsage]


# --- A snapshot as a table, for a terminal and for a notebook --------------------------------------------------------


_COLUMNS = ("path", "dtype", "shape", "size", "files")
_LONGEST = 40  # characters of a value


def _title(path: str, found: SnapshotMetadata) -> str:
    ranks = f"{found.world_size:,} {'rank' if found.world_size == 1 else 'ranks'}"
    sums = "" if found.checksum else ", no checksums"
    entries = shown(len(found.manifest), "entry", "entries")
    return f"memstore.Snapshot {path}: {size(found.nbytes)} of {ranks}, {age(found.created)} old{sums}; {entries}"


def _cells(found: SnapshotMetadata) -> Iterator[tuple[str, str, str, str, str]]:
    for path, entry in found.manifest.items():
        if isinstance(entry, TensorEntry):
            dtype = str(entry.dtype).removeprefix("torch.")
            yield path, dtype, str(list(entry.shape)), size(entry.nbytes), f"{len(entry.files)}"
        else:
            text = repr(entry.value)
            short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
            yield path, type(entry.value).__name__, short, "", ""


# --- Differences between two snapshots -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SnapshotDifference:
    """A path, and how what two snapshots have there differs."""

    path: str
    what: str


def differences(
    first: Snapshot, second: Snapshot, done: Callable[[int, int], None] | None = None
) -> list[SnapshotDifference]:
    """Lists what differs, by rank and path. Tensors are equal if their bits are; two are in memory at a time.

    Args:
        done: called with how many leaves have been compared, and how many there are.
    """
    left, right = stored_of(first), stored_of(second)
    ours, theirs = dict(all_leaves(left, allow_pickle=False)), dict(all_leaves(right, allow_pickle=False))
    paths = list(dict.fromkeys([*ours, *theirs]))
    known: dict[tuple[int, int], str] = {}
    found: list[SnapshotDifference] = []
    for number, path in enumerate(paths, 1):
        if path not in theirs or path not in ours:
            found.append(SnapshotDifference(path, f"only in {(first if path in ours else second).path}"))
        else:
            what = _compare(left, right, path, ours[path], theirs[path], known)
            if what:
                found.append(SnapshotDifference(path, what))
        if done is not None:
            done(number, len(paths))
    return found


def _compare(
    left: Stored, right: Stored, path: str, ours: SnapshotLeaf, theirs: SnapshotLeaf, known: dict[tuple[int, int], str]
) -> str:
    """Says how two leaves differ; "" if they are equal."""
    if ours.tensor is None or theirs.tensor is None:
        if ours.tensor is not theirs.tensor:
            return "a tensor in one, an object in the other"
        if ours.object is PICKLED and theirs.object is PICKLED:
            return "" if ours.stored == theirs.stored else "both are stored with pickle, as other bytes"
        return "" if _same(ours.object, theirs.object) else f"{ours.object!r:.60} and {theirs.object!r:.60}"
    pair = (id(ours.tensor), id(theirs.tensor))
    if pair not in known:
        known[pair] = _compare_tensors(left, right, path, ours.tensor, theirs.tensor)
    return known[pair]


def _same(ours: Any, theirs: Any) -> bool:
    try:
        return type(ours) is type(theirs) and bool(ours == theirs or (ours != ours and theirs != theirs))
    except (TypeError, ValueError, RuntimeError):  # of arrays, and of classes of others
        return repr(ours) == repr(theirs)


def _compare_tensors(left: Stored, right: Stored, path: str, ours: ManifestTensor, theirs: ManifestTensor) -> str:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype}{list(ours.shape)} and {theirs.dtype}{list(theirs.shape)}"
    one: torch.Tensor = read_tensor(left, path, ours, None, None)
    other: torch.Tensor = read_tensor(right, path, theirs, None, None)
    unequal = compare(one, other)
    return "" if unequal is None else str(unequal)
