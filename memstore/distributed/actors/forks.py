"""Monarch doesn't go through a fork: what a child has of its parent's Monarch hangs, for ever, whatever it is asked."""

from __future__ import annotations

import os
import sys

_is_lost = False


def is_monarch_lost() -> bool:
    """Whether this process was forked from one that had imported Monarch."""
    return _is_lost


def _note_fork() -> None:
    global _is_lost
    _is_lost = _is_lost or "monarch" in sys.modules


os.register_at_fork(after_in_child=_note_fork)
