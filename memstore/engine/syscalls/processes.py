"""Processes that belong together."""

from __future__ import annotations

import os
import signal

from memstore.engine.syscalls.binding import Int, Long, bind, holding_gil, last_error

_PR_SET_PDEATHSIG = 1

_prctl = bind(holding_gil, "prctl", Int, Int, Long, Long, Long, Long)


def die_with_parent(parent: int) -> bool:
    """Asks the kernel to kill this process when the thread that started it ends.

    Args:
        parent: the pid of who started it.

    Returns: False if that one has ended already, so that nobody will be told: end then.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise last_error()
    return os.getppid() == parent
