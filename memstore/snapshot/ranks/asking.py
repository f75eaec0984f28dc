"""The objects of an app state are asked for their state dicts, by all ranks in one order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from memstore.snapshot.ranks.ranks import Ranks
from memstore.snapshot.stateful import AppState, RNGState


def ask(ranks: Ranks, keys: Iterable[str], app_state: AppState) -> dict[str, Any]:
    """The state dicts by name.

    The random state comes first, and stays what it was: other state dicts may draw numbers. These come one after the
    other on all ranks, since they may have collectives inside: a rank whose state dict fails keeps none of the others
    waiting in the next one's.

    Args:
        keys: what any rank has, the same on all of them.
        app_state: what this rank has.

    Raises:
        Exception: what a state_dict raised here, or on another rank, which is named.
    """
    random_state = RNGState()
    before = random_state.state_dict()
    found = {key: value.state_dict() for key, value in app_state.items() if isinstance(value, RNGState)}

    def one(key: str) -> bytes:
        if key in app_state and key not in found:
            found[key] = app_state[key].state_dict()
        return b""

    try:
        for key in sorted(keys):
            ranks.together(partial(one, key))
    finally:
        random_state.load_state_dict(before)
    return found
