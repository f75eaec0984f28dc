"""Files of a snapshot, and the folder of a file system that has them; how far a snapshot is. Imports no torch.

The folder may be of any file system that has hard links: tmpfs, ext4, xfs, btrfs, overlay, NFS. Every name is looked up
in the folder that was opened, wherever that is by now, and never through a link. What a file consists of are parts in
chunks (`chunks.py`). A file is published in these steps (`FileStorage.publish`):

    1. the data is written to a file ".memstore_snapshot.<random>.new" beside it
    2. durable: that file is synced, then the folder, which has the names of all files that were written before
    3. link(2) gives it its name, unless there is such a file
    4. the first name is removed
    5. durable: the folder is synced

A process that dies before 3 has published nothing, one that dies later all; it may leave the file of step 1 behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from memstore._info import Progress, shown_progress
from memstore._wording import check_new_folder
from memstore.engine import LockFile, OwnedFile, SharedMemory, is_in_memory, syscalls
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidKeyError,
    KeyNotFoundError,
    MemstoreError,
    NotAStoreError,
    PermissionDeniedError,
    ReadOnlyError,
    StoreTimeoutError,
    UnsupportedFilesystemError,
    error_of_lack,
    in_callers_code,
    is_of_caller,
)
from memstore.snapshot.chunks import (
    CHUNK,
    ChunkRun,
    Done,
    FilePart,
    PieceSums,
    by_width,
    damaged,
    in_parallel,
    read_run,
    runs_of,
    size_of_sums,
    whole_chunks,
    write_run,
)

# --- Names of files: those of manifests, which anybody may have written ----------------------------------------------


_MOST_BYTES = 255  # NAME_MAX of Linux's file systems
_UNFINISHED = re.compile(r"\.memstore_snapshot\.[0-9a-f]{32}\.new")


def new_unfinished_name() -> str:
    """Returns a name for a file that is about to be published under another name."""
    return f".memstore_snapshot.{uuid.uuid4().hex}.new"


def is_unfinished(name: str) -> bool:
    """Returns whether a file of this name is about to be published, or was by a process that died."""
    return _UNFINISHED.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Returns the name, if it is that of a file in the folder itself. Raises InvalidKeyError."""
    problem = ""
    if name in ("", ".", ".."):
        problem = "it names a folder"
    elif "/" in name:
        problem = "it has a '/', and all files of a snapshot lie in one folder"
    elif "\0" in name:
        problem = "it has a NUL"
    else:
        try:
            nbytes = len(name.encode())
            if nbytes > _MOST_BYTES:
                problem = f"it has {nbytes:,} bytes, and {_MOST_BYTES} are the most"
        except UnicodeEncodeError:
            problem = "it can't be written as UTF-8"
    if problem:
        raise InvalidKeyError(f"{name!r:.300} is no name of a file of a snapshot: {problem}")
    return name


# --- The folder ------------------------------------------------------------------------------------------------------


R = TypeVar("R")

_JOINED = 16 << 10  # bytes between two parts that are read rather than left out: a call costs as much
_PATIENCE, _PAUSE = 60.0, 0.01  # seconds for the lock of a folder, and between two looks
_UNTIL_REMOVED = 1.0  # seconds until who removes a step has removed its manifest
_ATTEMPTS = 20  # to leave a first file in a folder that others remove while it is empty


class NamedFile(Protocol):
    """A file as a manifest has it."""

    @property
    def name(self) -> str: ...


class FileStorage:
    """Files by name, in a folder that exists. Thread-safe.

    A name is one component of a path, as text: no "/", no "." or "..", no NUL, at most 255 bytes. InvalidKeyError says
    what is wrong with any other.

    The *sums* of a file are the xxh3-64 of each of its chunks of 16 MiB (`CHUNK`; the last one is what is left), from
    the file's first byte on: 8 bytes (`SUM_SIZE`) each, one after the other.

    Args:
        path: of the folder.
        file_mode: the permissions of new files.

    Raises:
        NotAStoreError: there is no such folder.
        PermissionDeniedError: this process may not open it.

    `ObjectStorage` has the same calls for a bucket.
    """

    is_remote = False
    look_pause = 0.25  # seconds between two looks whether somebody has published

    def __init__(self, path: str | os.PathLike[str], *, file_mode: int = 0o600) -> None:
        self.path = os.path.abspath(path)
        self._mode = file_mode
        try:
            with file_errors(self.path):
                self._folder = OwnedFile(os.path.join(self.path, "."), os.O_RDONLY | os.O_DIRECTORY)
                self._fd = self._folder.fd
                self._in_memory = is_in_memory(f"/proc/self/fd/{self._fd}")
        except (FileNotFoundError, NotADirectoryError):
            raise NotAStoreError(f"{self.path} is no folder") from None

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, durable: bool, folder_mode: int = 0o700, file_mode: int = 0o600
    ) -> FileStorage:
        """Makes the folder, and those above it that are missing; one that is there is opened as it is."""
        path = os.path.abspath(path)
        parent = os.path.dirname(path)
        check_new_folder(path)
        if not os.path.isdir(parent):
            cls.create(parent, durable=durable, folder_mode=0o777)
        with file_errors(path):
            try:
                syscalls.make_folder(path, folder_mode)
                made = True
            except FileExistsError:
                made = False
            try:
                if durable:  # whoever made a folder that is there may not have synced its name
                    try:
                        syscalls.sync_folder(parent)
                    except PermissionError:  # this process may not look into the folder above
                        if made:
                            raise
                return cls(path, file_mode=file_mode)
            except BaseException:
                if made:
                    with contextlib.suppress(OSError):  # another process may use it by now
                        syscalls.remove_folder(path)
                raise

    @classmethod
    def create_for(cls, path: str, first: Callable[[FileStorage], R], *, durable: bool) -> R:
        """Makes the folder as `create` does, and calls `first`, which leaves a file there.

        Both are done again if the folder is removed between them: who has made it and fails removes it if it is empty.
        """
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError, NotAStoreError):
                return first(cls.create(path, durable=durable))
            time.sleep(_PAUSE)
        return first(cls.create(path, durable=durable))

    @property
    def is_removed(self) -> bool:
        """Returns whether the folder that was opened has been removed, whatever its path has now."""
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError as error:
            return error.errno == errno.ESTALE  # as NFS says it

    def write(
        self,
        name: str,
        size: int,
        parts: Sequence[FilePart],
        *,
        durable: bool,
        checksum: bool = False,
        done: Done | None = None,
        pieces: PieceSums | None = None,
    ) -> bytes:
        """Makes a new file of the parts, in large writes, several at once. If it fails, nothing is left.

        Args:
            name: of a file that doesn't exist.
            size: of the file, in bytes. The parts cover it without gap and overlap, in any order.
            parts: what the file consists of. Where their memory changes meanwhile, the file has some of both; the sums
                are of the bytes that it has.
            durable: when it returns, the bytes are on the disk. (The file's name is there when a later durable
                `publish` returns.)
            checksum: whether to compute the sums, of each piece right before it is written.
            done: told the bytes written.
            pieces: gets the sums of the parts, cut at the ends of chunks, if sums are computed.

        Returns:
            The sums, or b"".

        Raises:
            AlreadyExistsError: there is such a file, which is left as it is.
            StoreFullError: no room, or the file would be larger than the process, or the file system, may write.
            OSError: any other failure of the file system.
        """
        path = self._path_of(name)
        runs = runs_of(parts)
        end = 0
        for run in runs:
            if run.offset != end:
                raise ValueError(f"no part has the bytes from {end:,} to {run.offset:,} of the file")
            end = run.end
        if end != size:
            raise ValueError(f"the parts end at {end:,}, and the file is to have {size:,} bytes")
        with file_errors(path), self._new_file(path) as fd:
            syscalls.truncate(fd, size)
            memory = None
            try:
                if size >= syscalls.HUGE_PAGE and self._in_memory:
                    # Huge pages are filled in a third of the time that writes take: writes allocate small pages one by
                    # one, under a lock of the file.
                    memory = SharedMemory(fd=os.dup(fd))
                    memory.keep_from_children()
                wanted = pieces if checksum else None
                write = partial(write_run, fd, memory, durable=durable, checksum=checksum, pieces_sums=wanted)
                sums = in_parallel(write, runs, _counting(done))
            finally:
                if memory is not None:
                    memory.leave()  # whatever refers to it: an error's traceback would keep the pages of a removed file
            if durable:
                syscalls.sync(fd)
        return b"".join(sums)

    @contextlib.contextmanager
    def _new_file(self, path: str) -> Generator[int]:
        """Makes a file and gives its descriptor. If the block fails, the file is removed again."""
        try:
            file = OwnedFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._mode, self._fd)
        except FileExistsError:
            raise AlreadyExistsError(f"{path} exists: nothing was written") from None
        with file:
            try:
                yield file.fd
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to tell
                    syscalls.unlink(path, self._fd)
                raise

    def read(
        self,
        name: str,
        parts: Sequence[FilePart],
        *,
        sums: bytes | None = None,
        check_narrow: bool = True,
        done: Done | None = None,
    ) -> None:
        """Reads runs of a file straight into their memory, sorted and joined, several at once.

        Args:
            name: of the file.
            parts: which runs, in any order, and where they go. They must not overlap in memory.
            sums: of the whole file, to check every chunk that a part touches (what else the chunk has is read too).
            check_narrow: False: chunks of which less than half is wanted are neither read whole nor checked.
            done: told the bytes read, those that only the sums need among them.

        Raises:
            CorruptionError: the file is missing, shorter than a part, or of another size than the sums are for; or
                a chunk doesn't fit its sum. The error names the file; the parts' memory then has any content.
        """
        path = self._path_of(name)
        with self._opened(path) as (fd, size):
            if sums is None:
                runs = runs_of(parts, join=_JOINED)
            else:
                expected = size_of_sums(size)
                if len(sums) != expected:
                    detail = f"it has {size:,} bytes, and {len(sums):,} of checksums instead of {expected:,}"
                    raise damaged(path, detail)
                wide, narrow = (parts, ()) if check_narrow else by_width(parts, size)
                runs = whole_chunks(wide, size)
                self._read_runs(fd, path, size, runs_of(narrow, join=_JOINED), None, done)
            self._read_runs(fd, path, size, runs, sums, done)

    def _read_runs(
        self, fd: int, path: str, size: int, runs: Sequence[ChunkRun], sums: bytes | None, done: Done | None
    ) -> None:
        if runs and runs[-1].end > size:
            raise damaged(path, f"it has {size:,} bytes, and those up to {runs[-1].end:,} were to be read")
        in_parallel(partial(read_run, fd, path, sums=sums), runs, _counting(done))

    @contextlib.contextmanager
    def _opened(self, path: str) -> Generator[tuple[int, int]]:
        """Opens a regular file for reading, and gives its descriptor and its size."""
        try:
            with file_errors(path):
                file = OwnedFile(path, os.O_RDONLY, dir_fd=self._fd)
        except FileNotFoundError:
            raise damaged(path, "the file is missing") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise damaged(path, "it is a link or a socket, and no regular file") from None
            raise
        with file:
            found = syscalls.status(file.fd)
            if not stat.S_ISREG(found.st_mode):
                raise damaged(path, "it is no regular file")
            with file_errors(path):
                yield file.fd, found.st_size

    def read_bytes(self, name: str, limit: int) -> bytes:
        """Reads a small file whole.

        Raises:
            KeyNotFoundError: there is no such file.
            CorruptionError: it has more than `limit` bytes (none was read), or is no regular file.
        """
        path = self._path_of(name)
        if not self._exists(path):
            raise KeyNotFoundError(f"{path} is missing")
        with self._opened(path) as (fd, size):
            if size > limit:
                raise damaged(path, f"it has {size:,} bytes, and {limit:,} are the most that such a file may have")
            data = bytearray(size)
            if syscalls.read_parts_at(fd, [memoryview(data)], 0) < size:
                raise damaged(path, f"it became shorter than {size:,} bytes while it was read")
            return bytes(data)

    def publish(self, name: str, data: bytes, *, durable: bool) -> None:
        """Makes a small file that appears whole or not at all, and never in the place of another one.

        With `durable`, the order is: the data is on the disk, then the names of all files that were written before;
        then the file appears; when the call returns, its name is on the disk too.

        Raises:
            AlreadyExistsError: there is such a file. Of several that publish one name at once, one gets no error.
            StoreFullError: no room.
        """
        path = self._path_of(name)
        folder = self._fd
        with file_errors(path):
            if self._exists(path):
                raise AlreadyExistsError(f"{path} exists: nothing was written")
            beside = self._write_beside(data, durable=durable)
            try:
                self._link(beside, name, path)
            finally:
                with contextlib.suppress(OSError):  # it is published, or there is another error to tell
                    syscalls.unlink(beside, folder)
            if durable:
                syscalls.sync(folder)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Publishes a file in the place of an earlier one of this name: readers find the one or the other, whole.

        Raises:
            StoreFullError: no room. The earlier file is as it was.
        """
        path = self._path_of(name)
        folder = self._fd
        with file_errors(path):
            beside = self._write_beside(data, durable=durable)
            try:
                syscalls.replace(beside, name, folder)
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to tell
                    syscalls.unlink(beside, folder)
                raise
            if durable:
                syscalls.sync(folder)

    def link_from(self, other: FileStorage, theirs: str, name: str, size: int, *, durable: bool) -> bool:
        """Gives a file of another folder a name here, too: both folders have the file, and it takes its room once.

        Args:
            other, theirs: the other folder, and the file's name there.
            name: here.
            size: that it should have.
            durable: whether its bytes are synced. (As of `write`, its name is there after a durable `publish`.)

        Returns:
            Whether that is so. Not if the file isn't there with this size, is no regular file, lies on another file
            system or belongs to another account, or has as many names as the file system allows.
        """
        path = self._path_of(name)
        check_name(theirs)
        try:
            syscalls.link(theirs, name, self._fd, other._fd)
        except FileExistsError:
            raise AlreadyExistsError(f"{path} exists: nothing was linked") from None
        except OSError:
            return False
        try:
            with self._opened(path) as (fd, found):
                if durable:
                    syscalls.sync(fd)
                if found == size:
                    return True
        except CorruptionError:  # it is a link
            pass
        except BaseException:
            self.remove(name)
            raise
        self.remove(name)
        return False

    def _write_beside(self, data: bytes, *, durable: bool) -> str:
        """Takes the steps 1 and 2. Returns the first name."""
        beside = new_unfinished_name()
        path = f"{self.path}/{beside}"
        with file_errors(path), self._new_file(path) as fd:
            syscalls.write_at(fd, data, 0)
            if durable:
                syscalls.sync(fd)
                syscalls.sync(self._fd)
        return beside

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Keeps other processes out of such a block of this folder while the block runs. The dead are in none.

        Raises:
            StoreTimeoutError: another process is in one for a minute.
        """
        with file_errors(self.path):
            folder = OwnedFile(os.path.join(self.path, "."), os.O_RDONLY | os.O_DIRECTORY)
        with folder:
            deadline = time.monotonic() + _PATIENCE
            while not _locked(partial(syscalls.lock_exclusive, folder.fd), without_locks=True):
                if time.monotonic() > deadline:
                    raise StoreTimeoutError(f"{self.path} is locked by another process for {_PATIENCE:g} s")
                time.sleep(_PAUSE)
            yield

    def keep(self, name: str) -> OwnedFile | None:
        """Marks a file as one that this process needs, until what is returned is closed, or the process dies.

        Several processes may keep a file. A file system without locks (`flock`) takes all files for kept ones.

        Returns:
            None if there is no such file (any more).
        """
        path = self._path_of(name)
        try:
            file = LockFile(path, os.O_RDWR, dir_fd=self._fd)  # a forked child closes its copy
        except FileNotFoundError:
            return None
        # Without locks it is kept as far as that goes: `unless_kept` takes every file for one that somebody keeps.
        if _locked(partial(syscalls.lock_shared, file.fd), without_locks=True):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if os.path.samestat(found, os.fstat(file.fd)):  # who removes a file does so under its lock
                    return file
        file.close()
        return None

    @contextlib.contextmanager
    def unless_kept(self, name: str) -> Generator[bool]:
        """Gives whether nobody keeps a file, and while the block runs, nobody can."""
        try:
            file = LockFile(self._path_of(name), os.O_RDWR, dir_fd=self._fd)
        except FileNotFoundError:
            yield False
            return
        with file:
            yield _locked(file.lock, without_locks=False)

    def _link(self, beside: str, name: str, path: str) -> None:
        folder = self._fd
        try:
            syscalls.link(beside, name, folder)
        except FileExistsError:
            is_ours = False
            with contextlib.suppress(FileNotFoundError):  # whoever was first has removed one of them by now
                ours = os.stat(beside, dir_fd=folder, follow_symlinks=False)
                theirs = os.stat(name, dir_fd=folder, follow_symlinks=False)
                is_ours = os.path.samestat(ours, theirs)  # over NFS, a call that succeeded may be sent again
            if not is_ours:
                raise AlreadyExistsError(f"{path} was made by somebody else meanwhile") from None
        except FileNotFoundError:  # so does a take once it is published, with what others have not finished
            text = f"{path}: another take to this folder was first, and removed what this one was about to publish"
            raise AlreadyExistsError(text) from None
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise UnsupportedFilesystemError(
                    f"{path}: the file system has no hard links ({error.strerror}), by which a snapshot appears at "
                    "once: take it elsewhere, and copy the folder"
                ) from error
            raise

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes; None if there is no such file."""
        path = self._path_of(name)
        if not self._exists(path):
            return None
        with self._opened(path) as (_, size):
            return size

    def names(self) -> list[str]:
        """Returns the names of all files, sorted, whoever made them."""
        return sorted(os.listdir(self._fd))

    def remove(self, name: str) -> None:
        """Removes a file; nothing happens if there is none."""
        path = self._path_of(name)
        with file_errors(path), contextlib.suppress(FileNotFoundError):
            syscalls.unlink(path, self._fd)

    def present(self, names: Iterable[str]) -> set[str]:
        """Returns which of these files are there."""
        return {name for name in names if self._exists(self._path_of(name))}

    def remove_all(self, names: Iterable[str]) -> None:
        """Removes files, as far as that is possible: one that stays harms nobody."""
        for name in names:
            with contextlib.suppress(OSError):
                self.remove(name)

    def remove_place(self) -> None:
        """Removes the folder, if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)  # to look whether it is empty takes a descriptor, and there may be none

    def know(self, files: object) -> None:
        """Does nothing: names say all here."""

    def names_of(self, file: NamedFile) -> list[str]:
        """Returns the names of what a file consists of: here of itself."""
        return [file.name]

    def confirm(self, files: object) -> None:
        """Does nothing: nobody removes files of a take that goes on."""

    def _path_of(self, name: str) -> str:
        return f"{self.path}/{check_name(name)}"

    def _exists(self, path: str) -> bool:
        try:
            os.stat(path[len(self.path) + 1 :], dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True


_AT_ONCE = 4 * CHUNK  # bytes of a file that is verified, read in parallel


class Readable(Protocol):
    """A storage, as far as it is read."""

    def read(
        self, name: str, parts: Sequence[FilePart], *, sums: bytes | None = None, done: Done | None = None
    ) -> None: ...


def verify_file(storage: Readable, name: str, size: int, sums: bytes, done: Done | None = None) -> None:
    """Reads all of a file that should have `size` bytes. Raises CorruptionError, which says where it is damaged."""
    memory = memoryview(bytearray(min(size, _AT_ONCE)))
    if not size:
        storage.read(name, [], sums=sums)
    for start in range(0, size, _AT_ONCE):
        storage.read(name, [FilePart(start, memory[: size - start])], sums=sums, done=done)


HELD = "memstore_checkpoint.json"  # the record of a step that a CheckpointManager saved


def hold(path: str) -> OwnedFile | None:
    """Keeps the folder of a step from being removed by a CheckpointManager, until what is returned is closed.

    Whoever reads a snapshot or writes its files calls this. It takes a shared lock of the step's record, and whoever
    removes the folder takes an exclusive one. It never fails, and needs no right to write.

    Returns:
        None if no manager saved this folder, if it is being removed (the manifest, which goes first, is gone then), or
        if the file system has no locks.
    """
    try:
        file = LockFile(f"{path}/{HELD}", os.O_RDONLY)  # a forked child closes its copy
    except OSError:
        return None
    deadline = time.monotonic() + _UNTIL_REMOVED
    with contextlib.suppress(OSError):  # no locks, or the record is gone
        while os.path.samestat(os.stat(f"{path}/{HELD}"), os.fstat(file.fd)):
            if syscalls.lock_shared(file.fd):
                # Only now it is known whether it was removed before: who has removed it has let go of the lock.
                if os.path.samestat(os.stat(f"{path}/{HELD}"), os.fstat(file.fd)):
                    return file
                break
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
    file.close()
    return None


def _locked(lock: Callable[[], bool], *, without_locks: bool) -> bool:
    """Takes a lock (flock), which is gone when its process dies, and returns whether that succeeded.

    Args:
        without_locks: what to return where the file system has no locks; over NFS they want a file that is open for
            writing.
    """
    try:
        return lock()
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
            return without_locks
        raise


def _counting(done: Done | None) -> Callable[[ChunkRun], None]:
    return (lambda _: None) if done is None else lambda run: done(run.nbytes)


# --- What the file system refuses, as memstore's errors --------------------------------------------------------------


@contextlib.contextmanager
def file_errors(path: str) -> Generator[None]:
    """Turns OSErrors that a caller can do something about into typed ones that name `path`. Others get it as well."""
    try:
        yield
    except MemstoreError:
        raise
    except OSError as error:
        typed = error if is_of_caller(error) else _typed(error, path)
        if typed is error:
            raise
        raise typed from error


def _typed(error: OSError, path: str) -> OSError | MemstoreError:
    code, reason = error.errno or 0, error.strerror
    lack = error_of_lack(error, path)
    if lack is not None:
        return lack
    if code in (errno.EACCES, errno.EPERM):
        return PermissionDeniedError(f"{path}: {reason}: it belongs to somebody else, or its folder does")
    if code == errno.EROFS:
        return ReadOnlyError(f"{path} is on a file system that is mounted read-only")
    if error.filename is None:
        return type(error)(code, reason, path)
    return error


# --- How far a snapshot is -------------------------------------------------------------------------------------------


class ProgressMeter:
    """A count of bytes, which is told. Thread-safe.

    Args:
        progress: called with the bytes done and those in all; True: a bar, if standard error is a terminal, else lines
            of the logger "memstore"; None.
        total: bytes in all.
        what: what is done, for the bar: "writing".
        rank: of several, rank 0 alone has a bar; a callback is each rank's own.
        keeps_errors: what the callback raises is kept as `failure`, and it is called no more; else it is raised.

    Attributes:
        failure: what the callback has raised.
    """

    def __init__(
        self, progress: Progress | bool | None, total: int, what: str, *, rank: int = 0, keeps_errors: bool = False
    ) -> None:
        self.total, self._done = total, 0
        self.failure: BaseException | None = None
        self._keeps_errors = keeps_errors
        self._lock = threading.Lock()
        self._tell: Progress | None = shown_progress(progress, what, rank=rank)

    @property
    def done(self) -> Callable[[int], None] | None:
        """Returns what is called with the bytes that were passed; None if nobody wants to know."""
        return None if self._tell is None else self._add

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self._done = min(self._done + nbytes, self.total)
            if self._tell is None or self.failure is not None:
                return
            try:
                with in_callers_code():
                    self._tell(self._done, self.total)
            except BaseException as error:  # SystemExit, too, would end the thread that calls this
                if not self._keeps_errors:
                    raise
                self.failure = error

    def finish(self) -> None:
        """Tells that all is done, whatever was counted."""
        if self._done < self.total or not self.total:
            self._add(self.total - self._done)


SILENT = ProgressMeter(None, 0, "")  # tells nobody
