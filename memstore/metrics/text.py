"""Figures as Prometheus reads them: the text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from memstore.listing import Keyspace
from memstore.metrics.calls import CallCount, calls
from memstore.metrics.looking import KeyFigures, StoreLook, all_keys, look_at

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


def _of_calls(counted: Mapping[str, CallCount]) -> Iterator[_Family]:
    named = [({"call": name}, one) for name, one in counted.items()]
    yield "memstore_calls_total", "counter", "Calls of the process that tells this.", _each(named, "count")
    yield "memstore_call_bytes_total", "counter", "Bytes of their values.", _each(named, "nbytes")
    yield "memstore_call_seconds_total", "counter", "Seconds that they took.", _each(named, "seconds")
