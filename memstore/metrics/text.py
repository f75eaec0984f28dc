"""Figures of a store: one look at it, for metrics and for the live page, and the look as Prometheus reads it.

`look_at` asks the catalog, the folder, /proc and the hosts, and changes nothing: it writes no file and takes no lock of
the store. What it costs grows with the processes of the host, whose maps it reads (0.1 s of CPU for 180 of them), and
not with the keys, of which `key_page` reads a page. `prometheus` writes the text format, version 0.0.4.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memstore._info import ClusterStatus, PendingInfo, QuotaInfo, StoreStats
from memstore._threads import between_forks
from memstore.engine import Record, command_of, is_served, numbers_of_rows, numbers_of_store, who_holds
from memstore.errors import MemstoreError
from memstore.listing import Keyspace, ListedEntry, UnknownKindError, entries_after, opened, outline
from memstore.metrics.calls import CallCount, calls

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
        quotas=store.quotas(),
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


# --- The text for Prometheus -----------------------------------------------------------------------------------------


PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KEYS = 1000
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

_Labels = Mapping[str, str]
_Family = tuple[str, str, str, Iterable[tuple[_Labels, float]]]  # name, kind, help, values by their labels


def prometheus(store: Keyspace, *, keys: int = _KEYS, checkpoints: Sequence[str] = ()) -> str:
    """Returns the figures of a store, and those of this process's calls, as text for Prometheus.

    What they mean stands in the text, and in docs/metrics.md. It takes some milliseconds, and 10 us for each key.

    Args:
        keys: how many keys have figures of their own, the first ones by name: each makes three time series.
        checkpoints: folders of a CheckpointManager, or URLs of buckets, whose steps are told too.

    Raises:
        NotAStoreError: the store was removed.

    Example:
        >>> import memstore, tempfile
        >>> with memstore.open(tempfile.mkdtemp()) as store:
        ...     version = store.put("lr", 0.1)
        ...     text = memstore.metrics.prometheus(store)
        >>> [line for line in text.splitlines() if line.startswith("memstore_key_version")]
        ['memstore_key_version{key="lr"} 1']
    """
    return prometheus_of(look_at(store, checkpoints=checkpoints), list(all_keys(store, keys)), calls())


def prometheus_of(look: StoreLook, keys: Sequence[KeyFigures], counted: Mapping[str, CallCount]) -> str:
    """Returns a look at a store, some of its keys, and counts of calls as text for Prometheus."""
    lines: list[str] = []
    families = (*_of_store(look), *_of_keys(keys), *_of_hosts(look), *_of_steps(look), *_of_calls(counted))
    for name, kind, text, values in families:
        told = [f"{name}{_labelled(labels)} {_number(value)}" for labels, value in values]
        if told:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *told]
    return "\n".join(lines) + "\n"


def _labelled(labels: _Labels) -> str:
    inside = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _of_store(look: StoreLook) -> Iterator[_Family]:
    stats = look.stats
    sizes = {
        "live": stats.live_bytes,
        "reusable": stats.reusable_bytes,
        "pinned": stats.pinned_bytes,
        "filling": stats.filling_bytes,
        "pending": stats.pending_bytes,
        "catalog": stats.catalog_bytes,
    }
    one: _Labels = {}
    yield "memstore_keys", "gauge", "Keys of the store.", [(one, stats.keys)]
    yield (
        "memstore_bytes",
        "gauge",
        "Bytes of its files, by what they are.",
        [({"state": state}, size) for state, size in sizes.items()],
    )
    if stats.capacity is not None:
        yield "memstore_capacity_bytes", "gauge", "Bytes that all files may take together.", [(one, stats.capacity)]
    yield "memstore_versions_total", "counter", "Versions that this host has given: one a put.", [(one, look.versions)]
    yield (
        "memstore_publications_total",
        "counter",
        "Changes that became visible; a put_many is one.",
        [(one, look.publications)],
    )
    yield "memstore_processes", "gauge", "Processes that have it open.", [(one, sum(h.is_open for h in look.holders))]
    held = [({"pid": str(holder.pid)}, holder) for holder in look.holders]
    yield "memstore_held_bytes", "gauge", "Bytes of present versions that a process holds.", _each(held, "nbytes")
    yield (
        "memstore_held_replaced_bytes",
        "gauge",
        "Bytes of replaced versions that a process holds.",
        _each(held, "replaced_nbytes"),
    )
    yield (
        "memstore_held_replaced_keys",
        "gauge",
        "Keys of which a process holds a replaced version: it lags behind.",
        [(labels, len(holder.replaced)) for labels, holder in held],
    )
    yield "memstore_pending_puts", "gauge", "Sharded puts that wait for ranks.", [(one, len(look.pending))]
    quotas = [({"prefix": quota.prefix}, quota) for quota in look.quotas]
    yield "memstore_quota_bytes", "gauge", "Bytes that keys with a prefix may take.", _each(quotas, "quota")
    yield "memstore_quota_used_bytes", "gauge", "Bytes that keys with a prefix take.", _each(quotas, "used")


def _each(labelled: Iterable[tuple[_Labels, object]], attribute: str) -> list[tuple[_Labels, float]]:
    found = [(labels, getattr(value, attribute)) for labels, value in labelled]
    return [(labels, value) for labels, value in found if value is not None]


_OF_KEYS = (
    ("memstore_key_version", "gauge", "Version of a key.", "version"),
    ("memstore_key_bytes", "gauge", "Bytes of its tensors.", "nbytes"),
    ("memstore_key_created_seconds", "gauge", "When it was put, in Unix seconds.", "created"),
    ("memstore_rows", "gauge", "Rows of a dataset or a replay buffer.", "rows"),
    ("memstore_rows_capacity", "gauge", "Rows that it may have.", "capacity"),
    ("memstore_rows_added_total", "counter", "Rows that a replay buffer ever got.", "added"),
    ("memstore_rows_sampled_total", "counter", "Rows sampled from a buffer with a rate limiter.", "sampled"),
)
_OF_LIVING_HOSTS = (
    ("memstore_host_keys", "gauge", "Keys that a host owns.", "keys"),
    ("memstore_host_live_bytes", "gauge", "Bytes of values that lie there.", "live_bytes"),
    ("memstore_host_sent_bytes_total", "counter", "Bytes that its index process has sent.", "sent"),
    ("memstore_host_received_bytes_total", "counter", "Bytes that its index process has received.", "received"),
    ("memstore_host_lacking_keys", "gauge", "Its keys that lack a replica.", "lacking"),
)


def _of_keys(keys: Sequence[KeyFigures]) -> Iterator[_Family]:
    named = [({"key": one.key}, one) for one in keys]
    for name, kind, text, attribute in _OF_KEYS:
        yield name, kind, text, _each(named, attribute)


def _of_hosts(look: StoreLook) -> Iterator[_Family]:
    if look.cluster is None:
        return
    named = [({"host": host.address}, host) for host in look.cluster.hosts]
    yield "memstore_host_up", "gauge", "Whether a host answers.", [(labels, int(host.alive)) for labels, host in named]
    for name, kind, text, attribute in _OF_LIVING_HOSTS:
        yield name, kind, text, _each([(labels, host) for labels, host in named if host.alive], attribute)
    yield "memstore_lost_keys", "gauge", "Keys that were lost with removed hosts.", [({}, len(look.cluster.lost))]


def _of_steps(look: StoreLook) -> Iterator[_Family]:
    whole, unfinished = dict[str, int](), dict[str, int]()
    last: dict[str, tuple[int, float]] = {}
    for one in look.steps:
        unfinished[one.root] = unfinished.get(one.root, 0) + (one.state != "whole")
        whole[one.root] = whole.get(one.root, 0) + (one.state == "whole")
        if one.state == "whole" and one.created is not None and one.created >= last.get(one.root, (0, 0.0))[1]:
            last[one.root] = one.step, one.created

    def by_root(values: Mapping[str, float]) -> list[tuple[_Labels, float]]:
        return [({"root": root}, value) for root, value in values.items()]

    yield "memstore_checkpoints", "gauge", "Whole checkpoints of a run.", by_root(whole)
    yield "memstore_checkpoints_unfinished", "gauge", "Its steps that aren't whole.", by_root(unfinished)
    steps, times = {root: step for root, (step, _) in last.items()}, {root: at for root, (_, at) in last.items()}
    yield "memstore_checkpoint_step", "gauge", "The step that was saved last.", by_root(steps)
    yield "memstore_checkpoint_created_seconds", "gauge", "When its save began, in Unix seconds.", by_root(times)


def _of_calls(counted: Mapping[str, CallCount]) -> Iterator[_Family]:
    named = [({"call": name}, one) for name, one in counted.items()]
    yield "memstore_calls_total", "counter", "Calls of the process that tells this.", _each(named, "count")
    yield "memstore_call_bytes_total", "counter", "Bytes of their values.", _each(named, "nbytes")
    yield "memstore_call_seconds_total", "counter", "Seconds that they took.", _each(named, "seconds")
