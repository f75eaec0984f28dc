"""How a ReplayBuffer finds its entry: opened, or made where there is none."""

from __future__ import annotations

from typing import Any, Literal

from memstore import structure
from memstore.datasets import Spec, check_capacity, spec_of
from memstore.engine import MutableEntry, Root, deadline_after, open_mutable, resource_errors
from memstore.errors import (
    AlreadyExistsError,
    KeyNotFoundError,
    MutableEntryError,
    ReadOnlyError,
    StructureMismatchError,
)
from memstore.listing import absent
from memstore.replay.creating import create, plan_of_spec
from memstore.replay.layout import ALPHA_LIMIT, RingOptions, capacity_of, options_of
from memstore.replay.limits import RateLimiter
from memstore.structure import modes

_NO_PRIORITIES = "it was made without priorities"
BufferMode = Literal["a", "r+", "x"]


def checked_alpha(alpha: Any) -> float:
    """Raises ValueError, TypeError: it is none."""
    if isinstance(alpha, str) or not hasattr(alpha, "__float__"):
        raise TypeError(f"alpha is a number from 0 to {ALPHA_LIMIT:g}, and not {alpha!r:.100}")
    if not 0 <= alpha <= ALPHA_LIMIT:
        raise ValueError(f"alpha is a number from 0 to {ALPHA_LIMIT:g}, and not {alpha!r}")
    return float(alpha)


def options_for(root: Root, alpha: float | None, limiter: Any) -> RingOptions:
    """Those of a new buffer; `alpha` is None: without priorities. Raises TypeError: the limiter is none."""
    if limiter is not None and not isinstance(limiter, RateLimiter):
        raise TypeError(f"rate_limiter is a memstore.RateLimiter, and not {limiter!r}")
    numbers = None if limiter is None else (limiter.samples_per_insert, limiter.min_size, limiter.tolerance)
    return RingOptions(alpha, numbers, not root.on_tmpfs)


def open_or_create(
    root: Root,
    key: str,
    spec: Spec,
    capacity: int | None,
    options: RingOptions,
    alpha: float,
    mode: BufferMode,
    timeout: float,
    *,
    writable: bool,
) -> MutableEntry:
    """The entry of a buffer. What `spec`, `capacity` and `options` say has to be so, None: as it is.

    So does `alpha`, if the buffer has priorities, whether `options` ask for them or not. DEFAULT_ALPHA: as it is.

    Raises:
        As `ReplayBuffer`.
    """
    deadline = deadline_after(timeout)
    with resource_errors(root.path, key, root), modes.put_aside():
        if mode not in ("a", "r+", "x"):
            raise ValueError(f"mode is 'a', 'r+' or 'x', and not {mode!r}")
        if capacity is not None:
            check_capacity(capacity)
        if mode == "x" and not writable:
            raise ReadOnlyError(f"the store was opened with mode 'r', and can't make {key!r}", key=key)
        while True:
            if mode != "x":
                try:
                    entry = open_mutable(root, key, "buffer", capacity_of, deadline, writable=writable)
                except KeyNotFoundError:
                    if mode != "a" or not writable or spec is None or capacity is None:
                        raise _not_there(root, key, mode, writable=writable) from None
                else:
                    _check_recovered(entry)
                    _compare(entry, spec, capacity, options, alpha)
                    return entry
            if spec is None or capacity is None:
                raise _not_there(root, key, mode, writable=writable)
            try:
                create(root, key, spec, options, capacity, deadline)
            except AlreadyExistsError:
                if mode == "x":
                    raise
            mode = "a"


def _not_there(root: Root, key: str, mode: BufferMode, *, writable: bool) -> Exception:
    if mode == "x":
        return ValueError(f"{key!r}: to make a buffer takes spec= and capacity=")
    if not writable:
        advice = "this store was opened with mode 'r', which can't make it"
    elif mode == "a":
        advice = "with spec= and capacity= it is made"
    else:
        advice = "mode 'a' makes it"
    return KeyNotFoundError(f"{absent(root, key.encode()).message}; {advice}", key=key)


def _check_recovered(entry: MutableEntry) -> None:
    """For who may only read: on a disk, what is whole after a crash of the host is found by who writes."""
    page = entry.page
    if entry.writable or not options_of(entry.record).is_noted or (page.is_of_this_boot and not page.is_new):
        return
    raise MutableEntryError(
        f"{entry.key!r}: nobody has opened it to write since the host was started, and so nothing says which rows are "
        "whole: open the store with mode 'r+' once",
        key=entry.key,
    )


def _compare(entry: MutableEntry, spec: Spec, capacity: int | None, options: RingOptions, alpha: float) -> None:
    """Raises StructureMismatchError, which shows what there is, and what was asked for."""
    key, record = entry.key, entry.record
    found, there = options_of(record), capacity_of(record)
    wrong: list[str] = []
    if capacity is not None and capacity != there:
        wrong.append(f"its capacity is {there:,}, and not {capacity:,}")
    if spec is not None:
        asked, _ = plan_of_spec(key, spec, found, there)
        stored = structure.plan_of_rows(record.description, record.nbytes)
        if _rows(asked) != _rows(stored):
            wrong.append(f"its rows are {spec_of(stored)}, and not {spec_of(asked)}")
    if options.alpha is not None and found.alpha is None:
        wrong.append(_NO_PRIORITIES)
    elif found.alpha is not None and alpha not in (found.alpha, DEFAULT_ALPHA):
        wrong.append(f"its alpha is {found.alpha}, and not {alpha}")
    if options.limiter is not None and options.limiter != found.limiter:
        wrong.append(f"its rate limiter is {found.rate_limiter}, and not {options.rate_limiter}")
    if wrong:
        advice = "say the same, or leave it out to take the buffer as it is"
        if wrong == [_NO_PRIORITIES]:
            advice = "leave sampler= out to take the buffer as it is, or make one under another key"
        raise StructureMismatchError(f"{key!r} is there already, and {'; '.join(wrong)}: {advice}", key=key)


DEFAULT_ALPHA = 0.6  # of the contract: who says nothing else takes the buffer's


def _rows(plan: structure.Plan) -> dict[object, object]:
    return {leaf.name: (tuple(leaf.shape[1:]), leaf.dtype) for leaf in plan.leaves}
