"""Saves of this process of which a storage can't know whether they go on.

torch tells a storage neither that another rank has failed, nor that a save is over on a rank which doesn't coordinate.
So a save is taken for over if its writer is gone or begins another save, or if the thread in which it ran has ended or
begins another save.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from memstore.integrations.dcp.places import Place

_REMEMBERED = 4096
_abandoned: list[tuple[Place, str]] = []  # saves that this process coordinated, and that have no end
_parts: dict[weakref.finalize[..., Any], weakref.ref[threading.Thread]] = {}  # what ends each, and where it runs
_carried_out: dict[Hashable, None] = {}  # plans that this process has carried out; the last ones


def coordinate(writer: Any, place: Place, save: str) -> weakref.finalize[..., Any]:
    """Notes that a writer coordinates a save: unless what is returned is detached, the save is abandoned by the next.

    A finalizer may come at any time, so it does no more than note that.
    """
    unfinished = weakref.finalize(writer, _abandoned.append, (place, save))
    unfinished.atexit = False
    return unfinished


def abandon() -> None:
    """Gives back what saves have left that were over before their end."""
    while True:
        try:
            place, save = _abandoned.pop()
        except IndexError:
            return
        place.abandon(save)


def take_part(writer: Any, end: Callable[[], None]) -> weakref.finalize[..., Any]:
    """`end` is called once the save is over for this rank. It may be called at any time, by any thread."""
    part = weakref.finalize(writer, end)
    part.atexit = False
    _parts[part] = weakref.ref(threading.current_thread())
    return part


def end_parts() -> None:
    """Ends this process's parts in saves that are over: called by a thread that begins a save."""
    for part, runs_in in list(_parts.items()):
        thread = runs_in()
        if not part.alive or thread is None or thread is threading.current_thread() or not thread.is_alive():
            part()
            _parts.pop(part, None)


def carry_out(plan: Hashable) -> bool:
    """Notes that this process carries out a plan. Whether it has done so before."""
    is_again = _carried_out.pop(plan, 0) is None
    _carried_out[plan] = None
    for old in list(_carried_out)[:-_REMEMBERED] if len(_carried_out) > _REMEMBERED else ():
        _carried_out.pop(old, None)
    return is_again
