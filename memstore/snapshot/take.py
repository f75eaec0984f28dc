"""Takes: how a snapshot is taken. Every rank runs these steps; one that fails anywhere fails on all of them.

    1. rank 0 looks that there is no snapshot, makes the folder, and claims its plain names if nobody has (`open_take`)
    2. the state dicts are asked for, one name after the other on all ranks, since they may have collectives inside
    3. the ranks tell each other which tensors they share; each computes who writes what (`prepare`)
    4. each writes its files, straight from the tensors' memory (`take`)
    5. rank 0 collects the parts and publishes the snapshot: `publishing` says in which steps

A rank that dies in 1 to 4 leaves files that no manifest names: there is no snapshot. The next take to the same path
chooses other names, and removes them once its own manifest is there. When a rank is lost in 5, rank 0 has published the
snapshot and returns it; the others look, and where there is none yet, they can't know. An error removes what the take
has written, if every rank knows of it, or this one has not told the others yet that its files are there.

Snapshots that are written while training goes on are copied first, then written by a process of its own:

    1. as a take: the ranks agree on who writes what (`prepare`, steps 1 to 3)
    2. each rank copies what it writes into shared memory; from here on the tensors may change (`start`)
    3. its writer makes the files, and leaves a part that says so; the writer that finds all parts publishes
    4. `wait` waits for the publication; what fails in a writer raises there, and by a note in the folder on all ranks

Once all ranks are through 2, the writers need no trainer: if these die, the snapshot is completed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import uuid
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch

from memstore import _modes as modes
from memstore._arguments import flag
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
from memstore.snapshot.drafts import (
    DraftPiece,
    FileDraft,
    Naming,
    Offer,
    bytes_of,
    draft,
    lone_replicas,
    offers_of,
    own_bytes,
    partition,
)
from memstore.snapshot.file_storage import FileStorage
from memstore.snapshot.manifest import LIMIT, Manifest, ManifestValue, check_length, read_manifest
from memstore.snapshot.names import (
    CLAIM,
    INDEX,
    MANIFEST,
    claim_name,
    failure_name,
    local_path,
    others_in,
    part_name,
    path_of,
)
from memstore.snapshot.progress import ProgressMeter
from memstore.snapshot.publishing import SnapshotPart, Take, abandon, publish, published, with_sums
from memstore.snapshot.ranks import TIMEOUT, RankGroup
from memstore.snapshot.staging import StagedTensors, stage
from memstore.snapshot.stateful import (
    AppState,
    HeldTensor,
    State,
    StateWalker,
    ask_state_dicts,
    check_app_state,
    globs_of_ddp,
    is_replicating,
    matches_globs,
)
from memstore.snapshot.storage import FilePart, LateBytes, Storage
from memstore.snapshot.writer import PendingWrite, StagedFile

# --- Options ---------------------------------------------------------------------------------------------------------


class TakeOptions(NamedTuple):
    """As the arguments of `Snapshot.take`."""

    replicated: Sequence[Any]
    durability: str
    checksum: bool
    allow_pickle: bool
    timeout: float  # seconds for the other ranks in each step

    @classmethod
    def of(
        cls, replicated: Any, durability: Any, checksum: Any, allow_pickle: Any, storage_options: Any
    ) -> TakeOptions:
        """Raises TypeError or ValueError for what can't be meant, and storage options that memstore doesn't have."""
        flag("checksum", checksum)
        flag("allow_pickle", allow_pickle)
        timeout = storage_options_of(storage_options).timeout
        return cls(replicated or (), durability, checksum, allow_pickle, timeout)


class StorageOptions(NamedTuple):
    """As `storage_options` of `Snapshot`."""

    allow_pickle: bool
    timeout: float


def storage_options_of(given: dict[str, Any] | None) -> StorageOptions:
    """Raises TypeError or ValueError for options that memstore doesn't have."""
    options = given or {}
    unknown = set(options) - set(StorageOptions._fields)
    if unknown:
        raise TypeError(f"storage_options has {sorted(unknown)}; memstore knows {sorted(StorageOptions._fields)}")
    timeout = options.get("timeout")
    timeout = TIMEOUT if timeout is None else timeout
    deadline_after(timeout)  # raises for what is no number of seconds
    return StorageOptions(flag("allow_pickle", options.get("allow_pickle") or False), timeout)


# --- Steps 1 to 3: what each rank is to write ------------------------------------------------------------------------


class PreparedTake(NamedTuple):
    """What a rank is about to write."""

    ranks: RankGroup
    storage: FileStorage
    part: SnapshotPart
    files: list[FileDraft]

    @property
    def nbytes(self) -> int:
        """Of the files."""
        return sum(file.size for file in self.files)


def prepare(path: Any, app_state: Any, group: Any, options: TakeOptions) -> PreparedTake:
    """All but the writing: afterwards every rank knows what it writes."""
    ranks = RankGroup(group, options.timeout)
    begun: list[Take] = []  # rank 0's
    may_write: list[bool] = []  # once it is not empty, other ranks may be writing
    try:
        said = ranks.together(lambda: open_take(ranks, path, app_state, options, begun))
        opening = [msgspec.msgpack.decode(text, type=Opening) for text in said]
        with modes.put_aside():
            return _prepare(ranks, opening, app_state, options, may_write)
    except BaseException as error:
        ranks.leave(error)
        for take in begun:
            abandon(FileStorage(take.path), take, [], ranks.rank, all_ended=ranks.all_know or not may_write)
        raise


def _prepare(
    ranks: RankGroup, opening: list[Opening], app_state: AppState, options: TakeOptions, may_write: list[bool]
) -> PreparedTake:
    take = opening[0].take
    if take is None:
        raise MemstoreError("rank 0 of the process group said nothing of the snapshot")
    storages: list[FileStorage] = []
    tensors: list[HeldTensor] = []
    states: list[State] = []
    shared: set[str] = set()
    dicts = ask_state_dicts(ranks, {key for said in opening for key in said.keys}, app_state)
    globs = set.intersection(*(set(said.replicated) for said in opening))

    def walk() -> bytes:
        storages.append(FileStorage(take.path))
        walker = StateWalker(allow_pickle=options.allow_pickle)
        # modules first: a tensor has the name of its first leaf, and a dict may hold a model's tensors, too
        found = sorted(dicts.items(), key=lambda item: not isinstance(app_state[item[0]], torch.nn.Module))
        states.extend(walker.add(key, value) for key, value in found)
        tensors.extend(walker.tensors)
        values = [ManifestValue(*state) for state in states]
        check_length(sum(value.manifest_bytes for value in values) + sum(len(one.path) for one in tensors), values)
        alike = globs if ranks.size > 1 else ()
        shared.update(one.path for one in tensors if one.is_sharded or matches_globs(one.path, alike, ranks.rank))
        return msgspec.msgpack.encode((own_bytes(tensors, shared), offers_of(tensors, shared)))

    found = [msgspec.msgpack.decode(text, type=tuple[int, list[Offer]]) for text in ranks.together(walk)]
    may_write.append(True)
    alone = lone_replicas([mine for _, mine in found])
    shared -= alone
    try:
        shares = partition(
            [nbytes for nbytes, _ in found], [[offer for offer in mine if offer.path not in alone] for _, mine in found]
        )
    except MemstoreError:
        ranks.all_know = True  # each computes the same
        raise
    part, files = draft(take, ranks.rank, states, tensors, shared, shares, naming_of(opening))
    return PreparedTake(ranks, storages[0], part, files)


# --- Step 1: the folder ----------------------------------------------------------------------------------------------


class Opening(msgspec.Struct, frozen=True):
    """What a rank says first."""

    take: Take | None  # rank 0's
    replicated: list[str]
    keys: list[str]
    modules: list[tuple[str, str]]  # names of modules, and the prefix of DDP


def open_take(ranks: RankGroup, path: Any, app_state: Any, options: TakeOptions, begun: list[Take]) -> bytes:
    """What this rank says first. Rank 0 begins the take, which it then finds in `begun`."""
    checked = check_app_state(app_state)
    if options.durability not in ("process", "disk"):
        raise ValueError(f"durability is 'process' or 'disk', and not {options.durability!r}")
    if isinstance(options.replicated, str) or not all(isinstance(glob, str) for glob in options.replicated):
        raise TypeError(f"replicated is a list of patterns, and not {options.replicated!r}")
    found = local_path(path)
    modules = [
        (key, "module." if is_replicating(value) else "")
        for key, value in checked.items()
        if isinstance(value, torch.nn.Module)
    ]
    replicated = [*options.replicated, *globs_of_ddp(checked)]
    if not ranks.rank:
        begun.append(_begin(found, ranks.size, options))
    return msgspec.msgpack.encode(Opening(begun[0] if begun else None, replicated, list(checked), modules))


def _begin(path: str, world_size: int, options: TakeOptions) -> Take:
    """Rank 0's: an error for a snapshot that is there; else the folder, and whose names the plain ones are."""
    if os.path.lexists(f"{path}/{MANIFEST}"):
        raise AlreadyExistsError(f"{path} has a snapshot: take to another path, or remove it first")
    if os.path.lexists(f"{path}/memstore.json"):
        raise AlreadyExistsError(f"{path} is a store: take to a folder of its own, such as {path}-step-1")
    for other in others_in(path):
        raise AlreadyExistsError(f"{path} has {other.kind} ({other.name}): take to another path, or remove it first")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise AlreadyExistsError(f"{path} is there, and is no folder: take to another path")
    writer = f"memstore {importlib.import_module('memstore').__version__}"  # which is a layer above this one
    durable = options.durability == "disk"
    take = Take(uuid.uuid4().hex[:16], path, world_size, time.time(), writer, False, durable, options.checksum)
    storage = FileStorage.create(path, durable=durable)
    try:
        return msgspec.structs.replace(take, plain=_claim(storage, take.id))
    except BaseException:
        abandon(storage, take, [], 0, all_ended=True)
        raise


def _claim(storage: FileStorage, take: str) -> bool:
    """Claims names for a take. Whether it may use the plain ones: nobody else does, or has used them."""
    plain = not any(name.endswith(".safetensors") or name in (INDEX, CLAIM) for name in storage.names())
    if plain:
        with contextlib.suppress(AlreadyExistsError):
            storage.publish(CLAIM, take.encode(), durable=False)
            return True
    storage.publish(claim_name(take), b"", durable=False)
    return False


def naming_of(opening: Sequence[Opening]) -> Naming:
    found = {key: prefix for said in opening for key, prefix in said.modules}
    if len(found) != 1:
        return Naming(None, "")
    ((key, prefix),) = found.items()
    return Naming(path_of((key,)), prefix)


# --- Steps 4 and 5: files, and the publication -----------------------------------------------------------------------


def take(prepared: PreparedTake, progress: Progress | bool | None) -> Manifest:
    """Steps 4 and 5, for a take that is prepared. Returns the snapshot's manifest."""
    ranks, storage, files = prepared.ranks, prepared.storage, prepared.files
    take = prepared.part.take
    written: list[str] = []
    handed_over: list[bool] = []
    try:
        meter = ProgressMeter(progress, prepared.nbytes, "writing", rank=ranks.rank)

        def write() -> bytes:
            sums: dict[str, bytes] = {}
            for file in files:
                sums[file.name] = _write(storage, file, take, meter)
                written.append(file.name)
            meter.finish()
            handed_over.append(True)
            return msgspec.msgpack.encode(with_sums(prepared.part, sums))

        parts = ranks.together(write)

        def finish() -> bytes:
            return publish(storage, [msgspec.msgpack.decode(part, type=SnapshotPart) for part in parts])

        text = ranks.at_first(finish)
        ranks.end()
        return read_manifest(take.path, text)
    except BaseException as error:
        ranks.leave(error)
        if ranks.lost and handed_over:
            found = published(storage, take)
            if found is not None:
                return found
            if ranks.rank:
                raise UnknownOutcomeError(
                    f"{error}. Whether rank 0 has published the snapshot is not known: {take.path}/{MANIFEST} is there "
                    "if it has"
                ) from error
        # A rank that has lost the others after step 4 doesn't know whether rank 0 is publishing its files just now.
        if ranks.rank == 0 or not handed_over or ranks.all_know:
            abandon(storage, take, written, ranks.rank, all_ended=ranks.all_know)
        raise


def _write(storage: FileStorage, file: FileDraft, take: Take, meter: ProgressMeter) -> bytes:
    parts = [FilePart(0, file.header)]
    at = len(file.header)
    for device in {piece.elements.device for piece in file.pieces if piece.elements.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # the writing threads have streams of their own
    with modes.put_aside():
        for piece in file.pieces:
            parts.append(FilePart(at, _memory(piece)))
            at += piece.nbytes
    return storage.write(file.name, file.size, parts, durable=take.durable, checksum=take.checksum, done=meter.done)


def _memory(piece: DraftPiece) -> Any:
    """The elements' own memory; what lies otherwise is copied when its turn has come, and so never all at once."""
    plain = piece.elements
    if plain.is_cpu and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return bytes_of(plain)
    return LateBytes(piece.nbytes, modes.put_aside()(partial(bytes_of, plain)))


# --- Asynchronous takes ----------------------------------------------------------------------------------------------


_PROGRESS_FAILED = "the snapshot is there, but progress= was called no more after it raised {!r}"
_FIRST_LOOK, _LAST_LOOK = 0.002, 0.25  # seconds between two looks at the folder


class PendingTake:
    """A snapshot that is being written, as this rank sees it. Attributes: path: of its folder."""

    def __init__(self, prepared: PreparedTake, write: PendingWrite, meter: ProgressMeter) -> None:
        self.path: str = prepared.part.take.path
        self._storage, self._take, self._rank = prepared.storage, prepared.part.take, prepared.ranks.rank
        self._patience = prepared.ranks.timeout  # seconds for the other ranks, where `wait` is given no timeout
        self._files = [file.name for file in prepared.files]
        self._write, self._meter = write, meter
        self._manifest: Manifest | None = None

    def wait(self, timeout: float | None = None) -> Manifest:
        """As `PendingSnapshot.wait`, which makes a Snapshot of it."""
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
        """Whether `wait` would return, or raise, at once."""
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
        """The manifest, if this rank's writer was the last one."""
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

    def _give_up(self, error: Exception, files: list[str]) -> NoReturn:
        """Tells the other ranks, removes what this one has written, and raises."""
        tell_others(self._storage, self._take, self._rank, error)
        if not self._has_part(self._rank):  # else another rank's writer may be publishing it
            self._abandon(files)
        raise error

    def _has_part(self, rank: int) -> bool:
        return self._storage.size(part_name(self._take.id, rank)) is not None

    def _abandon(self, files: list[str]) -> None:
        """Once the take can't be published any more."""
        others = set(range(self._take.world_size)) - {self._rank}
        failed = all(self._storage.size(failure_name(self._take.id, rank)) is not None for rank in others)
        abandon(self._storage, self._take, files, self._rank, all_ended=failed)

    def _all_files(self) -> list[str]:
        return [*self._files, part_name(self._take.id, self._rank)]

    def _others_outcome(self, deadline: float) -> Manifest:
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
            pause = min(2 * pause, _LAST_LOOK)

    def _missing(self) -> str:
        """What the wait was for, and what to do."""
        ranks = [rank for rank in range(self._take.world_size) if not self._has_part(rank)][:20]
        if not ranks:
            return "all ranks have written their parts, and it is not published yet: wait longer"
        if len(ranks) == 1:
            return f"rank {ranks[0]} has not written its part: it may have died, or wait longer"
        return f"ranks {', '.join(map(str, ranks))} have not written their parts: they may have died, or wait longer"

    def _published(self) -> Manifest | None:
        """The manifest of this take; an error if another one's is there."""
        try:
            found = read_manifest(self.path, self._storage.read_bytes(MANIFEST, LIMIT))
        except KeyNotFoundError:
            return None
        if found.id != self._take.id:
            self._abandon(self._all_files())
            raise AlreadyExistsError(f"{self.path}: another take to this path was first")
        return found

    def _failure(self) -> Exception | None:
        """What another rank has noted. Without its part nobody can publish: so this rank's files go."""
        for rank in range(self._take.world_size):
            name = failure_name(self._take.id, rank)
            if self._storage.size(name) is not None:
                with contextlib.suppress(KeyNotFoundError, CorruptionError, *UNDECODABLE):
                    kind, text = msgspec.json.decode(self._storage.read_bytes(name, 1 << 20), type=tuple[str, str])
                    if not self._has_part(rank):
                        self._abandon(self._all_files())
                    return RankError(kind, text, rank).as_error()
        return None


def tell_others(storage: Storage, take: Take, rank: int, error: BaseException) -> None:
    """Leaves a note of what has failed here, for the other ranks' `wait`."""
    note = msgspec.json.encode([type(error).__name__, str(error)])
    with contextlib.suppress(MemstoreError, OSError):
        if take.world_size > 1:
            storage.publish(failure_name(take.id, rank), note, durable=False)


def start(prepared: PreparedTake, meter: ProgressMeter) -> PendingTake:
    """Steps 2 and 3, for a take that is prepared."""
    take, part = prepared.part.take, prepared.part
    staged: list[StagedTensors] = []

    def copy() -> bytes:
        with modes.put_aside():
            pieces = [piece for file in prepared.files for piece in file.pieces]
            names = [part.tensors[piece.tensor].path for piece in pieces]
            staged.append(stage([piece.elements for piece in pieces], names=names))
        return b""

    try:
        prepared.ranks.together(copy)
        prepared.ranks.end()
        (held,) = staged
        write = held.write(
            take.path,
            _files(prepared.files, held),
            finish="part",
            argument=msgspec.msgpack.encode(part),
            durable=take.durable,
            checksum=take.checksum,
            done=meter.done,
        )
    except BaseException as error:
        for held in staged:
            held.release()
        prepared.ranks.leave(error)
        if not prepared.ranks.all_know:
            tell_others(prepared.storage, take, prepared.ranks.rank, error)
        abandon(prepared.storage, take, [], prepared.ranks.rank, all_ended=prepared.ranks.all_know)
        raise
    return PendingTake(prepared, write, meter)


def _files(drafts: list[FileDraft], staged: StagedTensors) -> list[StagedFile]:
    places = iter(staged.places)
    return [StagedFile(draft.name, draft.header, [next(places) for _ in draft.pieces]) for draft in drafts]
