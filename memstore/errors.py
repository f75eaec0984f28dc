"""Every exception that memstore raises on purpose, grouped by what a handler does about it.

    MemstoreError
    ├── the key or the value (fix the call)
    │   ├── InvalidKeyError (ValueError)            not a key: empty, too long, NUL, not text
    │   ├── UnsupportedValueError (TypeError)       a leaf that can't be stored, named
    │   ├── StructureMismatchError (ValueError)     out= or like= differs from what is stored
    │   ├── ShardMismatchError (ValueError)         ranks disagree about a leaf, or about their attempt
    │   └── MutableEntryError                       a call that mutable entries don't have
    ├── the state of the key (decide, retry)
    │   ├── KeyNotFoundError (KeyError)
    │   ├── PartialCommitError (KeyError)           parts of a sharded put are missing
    │   ├── VersionGoneError (KeyError)             that version was overwritten and is given back
    │   └── VersionConflictError                    expect_version was not the version found
    ├── the store (open it otherwise)
    │   ├── NotAStoreError
    │   ├── AlreadyExistsError (FileExistsError)
    │   ├── FormatVersionError
    │   ├── PermissionDeniedError (PermissionError)
    │   ├── UnsupportedFilesystemError
    │   ├── ReadOnlyError
    │   └── StoreClosedError
    ├── the installation (install something)
    │   ├── MissingPackageError (ImportError)       of an optional part
    │   └── TransportUnavailableError               a host was to be served with RDMA, and has none
    ├── the machine (wait, free something)
    │   ├── StoreFullError (OSError, ENOSPC)
    │   ├── ResourceLimitError (OSError)            file descriptors, mappings
    │   ├── StorageError (OSError)                  storage that hosts share: not mounted, read-only, failing
    │   ├── StoreTimeoutError (TimeoutError)
    │   └── ContentionError
    ├── the bytes (restore, repair)
    │   └── CorruptionError
    ├── the links between hosts (set them up otherwise)
    │   ├── InvalidAddressError (ValueError)        not tcp://IP:PORT, or no host has such an address
    │   ├── AddressUnavailableError (OSError)       taken by another process, or not of this host
    │   ├── SecretError (ValueError)                the secret's file is missing, short or readable by others
    │   └── LinkRefusedError                        another secret, protocol or member than was expected
    └── the hosts (repeat: it is safe)
        ├── HomeUnavailableError (TimeoutError)     the host that has the key doesn't answer
        ├── UnknownOutcomeError                     nor says whether it made a change
        ├── CrossHostError                          a call for one host, and the keys or the entry are elsewhere
        ├── StaleMembershipError                    this host was removed from the cluster
        └── NotServedError                          a root isn't served, or can't be

Each says what was found, what was expected and what to do, and has `.key` where there is one.
"""

from __future__ import annotations

import errno
from typing import Any


class MemstoreError(Exception):
    """The root of memstore's exceptions. `key` is the key concerned, or None."""

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
    """The key is empty, longer than 500 bytes of UTF-8, has a NUL or a lone surrogate, or is no str."""


class UnsupportedValueError(MemstoreError, TypeError):
    """A leaf of the value can't be stored; the message names the leaf. Nothing was written."""


class StructureMismatchError(MemstoreError, ValueError):
    """`out=`, `like=` or a batch of rows differs from what is stored; the message lists all. Nothing was written."""


class ShardMismatchError(MemstoreError, ValueError):
    """Ranks disagree about a leaf's shape, dtype, parts or bytes, or about their attempt. Nothing was put, or taken."""


class MutableEntryError(MemstoreError):
    """The call does not apply to a mutable entry."""


class KeyNotFoundError(MemstoreError, KeyError):
    """The store has no such key."""


class PartialCommitError(MemstoreError, KeyError):
    """Parts of a sharded put are missing, so there is no version of it.

    Attributes:
        missing_ranks: ranks that have put nothing.
        missing_boxes: where all ranks have: (leaf, offsets, shape) of what none of them holds.
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
    """The version that a ref names was overwritten or deleted, and its bytes have been given back."""


class VersionConflictError(MemstoreError):
    """`expect_version` was not what the store has. `expected` and `found` are versions; 0 means no such key."""

    def __init__(self, message: str, *, key: str | None = None, expected: int = 0, found: int = 0) -> None:
        super().__init__(message, key=key)
        self.expected = expected
        self.found = found


class NotAStoreError(MemstoreError):
    """No store or snapshot is there: the folder is missing or no folder, or `memstore.json` is foreign or damaged."""


class AlreadyExistsError(MemstoreError, FileExistsError):
    """What was to be made is there already: a store (mode "x"), a dataset, a snapshot, or the folder of an export."""


class FormatVersionError(MemstoreError):
    """The store was written by a version of memstore that this one can't read."""


class PermissionDeniedError(MemstoreError, PermissionError):
    """The root or a file in it belongs to somebody else, is open to all, or is a planted link."""


class UnsupportedFilesystemError(MemstoreError):
    """The file system lacks what the store needs: a network one, "disk" durability on tmpfs, or no /proc of Linux."""


class ReadOnlyError(MemstoreError):
    """A write by a store that was opened with mode "r", or into a lazy leaf of a view."""


class StoreClosedError(MemstoreError):
    """The store was closed. Values that were got before stay valid."""


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
    """No room for the value (`errno` is ENOSPC). Nothing changed; gets and deletes still work.

    `host` is the address of the host that is full, or None: this one.
    """

    errno_default = errno.ENOSPC
    host: str | None = None
    needed: int | None = None  # bytes that the value takes, where the capacity said no


class ResourceLimitError(_ErrnoError):
    """The process or the machine ran out of file descriptors or mappings."""

    errno_default = errno.EMFILE


class StorageError(_ErrnoError):
    """Storage that hosts share is not mounted here, is read-only, or fails; or doesn't show what another host wrote.

    `path` is the file or folder, `host` the name of the host that met the error; `errno` is the kernel's, or EIO.
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


class StoreTimeoutError(MemstoreError, TimeoutError):
    """The deadline passed. The message says what was waited for, and the pid that held it."""


class ContentionError(MemstoreError):
    """Others changed the entry faster than the call could follow."""


class CorruptionError(MemstoreError):
    """Stored bytes are damaged. `path` is the file, `detail` what is wrong with it.

    Without a message of its own the error says what it knows of the three: "'key': path: detail".
    """

    def __init__(self, message: str = "", *, key: str | None = None, path: str | None = None, detail: str = "") -> None:
        if not message:
            message = ": ".join(part for part in (None if key is None else repr(key), path, detail) if part)
        super().__init__(message, key=key)
        self.path = path
        self.detail = detail or message


class InvalidAddressError(MemstoreError, ValueError):
    """Text that is no address of a listener. The message shows it, and what an address looks like."""


class AddressUnavailableError(_ErrnoError):
    """This process can't listen at the address: another one does, or it is not an address of this host."""

    errno_default = errno.EADDRINUSE


class SecretError(MemstoreError, ValueError):
    """The secret's file is missing, too short, or open to others; or there is none, and the address needs one."""


class LinkRefusedError(MemstoreError):
    """What answers at the address has another secret, protocol or store id. The message names both sides."""


class UnknownOutcomeError(MemstoreError):
    """A remote call may or may not have happened; repeating it is safe."""


class HomeUnavailableError(MemstoreError, TimeoutError):
    """The host where a key has its home, or where its bytes lie, did not answer in time. Nothing was changed."""


class CrossHostError(MemstoreError):
    """A call that one host must be able to answer, and its keys have several homes, or the entry is on another host."""


class NotServedError(MemstoreError):
    """A root isn't served where it should be, or can't be: the message says what is in the way."""


class TransportUnavailableError(MemstoreError):
    """A host was to be served with a transport that it doesn't have: RDMA, without ibverbs. Nothing was made."""


class StaleMembershipError(MemstoreError):
    """This host was removed from the cluster: what it holds is no part of the store any more."""
