"""One look at a store, for metrics and for the live page: what the catalog, the folder, /proc and the hosts say.

`look_at` changes nothing: it writes no file and takes no lock of the store. What it costs grows with the processes of
the host, whose maps it reads (0.1 s of CPU for 180 of them), and not with the keys, of which `key_page` reads a page.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memstore._info import ClusterStatus, PendingInfo, QuotaInfo, StoreStats
from memstore._threads import between_forks
from memstore.engine import Record, command_of, index, is_served, numbers_of_rows, numbers_of_store, who_holds
from memstore.errors import MemstoreError
from memstore.listing import Keyspace, ListedEntry, UnknownKindError, entries_after, opened, outline

_PENDING_WITHIN = 2.0  # seconds, for other hosts
_WRITTEN_LATELY = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class KeyFigures:
    """A key, as the catalog has it.

    Attributes:
        key, version, kind, type, nbytes, created, leaves: as of `memstore ls`; `created` is in Unix seconds.
        capacity: in rows, of a dataset or a replay buffer; else None, as are the next three.
        rows: that are there.
        added: rows that a replay buffer ever got; None for a dataset.
        sampled: rows that were sampled from it; None without a rate limiter, where nobody counts them.
    """

    key: str
    version: int
    kind: str
    type: str
    nbytes: int
    created: float
    leaves: int
    capacity: int | None = None
    rows: int | None = None
    added: int | None = None
    sampled: int | None = None


@dataclass(frozen=True, slots=True)
class HolderFigures:
    """A process that has the store open, or holds values of it.

    Attributes:
        pid: of the process.
        command: its command line; empty if this user may not see it.
        keys: whose present versions it holds.
        nbytes: of these.
        replaced: keys of which it holds versions that were replaced: it lags behind.
        replaced_nbytes: of these.
        is_open: whether it has the store open.
    """

    pid: int
    command: str
    keys: tuple[str, ...]
    nbytes: int
    replaced: tuple[str, ...]
    replaced_nbytes: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A step of a run's checkpoints.

    Attributes:
        root: the folder of the run.
        step: its number.
        state: "whole", "being written", "unfinished" (nobody has written for a minute), "unreadable".
        nbytes: of its files, so far.
        created: when its save began, in Unix seconds; None if that isn't known.
        part: how much of it is written, from 0 to 1, by the size of the newest whole step; None if there is none.
    """

    root: str
    step: int
    state: str
    nbytes: int
    created: float | None
    part: float | None


@dataclass(frozen=True, slots=True)
class StoreLook:
    """The figures of a store at one moment.

    Attributes:
        at: when, in Unix seconds.
        root: the store's folder.
        stats: its sizes.
        versions: the last version that this host has given: its growth is the number of puts.
        publications: how often puts and deletes became visible; a `put_many` is one.
        holders: the processes that have it open, or hold values of it; who holds most comes first.
        pending: sharded puts that wait for ranks.
        quotas: of prefixes.
        cluster: the hosts that serve it; None: it isn't served, or they can't be asked.
        steps: of checkpoints, by folder and number.
        troubles: what could not be looked at, and why.
    """

    at: float
    root: str
    stats: StoreStats
    versions: int
    publications: int
    holders: tuple[HolderFigures, ...]
    pending: tuple[PendingInfo, ...]
    quotas: tuple[QuotaInfo, ...]
    cluster: ClusterStatus | None
    steps: tuple[StepFigures, ...]
    troubles: tuple[str, ...]


def look_at(store: Keyspace, *, checkpoints: Sequence[str] = ()) -> StoreLook:
    """Looks at a store, and at folders of a CheckpointManager.

    Raises:
        NotAStoreError: the store was removed.
        StoreClosedError.
    """
    root, at, troubles = opened(store), time.time(), list[str]()
    root.check_in_place()
    numbers = numbers_of_store(root)
    pending: tuple[PendingInfo, ...] = ()
    cluster: ClusterStatus | None = None
    try:
        pending = store.pending(timeout=_PENDING_WITHIN)
    except MemstoreError as error:
        troubles.append(str(error))
    if is_served(root):
        with between_forks():
            from memstore.distributed.serving import cluster_of
        try:
            cluster = cluster_of(root.path).status()
        except (MemstoreError, OSError) as error:
            troubles.append(str(error))
    steps: list[StepFigures] = []
    for folder in checkpoints:
        try:
            steps.extend(_steps_of(folder))
        except (MemstoreError, OSError, ValueError) as error:
            troubles.append(f"{folder}: {error}")
    return StoreLook(
        at=at,
        root=root.path,
        stats=store.stats(),
        versions=numbers.versions,
        publications=numbers.publications,
        holders=tuple(
            HolderFigures(
                pid=one.pid,
                command=command_of(one.pid),
                keys=one.keys,
                nbytes=one.live_bytes,
                replaced=one.replaced,
                replaced_nbytes=one.replaced_bytes,
                is_open=one.is_open,
            )
            for one in who_holds(root)
        ),
        pending=pending,
        quotas=tuple(QuotaInfo(row.prefix.decode(), row.limit, row.used) for row in index.quotas_here(root)),
        cluster=cluster,
        steps=tuple(steps),
        troubles=tuple(troubles),
    )


def key_page(store: Keyspace, prefix: str = "", after: str | None = None, *, limit: int = 100) -> list[KeyFigures]:
    """Returns up to `limit` keys that start with `prefix`, sorted, beyond the key `after`. Of a store on several hosts
    they are those of all hosts.

    Raises InvalidKeyError, StoreClosedError, HomeUnavailableError.
    """
    root = opened(store)
    found: list[KeyFigures] = []
    for entry, record in entries_after(store, prefix, after, limit=limit):
        capacity = rows = added = sampled = None
        if record.is_mutable:
            capacity = _capacity_of(record)
            numbers = numbers_of_rows(root, record)
            if numbers is not None:
                is_buffer = record.kind == "buffer"
                rows = numbers.rows if is_buffer else numbers.length
                added = numbers.added if is_buffer else None
                sampled = numbers.sampled if is_buffer and numbers.sampled else None
        found.append(_key_figures(entry, capacity, rows, added, sampled))
    return found


def all_keys(store: Keyspace, limit: int) -> Iterator[KeyFigures]:
    """Yields the first `limit` keys, in pages."""
    after: str | None = None
    while limit > 0 and (page := key_page(store, "", after, limit=min(limit, 1000))):
        yield from page
        after, limit = page[-1].key, limit - len(page)


def _key_figures(
    entry: ListedEntry, capacity: int | None, rows: int | None, added: int | None, sampled: int | None
) -> KeyFigures:
    return KeyFigures(
        entry.key,
        entry.version,
        entry.kind,
        entry.type,
        entry.nbytes,
        entry.created,
        entry.leaves,
        capacity,
        rows,
        added,
        sampled,
    )


def _capacity_of(record: Record) -> int | None:
    with contextlib.suppress(UnknownKindError, MemstoreError):
        for leaf in outline(record.description)[1]:
            return leaf.shape[0] if leaf.shape else None
    return None


def _steps_of(folder: str) -> list[StepFigures]:
    with between_forks():
        from memstore.checkpoints.buckets import steps_at
        from memstore.checkpoints.folders import newest
        from memstore.snapshot.buckets import is_url
    storage = steps_at(folder)
    found = storage.steps()
    if not found and not is_url(storage.root) and not os.path.isdir(storage.root):
        raise FileNotFoundError("there is no such folder")
    sizes = {saved.name: storage.size_of(saved) for saved in found}
    last = newest(found)
    steps: list[StepFigures] = []
    for saved in sorted(found, key=lambda one: (one.step, one.order)):
        state, part = "whole" if saved.is_whole else "unreadable", 1.0 if saved.is_whole else None
        if saved.format is None:
            is_written = time.time() - _last_write(storage.path(saved.name)) < _WRITTEN_LATELY
            state = "being written" if is_written else "unfinished"
            if last is not None and sizes[last.name]:
                part = min(sizes[saved.name] / sizes[last.name], 1.0)
        steps.append(StepFigures(storage.root, saved.step, state, sizes[saved.name], saved.created, part))
    return steps


def _last_write(path: str) -> float:
    """Returns when a file of a folder was written last, in Unix seconds; 0 if it has none that can be seen."""
    last = 0.0
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            with contextlib.suppress(OSError):
                last = max(last, os.stat(f"{folder}/{name}", follow_symlinks=False).st_mtime)
    return last
