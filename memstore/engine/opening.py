"""The store folder is opened and, where there is none, created: `open_root` returns a store that is whole and checked.

Openings of one folder go one after another, by a lock on it (`folder.locked`). A process opens a folder once, and
knows who uses it (`roots.py`).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import stat
from collections.abc import Generator
from dataclasses import dataclass
from time import monotonic
from typing import Literal

import msgspec

from memstore._wording import of_no_place
from memstore.engine import syscalls
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.catalog.tables import SPILLED, Transaction
from memstore.engine.files.mapping import LockFile
from memstore.engine.protocols.change import SMALL
from memstore.engine.protocols.recovery import LOOKED_AT, after_death, check_headers, check_publications
from memstore.engine.protocols.reuse import close_next_file
from memstore.engine.protocols.sweep import sweep_all
from memstore.engine.root import folder, roots
from memstore.engine.root.filesystem import TMPFS, Durability, check_filesystem, mappings_keep_locks
from memstore.engine.root.folder import (
    CATALOG,
    CLUSTER,
    DOORBELL,
    LOCK,
    SEGMENTS,
    SPILL,
    Settings,
    check_alone,
    discard,
    has_settings,
    new_settings,
    remove_begun,
    remove_root,
    unserved,
)
from memstore.engine.root.roots import Root, RootUse, close_root
from memstore.engine.root.shared import (
    CLAIMS_FILE,
    SharedStorage,
    check_local,
    check_owner,
    create_segments,
    create_shared,
    new_shared,
    no_state,
    paths_of,
    prepare_state,
    shared_settings,
    state_of,
    storage_error,
)
from memstore.engine.root.spill import check_spill, prepare_spill
from memstore.engine.root.storage import LocalFiles, Overlay, StorageDriver, StorePaths
from memstore.engine.sync.pages import HostLeaseWord, LockPage, is_lock_page, read_notes
from memstore.engine.sync.primitives import Doorbell, SharedPage, deadline_after
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    CrossHostError,
    MemstoreError,
    NotAStoreError,
    NotServedError,
    PermissionDeniedError,
    ReadOnlyError,
    StoreClosedError,
)

log = logging.getLogger("memstore")

MEMBER = "cluster"  # a file that members have: `distributed/serving/membership.py`
_TIGHT = 64 << 20  # bytes: a smaller capacity is to be kept to, also by values of a few KiB
_REMOVED_WITHIN = 1.0  # seconds, for the lock on the folder
CREATE = ("a", "x", "w")  # modes that create a store where there is none


@dataclass(frozen=True, slots=True)
class Creation:
    """The options of `open` beside the folder; None where it takes the store as it is."""

    durability: Durability | None = None
    checksum: bool | None = None
    inline_limit: int | None = None
    unix_group: int | str | None = None
    file_mode: int = 0o600
    capacity: int | None = None
    spill: str | None = None  # the folder to which values move when there is no room
    shared: Literal["copy", "map"] | None = None  # make it a store on storage that hosts share, read in that way


def may_come(path: str) -> bool:
    """Returns whether there may be a store at a path later: there is nothing now, or a folder that is no snapshot's."""
    path = os.path.realpath(path)  # where a link leads, there may be nothing yet
    if os.path.lexists(f"{path}/{folder.SNAPSHOT}"):
        return False
    while True:
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
        except PermissionError:
            return True
        except OSError:  # too long a name
            return False


def open_root(path: str, mode: str, creation: Creation, timeout: float) -> RootUse:
    """Opens, and with mode "a", "x" or "w" creates, the store at `path`, until the use ends.

    Openings of one folder go one after another, by a lock on it; on storage that hosts share, on the state folder of
    this host. What waits, waits without `roots.lock`, which forks and closes take too.
    """
    path = os.path.abspath(path)
    deadline = deadline_after(timeout)
    shares = creation.shared is not None
    if not os.path.lexists(path):
        folder.group_id(creation.unix_group)  # raises before a folder is made
    while True:
        made = folder.ensure_folder(path, creation.durability, create=mode in CREATE, anywhere=shares)
        real = os.path.realpath(path)
        try:
            with _permission_errors(real):
                shared = shared_settings(real)
                if shared is not None or shares:
                    use, is_new = _open_shared(real, shared, mode, creation, deadline)
                else:
                    use, is_new = _open_own(real, mode, creation, deadline)
            break
        except folder.FolderGoneError:  # its store was destroyed while this process waited for the lock
            if monotonic() > deadline:
                raise
        except BaseException:
            if made:  # nothing is left of an opening that failed
                _remove_empty(real)
            raise
    root = use.root
    with _closed_on_error(use):
        _open_spill(root, creation.spill, deadline, writable=root.lock is not None and mode != "r")
    if root.lock is not None and mode != "r":
        with _closed_on_error(use), _replacement_told(root):
            if is_new:
                # If the last owner died, `run` recovers first, so that what it committed is seen here.
                root.lock.run(check_headers, deadline, root, LOOKED_AT)
                _sweep(root, deadline)
            if creation.capacity is not None:
                _set_capacity(root, creation.capacity, deadline)
    return use


def _remove_empty(path: str) -> None:
    """Tries to remove a folder; not while somebody else, who has found it, creates a store in it."""
    with contextlib.suppress(MemstoreError, OSError):
        try:
            with folder.locked(path, monotonic(), roots.lock):
                syscalls.remove_folder(path)
        except MemstoreError:
            raise
        except OSError:  # there is no descriptor left to lock it
            syscalls.remove_folder(path)


def check_is_host(use: RootUse) -> None:
    """Ends the use of a root on shared storage of which this host is no host yet, and raises NotServedError.

    Who becomes one opens it before. So there is a state folder, in which nobody else would see what is put.
    """
    root = use.root
    if root.settings.shared is not None and not root.catalog.has_membership():
        close_root(use)
        raise no_state(root.path, root.state)


def _open_own(path: str, mode: str, creation: Creation, deadline: float) -> tuple[RootUse, bool]:
    """Opens a store of this host alone, or one of a cluster that sends bytes. Also: whether it wasn't open before."""
    places = StorePaths(path, path, f"{path}/{SEGMENTS}")
    with folder.locked(path, deadline, roots.lock) as fd:
        settings = folder.read_settings(path)
        if settings is None and mode not in CREATE:
            folder.check_no_snapshot(path)
            raise NotAStoreError(
                f"{path} is no store: it has no {folder.SETTINGS}; mode 'a' creates one in an empty folder"
            )
        if settings is not None and mode == "x":
            raise AlreadyExistsError(f"{path} is a store already, and mode 'x' asks for a new one")
        folder.check_folder(path, fd, settings)
        joins = settings is not None and mode != "w"
        kind = check_filesystem(path, settings.durability if settings is not None and joins else creation.durability)
        if settings is not None and joins:
            _check_agreement(path, settings, creation)
        elif settings is not None or folder.is_discarded(path):
            settings = _give_up(path, settings, creation)
        identity = (os.fstat(fd).st_dev, os.fstat(fd).st_ino)
        use = roots.registered(identity, settings)
        if use is not None:
            return use, False
        if settings is not None:
            return _join(places, identity, settings, kind == TMPFS, mode, deadline), True
        was_empty = not os.listdir(path)
        try:
            return _create(places, identity, _chosen(creation), kind == TMPFS, deadline), True
        except BaseException:
            if was_empty:
                remove_begun(path)
            raise


def _give_up(path: str, settings: Settings | None, creation: Creation) -> None:
    """Removes the store that mode "w" replaces, or the rest of one that was given up. The folder is locked.

    What keeps the new store from being made, and can be known, is raised before.
    """
    if settings is not None:
        check_alone(path, settings)
        group = _chosen(creation).unix_group
        if os.stat(path).st_uid != os.geteuid():
            raise PermissionDeniedError(
                f"{path} belongs to another user, who alone begins it anew: clear() deletes keys"
            )
        if group is not None and os.geteuid() != 0 and group not in (os.getegid(), *os.getgroups()):
            raise PermissionDeniedError(f"{path}: this process is not in the group {creation.unix_group!r}")
    with unserved(path):
        discard(path, settings)


def destroy_root(path: str, timeout: float, *, even_used: bool = True) -> bool:
    """Removes the store at `path`, and its folder. Returns whether it did.

    Raises NotAStoreError where there is none, or anything else beside it; NotServedError while it is served.

    Args:
        even_used: False: what a process has open by now, or is a member of a cluster, stays.
    """
    path, deadline = os.path.abspath(path), deadline_after(timeout)
    if not os.path.lexists(path):
        raise NotAStoreError(
            f"{path} doesn't exist{of_no_place(path)}: nothing was removed; memstore.stores() lists the stores of this "
            "host"
        )
    folder.ensure_folder(path, None, create=False)
    is_link, path = os.path.islink(path), os.path.realpath(path)
    with _permission_errors(path), folder.locked(path, deadline, roots.lock) as fd:
        settings = folder.read_settings(path)
        if settings is None and not folder.is_discarded(path):
            folder.check_no_snapshot(path)
            raise NotAStoreError(f"{path} is no store: it has no {folder.SETTINGS}; nothing was removed")
        if settings is not None and settings.shared is not None:
            raise NotServedError(
                f"{path} belongs to a store on storage that hosts share, which no host removes by itself: end the "
                "agents of all hosts, then remove the folder on the storage"
            )
        folder.check_folder(path, fd, settings)
        with contextlib.ExitStack() as held:
            if settings is not None and not even_used:
                if CLUSTER in settings.features:
                    return False
                if os.path.lexists(f"{path}/{LOCK}"):
                    page = _page_of_nobody(path)
                    if page is None:
                        return False
                    held.callback(page.close)
            with unserved(path):
                discard(path, settings)
        if not is_link:  # which would lead nowhere
            remove_root(path)
        return True


def _page_of_nobody(path: str) -> LockFile | None:
    """Returns the lock page of a store that nobody has open, locked; None if a process has it open.

    The folder is locked, so nobody opens the store meanwhile. The kernel tells of processes in other namespaces too.
    """
    page = LockFile(f"{path}/{LOCK}", os.O_RDWR)
    if syscalls.lock_exclusive(page.fd):
        return page
    gc.collect()  # what this process closed may be kept by the traceback of an error, in a cycle
    if syscalls.lock_exclusive(page.fd):
        return page
    page.close()
    return None


@contextlib.contextmanager
def gone_if_new(path: str) -> Generator[None]:
    """Removes a store that was made within its body, and its folder, if the body raises and nobody has used it.

    For calls that open a folder before they can know that they fail.
    """
    path = os.path.abspath(path)
    was_there, was_store = os.path.lexists(path), has_settings(path)
    try:
        yield
    except BaseException:
        if not was_store:
            remove_unused(path, folder_too=not was_there)
        raise


def has_no_options(root: Root) -> bool:
    """Returns whether a store is as one that was made without options, and without a capacity."""
    found, plain = root.settings, _chosen(Creation())
    plain = msgspec.structs.replace(plain, format=found.format, store=found.store, features=found.features)
    return found == plain and not root.catalog.view(lambda transaction: transaction.counters().capacity)


def remove_unused(path: str, *, folder_too: bool, is_alone: bool = False) -> None:
    """Removes a store in which nothing was ever put, unless it is open or served, or is a member of a cluster.

    It may have asked to be one. If the seed has just agreed, it takes the next root at this address for a new one.

    Args:
        is_alone: it is known to be a cluster by itself, and to have no key.
    """
    with contextlib.suppress(OSError, MemstoreError):
        path = os.path.realpath(path)
        with folder.locked(path, deadline_after(_REMOVED_WITHIN), roots.lock):
            settings = folder.read_settings(path)
            if settings is None or set(settings.features) - {CLUSTER}:
                return
            if not is_alone and os.path.lexists(f"{path}/{MEMBER}"):
                return
            page = _page_of_nobody(path)
            if page is None:
                return
            try:
                content = syscalls.read_at(page.fd, syscalls.PAGE, 0)
                if not is_lock_page(content):  # not whole: of a copy, perhaps
                    return
                if not is_alone and read_notes(content).publications_rung:
                    return
                with unserved(path):
                    discard(path, settings)
            finally:
                page.close()
            if folder_too:
                remove_root(path)


def _open_shared(
    path: str, shared: Settings | None, mode: str, creation: Creation, deadline: float
) -> tuple[RootUse, bool]:
    """Opens a store on storage that hosts share; `shared` is what the storage says of it. Returns as `_open_own`."""
    if shared is not None and mode == "x":
        raise AlreadyExistsError(f"{path} is a store already, and mode 'x' asks for a new one")
    if mode == "w" and shared is not None:
        check_alone(path, shared)
    may_create = creation.shared is not None and mode in ("a", "x")
    if shared is None:
        if not may_create or creation.shared is None:
            raise NotAStoreError(f"{path} is no store: it has no {folder.SETTINGS}; memstore serve --shared makes one")
        check_owner(path, None)
        shared = create_shared(path, new_shared(_chosen(creation), maps=creation.shared == "map"))
    if shared.shared is not None and shared.store != shared.shared.store:
        raise NotAStoreError(f"{path} has a host's state of a store on shared storage: open the folder on that storage")
    check_owner(path, shared)
    state = state_of(shared)
    fresh = prepare_state(shared) if may_create else None
    if not os.path.isdir(state):
        raise no_state(path, state)
    check_local(state)
    with folder.locked(state, deadline, roots.lock) as fd:
        settings = folder.read_settings(state)
        if settings is None and fresh is None:
            raise no_state(path, state)
        folder.check_folder(state, fd, settings)
        identity = (os.fstat(fd).st_dev, os.fstat(fd).st_ino)
        use = roots.registered(identity, settings)
        if use is not None:
            return use, False
        if settings is not None:
            _check_agreement(path, settings, creation)
            return _join(paths_of(path, settings), identity, settings, False, mode, deadline), True
        assert fresh is not None, "that was looked at"
        return _create(paths_of(path, fresh), identity, fresh, False, deadline), True


def _chosen(creation: Creation) -> Settings:
    checksum = True if creation.checksum is None and creation.shared is not None else creation.checksum
    inline_limit = creation.inline_limit
    is_tight = creation.capacity is not None and creation.capacity < _TIGHT
    if inline_limit is None and (is_tight or creation.shared is not None):
        # the first 8 MiB of the catalog don't count, and it gives nothing back; files that hosts share outlive it
        inline_limit = SMALL
    return new_settings(
        durability=creation.durability,
        checksum=checksum,
        inline_limit=inline_limit,
        file_mode=creation.file_mode,
        group=folder.group_id(creation.unix_group),
    )


def _set_capacity(root: Root, capacity: int, deadline: float) -> None:
    def write(transaction: Transaction) -> None:
        counters = transaction.counters()
        counters.capacity = capacity
        transaction.put_counters(counters)

    def action() -> None:
        if root.catalog.view(lambda transaction: transaction.counters().capacity) != capacity:
            root.catalog.update(write, is_delete=True)

    root.mutex.run(action, deadline)


def _open_spill(root: Root, path: str | None, deadline: float, *, writable: bool) -> None:
    """Names the folder to which values move, or looks whether that is there which the store has named.

    Raises StorageError, ValueError; CrossHostError in a store on storage that hosts share.
    """
    own = root.storage.spill_folder()
    if path is None and own is None:
        return
    root.catalog.open_optional()
    has_values = root.catalog.view(lambda transaction: transaction.count(SPILLED)) > 0
    if path is None and own is not None:
        check_spill(root.state, root.settings, own, has_values=has_values, writable=writable)
        return

    assert path is not None, "one of them was given"
    if root.settings.shared is not None:
        raise CrossHostError(
            f"{root.path} lies on storage that hosts share, so its values take no memory, and none moves to another "
            "disk: leave spill= out"
        )

    def name_it() -> None:
        own = root.storage.spill_folder()
        found = os.path.join(os.path.realpath(path), root.settings.store)
        if own is not None and found != own and has_values and not os.path.isdir(found):
            raise ValueError(
                f"{root.path} has moved values to {own}, and {os.path.realpath(path)} doesn't have them: move that "
                f"folder to {found} while no process has the store open, or leave spill= out"
            )
        prepared = prepare_spill(root.state, root.settings, path)
        root.settings = folder.add_feature(root.state, root.settings, SPILL, prepared)

    root.mutex.run(name_it, deadline)


def _sweep(root: Root, deadline: float) -> None:
    try:
        sweep_all(root, deadline, keep=None)
    except (OSError, MemstoreError) as error:  # not what the caller asked for; gc says it
        log.warning("%s: nothing swept: %s", root.path, str(error))


def _check_agreement(path: str, settings: Settings, creation: Creation) -> None:
    for name, asked, found in (
        ("durability", creation.durability, settings.durability),
        ("checksum", creation.checksum, settings.checksum),
        ("inline_limit", creation.inline_limit, settings.inline_limit),
    ):
        if asked is not None and asked != found:
            raise ValueError(
                f"{path} was created with {name}={found!r}, which can't be changed; {asked!r} was asked for: "
                f"leave {name} out, or choose another folder"
            )


def _create(
    places: StorePaths, identity: tuple[int, int], settings: Settings, on_tmpfs: bool, deadline: float
) -> RootUse:
    path = places.state
    folder.check_empty(path)
    folder.check_files(path, settings)
    folder.create_folder(path, settings)
    for name in ("catalog", CATALOG):
        folder.create_folder(f"{path}/{name}", settings)
    for name in (LOCK, DOORBELL, *([CLAIMS_FILE] if settings.shared is not None else [])):
        if not os.path.exists(f"{path}/{name}"):
            folder.create_file(path, name, bytes(syscalls.PAGE), settings)
        elif settings.durable:  # its creator was killed, and may have asked for a store that needs no disk
            folder.sync_file(f"{path}/{name}")
    if settings.shared is not None:
        create_segments(places, settings)
    else:
        folder.create_folder(places.segments, settings)
    use = _assemble(places, identity, settings, on_tmpfs, deadline, writable=True)
    root = use.root
    with _closed_on_error(use):
        if root.catalog.view(lambda transaction: transaction.count("entries") + transaction.count("segments")):
            raise NotAStoreError(f"{path} has lost its {folder.SETTINGS}, not its catalog: restore it from a copy")
        root.catalog.update(lambda transaction: transaction.put_store_id(settings.store))
        for name in ("data.mdb", "lock.mdb"):
            os.chmod(f"{path}/{CATALOG}/{name}", settings.file_mode)
            if settings.unix_group is not None:
                os.chown(f"{path}/{CATALOG}/{name}", -1, settings.unix_group)
        if settings.durable:
            for name in (f"{path}/{CATALOG}", f"{path}/catalog", path, os.path.dirname(path)):
                syscalls.sync_folder(name)
        folder.write_settings(path, settings)
    return use


def _join(
    places: StorePaths, identity: tuple[int, int], settings: Settings, on_tmpfs: bool, mode: str, deadline: float
) -> RootUse:
    path = places.state
    folder.check_files(path, settings)
    needed = [f"{path}/{name}" for name in (LOCK, DOORBELL, f"{CATALOG}/data.mdb")]
    for name in (*needed, places.segments):
        if not os.path.lexists(name):
            if name == places.segments and settings.shared is not None:
                raise storage_error(name, FileNotFoundError(errno.ENOENT, "the folder of this host's files", name))
            raise CorruptionError(
                f"{name} is missing: restore the store from a copy, or create another one elsewhere",
                path=name,
                detail="missing",
            )
    readers = f"{path}/{CATALOG}/lock.mdb"
    if os.path.lexists(readers) and not os.access(readers, os.W_OK):  # missing, as in a copy, it is made again
        if _is_read_only(path):
            raise ReadOnlyError(
                f"{path} is on a file system that is mounted read-only, and readers too write to the catalog's "
                "lock.mdb: mount it to be written; with mode 'r' nothing else is"
            )
        raise PermissionDeniedError(
            f"{path}: readers too must be able to write its catalog's lock.mdb: create it with file_mode=0o660"
        )
    writable = os.access(path, os.W_OK) and os.access(f"{path}/{LOCK}", os.W_OK)
    if not writable and mode != "r" and _is_read_only(path):
        raise ReadOnlyError(f"{path} is on a file system that is mounted read-only: open it with mode 'r'")
    if not writable and mode != "r":
        raise PermissionDeniedError(f"{path} can't be written by this process: open it with mode 'r'")
    use = _assemble(places, identity, settings, on_tmpfs, deadline, writable=writable)
    root = use.root
    with _closed_on_error(use):
        found = root.catalog.view(Transaction.store_id)
        if found != settings.store:
            where = f"{path}/{CATALOG}"
            detail = f"the catalog belongs to store {found}, memstore.json to {settings.store}: restore one copy"
            raise CorruptionError(path=where, detail=detail)
        check_publications(root)
    return use


def _is_read_only(path: str) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


@contextlib.contextmanager
def _replacement_told(root: Root) -> Generator[None]:
    """Says that the store was begun anew, where another thread did so before its opening has come to its end."""
    try:
        yield
    except StoreClosedError:
        root.check_in_place()
        raise


@contextlib.contextmanager
def _closed_on_error(use: RootUse) -> Generator[None]:
    """Closes a root after an error: left open, the catalog would bar this process from opening it again."""
    try:
        yield
    except BaseException:
        close_root(use)
        raise


def _assemble(
    places: StorePaths,
    identity: tuple[int, int],
    settings: Settings,
    on_tmpfs: bool,
    deadline: float,
    *,
    writable: bool,
) -> RootUse:
    """Maps the pages, opens the catalog and registers the root, with its first use; the folder is locked."""
    path = places.state
    with roots.lock:  # a child that is forked meanwhile would keep the lock too
        needs_files = not mappings_keep_locks(f"{path}/{DOORBELL}")
    lock = LockPage(f"{path}/{LOCK}", keep_open=needs_files) if writable else None
    watch = lock.watch if lock is not None else None
    if lock is not None:
        lease = lock.host_lease
    else:
        page = SharedPage(f"{path}/{LOCK}", writable=False)
        page.close_file()
        lease = HostLeaseWord.of(page)
    if settings.shared is not None:
        storage: StorageDriver = SharedStorage(places, settings)
    else:
        storage = Overlay(places, settings) if needs_files else LocalFiles(places, settings)
    doorbell = Doorbell.open(f"{path}/{DOORBELL}", writable=writable, watch=watch)

    def register() -> RootUse:
        with roots.lock:  # so that no child gets an environment that it doesn't know of
            catalog = Catalog(f"{path}/{CATALOG}", durable=settings.durable, writable=writable)
            root = Root(places, settings, lock, doorbell, catalog, on_tmpfs, storage)
            root.before_close = close_next_file
            root.host_lease = lease
            if lock is not None:
                lock.recover = lambda: after_death(root)
            return roots.register(identity, root)

    return register() if lock is None else lock.run(register, deadline)


@contextlib.contextmanager
def _permission_errors(path: str) -> Generator[None]:
    try:
        yield
    except PermissionDeniedError:
        raise
    except PermissionError as error:
        raise PermissionDeniedError(f"{path}: {error}") from None
