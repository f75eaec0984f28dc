"""Opening a store: what may be asked for, checked before anything is touched; and waiting until a store is there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from memstore._arguments import flag, whole_number
from memstore._threads import between_forks
from memstore._wording import parse_size
from memstore.engine import (
    Creation,
    absolute_path,
    check_is_host,
    close_root,
    deadline_after,
    gone_if_new,
    has_settings,
    may_come,
    open_root,
    resource_errors,
)
from memstore.errors import (
    CorruptionError,
    MemstoreError,
    NotAStoreError,
    PermissionDeniedError,
    ReadOnlyError,
    StoreTimeoutError,
)
from memstore.listing import Mode
from memstore.store.store import Store
from memstore.structure import modes

if TYPE_CHECKING:
    from memstore.distributed.serving import Cluster

# --- Modes of files: numbers that are read and written in octal, in `help` too ---------------------------------------


class Octal(int):
    def __repr__(self) -> str:
        return oct(self)


OWNER_ONLY = Octal(0o600)


# --- Opening ---------------------------------------------------------------------------------------------------------


_JOINED_WITHIN = 60.0  # seconds, as `memstore.join`
_INLINE_LIMIT_MOST = 1 << 16  # bytes; a larger value costs less in a segment


def check_mode(mode: object) -> None:
    """Raises ValueError for what is no mode."""
    if mode not in ("r", "r+", "a", "x", "w"):
        raise ValueError(f"mode is 'r', 'r+', 'a', 'x' or 'w', and not {mode!r}")


@modes.uncompiled
def open(
    root: str | os.PathLike[str],
    mode: Mode = "a",
    *,
    durability: Literal["process", "disk"] | None = None,
    checksum: bool | None = None,
    inline_limit: int | None = None,
    capacity: int | str | None = None,
    spill: str | os.PathLike[str] | None = None,
    verify: bool = False,
    allow_pickle: bool = False,
    unix_group: int | str | None = None,
    file_mode: int = OWNER_ONLY,
    timeout: float = 30.0,
    wait: float | None = None,
    cluster: str | Cluster | None = None,
    secret: str | bytes | None = None,
) -> Store:
    """Opens the store in the folder `root`, and creates it if necessary.

    Args:
        root: a folder on `/dev/shm` or a local disk. Its parent must exist.
        mode: "r" only reads; "r+" reads and writes an existing store; "a" creates the store if it doesn't exist; "x"
            must create it. "w" begins anew: it removes the store that is there, with all keys, and creates an empty one
            with the options of this call. Values that processes got stay valid; every call of a store that they have
            open raises a NotAStoreError then. If this process is killed meanwhile, there is the old store, none, or the
            new one. Only one process of a run may use "w".
        durability: "process": a put survives the death of any process. "disk": it survives a crash of the host too;
            refused on tmpfs. Fixed at creation; None: as created ("process" for a new store).
        checksum: keep a checksum of each leaf. Fixed at creation; None: as created (new: True with "disk").
        inline_limit: values of up to this many bytes are stored in the catalog, without a file. Fixed at creation;
            None: as created (new: 65,536, or 1,536 with a `capacity` under 64 MiB). 0 puts every value in a file.
        capacity: how many bytes the files of all values may take together, as a number or text ("8GiB", "500MB"). The
            growth of the catalog beyond its first 8 MiB counts too. None: as created (new: no limit); another value
            changes it for all processes.
        spill: a folder on a disk. Values in files that nobody has read for longest move there, instead of a
            StoreFullError, and are read from there. It holds for all processes from now on; None: as before.
        verify: compare what is read with its checksums, if it has any.
        allow_pickle: use pickle for leaves that can't be stored otherwise. Loading a pickle runs code of whoever wrote
            it: allow it only for stores whose writers you trust.
        unix_group: the group, by name or number, that the store's files belong to; used at creation.
        file_mode: the permissions of its files: 0o600 (yours alone, the default), or for example 0o660 (the group may
            read and write); used at creation.
        timeout: seconds for which any call waits, for a lock, a version or rows, unless it has a timeout of its own.
        wait: with mode "r" or "r+": seconds to wait until another process has made the store, or the folder;
            `float("inf")`: for ever. None: the store must exist.
        cluster: the address of a member of a cluster, ``tcp://IP:PORT``, or a `Cluster`. This host joins it first, as
            by `memstore.join`, unless it is a member; the folder is created if it doesn't exist, also with "r" and
            "r+". `wait` is then how many seconds that may take (None: 60). None: the store is opened as it is.
        secret: with `cluster`, what its hosts share, as of `memstore.join`.

    Returns:
        A Store; close it, or use it in a `with`.

    Raises:
        NotAStoreError: no parent, not a folder, no store in mode "r" or "r+", a foreign or damaged `memstore.json`; in
            mode "w" also files in the folder that aren't memstore's.
        StoreTimeoutError: nobody has made a store within `wait` seconds; or another process takes too long to open it.
        AlreadyExistsError: mode "x", and the store exists.
        PermissionDeniedError: the folder or a file in it belongs to another user, is open to others, or is a link.
        ValueError: an option makes no sense, or the store was created with another value of it.
        FormatVersionError: a newer memstore has created the store.
        UnsupportedFilesystemError: the folder is on a network file system, or "disk" was asked for on a tmpfs.
        StoreFullError: there is no room for the catalog of a new store.
        InvalidAddressError: `cluster` is no address.
        StorageError: values were moved to the folder of `spill`, and it isn't there.
        CrossHostError: `spill`, in a store on storage that hosts share.
        NotServedError: this host can't be a member of that cluster; or in mode "w" the store is one host's part of a
            store on several.

    Example:
        >>> import memstore, tempfile, torch
        >>> with memstore.open(tempfile.mkdtemp()) as store:
        ...     version = store.put("policy", {"w": torch.ones(2, 2)})
        ...     store.get("policy")["w"].sum()
        tensor(4.)
    """
    check_mode(mode)
    deadline_after(timeout)  # raises for what is no number of seconds
    flag("verify", verify)
    flag("allow_pickle", allow_pickle)
    if secret is not None and cluster is None:
        raise ValueError("secret= is that of the cluster which cluster= names")
    if cluster is not None and mode in ("x", "w"):
        raise ValueError(f"mode {mode!r} creates a store, and cluster= joins one: use mode 'a'")
    if wait is not None:
        deadline_after(wait)  # raises for what is no number of seconds
        if cluster is None and mode not in ("r", "r+"):
            raise ValueError(f"mode {mode!r} makes the store itself: wait= is for modes 'r' and 'r+', which need one")
    creation = _creation(mode, durability, checksum, inline_limit, capacity, spill, unix_group, file_mode)
    path = absolute_path(root)

    def open_now(within: float | None = None) -> Store:
        with resource_errors(path):
            opened = open_root(path, mode, creation, timeout if within is None else min(timeout, within))
            check_is_host(opened)
        kept: Mode = "r" if mode == "r" else "r+"
        return Store(opened, kept, verify=verify, allow_pickle=allow_pickle, timeout=timeout, asked=mode)

    if cluster is not None:
        _join(path, cluster, secret, creation, _JOINED_WITHIN if wait is None else max(wait, 0.0))
    return open_now() if wait is None or cluster is not None else when_there(path, wait, open_now, timeout)


def _creation(
    mode: Mode,
    durability: Literal["process", "disk"] | None,
    checksum: bool | None,
    inline_limit: int | None,
    capacity: int | str | None,
    spill: str | os.PathLike[str] | None,
    unix_group: int | str | None,
    file_mode: int,
) -> Creation:
    """Returns the settings of a new store. Raises ValueError, TypeError, ReadOnlyError."""
    if durability not in (None, "process", "disk"):
        raise ValueError(f"durability is 'process' or 'disk', and not {durability!r}")
    if checksum is not None:
        flag("checksum", checksum)
    if unix_group is not None and not isinstance(unix_group, str) and whole_number("unix_group", unix_group) < 0:
        raise ValueError(f"unix_group is a group's name or its number, and not {unix_group}")
    if inline_limit is not None and not 0 <= whole_number("inline_limit", inline_limit) <= _INLINE_LIMIT_MOST:
        raise ValueError(f"inline_limit is 0 to {_INLINE_LIMIT_MOST:,} bytes, and not {inline_limit}")
    if type(file_mode) not in (int, Octal) or file_mode & ~0o666 or file_mode & 0o600 != 0o600:
        found = oct(file_mode) if type(file_mode) in (int, Octal) else repr(file_mode)
        raise ValueError(f"file_mode is 0o600, with 0o060 or 0o006 or parts of them added, and not {found}")
    if capacity is not None and mode == "r":
        raise ReadOnlyError("mode 'r' can't set capacity: open the store with 'r+' for that")
    limit = None if capacity is None else parse_size(capacity)
    if spill is not None and mode == "r":
        raise ReadOnlyError("mode 'r' moves no values, and finds what was moved by itself: leave spill= out")
    folder = None if spill is None else absolute_path(spill, "spill")
    return Creation(durability, checksum, inline_limit, unix_group, int(file_mode), limit, folder)


def _join(path: str, cluster: str | Cluster, secret: str | bytes | None, creation: Creation, timeout: float) -> None:
    """Makes this host a member, and the folder a store that is created as it is wished."""
    with between_forks():
        from memstore.distributed.links import parse_own_address
        from memstore.distributed.serving import Cluster, given_secret, join

    if not isinstance(cluster, Cluster):
        parse_own_address(cluster)  # before anything is made
    given_secret(secret)
    with gone_if_new(path):
        with resource_errors(path):
            close_root(open_root(path, "a", creation, timeout))
        join(path, cluster=cluster, secret=secret, timeout=timeout)


# --- Stores that another process is about to make --------------------------------------------------------------------
# Stores that another process is about to make: who may start before it looks for them again and again.
#
# A look costs some microseconds, and takes no part in what the maker does: `memstore.json` is written last, so a store
# that is half made is none yet. One that is half removed, since somebody clears the folder, is waited out too. A folder
# that another user makes for a group is closed to the group at first: that is waited out for some seconds.


_OpenedT = TypeVar("_OpenedT")

CLOSED_AT_MOST = 5.0  # seconds; it takes milliseconds, and who has no right to the folder is to hear of it soon
_FIRST_LOOK, _LAST_LOOK = 0.002, 0.05  # seconds between two
_AN_OPENING = 0.1  # seconds; it takes milliseconds, and with wait=0 others may be in the middle of one


def when_there(path: str, wait: float, open_now: Callable[[float], _OpenedT], timeout: float) -> _OpenedT:
    """Waits until there is a store in the folder `path`.

    Returns what `open_now` returns, which gets the seconds it may take.

    Args:
        timeout: seconds after which an opening is given up that waits for a lock; the end of `wait` may come before.

    Raises:
        StoreTimeoutError: there was none within `wait` seconds; or another process was opening it all the time.
        NotAStoreError: nor can there be: something else is there.
        CorruptionError: a file of the store is missing, and that didn't change.
        PermissionDeniedError: the store isn't open to this user; or the folder isn't, and that didn't change.
        TypeError, ValueError: `wait` is no number of seconds.
    """
    deadline, pause = deadline_after(wait), _FIRST_LOOK
    opens_by: float | None = None
    while True:
        was_there = has_settings(path)
        within = max(min(deadline - time.monotonic(), timeout), _AN_OPENING)
        try:
            return open_now(within)
        except (NotAStoreError, CorruptionError, PermissionDeniedError, FileNotFoundError) as error:
            is_there = has_settings(path)
            if is_there and not was_there:  # it was made between the two looks
                continue
            if isinstance(error, PermissionDeniedError):
                opens_by = opens_by or min(deadline, time.monotonic() + CLOSED_AT_MOST)
                if is_there or time.monotonic() >= opens_by:
                    raise
            elif not (_is_being_cleared(error) if is_there else may_come(path)):
                raise
            else:
                opens_by = None
            left = deadline - time.monotonic()
            if left <= 0 and is_there:
                raise
            if left <= 0:
                said = f"{path} doesn't exist"
                if os.path.lexists(path):
                    said = error.message if isinstance(error, MemstoreError) else f"{path}: {error}"
                raise StoreTimeoutError(f"{said}; nobody has made a store there within {float(wait):g} s") from None
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_LOOK)


def _is_being_cleared(error: Exception) -> bool:
    """Returns whether a file is missing in a folder that says that it is a store."""
    return isinstance(error, FileNotFoundError) or (isinstance(error, CorruptionError) and error.detail == "missing")
