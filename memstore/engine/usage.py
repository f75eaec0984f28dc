"""Usage: how much memory and disk a store takes, who holds it, and the errors where there is no room.

`measure` is for `stats` and errors. `who_holds` and `stores_of_machine` are for people who look where memory went: they
read files and /proc, and take milliseconds. Found are the stores on `/dev/shm`, up to three folders deep, and those
that running processes have open, wherever they lie, as far as this user may look; nothing is opened. A process that has
a store open maps its doorbell. `resource_errors` turns "disk full" and "too many files or mappings" into memstore's
errors, which say who takes what.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass

from memstore._info import StoreSummary
from memstore._wording import size
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.mapping import OwnedFile
from memstore.engine.files.segments import segment_path
from memstore.engine.format.records import LIVE, RETIRED, Record
from memstore.engine.root import folder
from memstore.engine.root.filesystem import all_maps, holders_of, lock_holders, mappers_of
from memstore.engine.root.folder import AGENT_LOCK, CATALOG, CLUSTER, DOORBELL, SEGMENTS, Settings
from memstore.engine.root.roots import Root
from memstore.engine.sync.pages import CONTROL_SIZE, ControlNumbers, read_numbers
from memstore.engine.sync.primitives import boot_clock
from memstore.errors import MemstoreError, ResourceLimitError, StoreFullError, is_of_caller, lack_of, way_out

_ROWS_A_PAGE = 1024
_MISSING = -1  # for an inode


@dataclass(frozen=True, slots=True)
class Usage:
    keys: int
    live_bytes: int
    reusable_bytes: int  # retired, or kept, and nobody holds them: kept for the next puts; `gc` gives them back
    pinned_bytes: int  # retired, and held or leased
    filling_bytes: int
    pending_bytes: int  # of parts of sharded puts that wait for others
    spilled_bytes: int  # of files in the spill folder
    capacity: int | None
    catalog_bytes: int
    pinned_by: tuple[int, ...]


def measure(root: Root) -> Usage:
    with root.guard:
        keys, counters, parts, spilled = root.catalog.view(
            lambda transaction: (
                transaction.count("entries"),
                transaction.counters(),
                tables.parts_of(transaction),
                tables.spilled_segments(transaction),
            )
        )
        kept = root.next_put.file.size if root.next_put.file is not None else 0
    pending = sum(part.size for part in parts if not part.host)
    retired, now, device = _retired(root), boot_clock(), os.fstat(root.segments_fd).st_dev
    files = {segment: (device, _inode(segment_path(root.segments, segment))) for segment in retired}
    holders = holders_of({file for file in files.values() if file[1] != _MISSING})
    pinned_by = set[int]().union(*holders.values())
    pinned = sum(size for segment, (size, leased) in retired.items() if files[segment] in holders or leased > now)
    return Usage(
        keys=keys,
        live_bytes=counters.live,
        reusable_bytes=max(counters.retired + counters.held - pinned, 0) + kept,  # others put meanwhile
        pinned_bytes=pinned,
        filling_bytes=counters.filling - kept - pending,
        pending_bytes=pending,
        spilled_bytes=sum(spilled.values()),
        capacity=counters.capacity or None,
        catalog_bytes=root.catalog.nbytes,
        pinned_by=tuple(sorted(pinned_by)),
    )


def _retired(root: Root) -> dict[int, tuple[int, int]]:
    """Returns, by segment, its size, and until when it is leased.

    It reads pages: a long transaction grows the catalog.
    """
    found: dict[int, tuple[int, int]] = {}
    for table in ("retired", "held"):
        after: bytes | None = None
        while True:
            last, page = root.catalog.view(_page, table, after)
            found |= page
            if last is None:
                break
            after = last
    return found


def _page(transaction: Transaction, table: str, after: bytes | None) -> tuple[bytes | None, dict[int, tuple[int, int]]]:
    """Returns the last key, or None if there are no more; and the rows."""
    found: dict[int, tuple[int, int]] = {}
    rows = transaction.listed(table, after, _ROWS_A_PAGE)
    for _, segment in rows:
        row = transaction.segment(segment)
        if row is not None:
            found[segment] = row.nbytes, transaction.number("leases", segment) or 0
    return rows[-1][0] if len(rows) == _ROWS_A_PAGE else None, found


def _inode(path: str) -> int:
    """Returns the inode of a file. Its device is the folder's: overlay tells another, not that of its locks."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return _MISSING


def huge_page_bytes(root: Root) -> int:
    """Returns the bytes of huge pages in this process's mappings. The more is mapped, the longer it takes."""
    total, ours = 0, False
    try:
        with open("/proc/self/smaps") as file:
            for line in file:
                if line[0] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]:
                    ours = root.segments in line
                elif ours and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
                    total += int(line.split()[1]) * 1024
    except OSError:
        pass
    return total


def numbers_of_rows(root: Root, record: Record) -> ControlNumbers | None:
    """Reads the numbers of a dataset or a replay buffer from its file; None where it isn't on this host."""
    if not record.is_mutable or not record.segment:
        return None
    try:
        with OwnedFile(segment_path(root.segments, record.segment), os.O_RDONLY | os.O_CLOEXEC) as file:
            return read_numbers(os.pread(file.fd, CONTROL_SIZE, record.start))
    except OSError:  # deleted meanwhile, or on storage that hosts share, where names differ
        return None


@dataclass(frozen=True, slots=True)
class StoreNumbers:
    """Numbers of a store that one transaction reads: it takes some microseconds, where `measure` looks through /proc.

    Attributes:
        versions: the last version that this host has given.
        publications: how often it has published some.
        keys: how many there are.
        live_bytes: as of `StoreStats`.
    """

    versions: int
    publications: int
    keys: int
    live_bytes: int


def numbers_of_store(root: Root) -> StoreNumbers:
    keys, counters = root.catalog.view(lambda transaction: (transaction.count("entries"), transaction.counters()))
    return StoreNumbers(counters.version, counters.publications, keys, counters.live)


# --- which process holds which values --------------------------------------------------------------------------------


_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Holding:
    """The values of a store that a process holds.

    Attributes:
        pid: as far as the kernel tells: see `holders_of`.
        keys: whose present versions it holds.
        live_bytes: of these.
        replaced: keys of which it holds versions that were replaced, or deleted.
        replaced_bytes: of these: they can't be given back as long as it does.
        is_open: whether it has the store open. A value stays held when the store was closed.
    """

    pid: int
    keys: tuple[str, ...]
    live_bytes: int
    replaced: tuple[str, ...]
    replaced_bytes: int
    is_open: bool


def who_holds(root: Root) -> list[Holding]:
    """Returns all processes that hold values of the store, or have it open; who holds most comes first."""
    device = os.fstat(root.segments_fd).st_dev
    segments = {(device, inode): segment for segment, inode in _segments(root)}
    held: defaultdict[int, list[int]] = defaultdict(list)
    for file, pids in holders_of(segments).items():
        for pid in pids:
            held[pid].append(segments[file])
    found = os.stat(f"{root.state}/{DOORBELL}")
    openers = mappers_of((found.st_dev, found.st_ino))
    made = [_holding(root, pid, held.get(pid, []), pid in openers) for pid in {*held, *openers}]
    return sorted(made, key=lambda one: (-one.live_bytes - one.replaced_bytes, one.pid))


def _segments(root: Root) -> list[tuple[int, int]]:
    """Returns the files that are there, with their inodes."""
    found: list[tuple[int, int]] = []
    for name in os.listdir(root.segments):
        stem, _, ending = name.partition(".")
        if f".{ending}" == _SUFFIX and len(stem) == 16:
            try:
                segment = int(stem, 16)
                found.append((segment, os.stat(segment_path(root.segments, segment)).st_ino))
            except (ValueError, FileNotFoundError):  # of others, or given back meanwhile
                continue
    return found


def _holding(root: Root, pid: int, segments: list[int], is_open: bool) -> Holding:
    keys: dict[str, None] = {}
    replaced: dict[str, None] = {}
    sizes = {LIVE: 0, RETIRED: 0}

    def look(transaction: Transaction) -> None:
        for segment in segments:
            row = transaction.segment(segment)
            if row is not None and row.state in sizes:
                sizes[row.state] += row.nbytes
                (keys if row.state == LIVE else replaced)[row.key.decode(errors="replace")] = None

    root.catalog.view(look)
    return Holding(pid, tuple(sorted(keys)), sizes[LIVE], tuple(sorted(replaced)), sizes[RETIRED], is_open)


def command_of(pid: int) -> str:
    """Returns a process's command line, as /proc has it; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


# --- the stores of this machine --------------------------------------------------------------------------------------


_SHARED_MEMORY = "/dev/shm"
_DEEPEST = 3  # folders
_BLOCK = 512  # bytes, as st_blocks counts
_DOORBELLS = re.compile(rf"^[0-9a-f]+-\S+ \S+ \S+ \S+ ([0-9]+) +(/.*)/{DOORBELL}$".encode(), re.MULTILINE)


def stores_of_machine() -> tuple[StoreSummary, ...]:
    """Returns the stores in shared memory, and those that are open anywhere; sorted by their roots."""
    opened, locks = _opened(), lock_holders()
    found: list[StoreSummary] = []
    for root in sorted({*_below(_SHARED_MEMORY, _DEEPEST), *opened}):
        summary = _summary(root, opened.get(root, set()), locks)
        if summary is not None:
            found.append(summary)
    return tuple(found)


def _below(path: str, depth: int) -> Iterator[str]:
    """Yields the folders that say that they are stores; those within a store are its own."""
    try:
        with os.scandir(path) as entries:
            folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # closed to this user, or removed meanwhile
        return
    for name in folders:
        if folder.has_settings(name):
            yield name
        elif depth > 1:
            yield from _below(name, depth - 1)


def _opened() -> dict[str, set[int]]:
    """Returns the pids that have each store open. In another mount namespace, its path may name another folder."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for pid, maps in all_maps():
        for inode, path in set(_DOORBELLS.findall(maps)):
            root = os.fsdecode(path.replace(rb"\012", b"\n"))  # the only character that the kernel escapes there
            try:
                is_same = os.stat(f"{root}/{DOORBELL}").st_ino == int(inode)
            except OSError:
                continue
            if is_same and folder.has_settings(root):
                found[root].add(pid)
    return found


def _summary(root: str, pids: set[int], locks: Container[tuple[int, int] | None]) -> StoreSummary | None:
    """Returns None for what was removed meanwhile, lacks files, or is a host's state of a store on shared storage."""
    settings: Settings | None = None
    with contextlib.suppress(MemstoreError, OSError):  # damaged, newer, or closed to this user: it takes space as well
        settings = folder.read_settings(root)
    if settings is not None and settings.shared is not None:
        return None
    try:
        nbytes = _size_of(f"{root}/{SEGMENTS}") + _size_of(f"{root}/{CATALOG}")
        created = min(os.stat(f"{root}/{folder.SETTINGS}").st_mtime, os.stat(f"{root}/catalog").st_mtime)
        changed = max(created, _changed(f"{root}/{SEGMENTS}"), _changed(f"{root}/{CATALOG}/data.mdb"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return StoreSummary(
        root=root,
        nbytes=nbytes,
        created=created,
        changed=changed,
        pids=tuple(sorted(pids)),
        is_member=settings is not None and CLUSTER in settings.features,
        is_served=_identity(f"{root}/{AGENT_LOCK}") in locks,
    )


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except PermissionError:
        return 0.0


def _size_of(path: str) -> int:
    """Returns the bytes that the files in a folder take."""
    nbytes = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    nbytes += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                except FileNotFoundError:  # replaced meanwhile
                    continue
    except PermissionError:
        return 0
    return nbytes


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# --- errors: no room, too many ---------------------------------------------------------------------------------------


def is_full(error: OSError) -> bool:
    """Returns whether this host has no room."""
    is_elsewhere = isinstance(error, StoreFullError) and error.host is not None
    return error.errno in (errno.ENOSPC, errno.EDQUOT) and not is_elsewhere


class OneOfMany(StoreFullError):
    """The lack of room for one value of a put of several. `explain_full` makes of it what users see.

    Attributes:
        value: the key. `key` is None: the message doesn't say all yet.
    """

    value: str = ""


def one_of_many(reason: OSError, key: bytes, nbytes: int, count: int, total: int) -> OneOfMany:
    """Makes the error for a value whose file takes `nbytes`, in a put of `count` values that take `total` together."""
    takes = f"it takes {size(nbytes)}, all {count:,} values of the call take {size(total)}"
    of_capacity = isinstance(reason, StoreFullError) and reason.needed is not None
    error = OneOfMany(takes if of_capacity else f"{reason.strerror}; {takes}")
    error.value, error.needed = key.decode(), total if of_capacity else None
    return error


NOTHING_CHANGED = "nothing was changed"
VERSIONS_WENT = "earlier versions went to make room, and nothing else was changed"


class resource_errors:
    """Turns "disk full" and "too many" into StoreFullError and ResourceLimitError, naming store and key.

    If it is given the opened root, a StoreFullError says in full who takes what, and a missing file is a NotAStoreError
    if the whole store has gone; on storage that hosts share, other errors are StorageErrors. The root's guard must not
    be held then.

    Attributes:
        outcome: what a StoreFullError says of what was changed.
    """

    __slots__ = ("_key", "_opened", "_root", "outcome")

    def __init__(self, root: str, key: str | None = None, opened: Root | None = None) -> None:
        self._root, self._key, self._opened = root, key, opened
        self.outcome = NOTHING_CHANGED

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or is_of_caller(error):
            return
        lack = None if isinstance(error, MemstoreError) else lack_of(error)
        if lack is not None:
            code, text = lack
            what = f" at {self._key!r}" if self._key is not None else ""
            raise ResourceLimitError(
                f"{self._root}: {text}{what}: {way_out(code)}", key=self._key, code=code
            ) from error
        if self._opened is not None and isinstance(error, FileNotFoundError):
            self._opened.check_in_place()
        if isinstance(error, StoreFullError) and (error.key is not None or isinstance(error.__cause__, OSError)):
            return  # it says all already
        if self._opened is not None and isinstance(error, OSError) and is_full(error):
            raise explain_full(self._opened, error, self._key, self.outcome) from error
        if not isinstance(error, OSError) or isinstance(error, MemstoreError):
            return
        if is_full(error):
            what = f" for {self._key!r}" if self._key is not None else ""
            raise StoreFullError(
                f"{self._root} has no room{what}: delete keys, drop held values, or enlarge the file system; "
                + self.outcome,
                key=self._key,
            ) from error
        if self._opened is not None:
            meant = self._opened.storage.error(error, self._key)
            if meant is not error:
                raise meant from error


def _free_at(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def explain_full(root: Root, reason: OSError, key: str | None, outcome: str = NOTHING_CHANGED) -> StoreFullError:
    """Makes the error that says what has no room, for what, who could make some, and what was changed."""
    usage = measure(root)
    takes = ""
    if isinstance(reason, OneOfMany):
        key, takes = reason.value, f"{reason.message},"
    what = f" for {key!r}" if key is not None else ""
    if isinstance(reason, StoreFullError) and reason.needed is not None and reason.needed > (usage.capacity or 0):
        return StoreFullError(
            f"{root.path} has no room{what}: {takes or f'it takes {size(reason.needed)},'} and the capacity of the "
            f"whole store is {size(usage.capacity or 0)}: open the store once with a larger capacity=, which all "
            f"processes then have; {outcome}",
            key=key,
        )
    limit = f"capacity {size(usage.capacity)}" if usage.capacity else "no capacity set"
    pinned = f"{size(usage.pinned_bytes)} replaced but held"
    if usage.pinned_by:
        pinned += f" by pid {', '.join(map(str, usage.pinned_by))}"
    waiting = f"{size(usage.pending_bytes)} in sharded puts that wait for ranks, " if usage.pending_bytes else ""
    catalog = f"{size(usage.catalog_bytes)} of catalog"
    if usage.capacity:  # which counts its growth alone
        catalog += ", of which the first 8 MiB don't count"
    detail = reason if isinstance(reason, StoreFullError) else reason.strerror
    folder, spill = root.storage.spill_folder(), ""
    if folder is not None:
        spill = f"{size(usage.spilled_bytes)} moved to {folder}, which has {size(_free_at(folder))} free, "
    return StoreFullError(
        f"{root.path} has no room{what} ({detail}): {limit}, {size(usage.live_bytes)} live, {pinned}, "
        f"{size(usage.filling_bytes)} being written, {waiting}{spill}{catalog}: delete keys, "
        f"drop held values, or enlarge the file system or the capacity; {outcome}",
        key=key,
    )
