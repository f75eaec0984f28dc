"""Where the parts of a replay buffer lie in its control area, and what its description says besides the plan.

Each part starts on a page: control page, claims, a word a slot, the sum tree, and on a disk what `flush` notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from memstore import structure
from memstore.engine import CLAIMS_SIZE, CONTROL_SIZE, Record, decode_mutable
from memstore.errors import CorruptionError
from memstore.replay.limits import RateLimiter
from memstore.replay.sum_tree import SumTree

_PAGE = CONTROL_SIZE
NOTE_SIZE = 16  # bytes a slot: its word, and the xxh3 of its row


class RingOptions(msgspec.Struct, frozen=True, array_like=True):
    """What is fixed when a buffer is made.

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


def encode_options(options: RingOptions) -> bytes:
    return msgspec.msgpack.encode(options)


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


def capacity_of(record: Record) -> int:
    """The slots of a buffer. Raises CorruptionError where its rows would lie in its control area."""
    plan: Any = structure.plan_of_rows(record.description, record.nbytes)
    capacity: int = plan.leaves[0].shape[0]
    size = layout_of(options_of(record), capacity).size
    if min(leaf.offset for leaf in plan.leaves) < size:
        raise CorruptionError(f"its rows start before the end of the {size:,} bytes that its {capacity:,} slots take")
    return capacity


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
