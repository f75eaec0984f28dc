"""Counters and spans of this process's calls, and figures by name for what draws curves over a training's steps.

Nothing is counted or traced before somebody asks for it. `ScalarLogger` is for TensorBoard and W&B.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memstore._arguments import seconds_of
from memstore._telling import Call, listening
from memstore._threads import between_forks
from memstore._wording import an_instance
from memstore.engine import numbers_of_store
from memstore.errors import MissingPackageError
from memstore.listing import Keyspace, opened

# --- Counters and spans ----------------------------------------------------------------------------------------------


_KEYS = 20  # of one call, as an attribute of its span


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
        attributes["memstore.keys"] = call.keys[:_KEYS]
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


# --- Figures by name -------------------------------------------------------------------------------------------------


def scalars(store: Keyspace) -> dict[str, float]:
    """Returns the figures of a store by name. It takes some milliseconds.

    They are "keys", "live_bytes", "reusable_bytes", "pinned_bytes", "pending_bytes", "versions", and for each call that
    `count_calls` counts "calls/get", "bytes/get" and "seconds/get".
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
    for name, one in calls().items():
        word = name.replace(" ", "_")
        found |= {f"calls/{word}": one.count, f"bytes/{word}": one.nbytes, f"seconds/{word}": one.seconds}
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
