"""Snapshots that are written while training goes on: copied first, then written by a process of its own.

    1. as a take: the ranks agree on who writes what (taking.py, steps 1 to 3)
    2. each rank copies what it writes into shared memory; from here on the tensors may change
    3. its writer makes the files, and leaves a part that says so; the writer that finds all parts publishes
    4. `wait` waits for the publication; what fails in a writer raises there, and by a note in the folder on all ranks

Once all ranks are through 2, the writers need no trainer: if these die, the snapshot is completed.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import NoReturn

import msgspec

from memstore import modes
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    KeyNotFoundError,
    MemstoreError,
    NotAStoreError,
    StoreTimeoutError,
    UnknownOutcomeError,
)
from memstore.snapshot.format import LIMIT, MANIFEST, Manifest, failure_name, part_name, read_manifest
from memstore.snapshot.parts import Take
from memstore.snapshot.progress import Meter
from memstore.snapshot.ranks import error_of_rank
from memstore.snapshot.staging import PendingWrite, Staged, StagedFile, stage
from memstore.snapshot.storage import Storage
from memstore.snapshot.take.abandoning import abandon
from memstore.snapshot.take.drafts import FileDraft
from memstore.snapshot.take.preparing import Prepared
from memstore.undecodable import UNDECODABLE

_PROGRESS_FAILED = "the snapshot is there, but progress= was called no more after it raised {!r}"
_FIRST_LOOK, _LAST_LOOK = 0.002, 0.25  # seconds between two looks at the folder


class PendingTake:
    """A snapshot that is being written, as this rank sees it. Attributes: path: of its folder."""

    def __init__(self, prepared: Prepared, write: PendingWrite, meter: Meter) -> None:
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
                    return error_of_rank(rank, kind, text)
        return None


def tell_others(storage: Storage, take: Take, rank: int, error: BaseException) -> None:
    """Leaves a note of what has failed here, for the other ranks' `wait`."""
    note = msgspec.json.encode([type(error).__name__, str(error)])
    with contextlib.suppress(MemstoreError, OSError):
        if take.world_size > 1:
            storage.publish(failure_name(take.id, rank), note, durable=False)


def start(prepared: Prepared, meter: Meter) -> PendingTake:
    """Steps 2 and 3, for a take that is prepared."""
    take, part = prepared.part.take, prepared.part
    staged: list[Staged] = []

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


def _files(drafts: list[FileDraft], staged: Staged) -> list[StagedFile]:
    places = iter(staged.places)
    return [StagedFile(draft.name, draft.header, [next(places) for _ in draft.pieces]) for draft in drafts]
