"""The exceptions of memstore, grouped by what a handler can do about them.

    MemstoreError
    ├── the key or the value (fix the call)
    │   ├── InvalidKeyError (ValueError)            not a key: empty, too long, NUL, not text
    │   ├── UnsupportedValueError (TypeError)       a leaf that can't be stored, named
    │   ├── StructureMismatchError (ValueError)     out= or like= differs from what is stored
    │   ├── ShardMismatchError (ValueError)         ranks disagree about a leaf, or about their attempt
    │   └── MutableEntryError                       a call that doesn't apply to datasets or replay buffers
    ├── the state of the key (decide, retry)
    │   ├── KeyNotFoundError (KeyError)
    │   ├── PartialCommitError (KeyError)           parts of a sharded put are missing
    │   ├── VersionGoneError (KeyError)             that version was overwritten, and its bytes were freed
    │   └── VersionConflictError                    the key has another version than expect_version
    ├── the store (open it differently)
    │   ├── NotAStoreError
    │   │   └── NoBucketError (FileNotFoundError)   an object store has no such bucket
    │   ├── AlreadyExistsError (FileExistsError)
    │   ├── FormatVersionError
    │   ├── AmbiguousCheckpointError                a folder has checkpoints of two libraries
    │   ├── PermissionDeniedError (PermissionError)
    │   │   └── CredentialsError                    an object store: none, expired or wrong ones, or a wrong clock
    │   ├── UnsupportedFilesystemError
    │   ├── ReadOnlyError
    │   └── StoreClosedError
    ├── the installation (install something)
    │   ├── MissingPackageError (ImportError)       of an optional part
    │   └── TransportUnavailableError               serve with RDMA, on a host without it
    ├── the machine (wait, free something)
    │   ├── StoreFullError (OSError, ENOSPC)
    │   │   └── QuotaExceededError (EDQUOT)         the keys with a prefix may take no more
    │   ├── ResourceLimitError (OSError)            files, their size, memory, mappings, processes
    │   ├── StorageError (OSError)                  storage that hosts share, or an object store: failing
    │   │   └── ThrottledError                      an object store that wants fewer requests
    │   ├── StoreTimeoutError (TimeoutError)
    │   └── ContentionError
    ├── the bytes (restore, repair)
    │   └── CorruptionError
    ├── the links between hosts (change their setup)
    │   ├── InvalidAddressError (ValueError)        not tcp://IP:PORT, or no host has such an address
    │   ├── AddressUnavailableError (OSError)       taken by another process, or not of this host
    │   ├── SecretError (ValueError)                the secret's file is missing, short or readable by others
    │   └── LinkRefusedError                        another secret, protocol or member than was expected
    └── the hosts (repeating the call is safe)
        ├── HomeUnavailableError (TimeoutError)     the host that has the key doesn't answer
        ├── UnknownOutcomeError                     nobody can say whether the change was made
        ├── NotReplicatedError                      the value was put, and lies on one host alone
        ├── CrossHostError                          a call for one host, with keys or an entry on others
        ├── StaleMembershipError                    this host was removed from the cluster
        └── NotServedError                          a root isn't served, or can't be

Each message says what was found, what was expected and what to do. `.key` is the key, if there is one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from typing import Any


class MemstoreError(Exception):
    """The base class of memstore's exceptions. `key` is the key concerned, or None."""

    key: str | None = None

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.key = key

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross processes (pools, actors); keyword arguments would be lost by the default.
        return _rebuild, (type(self), self.args, self._state())

    def _state(self) -> dict[str, Any]:
        return self.__dict__


def _rebuild(cls: type[MemstoreError], args: tuple[Any, ...], state: dict[str, Any]) -> MemstoreError:
    error = cls.__new__(cls, *args)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error


class InvalidKeyError(MemstoreError, ValueError):
    """The key isn't a str, is empty or longer than 500 bytes of UTF-8, or has a NUL or a lone surrogate."""


class UnsupportedValueError(MemstoreError, TypeError):
    """A leaf of the value can't be stored; the message names the leaf. Nothing was written."""


class StructureMismatchError(MemstoreError, ValueError):
    """`out=`, `like=` or a batch of rows differs from the stored value; the message lists all. Nothing was written."""


class ShardMismatchError(MemstoreError, ValueError):
    """Ranks disagree about a leaf's shape, dtype, parts or bytes, or about their attempt. Nothing was put or saved."""


class MutableEntryError(MemstoreError):
    """The call doesn't apply to a mutable entry (a dataset or replay buffer). The message names the right call."""


class KeyNotFoundError(MemstoreError, KeyError):
    """The store has no such key."""


class PartialCommitError(MemstoreError, KeyError):
    """Parts of a sharded put are missing, so there is no version of it.

    Attributes:
        missing_ranks: the ranks that haven't put yet.
        missing_boxes: if all ranks have put, (leaf, offsets, shape) of each box that none of them holds.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        missing_ranks: tuple[int, ...] = (),
        missing_boxes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (),
    ) -> None:
        super().__init__(message, key=key)
        self.missing_ranks = missing_ranks
        self.missing_boxes = missing_boxes


class VersionGoneError(MemstoreError, KeyError):
    """The version that a ref names was overwritten or deleted, and its bytes were freed."""


class VersionConflictError(MemstoreError):
    """The key's version isn't `expect_version`. `expected` and `found` are versions; 0 means that there is no key."""

    def __init__(self, message: str, *, key: str | None = None, expected: int = 0, found: int = 0) -> None:
        super().__init__(message, key=key)
        self.expected = expected
        self.found = found


class NotAStoreError(MemstoreError):
    """There is no store or snapshot: no such folder, or `memstore.json` is missing, foreign or damaged."""


class NoBucketError(NotAStoreError, FileNotFoundError):
    """The bucket, or container, of a URL doesn't exist, or not in this region. The message names it."""


class AlreadyExistsError(MemstoreError, FileExistsError):
    """The thing that the call would create exists: a store (mode "x"), a dataset, a snapshot, an export's target."""


class FormatVersionError(MemstoreError):
    """The store was written by a version of memstore that this one can't read."""


class AmbiguousCheckpointError(MemstoreError):
    """A folder has a checkpoint of memstore and one of another library, and nothing says which is newer."""


class PermissionDeniedError(MemstoreError, PermissionError):
    """The store's folder or a file in it isn't accessible, belongs to others, is open to others, or is a link."""


class CredentialsError(PermissionDeniedError):
    """An object store got no credentials, expired ones or wrong ones; or this host's clock is off, which it refuses."""


class UnsupportedFilesystemError(MemstoreError):
    """The file system can't hold the store: a network one, or tmpfs with durability "disk"; or there is no /proc."""


class ReadOnlyError(MemstoreError):
    """A write to a store that was opened with mode "r", or to a lazy leaf of a view."""


class StoreClosedError(MemstoreError):
    """The store was closed. Values that you got before stay valid."""


class MissingPackageError(MemstoreError, ImportError):
    """An optional part of memstore needs a package that isn't installed; the message says which."""


class _ErrnoError(MemstoreError, OSError):
    errno_default = 0

    def __init__(self, message: str, *, key: str | None = None, code: int | None = None) -> None:
        MemstoreError.__init__(self, message, key=key)
        self.errno = self.errno_default if code is None else code
        self.strerror = message

    def _state(self) -> dict[str, Any]:
        return {**self.__dict__, "errno": self.errno, "strerror": self.strerror}  # kept in slots of OSError


class StoreFullError(_ErrnoError):
    """There is no space for the value (`errno` is ENOSPC). Nothing was changed; gets and deletes still work.

    `host` is the address of the host that is full, or None for this host.
    """

    errno_default = errno.ENOSPC
    host: str | None = None
    needed: int | None = None  # bytes that the value takes, where the capacity said no


class QuotaExceededError(StoreFullError):
    """The keys that start with `prefix` would take more bytes than `Store.set_quota` lets them. Nothing was changed.

    `quota` and `used` are bytes, and `requested` those that the call would have added. `errno` is EDQUOT.
    """

    errno_default = errno.EDQUOT

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        prefix: str = "",
        quota: int = 0,
        used: int = 0,
        requested: int = 0,
    ) -> None:
        super().__init__(message, key=key)
        self.prefix, self.quota, self.used, self.requested = prefix, quota, used, requested


class ResourceLimitError(_ErrnoError):
    """The process or the machine ran out of descriptors, memory, mappings or threads, or a file may be no larger.

    `errno` says which: EMFILE, ENFILE, ENOMEM, EAGAIN or EFBIG.
    """

    errno_default = errno.EMFILE


class StorageError(_ErrnoError):
    """Storage that hosts share isn't mounted here, is read-only or fails, or lacks what another host has written.

    The same is raised for the folder of `open(spill=)`, and for an object store that answers with failures, or not at
    all, for longer than is repeated.
    `path` is the file, folder or URL, `host` the name of the host that met the error; `errno` is the kernel's, or EIO.
    """

    errno_default = errno.EIO

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        code: int | None = None,
        path: str | None = None,
        host: str | None = None,
    ) -> None:
        super().__init__(message, key=key, code=code)
        self.path, self.host = path, host


class ThrottledError(StorageError):
    """An object store answers that there are too many requests, for longer than they are repeated. `path` is the URL.

    Nothing is lost: the same call goes on with what is there.
    """


class StoreTimeoutError(MemstoreError, TimeoutError):
    """The timeout passed. The message says what the call waited for, and which pid held it."""


class ContentionError(MemstoreError):
    """Others changed the entry faster than the call could follow, or the call came in the middle of another change.

    The second happens in a signal handler, in a finalizer, and in a child that was forked during a change.
    """


class CorruptionError(MemstoreError):
    """Stored bytes are damaged. `path` is the file, `detail` what is wrong with it.

    If no message is given, it is made of key, path and detail: "'key': path: detail".
    """

    def __init__(self, message: str = "", *, key: str | None = None, path: str | None = None, detail: str = "") -> None:
        if not message:
            message = ": ".join(part for part in (None if key is None else repr(key), path, detail) if part)
        super().__init__(message, key=key)
        self.path = path
        self.detail = detail or message


class InvalidAddressError(MemstoreError, ValueError):
    """The text isn't the address of a listener. The message shows it, and what an address looks like."""


class AddressUnavailableError(_ErrnoError):
    """This process can't listen at the address: another process does, or it isn't an address of this host."""

    errno_default = errno.EADDRINUSE


class SecretError(MemstoreError, ValueError):
    """The secret's file is missing, too short, or readable by others; or the address needs a secret and has none."""


class LinkRefusedError(MemstoreError):
    """The process at the address has another secret, protocol or store id. The message names both sides."""


class UnknownOutcomeError(MemstoreError):
    """A change may or may not have been made, for instance on another host. Repeating the call is safe."""


class NotReplicatedError(MemstoreError):
    """The value was put, and lies on one host alone, though its group is to have replicas. `version`: of the put."""

    def __init__(self, message: str, *, key: str | None = None, version: int = 0) -> None:
        super().__init__(message, key=key)
        self.version = version


class HomeUnavailableError(MemstoreError, TimeoutError):
    """The host that owns the key or has its bytes, or the seed, didn't answer in time. Nothing was changed."""


class CrossHostError(MemstoreError):
    """The call works on one host only, but its keys have several owners, or the entry is on another host."""


class NotServedError(MemstoreError):
    """The root isn't served, or can't be served; the message says why."""


class TransportUnavailableError(MemstoreError):
    """The host lacks the transport with which it should be served: RDMA, without ibverbs. Nothing was created."""


class FencedError(MemstoreError):
    """This host has not heard from the other hosts for too long, and may have been removed: nothing was done."""


class StaleMembershipError(MemstoreError):
    """This host was removed from the cluster, and its values are no longer part of the store."""


# --- of snapshots: each is also the error that torchsnapshot raises in its place, since callers catch that ------------


class NoSnapshotError(NotAStoreError, FileNotFoundError, RuntimeError):
    """There is nothing to restore: no such folder, or one without a manifest. Callers start afresh.

    A folder of another kind (a store, a checkpoint of another library) is a plain NotAStoreError: what was saved there
    would be lost by a fresh start.
    """


class SnapshotMismatchError(StructureMismatchError, RuntimeError):
    """The objects to restore have other names, shapes or dtypes than the snapshot. Nothing was restored."""


class NoSuchPathError(KeyNotFoundError, RuntimeError):
    """The snapshot has no tensor or object at this path."""


class NoSuchStateError(KeyNotFoundError, AssertionError):
    """The snapshot has no state dict under this name."""


# --- what a process or a machine may lack -----------------------------------------------------------------------------

_WAYS_OUT = {
    errno.EMFILE: "raise `ulimit -n`, or drop held values",
    errno.ENFILE: "raise fs.file-max, or end processes that have many files open",
    errno.ENOMEM: "free memory, raise `ulimit -v` or vm.max_map_count, or drop held values",
    errno.EFBIG: "raise `ulimit -f`; where it is unlimited, the file system has no larger files",
    errno.EAGAIN: "raise `ulimit -u` or the container's limit of processes, or end some",
}
_LACKS = tuple(_WAYS_OUT)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_THE_LOADER = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # its ImportErrors have the kernel's text, and no number


_OF_THE_CALLER = "_memstore_of_the_caller"


@contextlib.contextmanager
def in_callers_code() -> Generator[None]:
    """Leaves what a callback such as `progress` raises as it is: a full disk of the caller's is none of the store's."""
    try:
        yield
    except Exception as error:
        vars(error)[_OF_THE_CALLER] = True  # also where its class is frozen
        raise


def is_of_caller(error: BaseException) -> bool:
    """Returns whether the error was raised within `in_callers_code`."""
    return hasattr(error, _OF_THE_CALLER)


def lack_of(error: BaseException) -> tuple[int, str] | None:
    """Returns the errno and the text of what is lacking, by an error of the kernel, of Python, torch or an import.

    Returns None if the error says something else. A full disk is none of it: that is a StoreFullError.
    """
    found = _code_of(error)
    return found if found is not None and found[0] in _LACKS else None


def _code_of(error: BaseException) -> tuple[int, str] | None:
    """Returns the errno that an error stands for, if it is one of a lack or of a full disk, and its text."""
    if is_of_caller(error):
        return None
    if isinstance(error, MemoryError):
        return errno.ENOMEM, "not enough memory"
    if isinstance(error, OSError):
        is_one = error.errno in _LACKS or error.errno in _FULL
        return (error.errno or 0, error.strerror or os.strerror(error.errno or 0)) if is_one else None
    text = str(error)
    if isinstance(error, ImportError):
        for code in _OF_THE_LOADER:
            if os.strerror(code) in text:
                return code, os.strerror(code)
        if "failed to map segment" in text:
            return errno.ENOMEM, os.strerror(errno.ENOMEM)
    elif isinstance(error, RuntimeError):
        if "can't start new thread" in text:
            return errno.EAGAIN, text
        for code in (*_LACKS, *_FULL):  # torch's have the kernel's text and number, either one in parentheses
            told = os.strerror(code)
            if f"{told} ({code})" in text or f"{code} ({told})" in text:
                return code, told
    return None


def way_out(code: int) -> str:
    """Says what to do about a lack of this errno."""
    return _WAYS_OUT[code]


def error_of_lack(error: BaseException, what: str) -> ResourceLimitError | StoreFullError | None:
    """Makes the typed error of a lack or of a full disk. `what` is what was worked on: mostly a path.

    Returns None for another error, and for memstore's own, which are typed already.
    """
    found = None if isinstance(error, MemstoreError) else _code_of(error)
    if found is None:
        return None
    code, text = found
    if code in _FULL:
        return StoreFullError(f"{what} has no room ({text}): free some, or choose a place on another disk", code=code)
    return ResourceLimitError(f"{what}: {text}: {way_out(code)}", code=code)


@contextlib.contextmanager
def lacks_told(what: str | os.PathLike[str]) -> Generator[None]:
    """Makes of a lack within a ResourceLimitError, and of a full disk a StoreFullError, which name `what`: a path."""
    try:
        yield
    except Exception as error:
        typed = error_of_lack(error, str(what))
        if typed is None:
            raise
        raise typed from error


def __dir__() -> list[str]:
    ours = (name for name, one in globals().items() if isinstance(one, type) and issubclass(one, MemstoreError))
    return sorted({*(name for name in ours if name[0] != "_"), "__doc__", "__file__", "__name__"})
