"""Takes: how a snapshot is taken. Every rank runs these steps; one that fails anywhere fails on all of them.

`prepare` has the steps 1 to 3 of all takes: the ranks agree on who writes what. `take` has the steps 4 and 5 of a plain
take. A take that is written while training goes on continues otherwise:

    4. each rank copies what it writes into shared memory; from here on the tensors may change (`start`)
    5. its writer makes the files, and leaves a part that says so; the writer that finds all parts publishes
       (`publishing.finish_part`). Killed from here on, even all trainers: the snapshot is completed
    6. `wait` waits for the publication; what fails in a writer raises there, and by a note in the folder on all ranks

A rank that dies before the publication leaves files that no manifest names: there is no snapshot. The next take to the
same path chooses other names, and removes them once its own manifest is there. An error removes what the take has
written, if every rank knows of it, or this one has not told the others yet that its files are there.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch

from memstore import _modes as modes
from memstore._arguments import flag, whole_number
from memstore._info import Progress
from memstore._parsing import UNDECODABLE
from memstore._ranks import RankError
from memstore.engine import deadline_after
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    KeyNotFoundError,
    MemstoreError,
    NotAStoreError,
    StoreTimeoutError,
    UnknownOutcomeError,
)
from memstore.snapshot.buckets import OF_ALL, bucket_options, check_options, is_url, path_or_url
from memstore.snapshot.drafts import FileDraft, Naming, Offer, draft, lone_replicas, offers_of, own_bytes, partition
from memstore.snapshot.manifest import (
    CLAIM,
    INDEX,
    MANIFEST,
    Manifest,
    ManifestFile,
    check_length,
    claim_name,
    failure_name,
    others_among,
    others_in,
    part_name,
    path_of,
    read_manifest,
)
from memstore.snapshot.objects import ObjectStorage, Storage, storage_at
from memstore.snapshot.publishing import (
    SnapshotPart,
    Take,
    abandon,
    new_take,
    present_manifest,
    publish,
    published,
)
from memstore.snapshot.ranks import TIMEOUT, RankGroup
from memstore.snapshot.staging import StagedTensors, stage
from memstore.snapshot.stateful import (
    AppState,
    StateWalker,
    ask_state_dicts,
    check_app_state,
    globs_of_ddp,
    is_replicating,
    matches_globs,
)
from memstore.snapshot.storage import FileStorage, ProgressMeter
from memstore.snapshot.writer import PendingWrite, StagedFile

# --- Options ---------------------------------------------------------------------------------------------------------


class StorageOptions(NamedTuple):
    """The `storage_options` of `Snapshot`.

    Attributes:
        bucket: those for an object store; obstore knows their names.
    """

    allow_pickle: bool
    timeout: float
    bucket: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, path: str) -> StorageOptions:
        """Raises TypeError or ValueError for options that memstore doesn't have, or not for this path."""
        options = dict(given or {})
        bucket = bucket_options(options)
        if is_url(path):
            check_options(bucket)
        elif bucket:
            raise TypeError(f"storage_options has {sorted(bucket)}; memstore knows {sorted(OF_ALL)}")
        timeout = options.get("timeout")
        timeout = TIMEOUT if timeout is None else timeout
        deadline_after(timeout)  # raises for what is no number of seconds
        return cls(flag("allow_pickle", options.get("allow_pickle") or False), timeout, bucket)


class TakeOptions(NamedTuple):
    """The arguments of `Snapshot.take` that say how."""

    replicated: Sequence[Any]
    durability: str
    checksum: bool
    allow_pickle: bool
    timeout: float  # seconds for the other ranks in each step
    bucket: dict[str, Any]  # options for an object store
    budget: int | None  # bytes of memory for uploads

    @classmethod
    def of(
        cls,
        path: Any,
        replicated: Any,
        durability: Any,
        checksum: Any,
        allow_pickle: Any,
        storage_options: Any,
        memory_budget_bytes: Any = None,
    ) -> TakeOptions:
        """Raises TypeError or ValueError for what can't be meant, and storage options that memstore doesn't have."""
        flag("checksum", checksum)
        flag("allow_pickle", allow_pickle)
        given = StorageOptions.of(storage_options, path_or_url(path))
        if memory_budget_bytes is not None and whole_number("memory_budget_bytes", memory_budget_bytes) < 1:
            raise ValueError(f"memory_budget_bytes is a positive number of bytes, and not {memory_budget_bytes!r}")
        return cls(
            replicated or (), durability, checksum, allow_pickle, given.timeout, given.bucket, memory_budget_bytes
        )

    def storage(self, path: str) -> Storage:
        """Returns the storage at a path or URL, which is there."""
        return storage_at(path, self.bucket, budget=self.budget)


# --- Steps 1 to 3: the ranks agree on who writes what ----------------------------------------------------------------


class PreparedTake(NamedTuple):
    """A rank's side of a take, before anything is written."""

    ranks: RankGroup
    storage: Storage
    part: SnapshotPart
    files: list[FileDraft]
    nbytes: int  # of the files


class Opening(msgspec.Struct, frozen=True):
    """The first message of a rank."""

    take: Take | None  # rank 0's
    replicated: list[str]
    keys: list[str]
    modules: list[tuple[str, str]]  # names of modules, and the prefix of DDP


def prepare(path: Any, app_state: Any, group: Any, options: TakeOptions) -> PreparedTake:
    """Takes the steps up to the writing. Returns what this rank is to write."""
    ranks = RankGroup(group, options.timeout)
    take: Take | None = None
    storage: Storage | None = None
    may_write = False  # whether other ranks may be writing
    try:
        # 1. Rank 0 looks that there is no snapshot, makes the folder, and claims its plain names if nobody has.
        #    Killed: a folder with a claim.
        with ranks.together() as step:
            checked, folder = _check_arguments(path, app_state, options)
            modules = [
                (key, "module." if is_replicating(value) else "")
                for key, value in checked.items()
                if isinstance(value, torch.nn.Module)
            ]
            replicated = [*options.replicated, *globs_of_ddp(checked)]
            if not ranks.rank:
                take, storage = _begin(folder, ranks.size, options)
            step.said = msgspec.msgpack.encode(Opening(take, replicated, list(checked), modules))
        opening = [msgspec.msgpack.decode(text, type=Opening) for text in step.heard]
        begun = opening[0].take
        if begun is None:
            raise MemstoreError("rank 0 of the process group said nothing of the snapshot")
        with modes.put_aside():
            # 2. The state dicts are asked for, one name after the other on all ranks, since they may have collectives
            #    inside. Killed, here and in 3: as before.
            dicts = ask_state_dicts(ranks, {key for said in opening for key in said.keys}, app_state)
            # 3. The ranks tell each other which tensors they share; each computes who writes what.
            globs = set.intersection(*(set(said.replicated) for said in opening)) if ranks.size > 1 else ()
            walker = StateWalker(allow_pickle=options.allow_pickle)
            with ranks.together() as step:
                storage = storage or options.storage(begun.path)
                # modules first: a tensor has the name of its first leaf, and a dict may hold a model's tensors, too
                modules_first = sorted(dicts, key=lambda key: not isinstance(app_state[key], torch.nn.Module))
                values = [walker.add(key, dicts[key]) for key in modules_first]
                nbytes = sum([len(one.path) for one in walker.tensors], sum([one.manifest_bytes for one in values]))
                check_length(nbytes, values)
                shared = {
                    one.path
                    for one in walker.tensors
                    if one.is_sharded or (globs and matches_globs(one.path, globs, ranks.rank))
                }
                said = own_bytes(walker.tensors, shared), offers_of(walker.tensors, shared)
                step.said = msgspec.msgpack.encode(said)
            found = [msgspec.msgpack.decode(text, type=tuple[int, list[Offer]]) for text in step.heard]
            may_write = True
            alone = lone_replicas([mine for _, mine in found])
            shared -= alone
            offers = [[one for one in mine if one.path not in alone] for _, mine in found]
            try:
                shares = partition([nbytes for nbytes, _ in found], offers)
            except MemstoreError:
                ranks.all_know = True  # each computes the same
                raise
            part, files = draft(begun, ranks.rank, values, walker.tensors, shared, shares, _naming_of(opening))
        return PreparedTake(ranks, storage, part, files, sum([file.size for file in files]))
    except BaseException as error:
        ranks.leave(error)
        if take is not None:
            abandon(
                storage or options.storage(take.path), take, [], ranks.rank, all_ended=ranks.all_know or not may_write
            )
        raise


def _check_arguments(path: Any, app_state: Any, options: TakeOptions) -> tuple[AppState, str]:
    """Returns the app state and the folder's path. Raises TypeError or ValueError."""
    checked = check_app_state(app_state)
    if options.durability not in ("process", "disk"):
        raise ValueError(f"durability is 'process' or 'disk', and not {options.durability!r}")
    if isinstance(options.replicated, str) or not all(isinstance(glob, str) for glob in options.replicated):
        raise TypeError(f"replicated is a list of patterns, and not {options.replicated!r}")
    return checked, path_or_url(path)


def _begin(path: str, world_size: int, options: TakeOptions) -> tuple[Take, Storage]:
    """Makes the folder, and claims names in it, on rank 0. Raises AlreadyExistsError for what is there."""
    if is_url(path):
        return _begin_in_bucket(path, world_size, options)
    if os.path.lexists(f"{path}/{MANIFEST}"):
        raise AlreadyExistsError(f"{path} has a snapshot: take to another path, or remove it first")
    if os.path.lexists(f"{path}/memstore.json"):
        raise AlreadyExistsError(f"{path} is a store: take to a folder of its own, such as {path}-step-1")
    for other in others_in(path):
        raise AlreadyExistsError(f"{path} has {other.kind} ({other.name}): take to another path, or remove it first")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise AlreadyExistsError(f"{path} is there, and is no folder: take to another path")
    take = new_take(path, world_size, durable=options.durability == "disk", checksum=options.checksum)
    return FileStorage.create_for(path, partial(_claim, take), durable=take.durable)


def _begin_in_bucket(path: str, world_size: int, options: TakeOptions) -> tuple[Take, Storage]:
    """Leaves a claim, which says until when `prune` must not take the take for a dead one.

    All takes have the plain names here: what they put under one name is the same.
    """
    storage = options.storage(path)
    if isinstance(storage, ObjectStorage) and storage.is_here and world_size > 1:
        raise ValueError(f"{path} is memory of one process, and {world_size:,} ranks take this snapshot")
    names = storage.names()
    if MANIFEST in names:
        raise AlreadyExistsError(f"{path} has a snapshot: take to another path, or remove it first")
    for other in others_among(names):
        raise AlreadyExistsError(f"{path} has {other.kind} ({other.name}): take to another path, or remove it first")
    take = new_take(path, world_size, durable=options.durability == "disk")
    storage.publish(claim_name(take.id), b"", durable=False)
    return msgspec.structs.replace(take, plain=True), storage


def _claim(take: Take, storage: FileStorage) -> tuple[Take, FileStorage]:
    """Claims the plain names of the folder, or names with the take's id where another take has those."""
    try:
        if not any(name.endswith(".safetensors") or name in (INDEX, CLAIM) for name in storage.names()):
            with contextlib.suppress(AlreadyExistsError):  # another take is first
                storage.publish(CLAIM, take.id.encode(), durable=False)
                return msgspec.structs.replace(take, plain=True), storage
        storage.publish(claim_name(take.id), b"", durable=False)
        return take, storage
    except BaseException:
        abandon(storage, take, [], 0, all_ended=True)
        raise


def _naming_of(opening: Sequence[Opening]) -> Naming:
    found = {key: prefix for said in opening for key, prefix in said.modules}
    if len(found) != 1:
        return Naming(None, "")
    ((key, prefix),) = found.items()
    return Naming(path_of((key,)), prefix)


# --- Steps 4 and 5 of a plain take: files, and the publication -------------------------------------------------------


def take(prepared: PreparedTake, progress: Progress | bool | None) -> Manifest:
    """Writes the files of a take that is prepared, and publishes it. Returns the snapshot's manifest."""
    ranks, storage, part, files, nbytes = prepared
    take = part.take
    written: list[str] = []
    is_told = False  # whether the others may know that this rank's files are there
    try:
        meter = ProgressMeter(progress, nbytes, "writing", rank=ranks.rank)
        # 4. Each rank writes its files, straight from the tensors' memory. Killed: files that no manifest names.
        with ranks.together() as step:
            with_sums: list[ManifestFile] = []
            for file in files:
                with_sums.append(file.write(storage, durable=take.durable, checksum=take.checksum, done=meter.done))
                written.append(file.name)
            meter.finish()
            is_told = True
            step.said = msgspec.msgpack.encode(msgspec.structs.replace(part, files=tuple(with_sums)))
        parts = step.heard
        # 5. Rank 0 publishes the parts. Killed: `publish` says in which step it leaves what.
        with ranks.at_first() as step:
            if not ranks.rank:
                step.said = publish(storage, [msgspec.msgpack.decode(text, type=SnapshotPart) for text in parts])
        ranks.end()
        return read_manifest(take.path, step.heard[0])
    except BaseException as error:
        ranks.leave(error)
        if ranks.lost and is_told:
            # Rank 0 has published the snapshot, and returns it. The others look; where there is none yet, they can't
            # know.
            found = published(storage, take)
            if found is not None:
                return found
            if ranks.rank:
                raise UnknownOutcomeError(
                    f"{error}. Whether rank 0 has published the snapshot is not known: {take.path}/{MANIFEST} is there "
                    "if it has"
                ) from error
        # A rank that has lost the others after step 4 doesn't know whether rank 0 is publishing its files just now.
        if ranks.rank == 0 or not is_told or ranks.all_know:
            abandon(storage, take, written, ranks.rank, all_ended=ranks.all_know)
        raise


# --- Steps 4 to 6 of an asynchronous take ----------------------------------------------------------------------------


def start(prepared: PreparedTake, meter: ProgressMeter, options: dict[str, Any] | None = None) -> PendingTake:
    """Copies the tensors of a take that is prepared, and hands them to the writer. When it returns, they may change.

    Args:
        options: for a bucket.
    """
    ranks, storage, part, files, _ = prepared
    take = part.take
    staged: StagedTensors | None = None
    try:
        # 4. Each rank copies its pieces into shared memory. Killed: nothing but the folder with its claim.
        with ranks.together(), modes.put_aside():
            pieces = [piece for file in files for piece in file.pieces]
            names = [part.tensors[piece.tensor].path for piece in pieces]
            staged = stage([piece.elements for piece in pieces], names=names)
        ranks.end()
        # 5. The writer gets the memory. Killed from here on: the writers complete the snapshot.
        places = iter(staged.places)
        write = staged.write(
            take.path,
            [StagedFile(file.name, file.header, [next(places) for _ in file.pieces]) for file in files],
            part=msgspec.msgpack.encode(part),
            durable=take.durable,
            checksum=take.checksum,
            done=meter.done,
            options=options,
        )
    except BaseException as error:
        if staged is not None:
            staged.release()
        ranks.leave(error)
        if not ranks.all_know:
            tell_others(storage, take, ranks.rank, error)
        abandon(storage, take, [], ranks.rank, all_ended=ranks.all_know)
        raise
    return PendingTake(prepared, write, meter)


_PROGRESS_FAILED = "the snapshot is there, but progress= was called no more after it raised {!r}"
_FIRST_LOOK = 0.002  # seconds between two looks at the folder


class PendingTake:
    """A snapshot that is being written, as this rank sees it.

    Attributes:
        path: of its folder.
    """

    def __init__(self, prepared: PreparedTake, write: PendingWrite, meter: ProgressMeter) -> None:
        self.path: str = prepared.part.take.path
        self._storage, self._take, self._rank = prepared.storage, prepared.part.take, prepared.ranks.rank
        self._patience = prepared.ranks.timeout  # seconds for the other ranks, where `wait` is given no timeout
        self._files = [file.name for file in prepared.files]
        self._write, self._meter = write, meter
        self._manifest: Manifest | None = None

    def wait(self, timeout: float | None = None) -> Manifest:
        """Waits for the publication: step 6. Returns the manifest; see `PendingSnapshot.wait`."""
        if self._manifest is None:
            started = time.monotonic()
            manifest = self._own_outcome(timeout)
            if manifest is None:
                left = self._patience if timeout is None else timeout - (time.monotonic() - started)
                manifest = self._others_outcome(time.monotonic() + left)
            self._meter.finish()
            if self._meter.failure is not None:
                warnings.warn(_PROGRESS_FAILED.format(self._meter.failure), RuntimeWarning, stacklevel=3)
            self._manifest = manifest
        return self._manifest

    def done(self) -> bool:
        """Returns whether `wait` would return, or raise, at once."""
        if self._manifest is not None:
            return True
        if not self._write.done():
            return False
        try:
            if self._write.wait(0) or self._published() is not None or self._failure() is not None:
                return True
            return self._storage.is_removed
        except (MemstoreError, OSError):
            return True

    def _own_outcome(self, timeout: float | None) -> Manifest | None:
        """Waits for this rank's writer. Returns the manifest if that was the last one."""
        try:
            last = bool(self._write.wait(timeout))
        except StoreTimeoutError:
            raise
        except UnknownOutcomeError as error:  # killed: before the publication, or after it
            found = self._published()
            if found is None:
                self._give_up(error, self._files)
            return found
        except (MemstoreError, OSError) as error:
            self._give_up(error, [])  # the writer has removed its files
        found = self._published() if last else None
        if last and found is None:
            raise NotAStoreError(f"{self.path}: the snapshot was published, and has been removed since")
        return found

    def _others_outcome(self, deadline: float) -> Manifest:
        """Waits until another rank's writer has published the snapshot, or says what has failed."""
        pause = _FIRST_LOOK
        while True:
            failure = self._failure()
            found = self._published()
            if found is not None:
                return found
            if failure is not None:
                raise failure
            if self._storage.is_removed:
                raise UnknownOutcomeError(
                    f"{self.path} was removed since this rank wrote its part: another rank may have waited for the "
                    "snapshot and then removed it; call wait on all ranks first"
                )
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"the snapshot {self.path}: {self._missing()}")
            time.sleep(pause)
            pause = min(2 * pause, self._storage.look_pause)

    def _missing(self) -> str:
        """Says what the wait was for, and what to do."""
        ranks = [rank for rank in range(self._take.world_size) if not self._has_part(rank)][:20]
        if not ranks:
            return "all ranks have written their parts, and it is not published yet: wait longer"
        if len(ranks) == 1:
            return f"rank {ranks[0]} has not written its part: it may have died, or wait longer"
        return f"ranks {', '.join(map(str, ranks))} have not written their parts: they may have died, or wait longer"

    def _published(self) -> Manifest | None:
        """Returns the manifest of this take, if it is there. Raises AlreadyExistsError if another one's is."""
        found = present_manifest(self._storage)
        if found is not None and found.id != self._take.id:
            self._abandon([*self._files, part_name(self._take.id, self._rank)])
            raise AlreadyExistsError(f"{self.path}: another take to this path was first")
        return found

    def _failure(self) -> Exception | None:
        """Returns what another rank has noted. Without its part nobody can publish: so this rank's files go."""
        names = {failure_name(self._take.id, rank): rank for rank in range(self._take.world_size)}
        found = self._storage.present(names) if len(names) > 1 else ()
        for name, rank in names.items():
            if name in found:
                with contextlib.suppress(KeyNotFoundError, CorruptionError, *UNDECODABLE):
                    kind, text = msgspec.json.decode(self._storage.read_bytes(name, 1 << 20), type=tuple[str, str])
                    if not self._has_part(rank):
                        self._abandon([*self._files, part_name(self._take.id, self._rank)])
                    return RankError(kind, text, rank).as_error()
        return None

    def _give_up(self, error: Exception, files: list[str]) -> NoReturn:
        """Tells the other ranks, removes what this one has written, and raises."""
        tell_others(self._storage, self._take, self._rank, error)
        if not self._has_part(self._rank):  # else another rank's writer may be publishing it
            self._abandon(files)
        raise error

    def _has_part(self, rank: int) -> bool:
        name = part_name(self._take.id, rank)
        return name in self._storage.present([name])

    def _abandon(self, files: list[str]) -> None:
        """Removes what this rank has written, once the take can't be published any more."""
        others = {failure_name(self._take.id, rank) for rank in range(self._take.world_size) if rank != self._rank}
        failed = not others or self._storage.present(others) == others
        abandon(self._storage, self._take, files, self._rank, all_ended=failed)


def tell_others(storage: Storage, take: Take, rank: int, error: BaseException) -> None:
    """Leaves a note of what has failed here, for the other ranks' `wait`."""
    note = msgspec.json.encode([type(error).__name__, str(error)])
    with contextlib.suppress(MemstoreError, OSError):
        if take.world_size > 1:
            storage.publish(failure_name(take.id, rank), note, durable=False)
