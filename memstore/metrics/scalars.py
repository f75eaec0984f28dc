"""Figures by name, for what draws curves over a training's steps: TensorBoard, W&B."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from memstore._arguments import seconds_of
from memstore._wording import an_instance
from memstore.engine import numbers_of_store
from memstore.listing import Keyspace, opened
from memstore.metrics.calls import calls


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
