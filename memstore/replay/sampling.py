"""Rows on their way out of a replay buffer: picked, copied without a lock, and looked at again.

What went meanwhile is picked anew. After some rounds, what is left is copied under the mutex, where nothing can be
claimed; so a sample always gets on. The rules: docs/decisions/015.
"""

from __future__ import annotations

import platform
import time
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from memstore.engine import SAMPLES
from memstore.errors import StoreTimeoutError
from memstore.replay.picking import Picked, Picker
from memstore.replay.ring import Ring
from memstore.replay.turns import Turn
from memstore.replay.waiting import pause, wait_for
from memstore.replay.words import are_same
from memstore.rows import copy_rows

Numbers = NDArray[np.int64]
Targets = list[torch.Tensor]

_ROUNDS = 16  # before the rest is copied under the mutex
_NONE = np.empty(0, np.int64)
LOADS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")  # elsewhere all is copied under the mutex


def new_targets(ring: Ring, rows: int) -> Targets:
    """A tensor for each leaf, of its bits: not every dtype has the kernels."""
    return [torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in ring.tensors]


def sample(ring: Ring, picker: Picker, rows: int, targets: Targets, deadline: float) -> Picked:
    """Fills targets with rows. Raises StoreTimeoutError: there are none, or a rate limiter says no."""
    picked = picker.pick(rows, locked=False) if ring.limiter is None else None
    if picked is None:
        picked = wait_for_rows(ring, picker, rows, deadline, count=True)
    wrong = copy_picked(ring, picked, targets) if LOADS_IN_ORDER else np.arange(rows)
    rounds = 0
    while len(wrong):
        wrong = _whole_units(wrong, picker.together)
        if time.monotonic() > deadline:
            raise StoreTimeoutError(
                f"{ring.key!r}: rows were written over faster than they could be copied", key=ring.key
            )
        rounds += 1
        locked = ring.entry.writable and (rounds > _ROUNDS or not LOADS_IN_ORDER)
        again = partial(_copy_others, ring, picker, picked, wrong, targets, locked=locked)
        left = ring.run(again, deadline) if locked else again()
        if left is None:
            others = wait_for_rows(ring, picker, len(wrong), deadline)
            left = _replace(ring, picked, wrong, targets, others)
        wrong = left
    return picked


def copy_picked(ring: Ring, picked: Picked, targets: Targets) -> Numbers:
    """Copies rows. Returns the numbers of those that lie there no more."""
    rows = torch.as_tensor(picked.slots)
    for tensor, target in zip(ring.tensors, targets, strict=True):
        copy_rows(tensor, rows, target, is_mapped=True)
    same = are_same(picked.words, ring.words.take(picked.slots))
    return _NONE if same.all() else np.flatnonzero(~same)


def _whole_units(wrong: Numbers, together: int) -> Numbers:
    """All rows of those units of which one went."""
    if together == 1:
        return wrong
    return (np.unique(wrong // together)[:, None] * together + np.arange(together)).ravel()


def _copy_others(
    ring: Ring, picker: Picker, picked: Picked, wrong: Numbers, targets: Targets, *, locked: bool
) -> Numbers | None:
    """Picks others for some rows, and copies these. Returns the numbers of those that went again; None: of all."""
    others = picker.pick(len(wrong), locked=locked)
    return None if others is None else _replace(ring, picked, wrong, targets, others)


def _replace(ring: Ring, picked: Picked, wrong: Numbers, targets: Targets, others: Picked) -> Numbers:
    """Copies others in the place of some rows. Returns the numbers of those that went again."""
    copies = new_targets(ring, len(wrong))
    still = wrong[copy_picked(ring, others, copies)]
    places = torch.as_tensor(wrong)
    for target, copy in zip(targets, copies, strict=True):
        target[places] = copy
    picked.slots[wrong], picked.words[wrong] = others.slots, others.words
    if picked.odds is not None and others.odds is not None:
        picked.odds[wrong] = others.odds
    return still


# --- wait -------------------------------------------------------------------------------------------------------------


def wait_for_rows(ring: Ring, picker: Picker, rows: int, deadline: float, *, count: bool = False) -> Picked:
    """Picks rows when there are some, and the rate limiter says yes. Raises StoreTimeoutError.

    Args:
        count: for the rate limiter. Who asks again for some of the same sample doesn't, and isn't stopped either.
    """
    if not ring.entry.writable:
        return pause(partial(picker.pick, rows, locked=False), ring, deadline, partial(picker.wants, rows))
    turn = Turn(ring, SAMPLES, rows)
    look = partial(_look, ring, picker, rows, turn if count else None)
    picked, sleeps = wait_for(ring, look, deadline, partial(reason, picker, rows, turn), turn)
    if sleeps:
        ring.page.wake()
    return picked


def _look(ring: Ring, picker: Picker, rows: int, turn: Turn | None) -> tuple[Picked, bool] | None:
    """Under the mutex. Also whether somebody is to be woken after it."""
    if turn is not None:
        if not turn.has_come():
            return None
        turn.leave()
    picked = picker.pick(rows, locked=True)
    if picked is None or turn is None or ring.limiter is None:
        return None if picked is None else (picked, False)
    ring.numbers.sampled += rows
    return picked, ring.page.ring()


def reason(picker: Picker, rows: int, turn: Turn) -> str:
    """Why there is nothing, for an error."""
    return turn.reason() or picker.wants(rows)
