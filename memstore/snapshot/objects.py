"""The objects of a snapshot in a bucket: the second driver of a snapshot's storage, beside the folder of `storage.py`.

A file of a snapshot is here a row of *pieces* of 64 MiB, each one object, put in one request, straight from the
tensors. An object's name has the checksum of what is in it:

    PATH/model.safetensors.00000-5f2c8c1f0d3b9a77      the first 64 MiB of model.safetensors
    PATH/memstore_snapshot.json                        the manifest: put last, and only if there is none

So the objects of a take that failed or died can be used by the next one to the same path: a piece whose object is there
isn't put again (`ObjectStorage.write`). Two takes at once don't disturb each other: they name equal bytes equally. No
multipart upload is ever begun: a killed one would leave what no listing shows.

What a manifest doesn't name belongs to takes that go on, failed or died. The take that is published removes it
(`publishing.remove_others`), since no other can be published at this path any more; `prune` does so where none was.

`storage_at` gives the storage of a path or URL. This file imports no torch.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple, Protocol

import xxhash

from memstore.engine import OwnedFile, syscalls
from memstore.errors import (
    AlreadyExistsError,
    KeyNotFoundError,
    StorageError,
    UnknownOutcomeError,
    UnsupportedFilesystemError,
)
from memstore.snapshot.buckets import Bucket, BucketObject, is_url, open_bucket, parse_url
from memstore.snapshot.chunks import (
    CHUNK,
    SUM_SIZE,
    ChunkRun,
    Done,
    FilePart,
    LatePiece,
    PieceSums,
    by_width,
    damaged,
    in_parallel,
    new_sum,
    runs_of,
    size_of_sums,
    sum_of,
    whole_chunks,
)
from memstore.snapshot.storage import FileStorage, check_name

# --- Pieces of files, and their names --------------------------------------------------------------------------------


PIECE = 64 << 20  # bytes of a file that are one object; whole chunks
_PIECE_NAME = re.compile(r"(.+)\.([0-9]{5,7})-([0-9a-f]{16})")


class SizedFile(Protocol):
    """A file as a manifest has it."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sums(self) -> bytes: ...


def piece_name(file: str, number: int, sums: bytes) -> str:
    """Returns the name of the object of a piece, of which these are the chunks' sums."""
    return f"{file}.{number:05}-{xxhash.xxh3_64_hexdigest(sums)}"


def file_of(name: str) -> str:
    """Returns the name of the file that an object is a piece of; the name itself if it is none."""
    found = _PIECE_NAME.fullmatch(name)
    return name if found is None else found[1]


class Piece(NamedTuple):
    """A piece of a file.

    Attributes:
        name: of its object.
        start, stop: its bytes in the file.
    """

    name: str
    start: int
    stop: int


def pieces_of(file: SizedFile) -> list[Piece]:
    """Returns the pieces of a file. Raises CorruptionError if it has no sums, by which they are named."""
    if len(file.sums) != size_of_sums(file.size):
        raise damaged(file.name, "the manifest has no checksums of it, by which its objects are named")
    each = PIECE // CHUNK * SUM_SIZE
    return [
        Piece(
            piece_name(file.name, number, file.sums[number * each : (number + 1) * each]),
            start,
            min(start + PIECE, file.size),
        )
        for number, start in enumerate(range(0, file.size, PIECE))
    ]


# --- The storage -----------------------------------------------------------------------------------------------------


BUDGET = 512 << 20  # bytes of memory for pieces that have to be put together before they are put
_MOST_AT_ONCE = 16  # requests: more are throttled by services, and a connection has 50 to 100 MB/s
_FEW_PARTS, _SMALL = 16, 32 << 10  # many parts smaller than that are put together before they are put
_JOINED = 256 << 10  # bytes between two ranges that are fetched rather than left out: a request costs as much
_SLACK = CHUNK // 32  # bytes more than are wanted, for which a whole chunk is fetched, and compared with its sum
_UNTIL_SETTLED = 2.0  # seconds until a manifest is looked at again, where the service has no conditional writes


class ObjectStorage:
    """The objects of one snapshot, by the names that its files have; see `FileStorage`, whose calls these are.

    Nothing here is synced, and `durable` has no effect: what a service has acknowledged is durable. A place in a bucket
    needs not be made, and there are no locks: what a lock would exclude is decided by conditional writes.

    Args:
        url: of the snapshot.
        options: for the bucket.
        budget: bytes of memory for uploads.

    Raises:
        MissingPackageError, CredentialsError, TypeError: as of `open_bucket`.

    Attributes:
        path: the URL.
        is_remote: tells it from a folder, where a protocol has to say that.
    """

    is_remote = True
    look_pause = 1.0  # seconds between two looks whether somebody has published

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, budget: int | None = None) -> None:
        self._url = parse_url(url)
        self.path = str(self._url)
        self._bucket: Bucket = open_bucket(self._url, options)
        self._at_once = max(min((BUDGET if budget is None else budget) // PIECE, _MOST_AT_ONCE), 1)
        self._files: dict[str, SizedFile] = {}
        self._found: dict[str, BucketObject] | None = None  # a listing, as old as the last that asked for a new one
        self._lock = threading.Lock()
        self._version: BucketObject | None = None  # of the manifest that was read, for one that takes its place

    @property
    def is_here(self) -> bool:
        """Returns whether no other process can see it."""
        return self._bucket.is_here

    @property
    def is_removed(self) -> bool:
        return False

    def know(self, files: Iterable[SizedFile]) -> None:
        """Says which files there are: their sums are the names of their objects."""
        self._files = {file.name: file for file in files}

    def names_of(self, file: SizedFile) -> list[str]:
        """Returns the names of the objects of a file."""
        return [piece.name for piece in pieces_of(file)]

    # --- writing

    def write(
        self,
        name: str,
        size: int,
        parts: Sequence[FilePart],
        *,
        durable: bool,
        checksum: bool = True,
        done: Done | None = None,
        pieces: PieceSums | None = None,
    ) -> bytes:
        """Puts the pieces of a file, several at once. Those whose objects are there already are not put again.

        If it fails, what was put stays: the next take to this path uses it. It has the file's sums, whatever `checksum`
        says, since they are the names.

        Raises:
            StorageError, ThrottledError, CredentialsError, PermissionDeniedError, NoBucketError: of the service.
        """
        self._name(name)
        runs = runs_of(parts)
        groups: list[list[ChunkRun]] = []
        end = 0
        for run in runs:
            if run.offset != end:
                raise ValueError(f"no part has the bytes from {end:,} to {run.offset:,} of the file")
            if end % PIECE == 0:
                groups.append([])
            groups[-1].append(run)
            end = run.end
        if end != size:
            raise ValueError(f"the parts end at {end:,}, and the file is to have {size:,} bytes")
        there = self._listing() if groups else {}
        buffers = _Buffers()
        put = partial(self._put_piece, name, there, buffers, pieces)
        report = (lambda _: None) if done is None else lambda group: done(sum(run.nbytes for run in group))
        return b"".join(in_parallel(put, groups, report, threads=self._at_once))

    def _put_piece(
        self,
        name: str,
        there: Mapping[str, BucketObject],
        buffers: _Buffers,
        found: PieceSums | None,
        runs: list[ChunkRun],
    ) -> bytes:
        """Puts a piece, of these chunks. Returns their sums, which are of the bytes that were put.

        Args:
            found: gets the sums of the parts of the chunks.
        """
        size = runs[-1].end - runs[0].offset
        number = runs[0].offset // PIECE
        straight = _in_place(runs)
        with buffers.of(0 if straight is not None else size) as buffer:
            chunks = straight or _copied(
                (map(_memory_of, run.pieces) for run in runs), buffer
            )  # one part after the other
            sums = _sums_of(chunks, runs[0].offset, found)
            own = self._name(piece_name(name, number, sums))
            if self._is_put(own, there, size):
                return sums
            self._bucket.put(own, buffer if straight is None else [part for parts in straight for part in parts])
            if straight is None or _sums_of(straight) == sums:
                return sums
        # Somebody has changed a tensor meanwhile: the object isn't what its name says, so it is put from a copy.
        self._bucket.remove([own])
        with buffers.of(size) as buffer:
            sums = _sums_of(_copied(straight, buffer), runs[0].offset, found)
            self._bucket.put(self._name(piece_name(name, number, sums)), buffer)
        return sums

    def _is_put(self, own: str, there: Mapping[str, BucketObject], size: int) -> bool:
        """Returns whether an object is there. A listing may be stale, so what it has is looked at by itself."""
        listed = there.get(own.rpartition("/")[2])
        if listed is None or listed.size != size:
            return False
        found = self._bucket.look(own)
        return found is not None and found.size == size

    def copy_from(self, other: ObjectStorage, file: SizedFile, name: str) -> bool:
        """Has the service copy a file of another place in this bucket here. Its objects are put nowhere else.

        Args:
            file: of the other place.
            name: here.

        Returns:
            Whether that is so. Not if the other place is in another bucket, or an object isn't there (any more).
        """
        if other._bucket is not self._bucket:
            return False
        there = self._listing()

        def copy(piece: Piece) -> None:
            own = self._name(name + piece.name[len(file.name) :])
            if not self._is_put(own, there, piece.stop - piece.start):
                self._bucket.copy(other._name(piece.name), own)

        try:
            in_parallel(copy, pieces_of(file), lambda _: None, threads=_MOST_AT_ONCE)
        except KeyNotFoundError:
            return False
        return True

    # --- reading

    def read(
        self,
        name: str,
        parts: Sequence[FilePart],
        *,
        sums: bytes | None = None,
        check_narrow: bool = True,
        done: Done | None = None,
    ) -> None:
        """Fetches ranges of a file into their memory, joined where they are near each other, several at once.

        Args:
            sums: of the whole file, to check the chunks of which nearly all is wanted: up to half a megabyte more is
                fetched for that. The others aren't checked, whatever `check_narrow` says, or a row would cost 16 MiB.

        Raises:
            CorruptionError: an object is missing, or shorter than it should be; or a chunk doesn't fit its sum.
        """
        file = self._known(name)
        if sums is not None and len(sums) != size_of_sums(file.size):
            raise damaged(self._path_of(name), f"it has {len(sums):,} bytes of checksums for {file.size:,} bytes")
        wide, narrow = by_width(parts, file.size, _SLACK) if sums is not None else ((), parts)
        runs = whole_chunks(wide, file.size)
        fetches = [_Fetch(run, sums) for run in runs]
        fetches += [_Fetch(run, None) for run in runs_of(narrow, join=_JOINED)]
        if any(fetch.run.end > file.size for fetch in fetches):
            raise damaged(self._path_of(name), f"it has {file.size:,} bytes, and more were to be read")
        pieces = pieces_of(file)
        report = (lambda _: None) if done is None else lambda fetch: done(fetch.run.nbytes)
        in_parallel(partial(self._fetch, name, pieces), fetches, report, threads=_MOST_AT_ONCE)

    def _fetch(self, name: str, pieces: Sequence[Piece], fetch: _Fetch) -> None:
        run, sums = fetch
        piece = pieces[run.offset // PIECE]
        path = self._path_of(piece.name)
        try:
            found = self._bucket.fetch(self._name(piece.name), run.offset - piece.start, run.end - piece.start)
        except KeyNotFoundError:
            raise damaged(path, "the object is missing") from None
        if len(found) != run.nbytes:
            raise damaged(path, f"it ended after {len(found):,} of {run.nbytes:,} bytes")
        if sums is not None:
            chunk = run.offset // CHUNK
            if sum_of(found) != sums[chunk * SUM_SIZE : (chunk + 1) * SUM_SIZE]:
                detail = f"bytes {run.offset:,} to {run.end:,} of {name} (chunk {chunk}) don't fit their checksum"
                raise damaged(path, detail)
        start = 0
        for target in run.pieces:
            if isinstance(target, int):
                start += target
                continue
            assert not isinstance(target, LatePiece)
            target[:] = found[start : start + len(target)]
            start += len(target)

    def read_bytes(self, name: str, limit: int) -> bytes:
        try:
            data, self._version = self._bucket.fetch_all(self._name(name), limit)
        except StorageError as error:
            if "are the most" in error.message:
                raise damaged(self._path_of(name), error.message.partition(" has ")[2]) from None
            raise
        return data

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes, as its objects have it; None if there is none, or a piece is missing."""
        if name not in self._files:
            found = self._bucket.look(self._name(name))
            return None if found is None else found.size
        listed = self._listing()
        total = 0
        for piece in pieces_of(self._files[name]):
            if piece.name not in listed:
                return None
            total += listed[piece.name].size
        return total

    def names(self) -> list[str]:
        """Returns the names of all objects here, sorted, whoever put them."""
        return sorted(self._listing(again=True))

    def present(self, names: Iterable[str]) -> set[str]:
        """Returns which of these objects are there, by one request."""
        return set(names) & self._listing(again=True).keys()

    # --- publication

    def publish(self, name: str, data: bytes, *, durable: bool) -> None:
        """Puts a small object, if there is none of this name; of several at once, one gets no error.

        The answer to a put that succeeded may be lost: an object that has just these bytes counts as this one, since
        what is published has the id of its take.

        Raises:
            AlreadyExistsError: there is one.
            StorageError, ThrottledError: the service failed, and the object has no bytes, so it says nothing.
            UnknownOutcomeError: the service failed, and doesn't say any more whether it has put it.
        """
        path = self._path_of(name)
        try:
            self._bucket.create(self._name(name), data)
            return
        except AlreadyExistsError:
            if self._has(name, data):
                return
            raise AlreadyExistsError(f"{path} exists: nothing was written") from None
        except UnsupportedFilesystemError:
            pass
        except StorageError as error:
            if self._has(name, data):
                return
            if not data:  # a claim, of which it doesn't matter whether it is there
                raise
            # That it isn't seen is no proof: a request that was cut may still be on its way.
            raise UnknownOutcomeError(f"{path} may have been put, or not: {error.message}") from error
        self._publish_unconditionally(name, data)

    def _publish_unconditionally(self, name: str, data: bytes) -> None:
        """Puts a small object where the service can't do so only if there is none.

        Of several at once, the last put stays; each looks two seconds later whether it is its own. Where a put takes
        longer than that on its way, two may be told that they were published.
        """
        if self._bucket.look(self._name(name)) is not None:
            raise AlreadyExistsError(f"{self._path_of(name)} exists: nothing was written")
        self._bucket.put(self._name(name), data)
        time.sleep(_UNTIL_SETTLED)
        if not self._has(name, data):
            raise AlreadyExistsError(f"{self._path_of(name)} was put by somebody else meanwhile")

    def _has(self, name: str, data: bytes) -> bool:
        try:
            found, _ = self._bucket.fetch_all(self._name(name), len(data))
        except (KeyNotFoundError, StorageError):
            return False
        return found == data

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Puts an object in the place of the one of this name that was read last here, or where there was none.

        Raises:
            AlreadyExistsError: another one has taken its place since.
        """
        before, self._version = self._version, None
        if before is None:
            self.publish(name, data, durable=durable)
            return
        try:
            self._bucket.replace(self._name(name), data, before)
        except AlreadyExistsError:
            if not self._has(name, data):
                raise
        except UnsupportedFilesystemError:
            self._bucket.put(self._name(name), data)

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Does nothing: see the class."""
        self._version = None
        yield

    def keep(self, name: str) -> OwnedFile | None:
        return None

    def confirm(self, files: Sequence[SizedFile]) -> None:
        """Looks that all pieces of these files were in the last listing, which was made right before.

        Raises:
            UnknownOutcomeError: some are gone: somebody has removed them.
        """
        self.know(files)
        there = self._listing()
        for file in files:
            for piece in pieces_of(file):
                found = there.get(piece.name)
                if found is None or found.size != piece.stop - piece.start:
                    found = self._bucket.look(self._name(piece.name))  # a listing may be stale
                if found is None or found.size != piece.stop - piece.start:
                    raise UnknownOutcomeError(
                        f"{self._path_of(piece.name)}, which was put for this snapshot, is gone: somebody has removed "
                        "it (by `memstore snapshot prune`, another save, or a rule of the bucket): call again"
                    )

    def remove(self, name: str) -> None:
        self.remove_all([name])

    def remove_all(self, names: Sequence[str]) -> None:
        """Removes objects, many by a request."""
        if names:
            self._bucket.remove([self._name(name) for name in names])
            self._found = None

    def remove_place(self) -> None:
        """Does nothing: a place without objects isn't there."""

    # --- what is there

    def objects(self) -> dict[str, BucketObject]:
        """Returns the objects here by name."""
        return dict(self._listing(again=True))

    def _listing(self, *, again: bool = False) -> dict[str, BucketObject]:
        with self._lock:
            if self._found is None or again:
                self._found = self._bucket.list(self._url.key)
            return self._found

    def prune(self, named: Iterable[str], is_ours: Callable[[str], bool], older_than: float) -> Pruned:
        """Removes what takes and saves have left that died.

        Nothing is removed while a claim, a part or the trace of a save is younger: such a take may go on, and use what
        an earlier one has left.

        Args:
            named: the objects that a manifest names.
            is_ours: whether a take, or a save, has left an object of this name.
            older_than: seconds. What is younger stays.
        """
        found, kept = self._listing(again=True), set(named)
        now = datetime.now(timezone.utc)
        ours = {name: one for name, one in found.items() if name not in kept and is_ours(name)}
        young = [name for name, one in ours.items() if (now - one.modified).total_seconds() < older_than]
        if young:
            return Pruned(0, 0, len(ours), young[0])
        # Claims and parts say whose the pieces are: so they go last.
        self.remove_all(sorted(ours, key=lambda name: _PIECE_NAME.fullmatch(name) is None))
        return Pruned(len(ours), sum(one.size for one in ours.values()), 0, "")

    def _known(self, name: str) -> SizedFile:
        if name not in self._files:
            raise KeyNotFoundError(f"{self._path_of(name)} is no file of the snapshot that was opened here")
        return self._files[name]

    def _name(self, name: str) -> str:
        return f"{self._url.key}/{check_name(name)}"

    def _path_of(self, name: str) -> str:
        return f"{self.path}/{name}"


class Pruned(NamedTuple):
    """The result of `ObjectStorage.prune`.

    Attributes:
        objects, nbytes: that were removed.
        kept: how many stay, since one of them is young.
        young: the name of that.
    """

    objects: int
    nbytes: int
    kept: int
    young: str


class _Fetch(NamedTuple):
    """A range to fetch, and the sums of its file if it is a whole chunk that is to be compared."""

    run: ChunkRun
    sums: bytes | None


class _Buffers:
    """Memory for pieces that have to be put together: new pages would cost half of the copy each time."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    @contextlib.contextmanager
    def of(self, size: int) -> Generator[memoryview]:
        if not size:
            yield memoryview(b"")
            return
        found: mmap.mmap | None = None
        with contextlib.suppress(queue.Empty):
            found = self._free.get_nowait()
        if found is None or len(found) < size:
            found = mmap.mmap(-1, size)
        try:
            yield memoryview(found)[:size]
        finally:
            self._free.put(found)


_Chunks = list[list[memoryview]]  # the parts of which each chunk consists, in memory


def _in_place(runs: Sequence[ChunkRun]) -> _Chunks | None:
    """Returns the parts of chunks where they lie; None if they are many small ones, which have to be put together.

    A put of 64 parts of 1 MiB, or of 640 of 100 KiB, takes as long as one of 64 MiB.
    """
    many = sum(len(run.pieces) for run in runs)
    if many > _FEW_PARTS and (runs[-1].end - runs[0].offset) // many < _SMALL:
        return None
    return [[_memory_of(piece) for piece in run.pieces] for run in runs]


def _memory_of(piece: memoryview | LatePiece | int) -> memoryview:
    assert not isinstance(piece, int)
    return piece.source.take(piece.start, piece.stop) if isinstance(piece, LatePiece) else piece


def _copied(chunks: Iterable[Iterable[memoryview]], buffer: memoryview) -> _Chunks:
    """Copies parts. Returns them in the copy."""
    copied: _Chunks = []
    start = 0
    for parts in chunks:
        copied.append([])
        for part in parts:
            target = buffer[start : start + len(part)]
            if part.readonly:
                target[:] = part
            else:
                syscalls.copy(syscalls.buffer_address(target), syscalls.buffer_address(part), len(part))
            start += len(part)
            copied[-1].append(target)
    return copied


def _sums_of(chunks: _Chunks, offset: int = 0, found: PieceSums | None = None) -> bytes:
    """Returns the sums of chunks.

    Args:
        offset: where the first one starts in the file.
        found: gets the sums of the parts, too.
    """
    sums: list[bytes] = []
    for parts in chunks:
        hasher = new_sum()
        for part in parts:
            hasher.update(part)
            if found is not None:
                found[offset] = hasher.digest() if len(parts) == 1 else sum_of(part)
            offset += len(part)
        sums.append(hasher.digest())
    return b"".join(sums)


# --- Storages by path ------------------------------------------------------------------------------------------------


Storage = FileStorage | ObjectStorage


def storage_at(
    path: str,
    options: Mapping[str, Any] | None = None,
    *,
    files: Iterable[SizedFile] = (),
    budget: int | None = None,
) -> Storage:
    """Returns the storage of a snapshot at a path, or a URL.

    Args:
        options: for a bucket.
        files: of the snapshot that is read there.
        budget: bytes of memory for uploads.

    Raises:
        NotAStoreError, PermissionDeniedError: as of `FileStorage`.
        MissingPackageError, CredentialsError, TypeError: as of `ObjectStorage`.
    """
    if not is_url(path):
        return FileStorage(path)
    storage = ObjectStorage(path, options, budget=budget)
    storage.know(files)
    return storage
