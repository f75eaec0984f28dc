"""Figures of a store and of this process's calls, for Prometheus, OpenTelemetry, TensorBoard and W&B.

    print(memstore.metrics.prometheus(store))             # what is in the store, and this process's calls

    memstore.metrics.count_calls()                        # before stores are opened: counts calls, bytes and seconds
    memstore.metrics.trace_calls()                        # a span for each call; the extra `otel`

    log = memstore.metrics.ScalarLogger(store, writer)    # a SummaryWriter, a run of W&B, or a function
    log(step)                                             # in the training loop

What isn't asked for costs nothing: a look reads what is there anyway, and calls are counted or traced only after
`count_calls` or `trace_calls`. Imports no torch.

`look_at` is one look at a store, for this and for the live page: it asks the catalog, the folder, /proc and the hosts,
and changes nothing: it writes no file and takes no lock of the store. What it costs grows with the processes of the
host, whose maps it reads (0.1 s of CPU for 180 of them), and not with the keys, of which `key_page` reads a page.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memstore._arguments import seconds_of
from memstore._info import ClusterStatus, PendingInfo, QuotaInfo, StoreStats
from memstore._telling import Call, followers, listening
from memstore._threads import between_forks
from memstore._wording import an_instance
from memstore.engine import Record, command_of, index, is_served, numbers_of_rows, numbers_of_store, who_holds
from memstore.errors import HomeUnavailableError, MemstoreError, MissingPackageError
from memstore.listing import Keyspace, ListedEntry, UnknownKindError, entries_after, opened, outline

__all__ = ["CallCount", "ScalarLogger", "calls", "count_calls", "prometheus", "scalars", "stop_calls", "trace_calls"]

# --- Counters and spans ----------------------------------------------------------------------------------------------


_SPAN_KEYS = 20  # of one call, as an attribute of its span


@dataclass(frozen=True, slots=True)
class CallCount:
    """The calls of one name that this process has made.

    Attributes:
        count: how many; of "replay retry", how many rows; of "evict", how many versions.
        nbytes: of their values, in all.
        seconds: that they took, in all.
    """

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class _Observer:
    """Counts the calls of this process, and makes spans of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[float]] = {}
        self.counts_calls = False
        self.tracer: Any = None  # of OpenTelemetry

    def count(self) -> None:
        with self._lock:
            if not self.counts_calls:
                self._counts.clear()
            self.counts_calls = True

    def observe(self, call: Call) -> None:
        if self.counts_calls:
            with self._lock:
                found = self._counts.setdefault(call.name, [0, 0, 0.0])
                found[0] += call.times
                found[1] += call.nbytes
                found[2] += call.seconds
        if self.tracer is not None:
            _make_span(self.tracer, call)

    def counted(self) -> dict[str, CallCount]:
        with self._lock:
            return {
                name: CallCount(int(found[0]), int(found[1]), found[2]) for name, found in sorted(self._counts.items())
            }


_observer = _Observer()


def _make_span(tracer: Any, call: Call) -> None:
    """Makes the span of a call that has just ended, as a child of the span that is current where it was made."""
    attributes: dict[str, Any] = {"memstore.root": call.root, "memstore.nbytes": call.nbytes}
    if len(call.keys) == 1:
        attributes["memstore.key"] = call.keys[0]
    elif call.keys:
        attributes["memstore.keys"] = call.keys[:_SPAN_KEYS]
    if call.times != 1:
        attributes["memstore.count"] = call.times
    end = time.time_ns()
    span = tracer.start_span(f"memstore.{call.name}", start_time=end - int(call.seconds * 1e9), attributes=attributes)
    span.end(end)


def count_calls() -> None:
    """Counts the calls of this process from now on, with their bytes and seconds: see `calls`. It begins at 0, unless
    this process is counting already.

    Call it before you open stores: a store asks when it is opened whether its gets and waits are counted. A forked
    child goes on counting, from what its parent had.

    Counted are "put", "get", "view" and "wait" (that found something), "fetch" (bytes of other hosts), "follow" (a
    follower has loaded a version), "take", "async_take" and "restore" of snapshots, "sweep" (files that were given
    back), "evict" (kept versions that went for lack of room), "replay wait" (before a rate limiter, or for rows),
    "replay retry" (sampled rows that were overwritten while they were copied). A call that raises isn't counted.
    """
    _observer.count()
    listening.observer = _observer


def trace_calls(tracer_provider: Any = None) -> None:
    """Makes an OpenTelemetry span of each call of this process from now on, named "memstore.put" and so on.

    Spans begin and end as the calls did, and are children of the span that is current around the call. They have the
    attributes memstore.root, memstore.key (or memstore.keys) and memstore.nbytes. The calls are those of `count_calls`,
    and it too has to be called before stores are opened. A call that raises has no span.

    Args:
        tracer_provider: a TracerProvider of OpenTelemetry; None: the global one.

    Raises:
        MissingPackageError: OpenTelemetry isn't installed: ``pip install 'memstore-torch[otel]'``.
    """
    try:
        with between_forks():
            from opentelemetry import trace
    except ImportError as error:
        raise MissingPackageError(
            "spans take the package opentelemetry-api: pip install opentelemetry-api, or memstore-torch[otel]"
        ) from error
    _observer.tracer = trace.get_tracer("memstore", tracer_provider=tracer_provider)
    listening.observer = _observer


def stop_calls() -> None:
    """Ends what `count_calls` and `trace_calls` have begun. Until counting begins anew, `calls` has what was."""
    listening.observer, _observer.counts_calls, _observer.tracer = None, False, None


def calls() -> dict[str, CallCount]:
    """Returns how many calls this process has made since `count_calls`, by their names.

    Example:
        >>> import memstore, tempfile
        >>> memstore.metrics.count_calls()
        >>> with memstore.open(tempfile.mkdtemp()) as store:
        ...     version = store.put("lr", 0.1)
        ...     rate = store.get("lr"), store.get("lr")
        >>> memstore.metrics.calls()["get"].count
        2
        >>> memstore.metrics.stop_calls()
    """
    return _observer.counted()


_WITHIN = 2.0  # seconds, for other hosts

# --- Figures by name -------------------------------------------------------------------------------------------------


def scalars(store: Keyspace) -> dict[str, float]:
    """Returns the figures of a store by name. It takes some milliseconds.

    They are "keys", "live_bytes", "reusable_bytes", "pinned_bytes", "pending_bytes", "versions"; "lag/policy", in
    seconds, for each key that this process follows; and for each call that `count_calls` counts "calls/get",
    "bytes/get" and "seconds/get".
    """
    stats, numbers = store.stats(), numbers_of_store(opened(store))
    found: dict[str, float] = {
        "keys": stats.keys,
        "live_bytes": stats.live_bytes,
        "reusable_bytes": stats.reusable_bytes,
        "pinned_bytes": stats.pinned_bytes,
        "pending_bytes": stats.pending_bytes,
        "versions": numbers.versions,
    }
    with contextlib.suppress(MemstoreError):  # the host that knows the key is silent
        found |= {f"lag/{key}": lag for key, lag in _lags(store).items()}
    for name, one in calls().items():
        word = name.replace(" ", "_")
        found |= {f"calls/{word}": one.count, f"bytes/{word}": one.nbytes, f"seconds/{word}": one.seconds}
    return found


def _lags(store: Keyspace) -> dict[str, float]:
    """Returns by how many seconds the followers of this process lag behind, as `FollowerStatus.lag` says it; of several
    that follow one key, the last one."""
    root, found = opened(store).path, dict[str, float]()
    for one in list(followers):
        if one.root == root and not one.is_ended:
            version = one.version  # read first: a load between both makes a small lag, and no large one
            newest = entries_after(store, one.key, limit=1, timeout=_WITHIN)  # the key itself sorts before longer ones
            is_behind = bool(newest) and newest[0][0].key == one.key and newest[0][0].version != version
            lag = max(time.time() - newest[0][0].created, 0.0) if is_behind else 0.0
            found[one.key] = max(lag, found.get(one.key, 0.0))
    return found


_RATE = "{}{}_per_second"
_GROWING = ("versions", "calls/", "bytes/", "seconds/")  # these are told as rates


class ScalarLogger:
    """Logs a store's figures to TensorBoard, W&B or a function. Call it in the training loop, with the step.

    Figures that only grow are logged as rates: "versions_per_second", "calls/get_per_second", "bytes/put_per_second";
    "seconds/wait_per_second" is the part of the time that the process waits. The first call logs no rates.

    Args:
        store: an open store.
        to: a SummaryWriter (anything with `add_scalar(name, value, step)`), a run of W&B (anything with
            `log(dict, step=)`), or a function of the figures and the step.
        every: seconds between two logs at least: calls in between return at once.
        prefix: of the names.

    Raises:
        TypeError: `to` is none of these.

    Example:
        >>> import memstore, tempfile
        >>> with memstore.open(tempfile.mkdtemp()) as store:
        ...     log = memstore.metrics.ScalarLogger(store, lambda figures, step: print(step, figures["memstore/keys"]))
        ...     log(0), log(1)
        0 0
        (True, False)
    """

    def __init__(self, store: Keyspace, to: Any, *, every: float = 10.0, prefix: str = "memstore/") -> None:
        self._store, self._every, self._prefix = store, seconds_of("every", every), prefix
        self._log = _log_of(to)
        self._at = 0.0
        self._before: dict[str, float] = {}

    def __call__(self, step: int) -> bool:
        """Logs the figures, if the last log was `every` seconds ago. Returns whether it did."""
        now = time.monotonic()
        if self._before and now - self._at < self._every:
            return False
        found, passed, told = scalars(self._store), now - self._at, dict[str, float]()
        for name, value in found.items():
            if not name.startswith(_GROWING):
                told[f"{self._prefix}{name}"] = value
            elif self._before and passed > 0:
                told[_RATE.format(self._prefix, name)] = (value - self._before.get(name, 0.0)) / passed
        self._at, self._before = now, found
        self._log(told, step)
        return True


def _log_of(to: Any) -> Callable[[Mapping[str, float], int], object]:
    """Returns the function that logs figures there."""
    add_scalar, log = getattr(to, "add_scalar", None), getattr(to, "log", None)
    if callable(add_scalar):

        def add_each(figures: Mapping[str, float], step: int) -> None:
            for name, value in figures.items():
                add_scalar(name, value, step)

        return add_each
    if callable(log):
        return lambda figures, step: log(dict(figures), step=step)
    if callable(to):
        return to
    raise TypeError(
        f"to is a SummaryWriter, a run of W&B, or a function of the figures and the step, and not {an_instance(to)}"
    )


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
        lags: seconds by which followers of this process lag behind, by key.
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
    lags: Mapping[str, float]
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
    lags: Mapping[str, float] = {}
    try:
        lags = _lags(store)
        pending = store.pending(timeout=_WITHIN)
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
        lags=lags,
        troubles=tuple(troubles),
    )


def key_page(
    store: Keyspace, prefix: str = "", after: str | None = None, *, limit: int = 100, timeout: float | None = None
) -> list[KeyFigures]:
    """Returns up to `limit` keys that start with `prefix`, sorted, beyond the key `after`. Of a store on several hosts
    they are those of all hosts, within `timeout` seconds; None: the store's.

    Raises InvalidKeyError, StoreClosedError, HomeUnavailableError.
    """
    root = opened(store)
    found: list[KeyFigures] = []
    for entry, record in entries_after(store, prefix, after, limit=limit, timeout=timeout):
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
    """Yields the first `limit` keys, in pages; none more when a host that may have some doesn't answer."""
    after: str | None = None
    with contextlib.suppress(HomeUnavailableError):
        while limit > 0 and (page := key_page(store, "", after, limit=min(limit, 1000), timeout=_WITHIN)):
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
    families = (
        *_of_store(look),
        *_of_keys(keys),
        *_of_hosts(look),
        *_of_steps(look),
        *_of_followers(look),
        *_of_calls(counted),
    )
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
        "spilled": stats.spilled_bytes,
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
    ("memstore_host_spilled_bytes", "gauge", "Bytes of values that were moved to its disk.", "spilled_bytes"),
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


def _of_followers(look: StoreLook) -> Iterator[_Family]:
    lags = [({"key": key}, lag) for key, lag in look.lags.items()]
    yield "memstore_follower_lag_seconds", "gauge", "Seconds by which a follower of this process lags behind.", lags


def _of_calls(counted: Mapping[str, CallCount]) -> Iterator[_Family]:
    named = [({"call": name}, one) for name, one in counted.items()]
    yield "memstore_calls_total", "counter", "Calls of the process that tells this.", _each(named, "count")
    yield "memstore_call_bytes_total", "counter", "Bytes of their values.", _each(named, "nbytes")
    yield "memstore_call_seconds_total", "counter", "Seconds that they took.", _each(named, "seconds")
