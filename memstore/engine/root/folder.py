"""The root folder of a store: its settings, who may own it, how its files are made, and how it is given up.

`memstore.json` holds the `Settings`. It is written last, by a rename, while the folder is locked (`locked`). A folder
with it is a whole store. Without it, it is no store yet, and the next creator finishes what was left half made.

A store is given up (`discard`) by one rename; then its files are removed. The caller holds the lock on the folder, so
nobody opens or creates a store there meanwhile. Who has the store open keeps what it has mapped, and hears from its
next call that the store is gone: see `Root.check_in_place`.

1. `segments` is renamed to `segments.discarded`. **This is the moment**: a put that commits later isn't acknowledged,
   since it looks for `segments` before it returns; and a folder with `segments.discarded` is no store, whatever else it
   has.
2. `memstore.json` is removed, then all else, `segments.discarded` last.

A kill after step 1 leaves no store, and files that the next creator, or `discard` again, removes first.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import stat
import time
import uuid
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
from msgspec import Meta

from memstore._parsing import UNDECODABLE
from memstore._wording import of_no_place
from memstore.engine import syscalls
from memstore.engine.files.mapping import LockFile
from memstore.engine.root.filesystem import Durability, check_filesystem, lockers_of
from memstore.engine.sync.primitives import describe_thread
from memstore.errors import (
    CrossHostError,
    FormatVersionError,
    NotAStoreError,
    NotServedError,
    PermissionDeniedError,
    StoreTimeoutError,
)

# --- settings --------------------------------------------------------------------------------------------------------


Feature = Literal["sharded", "mutable", "owners", "shared", "history", "quotas", "spill", "deltas"]

FORMAT = 2  # the newest that can be read; a store has the oldest one that can say what it holds
_PLAIN, _WITH_FEATURES = 1, 2
_HASHED_HOMES = "cluster"  # a feature of former versions: hashes said which host has the record of a key
SHARDED: Feature = "sharded"  # records of several segments, and prepared segments
MUTABLE: Feature = "mutable"  # entries whose rows are written in place
CLUSTER: Feature = "owners"  # the store was served to other hosts: records name what lies there
HISTORY: Feature = "history"  # versions that were replaced may stay readable: see `protocols/history.py`
QUOTAS: Feature = "quotas"  # prefixes of keys have quotas: see `protocols/history.py`
DELTAS: Feature = "deltas"  # versions may share files: see `protocols/deltas.py`
SPILL: Feature = "spill"  # values may lie in a folder on a disk: see `spill.py`
SHARED: Feature = "shared"  # its segments lie on storage that hosts mount, its catalogs do not: see `shared.py`

# What stores of several hosts don't have yet, and what to do instead.
_OF_ONE_HOST: dict[Feature, tuple[str, str]] = {
    QUOTAS: ("prefixes have quotas", "capacity= bounds what a host's part of it takes"),
    DELTAS: ("versions share files", "put without delta_of="),
}
_OF_OWN_STORAGE: dict[Feature, tuple[str, str]] = {  # the same, of stores on storage that hosts share
    HISTORY: ("replaced versions aren't kept there", "put without history=, and let readers hold a store.ref(key)"),
}

GRACE = 60.0  # seconds
INLINE_LIMIT = 1 << 16  # bytes; up to here a put into the record takes a fraction of one into a segment


class _AnyFormat(msgspec.Struct):
    """The part of `memstore.json` that every version has."""

    format: int


class _AnyFeatures(msgspec.Struct):
    features: tuple[str, ...] = ()


class Shared(msgspec.Struct, frozen=True):
    """The settings that a store on storage that hosts share has beside all others.

    Attributes:
        store: the id that all of its hosts have in common; each has one of its own, too.
        grace: seconds for which the file of a value that was replaced stays, for its readers on other hosts.
        maps: files may be mapped: the storage keeps what a host has open, also when another one has removed it.
    """

    store: str
    grace: Annotated[float, Meta(ge=0, le=1e6)] = GRACE
    maps: bool = False


class Settings(msgspec.Struct, frozen=True):
    """The content of `memstore.json`. All is fixed at creation, but `features`, which come when they are first used."""

    format: Annotated[int, Meta(ge=1, le=FORMAT)]
    store: str
    durability: Durability
    checksum: bool
    inline_limit: Annotated[int, Meta(ge=0, le=1 << 16)]  # bytes
    file_mode: Annotated[int, Meta(ge=0, le=0o777)]
    unix_group: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    features: tuple[Feature, ...] = ()
    shared: Shared | None = None  # with the feature of that name
    spill: str | None = None  # with the feature of that name: the folder of folders of values that were moved

    def with_feature(self, feature: Feature) -> Settings:
        """Adds a feature. A version of memstore that doesn't know it refuses the store from then on."""
        return msgspec.structs.replace(self, format=_WITH_FEATURES, features=(*self.features, feature))

    @property
    def durable(self) -> bool:
        return self.durability == "disk"

    @property
    def folder_mode(self) -> int:
        """The file mode, with the x bits that match its r bits."""
        return self.file_mode | (self.file_mode & 0o444) >> 2


def new_settings(
    *, durability: Durability | None, checksum: bool | None, inline_limit: int | None, file_mode: int, group: int | None
) -> Settings:
    chosen = durability or "process"
    settings = Settings(
        format=_PLAIN,
        store=uuid.uuid4().hex,
        durability=chosen,
        checksum=chosen == "disk" if checksum is None else checksum,
        inline_limit=INLINE_LIMIT if inline_limit is None else inline_limit,
        file_mode=file_mode,
        unix_group=group,
    )
    try:  # what was written could else not be read again
        return msgspec.convert(msgspec.to_builtins(settings), Settings)
    except msgspec.ValidationError as error:
        raise ValueError(f"no store can be created so: {error}") from None


def encode_settings(settings: Settings) -> bytes:
    written = msgspec.to_builtins(settings)
    if not settings.features:  # as before there were any
        del written["features"]
    for name in ("shared", "spill"):
        if written[name] is None:
            del written[name]
    return msgspec.json.format(msgspec.json.encode(written)) + b"\n"


def decode_settings(text: bytes, path: str) -> Settings:
    """Raises FormatVersionError, and NotAStoreError; `path` is where the text was found."""
    try:
        version = msgspec.json.decode(text, type=_AnyFormat).format
        if version > FORMAT:
            raise FormatVersionError(
                f"{path} has format {version}, and this version of memstore reads up to {FORMAT}: upgrade memstore"
            )
        unknown = sorted(set(msgspec.json.decode(text, type=_AnyFeatures).features) - set(get_args(Feature)))
        if _HASHED_HOMES in unknown:
            raise FormatVersionError(
                f"{path} was served to other hosts by a former version of memstore, which kept records on hosts that "
                "this version would not look at: export the store with that version, or serve an empty folder and put "
                "the values again"
            )
        if unknown:
            raise FormatVersionError(
                f"{path} has the feature {', '.join(unknown)}, which this version of memstore doesn't know: upgrade it"
            )
        settings = msgspec.json.decode(text, type=Settings)
        for feature, said in ((SHARED, settings.shared), (SPILL, settings.spill)):
            if (said is None) == (feature in settings.features):
                raise NotAStoreError(f"{path} is damaged: the feature {feature!r}, and what it says of it, go together")
        return settings
    except UNDECODABLE as error:
        raise NotAStoreError(
            f"{path} is foreign or damaged: {error}: put back what was there, or choose another folder"
        ) from None


# --- the files of the folder -----------------------------------------------------------------------------------------


SETTINGS, LOCK, DOORBELL, CATALOG, SEGMENTS = "memstore.json", "lock", "doorbell", "catalog/local", "segments"
# One name and not a host's: processes of one kernel share a local file system, in containers too, but no host name.
DISCARDED = "segments.discarded"  # what `segments` is called once the store is given up: see `discard`
OWN = {LOCK, DOORBELL, "catalog", SEGMENTS, "claims"}  # beside the settings
SNAPSHOT = "memstore_snapshot.json"  # what a folder has that is a snapshot

# What to do where the parent folder of a store is missing.
_CREATE_ADVICE = "create it first"
_OPEN_ADVICE = (
    "check the path; modes 'r' and 'r+' open only what is there, and with wait= they wait until somebody makes it"
)


def read_settings(root: str) -> Settings | None:
    """Reads `memstore.json`. Returns None if the folder has none, or its store was given up."""
    path = f"{root}/{SETTINGS}"
    if _status_of(path, folder=False) is None or is_discarded(root):
        return None
    try:
        with syscalls.file_open(path, os.O_RDONLY) as fd:
            text = syscalls.read_at(fd, 1 << 16, 0)
    except FileNotFoundError:  # given up between the two looks
        return None
    return decode_settings(text, path)


def is_discarded(root: str) -> bool:
    """Returns whether the folder has the rest of a store that was given up: see `discard`."""
    return os.path.lexists(f"{root}/{DISCARDED}")


def has_settings(root: str) -> bool:
    """Returns whether a folder says that it is a store."""
    return os.path.lexists(f"{root}/{SETTINGS}") and not is_discarded(root)


def is_unfinished(name: str) -> bool:
    """Returns whether a kill may have left a file of this name: one of memstore's that was being written."""
    return name.endswith(".new") and name.startswith((".", "secret."))


def write_settings(root: str, settings: Settings) -> None:
    create_file(root, SETTINGS, encode_settings(settings), settings)


def add_feature(root: str, settings: Settings, feature: Feature, spill: str | None = None) -> Settings:
    """Notes that the store uses a feature from here on. Under the store's mutex. Returns the settings that it has.

    Args:
        spill: with the feature of that name.
    """
    present = read_settings(root)
    if present is None or present.store != settings.store:
        raise NotAStoreError(f"{root} is another store now, or none: open it again")
    check_one_host(root, present, feature)
    of_one_host = [_OF_ONE_HOST[one][0] for one in present.features if one in _OF_ONE_HOST and one != DELTAS]
    if feature == CLUSTER and of_one_host:
        raise NotServedError(
            f"{root} can't be served, since {' and '.join(of_one_host)} in a store of one host only, as this one has "
            "been: serve an empty folder, and put the values there"
        )
    found = present
    if feature not in present.features:
        present = present.with_feature(feature)
    if spill is not None:
        present = msgspec.structs.replace(present, spill=spill)
    if present != found:
        write_settings(root, present)
    return present


def check_one_host(root: str, settings: Settings, feature: Feature) -> None:
    """Raises CrossHostError for a feature that such a store, of several hosts or on their storage, doesn't have."""
    if feature in _OF_ONE_HOST and (CLUSTER in settings.features or settings.shared is not None):
        what, instead = _OF_ONE_HOST[feature]
        raise CrossHostError(f"{root} is the store of several hosts, and {what} in a store of one host only: {instead}")
    if feature in _OF_OWN_STORAGE and settings.shared is not None:
        what, instead = _OF_OWN_STORAGE[feature]
        raise CrossHostError(f"{root} is on storage that hosts share, and {what}: {instead}")


def create_file(root: str, name: str, content: bytes, settings: Settings) -> None:
    """Writes a file whole or not at all."""
    temporary = f"{root}/.{name}.new"
    with contextlib.suppress(FileNotFoundError):
        syscalls.unlink(temporary)
    with syscalls.file_open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        syscalls.write_at(fd, content, 0)
        give_to_group(fd, settings)
        if settings.durable:
            syscalls.sync(fd)
    syscalls.rename(temporary, f"{root}/{name}")
    if settings.durable:
        syscalls.sync_folder(root)


def sync_file(path: str) -> None:
    with syscalls.file_open(path, os.O_RDONLY) as fd:
        syscalls.sync(fd)


def create_folder(path: str, settings: Settings) -> None:
    with contextlib.suppress(FileExistsError):
        syscalls.make_folder(path, 0o700)
    if settings.unix_group is not None:
        os.chown(path, -1, settings.unix_group)
    os.chmod(path, settings.folder_mode)


def give_to_group(fd: int, settings: Settings) -> None:
    """Gives a new file the store's group and mode, whatever the umask; the default needs no call."""
    if settings.unix_group is not None:
        os.fchown(fd, -1, settings.unix_group)
    if settings.file_mode != 0o600:
        os.fchmod(fd, settings.file_mode)


def absolute_path(path: object, name: str = "root") -> str:
    """Returns the folder of a store, as a caller names it. Raises TypeError, ValueError for what is none.

    Args:
        name: of the caller's argument, for errors.
    """
    found: Any = path
    if isinstance(path, os.PathLike):
        found = os.fspath(cast("os.PathLike[str]", path))
    if not isinstance(found, str) or not found:  # "" would be the working directory
        instead = ", whose root is one" if hasattr(found, "put_many") else ""
        raise TypeError(f"{name} is the path of a folder, and not {found!r:.100}{instead}")
    if "://" in found:
        raise ValueError(f"{name} is a folder of this host, or of storage that is mounted there, and not {found!r}")
    if "\0" in found:
        raise ValueError(f"{name} is the path of a folder, and {found!r} has a NUL")
    return os.path.abspath(found)


# --- checks -----------------------------------------------------------------------------------------------------------


def check_folder(root: str, fd: int, settings: Settings | None) -> None:
    """Refuses a folder that others can change. `settings` is None while the store is being created."""
    found = syscalls.status(fd)
    mode = stat.S_IMODE(found.st_mode)
    group = settings.unix_group if settings else None
    ours = {os.getegid(), *os.getgroups()}  # what another user says of a group doesn't count for who is not in it
    below = f"open a folder below it, such as {root.rstrip('/')}/store, which is then yours alone"
    if found.st_uid != os.geteuid() and not (group in ours and found.st_gid == group):
        what = f"{root} belongs to user {found.st_uid}, and this process runs as {os.geteuid()}"
        raise PermissionDeniedError(f"{what}: {below}" if settings is None and os.access(root, os.W_OK) else what)
    allowed = 0o755 if settings is None else settings.folder_mode
    if mode & 0o777 & ~allowed:
        # no store yet, or sticky: a folder that people share, such as /tmp, and the host breaks with another mode
        advice = below if settings is None or mode & stat.S_ISVTX else f"chmod {allowed:o} it"
        raise PermissionDeniedError(f"{root} has mode {mode:04o}, open to others: {advice}")


def check_files(root: str, settings: Settings) -> None:
    """Refuses links and other people's files where the store's own should be."""
    names = (SETTINGS, LOCK, DOORBELL, "catalog", CATALOG, f"{CATALOG}/data.mdb", f"{CATALOG}/lock.mdb")
    for name in names if settings.shared is not None else (*names, SEGMENTS):
        path = f"{root}/{name}"
        found = _status_of(path, folder=name in ("catalog", CATALOG, SEGMENTS))
        if found is None:
            continue
        if found.st_uid != os.geteuid() and found.st_gid != settings.unix_group:
            raise PermissionDeniedError(
                f"{path} belongs to user {found.st_uid}, and this process runs as {os.geteuid()}"
            )


def _status_of(path: str, *, folder: bool) -> os.stat_result | None:
    """Returns the status of what should be a file, or a folder, itself; None if there is nothing."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not (stat.S_ISDIR(found.st_mode) if folder else stat.S_ISREG(found.st_mode)):
        expected = "a folder" if folder else "a file"
        raise PermissionDeniedError(
            f"{path} should be {expected} and is {stat.filemode(found.st_mode)}: not memstore's. Put back what was "
            "there, or choose another folder"
        )
    return found


def check_empty(root: str) -> None:
    """Raises NotAStoreError if a folder that is no store yet holds more than what a killed creator left."""
    foreign = sorted(name for name in os.listdir(root) if name not in OWN and not is_unfinished(name))
    check_no_snapshot(root)
    if foreign:
        raise NotAStoreError(f"{root} is no store, and not empty (it has {foreign[0]!r}): choose a new or empty folder")


def check_no_snapshot(root: str) -> None:
    """Raises NotAStoreError for the folder of a snapshot."""
    if os.path.lexists(f"{root}/{SNAPSHOT}"):
        raise NotAStoreError(f"{root} is a snapshot, and no store: memstore.Snapshot reads it, store.attach serves it")


def group_id(group: int | str | None) -> int | None:
    if not isinstance(group, str):
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise PermissionDeniedError(f"this machine has no group {group!r}") from None


# --- the lock on the folder -------------------------------------------------------------------------------------------


class FolderGoneError(NotAStoreError):
    """A folder that was there a moment ago was removed, or replaced, before it could be locked."""


def ensure_folder(root: str, durability: Durability | None, *, create: bool, anywhere: bool = False) -> bool:
    """Returns whether it made the folder. With `anywhere`, on file systems too that hosts share."""
    parent, is_new = os.path.dirname(root), False
    if not _is_there(root):
        if not os.path.isdir(parent):
            what = f"doesn't exist: {_CREATE_ADVICE if create else _OPEN_ADVICE}"
            if os.path.lexists(parent):
                what = "is not a folder"
            elif "/~" in parent:  # "~/run", as one writes it in a shell
                what = f"doesn't exist{of_no_place(parent)}"
            raise NotAStoreError(f"{root}: the parent folder {parent} {what}")
        if os.path.basename(root) == "~":
            raise NotAStoreError(f"{root} doesn't exist{of_no_place(root)}")
        if not create:
            raise NotAStoreError(
                f"{root} doesn't exist: memstore.open creates it with mode 'a', and waits for it with wait="
            )
        if not anywhere:
            check_filesystem(parent, durability)  # refused, it leaves nothing behind
        try:
            syscalls.make_folder(root, 0o700)
            is_new = True
        except FileExistsError:
            pass  # somebody else made it first
        except PermissionError as error:
            raise PermissionDeniedError(f"{root} can't be created: {error.strerror}") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NotAStoreError(f"{root} can't be created: {error.strerror}") from None
    found = os.lstat(root)
    if stat.S_ISLNK(found.st_mode) and found.st_uid != os.geteuid():
        raise PermissionDeniedError(f"{root} is a link that user {found.st_uid} made")
    if stat.S_ISLNK(found.st_mode) and not os.path.exists(root):
        raise NotAStoreError(f"{root} is a link to {os.readlink(root)}, where nothing is: create that folder first")
    if not os.path.isdir(root):
        raise NotAStoreError(f"{root} is not a folder, and a store is one: check the path")
    return is_new


def _is_there(root: str) -> bool:
    """Raises PermissionDeniedError where this process can't know, and NotAStoreError for what no path is."""
    try:
        os.lstat(root)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        raise PermissionDeniedError(f"{root} can't be reached: a folder above it is closed to this user") from None
    except OSError as error:
        raise NotAStoreError(f"{root} can't be a folder: {error.strerror}") from None
    return True


@contextlib.contextmanager
def locked(root: str, deadline: float, opening: AbstractContextManager[Any]) -> Generator[int]:
    """Holds an exclusive lock on the folder itself: creation and opening go one after another. Yields its fd.

    Raises FolderGoneError if the path names another folder, or none, once the lock is had.
    """
    try:
        with opening:
            file = LockFile(root, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise FolderGoneError(f"{root} was removed just now: check the path") from None
    with file:
        while not syscalls.lock_exclusive(file.fd):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"{root}: waited for {_who_locks(file.fd)} to finish opening the store")
            time.sleep(0.001)
        try:
            _check_named(root, file.fd)
            yield file.fd
        finally:
            if file.fd >= 0:  # in a forked child it is closed
                syscalls.unlock(file.fd)


def _who_locks(fd: int) -> str:
    return ", ".join(map(describe_thread, lockers_of(fd))) or "a process that can't be seen from here"


def _check_named(root: str, fd: int) -> None:
    """Raises FolderGoneError: the lock's last owner may have removed the store, and its folder."""
    held = syscalls.status(fd)
    try:
        found = os.stat(root)
    except (FileNotFoundError, NotADirectoryError):
        raise FolderGoneError(f"{root} was removed just now: check the path") from None
    if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
        raise FolderGoneError(f"{root} was replaced just now: open it again")


# --- a store is given up ---------------------------------------------------------------------------------------------


AGENT_LOCK = "agent.lock"  # held by who serves the store: `distributed/serving/supervision.py`
AGENT_LOG = "agent.log"  # held by who starts an agent: `turn` in `distributed/serving/joining.py`
_REMOVAL_TRIES = 1000  # processes that may be in the middle of a put
_LEFT_BY_SERVING = {
    AGENT_LOCK,
    AGENT_LOG,
    "cluster",
    "relays",
    "secret",
    "transport",
}  # what serving a store leaves in its folder


def _check_discardable(root: str) -> None:
    """Raises NotAStoreError if the folder has anything that isn't memstore's: nobody else's files are removed."""
    ours = {*OWN, *_LEFT_BY_SERVING, SETTINGS, DISCARDED}
    foreign = sorted(name for name in os.listdir(root) if name not in ours and not is_unfinished(name))
    if foreign:
        raise NotAStoreError(
            f"{root} has {foreign[0]!r} beside its store, which isn't memstore's: move it elsewhere first; nothing was "
            "removed"
        )


def check_alone(root: str, settings: Settings) -> None:
    """Raises NotServedError for the store of a host that is a member of a cluster: its keys are those of all hosts."""
    if settings.shared is not None or CLUSTER in settings.features:
        raise NotServedError(
            f"{root} is, or was, one host's part of a store on several hosts, and isn't begun anew by one of them: "
            "store.clear() deletes the keys of all hosts; or choose another folder"
        )


@contextlib.contextmanager
def unserved(root: str) -> Generator[None]:
    """Keeps everybody from serving the store meanwhile. Raises NotServedError if somebody serves it now."""
    with contextlib.ExitStack() as locks:
        for name, does in ((AGENT_LOCK, "is served"), (AGENT_LOG, "is about to be served")):
            if not os.path.lexists(f"{root}/{name}"):
                continue
            file = LockFile(f"{root}/{name}", os.O_RDWR)
            locks.callback(file.close)
            if not syscalls.lock_exclusive(file.fd):
                who = _who_locks(file.fd)
                raise NotServedError(f"{root} {does} to other hosts by {who}: end that agent first (SIGTERM)")
        yield


def discard(root: str, settings: Settings | None) -> None:
    """Gives up the store in the folder, and empties the folder. `settings`: of the store; None: it was given up before.

    Raises NotAStoreError, before anything is changed.
    """
    _check_discardable(root)
    moved, segments = f"{root}/{DISCARDED}", f"{root}/{SEGMENTS}"
    if settings is not None:
        try:
            syscalls.rename(segments, moved)
        except FileNotFoundError:  # of a damaged store
            syscalls.make_folder(moved, 0o700)
    is_durable = settings is None or settings.durable
    if is_durable:
        syscalls.sync_folder(root)
    if settings is not None and settings.spill is not None:  # while something names it
        with contextlib.suppress(OSError):  # the disk isn't there
            _remove_folder(f"{settings.spill}/{settings.store}")
    with contextlib.suppress(FileNotFoundError):
        syscalls.unlink(f"{root}/{SETTINGS}")
    for name in os.listdir(root):
        if name != DISCARDED:
            _remove(f"{root}/{name}")
    _empty_folder(moved)
    if is_durable:  # a crash of the host must not bring the settings back without their mark
        syscalls.sync_folder(root)
    _remove_folder(moved)


def remove_root(root: str) -> None:
    """Removes the emptied folder. It stays where it can't go: a mount point, or in a folder of somebody else."""
    try:
        syscalls.remove_folder(root)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTEMPTY, errno.ENOENT):
            raise


def remove_begun(root: str) -> None:
    """Removes what a creation that failed has made in a folder that was empty before. Best effort: its error counts."""
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name in OWN or is_unfinished(name):
                _remove(f"{root}/{name}")


def _remove(path: str) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        _remove_folder(path)
    else:
        syscalls.unlink(path)


def _remove_folder(path: str) -> None:
    """Removes it again and again: a put under way may make one more file in it before it finds out."""
    for left in reversed(range(_REMOVAL_TRIES)):
        _empty_folder(path)
        try:
            syscalls.remove_folder(path)
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not left:
                raise


def _empty_folder(path: str) -> None:
    """Removes what a folder contains. Links are removed, and not followed."""
    with os.scandir(path) as found:
        entries = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in entries:
        if is_folder:
            _remove_folder(name)
        else:
            with contextlib.suppress(FileNotFoundError):
                syscalls.unlink(name)
