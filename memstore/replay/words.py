"""A slot's word: state, the claim that writes it, and the lap of its row. The rules: docs/decisions/015.

A row has a *position*: how many were handed out before it. Its slot is the rest by the capacity, its *lap* what
remains.

    bits 0 and 1    state; bit 1 is set where a row can be sampled
    bits 2 to 15    the number of the claim that writes it
    from bit 16     lap + 1; 0: never used
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EMPTY, WRITING, WHOLE, TAKEN = range(4)
STATE, READABLE = 3, 2  # masks: the state, and the bit that whole and taken rows have
_CLAIM_AT, _LAP_AT = 2, 16
_CLAIM = (1 << _LAP_AT - _CLAIM_AT) - 1

Words = NDArray[np.int64]


def words_of(positions: Any, capacity: int, state: int, claim: int = 0) -> Any:
    """The words of positions: of an int an int, of an array an array."""
    return ((positions // capacity + 1) << _LAP_AT) | claim << _CLAIM_AT | state


def positions_of(words: Any, slots: Any, capacity: int) -> Any:
    """The positions of the rows that lie in slots; negative where there was never one."""
    return ((words >> _LAP_AT) - 1) * capacity + slots


def emptied(words: Any) -> Any:
    """The same laps, and nothing there."""
    return words >> _LAP_AT << _LAP_AT


def claims_of(words: Any) -> Any:
    """The numbers of the claims that write there."""
    return words >> _CLAIM_AT & _CLAIM


def are_same(before: Words, after: Words) -> NDArray[np.bool_]:
    """Second look: whether what could be read lies there still. It may have been taken meanwhile."""
    return (before | 1) == (after | 1)
