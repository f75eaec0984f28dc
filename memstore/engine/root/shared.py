"""Stores on storage that hosts share: a file system that all of them mount (NFS, Lustre, CephFS, ...).

ROOT there has `memstore.json`, which is written once, and `segments/MEMBER-ID/`, a folder for each host. All else of a
host lies in its *state folder*, on a local disk: catalog, lock page, doorbell, a `memstore.json` of its own with the
host's id, and `claims`, in which a byte is locked for each segment that is being filled. So nobody relies on locks,
mappings or renames of the shared file system, and no two hosts ever write the same file there.

`memstore.json` gets its name by `link`, which fails where there is one: so of hosts that create a store at the same
time one does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterable, Sequence

import msgspec

from memstore.engine import syscalls
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.files.mapping import Mapping, OwnedFile, address_in, map_file
from memstore.engine.files.segments import (
    ClaimedFile,
    ClaimedOnStorage,
    FileClaims,
    SharedStorageWriter,
    StorageFile,
    fits,
    open_stored,
    read_stored,
    segment_path,
)
from memstore.engine.format.records import Record, SegmentExtent
from memstore.engine.root import folder
from memstore.engine.root.filesystem import TMPFS, check_filesystem, filesystem_name, is_network
from memstore.engine.root.folder import SHARED, Settings, Shared, encode_settings
from memstore.engine.root.storage import OPEN_AGAIN, PlacedSegment, RetiredRow, StorageDriver, StorePaths, mapped_size
from memstore.engine.sync.primitives import boot_clock
from memstore.errors import (
    NotAStoreError,
    NotServedError,
    PermissionDeniedError,
    StorageError,
    UnsupportedFilesystemError,
)

STATE_VARIABLE = "MEMSTORE_STATE"
CLAIMS_FILE = "claims"
_LOOK_EVERY = 0.05  # seconds
_NO_STORAGES_FAULT = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE}  # any store may meet it


def shared_settings(root: str) -> Settings | None:
    """Returns the settings of a store on shared storage; None if there is none, or another store, or nothing."""
    try:
        settings = folder.read_settings(root)
    except OSError as error:
        if error.errno is None or error.errno in _NO_STORAGES_FAULT:  # None: a PermissionDeniedError of ours
            raise
        raise storage_error(root, error) from error
    return None if settings is None or settings.shared is None else settings


def state_folder(root: str) -> str:
    """Returns the folder of a store's catalog, locks and sockets on this host: `root` itself, but on shared storage.

    Args:
        root: an absolute path.
    """
    settings = shared_settings(root) if os.path.isdir(root) else None
    if settings is None or settings.shared is None or settings.store != settings.shared.store:  # or it is one already
        return root
    return state_of(settings)


def paths_of(root: str, settings: Settings) -> StorePaths:
    """Returns the paths of a store on shared storage, by the settings in this host's state folder."""
    return StorePaths(root, state_of(settings), segments_of(root, settings.store))


def segments_of(root: str, member: str) -> str:
    """Returns the folder on the storage that a host writes, by its id."""
    return f"{root}/{folder.SEGMENTS}/{member}"


def state_of(settings: Settings) -> str:
    """Returns the path of the state folder on this host, which may not be there."""
    assert settings.shared is not None, "no store on shared storage"
    return f"{state_base()}/{settings.shared.store}"


def state_base() -> str:
    """Returns the folder of all state folders: $MEMSTORE_STATE, or where XDG wants such things."""
    named = os.environ.get(STATE_VARIABLE)
    if named:
        return os.path.abspath(named)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.abspath(f"{state}/memstore")


# --- creation ---------------------------------------------------------------------------------------------------------


def create_shared(root: str, settings: Settings) -> Settings:
    """Makes `root` a store on shared storage, unless it is one. Returns the settings that it has then.

    Raises:
        NotServedError: it is another kind of store.
        NotAStoreError: it is none, and not empty.
        StorageError: the storage can't be written.
    """
    try:
        found = folder.read_settings(root) or _make_shared(root, settings)
    except OSError as error:
        raise storage_error(root, error) from error
    if found is None or found.shared is None:
        raise NotServedError(
            f"{root} is a store that was not made for storage that hosts share, and can't become one: serve it without "
            "--shared, or choose an empty folder"
        )
    return found


def wait_for_storage(root: str, deadline: float) -> None:
    """Waits until there is a store, which another host makes. So a host without the storage mounted makes none.

    Raises NotServedError at the deadline (monotonic).
    """
    while True:
        if os.path.isdir(root) and shared_settings(root) is not None:
            return
        if time.monotonic() > deadline:
            what = f"has no {folder.SETTINGS}" if os.path.isdir(root) else "is missing"
            raise NotServedError(
                f"{root} {what} on host {os.uname().nodename}: the first host of the cluster makes the store there, on "
                "storage that all hosts mount. Is that mounted here, and is the first host up?"
            )
        time.sleep(_LOOK_EVERY)


def new_shared(settings: Settings, *, maps: bool) -> Settings:
    """Returns the same settings for a store on shared storage."""
    return msgspec.structs.replace(settings.with_feature(SHARED), shared=Shared(settings.store, maps=maps))


def _make_shared(root: str, settings: Settings) -> Settings | None:
    try:
        left = [name for name in os.listdir(root) if name != folder.SEGMENTS and not folder.is_unfinished(name)]
        if left:
            folder.check_empty(root)
            raise NotServedError(
                f"{root} has {left[0]!r} of a store that was begun without --shared: choose an empty folder"
            )
    except (NotAStoreError, NotServedError):
        if made_meanwhile := folder.read_settings(root):  # by another host: its settings are what was found there
            return made_meanwhile
        raise
    _link_settings(root, settings)
    return folder.read_settings(root)


def _link_settings(root: str, settings: Settings) -> None:
    """Writes the settings, whole or not at all; and not where there are some already, by whichever host."""
    temporary = f"{root}/.{uuid.uuid4().hex}.new"
    with syscalls.file_open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        syscalls.write_at(fd, encode_settings(settings), 0)
        syscalls.sync(fd)
    try:
        with contextlib.suppress(FileExistsError):
            syscalls.link(temporary, f"{root}/{folder.SETTINGS}")
    finally:
        syscalls.unlink(temporary)
    syscalls.sync_folder(root)


def prepare_state(settings: Settings) -> Settings:
    """Makes the state folder of this host, if there is none. Returns the settings that a new one is to have.

    The catalog outlives the host where the folder is on a disk, whatever the first host had.

    Raises UnsupportedFilesystemError where the folder is on a file system that hosts share.
    """
    assert settings.shared is not None, "no store on shared storage"
    state = state_of(settings)
    base = os.path.dirname(state)
    os.makedirs(os.path.dirname(base), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        syscalls.make_folder(base, 0o700)
    if os.stat(base).st_uid != os.geteuid():
        raise PermissionDeniedError(
            f"{base} belongs to user {os.stat(base).st_uid}, and this process runs as {os.geteuid()}: name a folder of "
            f"your own by {STATE_VARIABLE}"
        )
    check_local(base)
    with contextlib.suppress(FileExistsError):
        syscalls.make_folder(state, 0o700)
    in_memory = check_filesystem(state, None) == TMPFS
    features = tuple(feature for feature in settings.features if feature == SHARED)
    return msgspec.structs.replace(
        settings, store=uuid.uuid4().hex, durability="process" if in_memory else "disk", features=features
    )


def check_local(state: str) -> None:
    """Raises UnsupportedFilesystemError where the folder is on a file system that hosts share."""
    if is_network(state):
        kind = filesystem_name(syscalls.filesystem_type(state))
        raise UnsupportedFilesystemError(
            f"{state}, the folder for this host's catalogs of stores on shared storage, is on {kind}, which has "
            f"neither the locks nor the mappings for that: name one on a local disk or /dev/shm by {STATE_VARIABLE}"
        )


def check_owner(root: str, settings: Settings | None) -> None:
    """Refuses a folder on the storage that others can change; `settings` is None while it is being made a store."""
    try:
        fd = syscalls.open_file(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise storage_error(root, error) from error
    try:
        folder.check_folder(root, fd, settings)
    finally:
        syscalls.close(fd)


def create_segments(places: StorePaths, settings: Settings) -> None:
    """Creates the folder on the storage that this host writes. Raises StorageError."""
    try:
        folder.create_folder(os.path.dirname(places.segments), settings)
        folder.create_folder(places.segments, settings)
        syscalls.sync_folder(os.path.dirname(places.segments))
    except OSError as error:
        raise storage_error(places.segments, error) from error


def no_state(root: str, state: str) -> NotServedError:
    return NotServedError(
        f"{root} is on storage that hosts share, and this host is no host of it yet, as far as {state} tells: run "
        f"memstore serve {root} --shared --address tcp://IP:PORT here, and have the same {STATE_VARIABLE} as its agent"
    )


# --- the driver -------------------------------------------------------------------------------------------------------


class SharedStorage(StorageDriver):
    """Files on storage that hosts share. A byte of a local file says who fills one: see `files/segments.py`."""

    maps_at_once = False
    sees_all_hosts = True
    sweep_every = look_every = 0.5
    swept_at_least = 64  # none of them stays open

    claimed_file = ClaimedOnStorage
    segment_writer = SharedStorageWriter

    def __init__(self, places: StorePaths, settings: Settings) -> None:
        super().__init__(places, settings)
        assert settings.shared is not None, "no store on shared storage"
        self._settings, self.durable = settings.shared, True  # others read the files, also after this host's death
        self._claims = FileClaims(f"{places.state}/{CLAIMS_FILE}")

    def _open(self, segment: int, path: str, flags: int) -> StorageFile:
        if self.fd < 0:
            raise self.closed_error()
        return StorageFile(self._claims, segment, path, flags, self._file_mode, self.fd)

    def map(self, record: Record, *, live: bool = False) -> Mapping | None:
        placed = self.placed(record)
        return self._bring(placed, mapped_size(record, [one.extent for one in placed]), live=live)

    def map_segment(self, extent: SegmentExtent, *, live: bool = False, writable: bool = False) -> Mapping | None:
        if writable:
            self.check_writable()
        placed = PlacedSegment(self.store, segment_path(self.path, extent.segment), extent)
        return self._bring([placed], extent.size, live=live)

    def map_beside(self, extents: Sequence[SegmentExtent], size: int) -> Mapping | None:
        found = [PlacedSegment(self.store, segment_path(self.path, extent.segment), extent) for extent in extents]
        return self._bring(found, size)

    def _bring(self, placed: Sequence[PlacedSegment], size: int, *, live: bool = False) -> Mapping | None:
        """Reads whole segments to where they lie in a range of addresses, or maps them there. None: one isn't there."""
        if self.fd < 0:
            raise self.closed_error()
        mapping = map_file(None, size)
        for member, path, extent in placed:
            try:
                file = open_stored(path, extent, member, live=live)
                if file is None:
                    return None
                address = address_in(mapping, extent.base, extent.size)
                if self._settings.maps:
                    syscalls.map_over(address, file.fd, extent.size)
                elif not read_stored(file, [(0, extent.size, address)]):
                    return None
                if not fits(file, extent, member):
                    return None
            except OSError as error:
                raise storage_error(path, error) from error
        return mapping

    def check_writable(self) -> None:
        """Raises the error: rows are written through mappings, under a lock that the mapping keeps."""
        raise UnsupportedFilesystemError(
            f"{self.root} is on storage that hosts share, and a dataset's or buffer's rows are written in place, which "
            "takes mappings and locks of a local file system: create it in a store of this host alone, and put there "
            "what the other hosts are to have"
        )

    def _folder_of(self, member: str) -> str:
        return segments_of(self.root, member)

    def leased(self, record: Record) -> Sequence[SegmentExtent]:
        """Returns this host's segments: those of others stay for their grace time."""
        return record.here(bytes.fromhex(self.store))

    def room_for(self, nbytes: int) -> int:
        return nbytes

    def reusable(self, transaction: Transaction, need: int) -> tuple[RetiredRow, ...]:
        """Returns nothing: readers of other hosts lock nothing, so no file is used again."""
        return ()

    def open_replaced(self, segment: int, size: int) -> None:
        return None

    def retire(self, transaction: Transaction, segments: Iterable[int]) -> None:
        """Leases them for the store's grace time."""
        until = boot_clock() + int(self._settings.grace * 1e9)
        for segment in segments:
            longest = max(until, transaction.number("leases", segment) or 0)
            transaction.put_number("leases", segment, longest)

    def limit(self, counters: Counters) -> int:
        return 0

    def unlink(self, segment: int, file: ClaimedFile | None) -> OwnedFile | None:
        """Removes a file. Its blocks stay: others may read it still."""
        super().unlink(segment, file)
        if file is not None:
            file.close()
        return None

    def error(self, error: OSError, key: str | None = None) -> StorageError:
        return storage_error(self.root, error, key)

    def unseen_error(self, error: OSError | None) -> StorageError:
        if error is not None:
            return storage_error(self.path, error)
        what = "the storage was mounted anew, or the store was replaced, while it was open"
        return StorageError(f"{self.path}: {what}: {OPEN_AGAIN}", path=self.path)


# --- the storage fails ------------------------------------------------------------------------------------------------

_MEANINGS = {
    errno.EROFS: "it is mounted read-only here: values can be read; mount it read-write to put",
    errno.ESTALE: "the server has removed what this host had open, or was restarted: open the store again",
    errno.EIO: "the server or the network to it fails: see the kernel's log of this host",
    errno.ENOENT: "it is missing: is the storage mounted on this host?",
    errno.ENOTDIR: "it is no folder: is the storage mounted on this host?",
    errno.EACCES: "this user may not: is it the same user, by number, as on the other hosts?",
    errno.EPERM: "this user may not: is it the same user, by number, as on the other hosts?",
}


def storage_error(path: str, error: OSError, key: str | None = None) -> StorageError:
    """Makes the error that says what the shared file system means, on which host, and what to do."""
    host = os.uname().nodename
    what = _MEANINGS.get(error.errno or 0, "the storage that hosts share fails: see the kernel's log of this host")
    name = "" if key is None else f"{key!r}: "
    text = f"{name}{error.filename or path} on host {host}: {error.strerror or error}: {what}"
    return StorageError(text, key=key, code=error.errno, path=error.filename or path, host=host)
