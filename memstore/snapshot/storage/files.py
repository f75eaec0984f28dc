"""A folder of a file system as storage. Works on all that have hard links: tmpfs, ext4, xfs, btrfs, overlay, NFS.

Every name is looked up in the folder that was opened, wherever that is by now, and never through a link. A file is
published in these steps:

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
import stat
from collections.abc import Callable, Generator, Sequence
from functools import partial

from memstore.engine import OwnedFile, SharedMemory, is_in_memory, syscalls
from memstore.errors import (
    AlreadyExistsError,
    KeyNotFoundError,
    NotAStoreError,
    UnsupportedFilesystemError,
)
from memstore.snapshot.parallel import in_parallel
from memstore.snapshot.storage import chunks, locks
from memstore.snapshot.storage.failures import file_errors
from memstore.snapshot.storage.interface import Done, FilePart
from memstore.snapshot.storage.names import check_name, new_unfinished_name
from memstore.snapshot.storage.transfer import NewFile, check_cover, check_sums, damaged, read_run, write_run
from memstore.wording import check_new_folder

_JOINED = 16 << 10  # bytes between two parts that are read rather than left out: a call costs as much


class FileStorage:
    """A `Storage` in a folder that exists.

    Args:
        path: of the folder.
        file_mode: the permissions of new files.

    Raises:
        NotAStoreError: there is no such folder.
        PermissionDeniedError: this process may not open it.
    """

    def __init__(self, path: str | os.PathLike[str], *, file_mode: int = 0o600) -> None:
        self.path = os.path.abspath(path)
        self._mode = file_mode
        try:
            with file_errors(self.path):
                self._folder = OwnedFile(os.path.join(self.path, "."), os.O_RDONLY | os.O_DIRECTORY)
                self._in_memory = is_in_memory(f"/proc/self/fd/{self._folder.fd}")
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

    @property
    def is_removed(self) -> bool:
        """Whether the folder that was opened has been removed, whatever its path has now."""
        try:
            return os.fstat(self._folder.fd).st_nlink == 0
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
    ) -> bytes:
        runs = chunks.runs_of(parts)
        check_cover(runs, size)
        with self._new_file(name) as file:
            syscalls.truncate(file.fd, size)
            with self._mapped(file, size) as memory:
                new = NewFile(file, memory, durable=durable)
                sums = in_parallel(partial(write_run, new, checksum=checksum), runs, _counting(done))
            if durable:
                syscalls.sync(file.fd)
        return b"".join(sums)

    @contextlib.contextmanager
    def _mapped(self, file: OwnedFile, size: int) -> Generator[SharedMemory | None]:
        """A new file in memory, whose huge pages are filled in a third of the time that writes take.

        Writes allocate small pages one by one, under a lock of the file.
        """
        if size < syscalls.HUGE_PAGE or not self._in_memory:
            yield None
            return
        memory = SharedMemory(fd=os.dup(file.fd))
        try:
            memory.keep_from_children()
            yield memory
        finally:
            memory.leave()  # whatever still refers to it: an error's traceback would keep the pages of a removed file

    @contextlib.contextmanager
    def _new_file(self, name: str) -> Generator[OwnedFile]:
        """A file that is removed again if the block fails."""
        path = self._path_of(name)
        with file_errors(path):
            try:
                file = OwnedFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._mode, self._folder.fd)
            except FileExistsError:
                raise AlreadyExistsError(f"{path} exists: nothing was written") from None
            try:
                yield file
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to tell
                    syscalls.unlink(path, self._folder.fd)
                raise
            finally:
                file.close()

    def read(
        self, name: str, parts: Sequence[FilePart], *, sums: bytes | None = None, done: Done | None = None
    ) -> None:
        path = self._path_of(name)
        with self._opened(path) as (file, size):
            if sums is None:
                runs = chunks.runs_of(parts, join=_JOINED)
            else:
                check_sums(path, size, sums)
                runs = chunks.whole_chunks(parts, size)
            if runs and runs[-1].end > size:
                raise damaged(path, f"it has {size:,} bytes, and those up to {runs[-1].end:,} were to be read")
            in_parallel(partial(read_run, file, path, sums=sums), runs, _counting(done))

    @contextlib.contextmanager
    def _opened(self, path: str) -> Generator[tuple[OwnedFile, int]]:
        """A regular file, for reading, and its size."""
        try:
            with file_errors(path):
                file = OwnedFile(path, os.O_RDONLY, dir_fd=self._folder.fd)
        except FileNotFoundError:
            raise damaged(path, "the file is missing") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise damaged(path, "it is a link or a socket, and no regular file") from None
            raise
        try:
            found = syscalls.status(file.fd)
            if not stat.S_ISREG(found.st_mode):
                raise damaged(path, "it is no regular file")
            with file_errors(path):
                yield file, found.st_size
        finally:
            file.close()

    def read_bytes(self, name: str, limit: int) -> bytes:
        path = self._path_of(name)
        if not self._exists(path):
            raise KeyNotFoundError(f"{path} is missing")
        with self._opened(path) as (file, size):
            if size > limit:
                raise damaged(path, f"it has {size:,} bytes, and {limit:,} are the most that such a file may have")
            data = bytearray(size)
            if syscalls.read_parts_at(file.fd, [memoryview(data)], 0) < size:
                raise damaged(path, f"it became shorter than {size:,} bytes while it was read")
            return bytes(data)

    def publish(self, name: str, data: bytes, *, durable: bool) -> None:
        path = self._path_of(name)
        folder = self._folder.fd
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
        path = self._path_of(name)
        folder = self._folder.fd
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

    def _write_beside(self, data: bytes, *, durable: bool) -> str:
        """Steps 1 and 2. Returns the first name."""
        beside = new_unfinished_name()
        with self._new_file(beside) as file:
            syscalls.write_at(file.fd, data, 0)
            if durable:
                syscalls.sync(file.fd)
                syscalls.sync(self._folder.fd)
        return beside

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """While the block runs, no other process is in such a block of this folder. The dead are in none.

        Raises:
            StoreTimeoutError: another process is in one for a minute.
        """
        with locks.alone(self.path):
            yield

    def keep(self, name: str) -> OwnedFile | None:
        """Marks a file as one that this process needs, until what is returned is closed, or the process dies.

        Several processes may keep a file. A file system without locks (`flock`) takes all files for kept ones.

        Returns:
            None if there is no such file (any more).
        """
        return locks.keep(self._path_of(name), self._folder.fd)

    @contextlib.contextmanager
    def unless_kept(self, name: str) -> Generator[bool]:
        """Gives whether nobody keeps a file, and while the block runs, nobody can."""
        with locks.unless_kept(self._path_of(name), self._folder.fd) as is_free:
            yield is_free

    def _link(self, beside: str, name: str, path: str) -> None:
        folder = self._folder.fd
        try:
            syscalls.link(beside, name, folder)
        except FileExistsError:
            if not _is_same(beside, name, folder):  # over NFS, a call that succeeded may be sent again
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
        path = self._path_of(name)
        if not self._exists(path):
            return None
        with self._opened(path) as (_, size):
            return size

    def names(self) -> list[str]:
        return sorted(os.listdir(self._folder.fd))

    def remove(self, name: str) -> None:
        path = self._path_of(name)
        with file_errors(path), contextlib.suppress(FileNotFoundError):
            syscalls.unlink(path, self._folder.fd)

    def _path_of(self, name: str) -> str:
        return f"{self.path}/{check_name(name)}"

    def _exists(self, path: str) -> bool:
        try:
            os.stat(os.path.basename(path), dir_fd=self._folder.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True


def _counting(done: Done | None) -> Callable[[chunks.Run], None]:
    return (lambda _: None) if done is None else lambda run: done(run.nbytes)


def _is_same(one: str, other: str, folder: int) -> bool:
    return os.path.samestat(
        os.stat(one, dir_fd=folder, follow_symlinks=False), os.stat(other, dir_fd=folder, follow_symlinks=False)
    )
