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
import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

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
from memstore.sharding import Box
from memstore.snapshot.buckets import OF_ALL, bucket_options, check_options, is_url, path_or_url
from memstore.snapshot.drafts import (
    DraftPiece,
    FileDraft,
    Naming,
    Offer,
    draft,
    lone_replicas,
    offers_of,
    own_bytes,
    partition,
    write_files,
)
from memstore.snapshot.increments import LATEST, Base, SharedFiles, latest_beside
from memstore.snapshot.manifest import (
    MANIFEST,
    Manifest,
    check_length,
    failure_name,
    part_name,
    path_of,
    read_manifest,
    tiers_of,
)
from memstore.snapshot.objects import ObjectStorage, Storage, storage_at
from memstore.snapshot.publishing import (
    SnapshotPart,
    Take,
    abandon,
    begin_in_bucket,
    claim,
    new_take,
    present_manifest,
    publish,
    published,
    refuse_what_is_there,
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

_log = logging.getLogger("memstore")

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
    base: str | None  # an absolute path, or LATEST
    then: Sequence[str]  # absolute paths
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
        base: Any = None,
        then: Any = (),
        memory_budget_bytes: Any = None,
    ) -> TakeOptions:
        """Raises TypeError or ValueError for what can't be meant, and storage options that memstore doesn't have."""
        flag("checksum", checksum)
        flag("allow_pickle", allow_pickle)
        if base is not None and not checksum:
            raise ValueError(
                "an increment compares checksums with its base's: give no base=, or leave out checksum=False"
            )
        place, tiers = path_or_url(path), tiers_of(then)
        if base is not None and base != LATEST:
            base = path_or_url(base)
        if base not in (None, LATEST) and is_url(place) != is_url(base):
            raise ValueError(
                f"base= is a snapshot in a folder for a take to a folder, and one in a bucket for a take to a bucket: "
                f"{base} can't share files with {place}"
            )
        given = StorageOptions.of(storage_options, next(filter(is_url, (place, *tiers)), place))
        if memory_budget_bytes is not None and whole_number("memory_budget_bytes", memory_budget_bytes) < 1:
            raise ValueError(f"memory_budget_bytes is a positive number of bytes, and not {memory_budget_bytes!r}")
        return cls(
            replicated or (),
            durability,
            checksum,
            allow_pickle,
            given.timeout,
            base,
            tiers,
            given.bucket,
            memory_budget_bytes,
        )

    def storage(self, path: str) -> Storage:
        """Returns the storage at a path or URL, which is there."""
        return storage_at(path, self.bucket, budget=self.budget)

    def base_of(self, tier: int, folder: str) -> str | None:
        """Returns the snapshot that a take shares files with; None if there is none.

        Args:
            tier: which folder of the take it is, from 0. The base that was given is for the first one.
            folder: its path.
        """
        if self.base is None or (self.base != LATEST and not tier):
            return self.base
        return latest_beside(folder, self.bucket)


# --- Steps 1 to 3: the ranks agree on who writes what ----------------------------------------------------------------


class PreparedTake(NamedTuple):
    """A rank's side of a take to one folder, before anything is written."""

    ranks: RankGroup
    storage: Storage
    part: SnapshotPart
    files: list[FileDraft]
    linked: SharedFiles

    @property
    def nbytes(self) -> int:
        """Returns how many bytes are to be written."""
        return sum([file.size for file in self.files])

    def abandon(self) -> None:
        """Removes what was made so far, if no rank writes yet."""
        abandon(self.storage, self.part.take, self.linked.names, self.ranks.rank, all_ended=True)


class Opening(msgspec.Struct, frozen=True):
    """The first message of a rank."""

    takes: list[Take]  # rank 0's, one for each tier
    bases: list[str | None]  # of these
    replicated: list[str]
    keys: list[str]
    modules: list[tuple[str, str]]  # names of modules, and the prefix of DDP


def prepare(path: Any, app_state: Any, group: Any, options: TakeOptions) -> list[PreparedTake]:
    """Takes the steps up to the writing. Returns what this rank is to write, for each tier."""
    ranks = RankGroup(group, options.timeout)
    begun: list[tuple[Take, Storage]] = []
    prepared: list[PreparedTake] = []
    may_write = False  # whether other ranks may be writing
    try:
        # 1. Rank 0 looks that there is no snapshot, makes the folder, and claims its plain names if nobody has.
        #    Killed: a folder with a claim.
        with ranks.together() as step:
            checked, folders = _check_arguments([path, *options.then], app_state, options)
            modules = [
                (key, "module." if is_replicating(value) else "")
                for key, value in checked.items()
                if isinstance(value, torch.nn.Module)
            ]
            replicated = [*options.replicated, *globs_of_ddp(checked)]
            bases: list[str | None] = []
            if not ranks.rank:
                for tier, folder in enumerate(folders):
                    bases.append(options.base_of(tier, folder))
                    begun.append(_begin(folder, ranks.size, options, plain=bases[-1] is None))
            said = Opening([take for take, _ in begun], bases, replicated, list(checked), modules)
            step.said = msgspec.msgpack.encode(said)
        opening = [msgspec.msgpack.decode(text, type=Opening) for text in step.heard]
        takes = opening[0].takes
        if not takes:
            raise MemstoreError("rank 0 of the process group said nothing of the snapshot")
        with modes.put_aside():
            # 2. The state dicts are asked for, one name after the other on all ranks, since they may have collectives
            #    inside. Killed, here and in 3: as before.
            dicts = ask_state_dicts(ranks, {key for said in opening for key in said.keys}, app_state)
            # 3. The ranks tell each other which tensors they share; each computes who writes what.
            globs = set.intersection(*(set(said.replicated) for said in opening)) if ranks.size > 1 else ()
            walker = StateWalker(allow_pickle=options.allow_pickle)
            with ranks.together() as step:
                storages = [storage for _, storage in begun] or [options.storage(take.path) for take in takes]
                open_bases = [_open_base(base, options) for base in opening[0].bases]
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
                sizes = own_bytes(walker.tensors, shared), offers_of(walker.tensors, shared)
                step.said = msgspec.msgpack.encode(sizes)
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
            naming = _naming_of(opening)
            for take, storage, base in zip(takes, storages, open_bases, strict=True):
                sharing = None
                if base is not None:
                    sharing = partial(base.share, storage, take.id, ranks.rank, ranks.size, take.durable)
                drafted = draft(take, ranks.rank, values, walker.tensors, shared, shares, naming, sharing)
                prepared.append(PreparedTake(ranks, storage, *drafted))
        return prepared
    except BaseException as error:
        ranks.leave(error)
        all_ended = ranks.all_know or not may_write
        for one in prepared:
            abandon(one.storage, one.part.take, one.linked.names, ranks.rank, all_ended=all_ended)
        for take, storage in begun[len(prepared) :]:
            abandon(storage, take, [], ranks.rank, all_ended=all_ended)
        raise


def _open_base(path: str | None, options: TakeOptions) -> Base | None:
    """Opens a base. One that was found, and not given, may be gone by now, or damaged: then all is written."""
    if path is None:
        return None
    try:
        return Base(path, options.bucket)
    except (MemstoreError, OSError) as error:
        if options.base == path:
            raise
        _log.warning("%s can't be the base of an increment, which is written whole: %s", path, error)
        return None


def _check_arguments(paths: Sequence[Any], app_state: Any, options: TakeOptions) -> tuple[AppState, list[str]]:
    """Returns the app state and the folders' paths. Raises TypeError or ValueError."""
    checked = check_app_state(app_state)
    if options.durability not in ("process", "disk"):
        raise ValueError(f"durability is 'process' or 'disk', and not {options.durability!r}")
    if isinstance(options.replicated, str) or not all(isinstance(glob, str) for glob in options.replicated):
        raise TypeError(f"replicated is a list of patterns, and not {options.replicated!r}")
    folders = list(map(path_or_url, paths))
    if len({folder if is_url(folder) else os.path.realpath(folder) for folder in folders}) < len(folders):
        raise ValueError(f"a folder stands twice among {folders}: each tier has one of its own")
    return checked, folders


def _begin(path: str, world_size: int, options: TakeOptions, *, plain: bool) -> tuple[Take, Storage]:
    """Makes the folder, and claims names in it, on rank 0. Raises AlreadyExistsError for what is there.

    Args:
        plain: whether its files may have the plain names. Those of an increment don't: nobody else is to take a file
            with a part of a model for the model.
    """
    if is_url(path):
        bucket = ObjectStorage(path, options.bucket, budget=options.budget)
        return begin_in_bucket(bucket, world_size, durable=options.durability == "disk"), bucket
    refuse_what_is_there(path)
    take = new_take(path, world_size, durable=options.durability == "disk", checksum=options.checksum)
    return FileStorage.create_for(path, partial(claim, take, plain), durable=take.durable)


def _naming_of(opening: Sequence[Opening]) -> Naming:
    found = {key: prefix for said in opening for key, prefix in said.modules}
    if len(found) != 1:
        return Naming(None, "")
    ((key, prefix),) = found.items()
    return Naming(path_of((key,)), prefix)


# --- Steps 4 and 5 of a plain take: files, and the publication -------------------------------------------------------


def take_tiers(prepared: Sequence[PreparedTake], progress: Progress | bool | None, group: Any) -> tuple[Manifest, str]:
    """Writes the files of each tier in turn, and publishes it. Returns the manifest of the first one, and its path.

    A tier that fails is told by a RuntimeWarning, except for the last one, whose error is raised.
    """
    first, last = prepared[0], len(prepared) - 1
    meter = ProgressMeter(progress, sum([one.nbytes for one in prepared]), "writing", rank=first.ranks.rank)
    found: tuple[Manifest, str] | None = None
    for tier, one in enumerate(prepared):
        try:
            if tier:
                one = one._replace(ranks=RankGroup(group, first.ranks.timeout))
            manifest = take(one, meter, finishes=tier == last)
            found = found or (manifest, one.part.take.path)
        except BaseException as error:
            goes_on = isinstance(error, MemstoreError | OSError) and (one.ranks.size == 1 or one.ranks.all_know)
            if tier == last or not goes_on:
                for left in prepared[tier + 1 :]:
                    left.abandon()
                raise
            warnings.warn(_TIER_FAILED.format(one.part.take.path, error), RuntimeWarning, stacklevel=3)
    assert found is not None
    return found


def take(prepared: PreparedTake, meter: ProgressMeter, *, finishes: bool) -> Manifest:
    """Writes the files of a take that is prepared, and publishes it. Returns the snapshot's manifest.

    Args:
        finishes: whether nothing is written after that, for the meter.
    """
    ranks, storage, part, files, linked = prepared
    take = part.take
    written = linked.names
    manifest: Manifest | None = None
    is_told = False  # whether the others may know that this rank's files are there
    try:
        # 4. Each rank writes its files, straight from the tensors' memory. Killed: files that no manifest names.
        with ranks.together() as step:
            part = write_files(
                storage,
                part,
                files,
                durable=take.durable,
                checksum=take.checksum,
                done=meter.done,
                written=written,
            )
            if finishes:
                meter.finish()
            is_told = True
            step.said = msgspec.msgpack.encode(part) if ranks.size > 1 else b""
        parts = step.heard
        # 5. Rank 0 publishes the parts. Killed: `publish` says in which step it leaves what.
        with ranks.at_first() as step:
            if not ranks.rank:
                found = (
                    [msgspec.msgpack.decode(text, type=SnapshotPart) for text in parts] if ranks.size > 1 else [part]
                )
                manifest, step.said = publish(storage, found)
        ranks.end()
        return manifest or read_manifest(take.path, step.heard[0])
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


def start(prepared: Sequence[PreparedTake], progress: Progress | bool | None, options: TakeOptions) -> PendingTiers:
    """Copies the tensors of a take that is prepared, for its writers. When it returns, the tensors may change."""
    ranks, nbytes = prepared[0].ranks, sum([one.nbytes for one in prepared])
    meter = ProgressMeter(progress, nbytes, "writing", rank=ranks.rank, keeps_errors=True)
    staged: StagedTensors | None = None
    pending: list[PendingTake] = []
    try:
        # 4. Each rank copies its pieces into shared memory, once for all tiers. Killed: folders with claims.
        with ranks.together(), modes.put_aside():
            pieces: dict[tuple[int, Box], DraftPiece] = {}
            for one in prepared:
                for file in one.files:
                    pieces.update({(piece.tensor, piece.box): piece for piece in file.pieces})
            names = [prepared[0].part.tensors[piece.tensor].path for piece in pieces.values()]
            staged = stage([piece.elements for piece in pieces.values()], names=names)
        ranks.end()
        # 5. The writers get the memory, for one tier after the other: those behind the first one have a writer of their
        #    own, so that no first one waits for a slow disk. Killed from here on: the writers complete the snapshots.
        places = dict(zip(pieces, staged.places, strict=True))
        for tier, (_, _, part, files, _) in enumerate(prepared):
            write = staged.write(
                part.take.path,
                [
                    StagedFile(file.name, file.header, [places[piece.tensor, piece.box] for piece in file.pieces])
                    for file in files
                ],
                part=msgspec.msgpack.encode(part),
                durable=part.take.durable,
                checksum=part.take.checksum,
                done=meter.done,
                lane=min(tier, 1),
                options=options.bucket,
                budget=options.budget,
                more=tier < len(prepared) - 1,
            )
            pending.append(PendingTake(prepared[tier], write))
    except BaseException as error:
        if staged is not None:
            staged.release()
        ranks.leave(error)
        for _, storage, part, _, linked in prepared[len(pending) :]:
            if not ranks.all_know:
                tell_others(storage, part.take, ranks.rank, error)
            abandon(storage, part.take, linked.names, ranks.rank, all_ended=ranks.all_know)
        raise
    return PendingTiers(pending, meter)


_PROGRESS_FAILED = "the snapshot is there, but progress= was called no more after it raised {!r}"
_TIER_FAILED = "there is no snapshot in {}, but the last tier is written: {}"
_FIRST_LOOK = 0.002  # seconds between two looks at the folder


TierState = Literal["writing", "whole", "failed"]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The state of a tier: of the snapshot in one folder. Made by `PendingSnapshot.status`.

    Attributes:
        path: of the folder.
        state: "writing", "whole" or "failed".
        error: what failed; None otherwise.
    """

    path: str
    state: TierState
    error: str | None = None


class PendingTiers:
    """A snapshot that is being written to one folder or several, as this rank sees it."""

    def __init__(self, tiers: Sequence[PendingTake], meter: ProgressMeter) -> None:
        self._tiers, self._meter = tiers, meter
        self.path: str = tiers[0].path

    def wait(self, timeout: float | None = None) -> tuple[Manifest, str]:
        """Waits for all tiers. Returns the manifest and the path of the first whole one; see `PendingSnapshot.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        found: tuple[Manifest, str] | None = None
        failures: list[str] = []
        for tier in self._tiers:
            try:
                manifest = tier.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
                found = found or (manifest, tier.path)
            except StoreTimeoutError:
                raise
            except (MemstoreError, OSError) as error:
                if tier is self._tiers[-1]:
                    raise
                failures.append(_TIER_FAILED.format(tier.path, error))
        self._meter.finish()
        if self._meter.failure is not None:
            failures.append(_PROGRESS_FAILED.format(self._meter.failure))
        for text in failures:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        assert found is not None
        return found

    def done(self) -> bool:
        return all(tier.done() for tier in self._tiers)

    def status(self) -> tuple[TierStatus, ...]:
        return tuple([tier.status() for tier in self._tiers])


class PendingTake:
    """A snapshot that is being written to one folder, as this rank sees it.

    Attributes:
        path: of its folder.
    """

    def __init__(self, prepared: PreparedTake, write: PendingWrite) -> None:
        self.path: str = prepared.part.take.path
        self._storage, self._take, self._rank = prepared.storage, prepared.part.take, prepared.ranks.rank
        self._patience = prepared.ranks.timeout  # seconds for the other ranks, where `wait` is given no timeout
        self._files = [*(file.name for file in prepared.files), *prepared.linked.names]
        self._linked = prepared.linked.names
        self._write = write
        self._manifest: Manifest | None = None

    def wait(self, timeout: float | None = None) -> Manifest:
        """Waits for the publication: step 6. Returns the manifest; see `PendingSnapshot.wait`."""
        if self._manifest is None:
            started = time.monotonic()
            manifest = self._own_outcome(timeout)
            if manifest is None:
                left = self._patience if timeout is None else timeout - (time.monotonic() - started)
                manifest = self._others_outcome(time.monotonic() + left)
            self._manifest = manifest
        return self._manifest

    def status(self) -> TierStatus:
        """Returns the state at this moment."""
        if not self.done():
            return TierStatus(self.path, "writing")
        try:
            self.wait(0.0)
        except StoreTimeoutError:
            return TierStatus(self.path, "writing")
        except (MemstoreError, OSError) as error:
            return TierStatus(self.path, "failed", str(error))
        return TierStatus(self.path, "whole")

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
            self._give_up(error, self._linked)  # the writer has removed its files
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
