"""Files of all formats: documents beside tensors are read and parsed strictly, new files appear whole or not at all.

read_whole, parse_*    a document that lies beside the tensors; `damaged` raises the error that names its file
new_file, new_folder   a target that is made beside its path, under a name that starts with a dot and ends in `.new`,
                       and then renamed. An error removes it; a kill leaves it behind
ExportFile             what is written to, with its bytes counted by a ByteMeter
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeVar

import msgspec
import torch

from memstore._parsing import Document, read_texts, read_value, split_object, split_object_of_python
from memstore._wording import an, check_new_folder, of_no_place, refuse_url
from memstore.engine import HEADER_LIMIT, opened, syscalls
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    MemstoreError,
    error_of_lack,
    in_callers_code,
    lacks_told,
)
from memstore.figures import pieces

# --- Documents -------------------------------------------------------------------------------------------------------


_Text = TypeVar("_Text")
_Result = TypeVar("_Result")


def path_text(path: Any) -> str:
    """Returns the path of a file or folder as text. Raises TypeError."""
    name: Any = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name:
        raise TypeError(f"path is that of a file or folder, as text, and not {path!r:.100}")
    refuse_url(name, "this call", "snapshots alone lie at URLs, and `memstore convert` reads and writes them there")
    return name


def damaged(path: str, detail: str) -> NoReturn:
    raise CorruptionError(path=path, detail=detail)


def read_whole(path: str) -> bytes:
    """Reads a file that is no tensors, of up to 100 MB."""
    with opened(path) as (fd, found):
        if found.st_size > HEADER_LIMIT:
            damaged(path, f"{found.st_size:,} bytes beside the tensors, and {HEADER_LIMIT:,} are the limit")
        return syscalls.read_at(fd, found.st_size, 0)


def parse_object(path: str, text: bytes | msgspec.Raw) -> Document:
    return _located(path, split_object, text)


def parse_object_of_python(path: str, text: bytes) -> Document:
    return _located(path, split_object_of_python, text)


def parse_texts(path: str, text: msgspec.Raw) -> dict[str, str]:
    return _located(path, read_texts, text)


def parse_value(path: str, text: bytes | msgspec.Raw | None) -> Any:
    return _located(path, read_value, text)


def _located(path: str, parse: Callable[[_Text], _Result], text: _Text) -> _Result:
    """Names the file in an error of damage that the text is from."""
    try:
        return parse(text)
    except CorruptionError as error:
        damaged(path, error.detail)


def are_sizes(value: Any, most: int = 64) -> bool:
    """Returns whether this is a list of up to `most` integers that may be sizes or offsets."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


# --- New files -------------------------------------------------------------------------------------------------------


Progress = Callable[[int, int], None]
_STEP = 1 << 20  # bytes, between two calls for progress
_CHUNK = 16 << 20  # bytes between reports
_PIECE = 1 << 22  # elements
_OF_THE_KERNEL = ("/proc/", "/sys/")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_WRITES = frozenset({errno.EIO, errno.EROFS})  # errors that name no file


def what_special(tensor: torch.Tensor) -> str | None:
    """Names a tensor that is more than its elements: nested, sparse, unbatched. None for all others."""
    if tensor.layout is not torch.strided:
        return f"{an(type(tensor))} of the layout {tensor.layout}"
    if tensor.is_nested or type(tensor) not in _PLAIN:
        return f"{an(type(tensor))}"
    return None


class ByteMeter:
    """Tells a caller's callback how many bytes are done."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self._progress, self._done = total, progress, 0
        self._told = -1

    def add(self, nbytes: int) -> None:
        """Counts bytes, and tells them in steps: of many small leaves each would be a call."""
        self._done = min(self._done + nbytes, self.total)
        if self._done - max(self._told, 0) >= _STEP or self._done == self.total:
            self._tell()

    def finish(self) -> None:
        self._done = self.total
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None and self._told < self._done:
            self._told = self._done
            with in_callers_code():
                self._progress(self._done, self.total)


class ExportFile:
    """A file being written, from its start on."""

    def __init__(self, fd: int, meter: ByteMeter) -> None:
        self._fd, self._meter, self._at = fd, meter, 0

    def write(self, data: memoryview) -> None:
        """Writes bytes that count as progress."""
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            self.write_uncounted(part)
            self._meter.add(len(part))

    def write_uncounted(self, data: bytes | memoryview) -> None:
        syscalls.write_at(self._fd, data, self._at)
        self._at += len(data)

    def write_tensor(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Writes the elements in C order, cast to `dtype`. Of those that would have to be copied, some at a time."""
        is_ready = type(tensor) in _PLAIN and tensor.is_contiguous() and dtype in (None, tensor.dtype)
        if not is_ready and tensor.numel() > _PIECE:
            for piece in pieces(tensor, _PIECE):
                self.write_tensor(piece, dtype)
        elif tensor.numel():
            flat = tensor.detach().to(dtype or tensor.dtype).contiguous().reshape(-1)
            self.write(flat.view(torch.uint8).numpy().data)

    def write_copy(self, source: int) -> None:
        """Writes the bytes of an open file. The kernel copies them; on btrfs and xfs both files then share them."""
        end = syscalls.size_of(source)
        while self._at < end:
            count = syscalls.copy_range(source, self._fd, end - self._at, self._at)
            if not count:
                raise OSError(errno.EIO, "the file that is copied has become shorter")
            self._at += count
            self._meter.add(count)


@contextlib.contextmanager
def new_file(path: str, meter: ByteMeter, *, durable: bool) -> Generator[ExportFile]:
    if os.path.isdir(path):
        raise AlreadyExistsError(f"{path} is a folder, and the export is a file")
    is_other = os.path.exists(path) and not os.path.isfile(path)
    parent = os.path.realpath(os.path.dirname(path))
    if is_other or parent == "/dev" or parent.startswith(_OF_THE_KERNEL):  # /dev/stdout may lead to a file
        raise AlreadyExistsError(f"{path} is no ordinary file, and an export takes the place of one: name another")
    beside = _beside(path)
    with _naming_path(path, beside):
        fd = syscalls.open_file(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                yield ExportFile(fd, meter)
                if durable:
                    syscalls.sync(fd)
            finally:
                syscalls.close(fd)
            syscalls.replace(beside, path)
        except BaseException:
            syscalls.unlink(beside)
            raise
        if durable:
            syscalls.sync_folder(os.path.dirname(path))


@contextlib.contextmanager
def new_folder(path: str, *, durable: bool) -> Generator[str]:
    """Yields a folder to fill, which then becomes `path`: that must be missing, or an empty folder."""
    given, path = path, os.path.realpath(path)
    if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise AlreadyExistsError(f"{path} is there, and no empty folder: export to one that is empty or missing")
    check_new_folder(path)
    beside = _beside(path)
    with _naming_path(given, beside):
        syscalls.make_folder(beside, 0o777)
        try:
            yield beside
            if durable:
                sync_all(beside)
            try:
                syscalls.rename(beside, path)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise AlreadyExistsError(f"{path} was filled by somebody else meanwhile") from None
                raise
        except BaseException:
            with contextlib.suppress(OSError):
                os.rmdir(beside)  # an empty one: to look into it takes a descriptor, and there may be none
            shutil.rmtree(beside, ignore_errors=True)
            raise
        if durable:
            syscalls.sync_folder(os.path.dirname(path))


@contextlib.contextmanager
def _naming_path(path: str, beside: str) -> Generator[None]:
    """Errors of the file system name the path that was asked for, and not what is written beside it.

    Lacks and a full disk are typed.
    """
    try:
        with lacks_told(path):
            yield
    except OSError as error:
        parent = os.path.dirname(path)
        if error.errno == errno.ENOENT and not os.path.lexists(parent):
            what = of_no_place(path).removeprefix("; ") or "create it first"
            what = f"the folder to export to doesn't exist: {what}"
            raise FileNotFoundError(error.errno, what, parent) from None
        if isinstance(error, MemstoreError):
            named = error_of_lack(error.__cause__, path) if error.__cause__ and beside in error.message else None
            if named is not None:  # of a file in a new folder
                raise named from error.__cause__
            raise
        if isinstance(error.filename, str) and error.filename.startswith(beside):
            raise OSError(error.errno, error.strerror, path) from None
        elif error.filename is None and error.errno in _OF_WRITES:
            error.filename = path
        raise


def _beside(path: str) -> str:
    return f"{os.path.dirname(path)}/.{uuid.uuid4().hex}.new"


def sync_all(folder: str) -> None:
    """Syncs a folder, and all that is in it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with syscalls.file_open(f"{parent}/{name}", os.O_RDONLY) as fd:
                syscalls.sync(fd)
        syscalls.sync_folder(parent)
