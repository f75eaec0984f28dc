"""Root: one opened store folder in this process. All Store objects of a process on one folder share one Root.

LMDB wants one environment a process, and so does a fork: before a fork every Root's guard is taken, so that no
transaction is split and no lock's file descriptor is between opening and registration; the child gives up its copies
of both and opens the catalog again when it needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from memstore.engine import folder, recovery, syscalls
from memstore.engine.catalog import Catalog
from memstore.engine.folder import CATALOG, DOORBELL, LOCK, SEGMENTS, Settings
from memstore.engine.lockfile import OwnedFile, close_all
from memstore.engine.pages import Doorbell, LockPage, deadline_after
from memstore.engine.spares import Spares
from memstore.engine.sweep import sweep_all
from memstore.engine.tables import Transaction
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    MemstoreError,
    NotAStoreError,
    PermissionDeniedError,
)

log = logging.getLogger("memstore")


@dataclass(frozen=True, slots=True)
class Creation:
    """What `open` may ask for beside the folder; None where it takes the store as it is."""

    durability: folder.Durability | None = None
    checksum: bool | None = None
    inline_limit: int | None = None
    unix_group: int | str | None = None
    file_mode: int = 0o600
    capacity: int | None = None


@dataclass(eq=False)
class Root:
    """The parts of an opened store that the protocols work on."""

    path: str
    settings: Settings
    lock: LockPage | None  # None where this process may only read
    doorbell: Doorbell
    catalog: Catalog
    on_tmpfs: bool
    segments_folder: OwnedFile  # whatever its path names by now
    guard: threading.RLock = field(default_factory=threading.RLock)  # every transaction, and every lock fd's opening
    users: int = 0
    spares: Spares = field(default_factory=Spares)
    looked_at_held: float = 0.0  # when this process last did, monotonic
    looked_for_dead: float = 0.0  # when this process last came to the end of the filling rows, monotonic
    last_filling: int = 0  # the row where it stopped

    @property
    def segments(self) -> str:
        return f"{self.path}/{SEGMENTS}"

    @property
    def segments_fd(self) -> int:
        return self.segments_folder.fd

    def is_in_place(self) -> bool:
        """Whether the path still names the folder that was opened."""
        try:
            return os.path.samestat(os.stat(self.segments), os.fstat(self.segments_fd))
        except OSError:
            return False

    @property
    def mutex(self) -> LockPage:
        if self.lock is None:
            raise PermissionDeniedError(f"{self.path}: this process may only read the store")
        return self.lock


_registry: dict[tuple[int, int], Root] = {}
_registry_lock = threading.RLock()  # before any root's guard
_abandoned: deque[Root] = deque()


def open_root(path: str, mode: str, creation: Creation, timeout: float) -> Root:
    """Opens, and with mode "a" or "x" creates, the store at `path`. Each call must be answered by one `close_root`.

    Openings of one folder go one after another, by a lock on it. What waits, waits without the registry's lock, which
    forks and closes take too.
    """
    path = os.path.abspath(path)
    deadline = deadline_after(timeout)
    folder.ensure_folder(path, creation.durability, create=mode in ("a", "x"))
    path = os.path.realpath(path)
    with _permission_errors(path), folder.locked(path, deadline, _registry_lock) as fd:
        settings = folder.read_settings(path)
        if settings is None and mode not in ("a", "x"):
            raise NotAStoreError(f"{path} is no store: it has no {folder.SETTINGS}; mode 'a' creates one")
        if settings is not None and mode == "x":
            raise AlreadyExistsError(f"{path} is a store already, and mode 'x' asks for a new one")
        folder.check_folder(path, fd, settings)
        kind = folder.check_filesystem(path, (settings.durability if settings else creation.durability))
        if settings is not None:
            _check_agreement(path, settings, creation)
        identity = (os.fstat(fd).st_dev, os.fstat(fd).st_ino)
        root = _registered(identity, settings)
        is_new = root is None
        if root is None and settings is None:
            root = _create(path, identity, creation, kind, deadline)
        elif root is None and settings is not None:
            root = _join(path, identity, settings, kind, mode, deadline)
    assert root is not None
    if root.lock is not None and mode != "r":
        with _closed_on_error(root):
            if is_new:
                root.lock.run(
                    lambda: None, deadline
                )  # recovers, if the last owner died: its commits are seen from here
                _sweep(root, deadline)
            if creation.capacity is not None:
                _set_capacity(root, creation.capacity, deadline)
    return root


def _registered(identity: tuple[int, int], settings: Settings | None) -> Root | None:
    """The root that this process has on the folder already, with one more user."""
    with _registry_lock:
        _close_abandoned()
        root = _registry.get(identity)
        if root is None:
            return None
        if settings is None or settings.store != root.settings.store:  # emptied or replaced while it was open here
            del _registry[identity]
            with root.guard:
                root.catalog.close()
            return None
        root.users += 1
        return root


def _set_capacity(root: Root, capacity: int, deadline: float) -> None:
    def write(transaction: Transaction) -> None:
        counters = transaction.counters()
        counters.capacity = capacity
        transaction.put_counters(counters)

    def action() -> None:
        with root.guard:
            if root.catalog.view(lambda transaction: transaction.counters().capacity) != capacity:
                root.catalog.update(write, is_delete=True)

    root.mutex.run(action, deadline)


def _sweep(root: Root, deadline: float) -> None:
    try:
        sweep_all(root, deadline, keep=None)
    except (OSError, MemstoreError) as error:  # not what the caller asked for; gc says it
        log.warning("%s: nothing swept: %s", root.path, str(error))


def reopen_root(root: Root, deadline: float) -> None:
    """In a forked child, before it first reads the store. Within the mutex: see Catalog."""

    def reopen() -> None:
        with root.guard:
            root.catalog.view(lambda _: None)

    if root.lock is None:
        reopen()
    else:
        root.lock.run(reopen, deadline)


def retain_root(root: Root) -> None:
    """One more user of an opened root, to be answered by one more `close_root`."""
    with _registry_lock:
        root.users += 1
        _close_abandoned()


def close_root(root: Root) -> None:
    abandon_root(root)
    with _registry_lock:
        _close_abandoned()


def abandon_root(root: Root) -> None:
    """As `close_root`, at the next opening or closing: a finalizer may run anywhere, and must take no lock."""
    _abandoned.append(root)


def close_abandoned() -> None:
    """Closes what finalizers gave up."""
    with _registry_lock:
        _close_abandoned()


def _close_abandoned() -> None:
    while _abandoned:
        root = _abandoned.popleft()
        root.users -= 1
        if root.users == 0:
            for identity in [identity for identity, other in _registry.items() if other is root]:
                del _registry[identity]
            with root.guard:
                root.catalog.close()
                root.segments_folder.close()
                root.spares.clear()
            if root.lock is not None:
                root.lock.recover = None  # it refers to the root


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


def _create(path: str, identity: tuple[int, int], creation: Creation, kind: int, deadline: float) -> Root:
    folder.check_empty(path)
    settings = folder.new_settings(
        durability=creation.durability,
        checksum=creation.checksum,
        inline_limit=creation.inline_limit,
        file_mode=creation.file_mode,
        group=folder.group_id(creation.unix_group),
    )
    folder.check_files(path, settings)
    folder.create_folder(path, settings)
    for name in ("catalog", CATALOG, SEGMENTS):
        folder.create_folder(f"{path}/{name}", settings)
    for name in (LOCK, DOORBELL):
        if not os.path.exists(f"{path}/{name}"):
            folder.create_file(path, name, bytes(syscalls.PAGE), settings)
        elif settings.durable:  # its creator was killed, and may have asked for a store that needs no disk
            folder.sync_file(f"{path}/{name}")
    root = _assemble(path, identity, settings, kind, deadline, writable=True)
    with _closed_on_error(root):
        with root.guard:
            rows = root.catalog.view(lambda transaction: transaction.count("entries") + transaction.count("segments"))
            if rows:
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
    return root


def _join(path: str, identity: tuple[int, int], settings: Settings, kind: int, mode: str, deadline: float) -> Root:
    folder.check_files(path, settings)
    for name in (LOCK, DOORBELL, f"{CATALOG}/data.mdb", SEGMENTS):
        if not os.path.lexists(f"{path}/{name}"):
            raise CorruptionError(
                f"{path}/{name} is missing: restore the store from a copy, or create another one elsewhere",
                path=f"{path}/{name}",
                detail="missing",
            )
    readers = f"{path}/{CATALOG}/lock.mdb"
    if os.path.lexists(readers) and not os.access(readers, os.W_OK):  # missing, as in a copy, it is made again
        raise PermissionDeniedError(
            f"{path}: readers too must be able to write its catalog's lock.mdb: create it with file_mode=0o660"
        )
    writable = os.access(path, os.W_OK) and os.access(f"{path}/{LOCK}", os.W_OK)
    if not writable and mode != "r":
        raise PermissionDeniedError(f"{path} can't be written by this process: open it with mode 'r'")
    root = _assemble(path, identity, settings, kind, deadline, writable=writable)
    with _closed_on_error(root):
        with root.guard:
            found = root.catalog.view(lambda transaction: transaction.store_id())
        if found != settings.store:
            where = f"{path}/{CATALOG}"
            detail = f"the catalog belongs to store {found}, memstore.json to {settings.store}: restore one copy"
            raise CorruptionError(f"{where}: {detail}", path=where, detail=detail)
    return root


@contextlib.contextmanager
def _closed_on_error(root: Root) -> Generator[None]:
    """Left open, the catalog would bar this process from opening it again."""
    try:
        yield
    except BaseException:
        close_root(root)
        raise


def _assemble(
    path: str, identity: tuple[int, int], settings: Settings, kind: int, deadline: float, *, writable: bool
) -> Root:
    """Maps the pages, opens the catalog and registers the root, with one user; the folder is locked."""
    segments = OwnedFile(f"{path}/{SEGMENTS}", os.O_RDONLY | os.O_DIRECTORY)
    lock = LockPage(f"{path}/{LOCK}") if writable else None
    doorbell = Doorbell(f"{path}/{DOORBELL}", writable=writable)

    def register() -> Root:
        with _registry_lock:  # so that no child gets an environment that it doesn't know of
            catalog = Catalog(f"{path}/{CATALOG}", durable=settings.durable, writable=writable)
            root = Root(path, settings, lock, doorbell, catalog, kind == folder.TMPFS, segments, users=1)
            _registry[identity] = root
        if lock is not None:
            lock.recover = lambda: recovery.after_death(root)
        return root

    return register() if lock is None else lock.run(register, deadline)


@contextlib.contextmanager
def _permission_errors(path: str) -> Generator[None]:
    try:
        yield
    except PermissionDeniedError:
        raise
    except PermissionError as error:
        raise PermissionDeniedError(f"{path}: {error}") from None


# --- fork -------------------------------------------------------------------------------------------------------------


def _before_fork() -> None:
    _registry_lock.acquire()
    for root in _registry.values():
        root.guard.acquire()
        root.spares.clear()  # where these were, a child has holes, that something else may be mapped into


def _after_fork_in_parent() -> None:
    for root in _registry.values():
        root.guard.release()
    _registry_lock.release()


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.RLock()
    close_all()
    for root in _registry.values():
        root.guard = threading.RLock()
        root.catalog.release()
        if root.lock is not None:
            root.lock.forget_threads()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
