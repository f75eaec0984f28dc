"""The entry of a replay buffer: what is fixed when it is made, where its parts lie, how it is created and opened.

1. `RateLimiter` and `RingOptions` are the choices that are stored with a buffer.
2. `layout_of` places the parts in the control area, before the rows. Each part starts on a page: the control page, the
   claims, a word a slot, the sum tree, and on a disk the notes of `flush`.
3. `open_or_create` opens a buffer, compares it with what the caller asked for, and creates it if it doesn't exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from memstore import structure
from memstore.datasets import Spec, check_capacity, control_of, put_entry, rows_of_spec, spec_of
from memstore.engine import (
    CLAIMS_SIZE,
    CONTROL_SIZE,
    MutableDescription,
    MutableEntry,
    Record,
    Root,
    deadline_after,
    decode_mutable,
    open_mutable,
    resource_errors,
)
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    KeyNotFoundError,
    MutableEntryError,
    ReadOnlyError,
    StructureMismatchError,
)
from memstore.listing import absent
from memstore.replay.priorities import SumTree
from memstore.structure import Plan, modes

# --- The rate limiter ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Lets writers and samplers of a buffer wait for each other, as the rate limiter of DeepMind's Reverb does.

    With the difference `inserted * samples_per_insert - sampled`, all counted in rows: rows may be inserted until there
    are `min_size`, or while the difference stays at most `samples_per_insert * min_size + tolerance`; they may be
    sampled from `min_size` on, while it stays at least `samples_per_insert * min_size - tolerance`. Callers that wait
    go on in the order in which they came. Writers and samplers have a queue each.

    Args:
        samples_per_insert: how often a row is sampled on average.
        min_size: how many rows must be inserted before the first sample.
        tolerance: how far the difference may deviate, in samples. It must be at least as large as the batches that are
            sampled, and as the batches that are inserted times `samples_per_insert`. A batch of more than twice that
            would wait for ever, and is refused with a ValueError.

    Raises:
        ValueError, TypeError: one of them isn't such a number.

    Example:
        >>> import memstore
        >>> memstore.RateLimiter(samples_per_insert=4.0, min_size=1000, tolerance=512.0)
        RateLimiter(samples_per_insert=4.0, min_size=1000, tolerance=512.0)
    """

    samples_per_insert: float
    min_size: int
    tolerance: float

    def __post_init__(self) -> None:
        for name in ("samples_per_insert", "tolerance"):
            if isinstance(getattr(self, name), (str, bytes)):
                raise TypeError(f"{name} is a number, and not {getattr(self, name)!r:.100}")
        ratio, tolerance = float(self.samples_per_insert), float(self.tolerance)
        if not (math.isfinite(ratio) and ratio > 0):
            raise ValueError(f"samples_per_insert is a number above 0, and not {self.samples_per_insert!r}")
        if type(self.min_size) is not int or self.min_size < 1:
            kind = ValueError if type(self.min_size) is int else TypeError
            raise kind(f"min_size is a number of rows, 1 at least, and not {self.min_size!r:.100}")
        if not (math.isfinite(tolerance) and tolerance >= max(1.0, ratio)):
            raise ValueError(
                f"tolerance is {self.tolerance!r}: with less than {max(1.0, ratio):g}, a sample or an insert of one "
                "row would wait for ever"
            )
        object.__setattr__(self, "samples_per_insert", ratio)
        object.__setattr__(self, "tolerance", tolerance)

    def may_ever_go(self, rows: int, *, is_insert: bool) -> bool:
        """Returns whether a batch of so many rows fits between the bounds at all (but for inserts up to `min_size`)."""
        return rows * (self.samples_per_insert if is_insert else 1.0) <= 2 * self.tolerance

    def most_at_once(self, *, is_insert: bool) -> int:
        """Returns the size of the largest batch for which `may_ever_go` is true."""
        return int(2 * self.tolerance / (self.samples_per_insert if is_insert else 1.0))

    def may_insert(self, inserted: int, sampled: int, rows: int) -> bool:
        """Returns whether `rows` more may be inserted."""
        if inserted + rows <= self.min_size:
            return True
        difference = (inserted + rows) * self.samples_per_insert - sampled
        return difference <= self.samples_per_insert * self.min_size + self.tolerance

    def may_sample(self, inserted: int, sampled: int, rows: int) -> bool:
        """Returns whether `rows` more may be sampled."""
        if inserted < self.min_size:
            return False
        difference = inserted * self.samples_per_insert - (sampled + rows)
        return difference >= self.samples_per_insert * self.min_size - self.tolerance


# --- Options and layout ----------------------------------------------------------------------------------------------


NOTE_SIZE = 16  # bytes a slot: its word, and the xxh3 of its row


class RingOptions(msgspec.Struct, frozen=True, array_like=True):
    """Choices that are fixed when a buffer is made.

    Attributes:
        alpha: the exponent of priorities; None: it has none.
        limiter: the numbers of a RateLimiter.
        is_noted: whether it has room for what `flush` notes.
    """

    alpha: float | None
    limiter: tuple[float, int, float] | None
    is_noted: bool

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """Raises ValueError where the numbers are none."""
        return None if self.limiter is None else RateLimiter(*self.limiter)


_decode = msgspec.msgpack.Decoder(RingOptions).decode


def options_of(record: Record) -> RingOptions:
    """Raises CorruptionError."""
    try:
        options = _decode(decode_mutable(record.description).options)
        options.rate_limiter  # noqa: B018 - looked at now
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptionError(f"what its description says of a buffer can't be read: {error}") from None
    if options.alpha is not None and not 0 <= options.alpha <= ALPHA_LIMIT:
        raise CorruptionError(f"its description has alpha {options.alpha}")
    return options


ALPHA_LIMIT = 4.0


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Offsets in the data section."""

    claims: int
    words: int
    tree: int
    notes: int
    size: int


def layout_of(options: RingOptions, capacity: int) -> RingLayout:
    words = CONTROL_SIZE + _pages(CLAIMS_SIZE)
    tree = words + _pages(8 * capacity)
    notes = tree + (0 if options.alpha is None else _pages(8 * SumTree.nodes(capacity)))
    end = notes + (_pages(NOTE_SIZE * capacity) if options.is_noted else 0)
    return RingLayout(CONTROL_SIZE, words, tree, notes, end)


def _pages(size: int) -> int:
    return -(-size // CONTROL_SIZE) * CONTROL_SIZE


def capacity_of(record: Record) -> int:
    """Returns the number of slots. Raises CorruptionError where the rows would lie in the control area."""
    plan: Any = structure.plan_of_rows(record.description, record.nbytes)
    capacity: int = plan.leaves[0].shape[0]
    size = layout_of(options_of(record), capacity).size
    if min(leaf.offset for leaf in plan.leaves) < size:
        raise CorruptionError(f"its rows start before the end of the {size:,} bytes that its {capacity:,} slots take")
    return capacity


# --- Open or create --------------------------------------------------------------------------------------------------


_OURS = ("index", "weight")  # what samples have besides
_NO_PRIORITIES = "it was made without priorities"
DEFAULT_ALPHA = 0.6  # of the contract: who says nothing else takes the buffer's
BufferMode = Literal["a", "r+", "x"]


def plan_of_spec(key: str, spec: Spec, options: RingOptions, capacity: int) -> tuple[Plan, bytes]:
    """Plans all rows. Also returns the entries of the header. Raises what `Store.create_dataset` raises for a spec."""
    control = control_of(layout_of(options, capacity).size)
    plain, _ = structure.plan_dense(rows_of_spec(spec, capacity), control)
    pairs = spec_of(plain)  # in dicts alone, whatever the example was: samples are TensorDicts
    taken = [name for name in _OURS if isinstance(pairs, dict) and name in pairs]
    if taken:
        raise ValueError(f"{key!r}: spec has the key {taken[0]!r}, which samples have of their own: rename it")
    return structure.plan_dense(rows_of_spec(pairs, capacity), control)


def checked_alpha(alpha: Any) -> float:
    """Raises ValueError, TypeError: it is none."""
    if isinstance(alpha, str) or not hasattr(alpha, "__float__"):
        raise TypeError(f"alpha is a number from 0 to {ALPHA_LIMIT:g}, and not {alpha!r:.100}")
    if not 0 <= alpha <= ALPHA_LIMIT:
        raise ValueError(f"alpha is a number from 0 to {ALPHA_LIMIT:g}, and not {alpha!r}")
    return float(alpha)


def options_for(root: Root, alpha: float | None, limiter: Any) -> RingOptions:
    """Returns the options of a new buffer.

    It has no priorities if `alpha` is None. Raises TypeError: the limiter is none.
    """
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
    """Opens the entry of a buffer, or creates it. It must have the `spec`, `capacity` and `options` that are not None.

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
            plan, entries = plan_of_spec(key, spec, options, capacity)
            mutable = MutableDescription("buffer", plan.description, msgspec.msgpack.encode(options))
            try:
                put_entry(root, key, mutable, plan, entries, deadline)
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
    """Raises MutableEntryError for a reader, while no writer has found out which rows survived a crash of the host."""
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


def _rows(plan: structure.Plan) -> dict[object, object]:
    return {leaf.name: (tuple(leaf.shape[1:]), leaf.dtype) for leaf in plan.leaves}
