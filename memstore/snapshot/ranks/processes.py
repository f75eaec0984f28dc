"""Processes of this host: whether one that took part in a call has ended. Imports no torch."""

from __future__ import annotations

import os

import msgspec

from memstore.engine import boot_id, syscalls

_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat, counted behind the program's name (proc(5): 3 and 22)


class Process(msgspec.Struct, frozen=True):
    """A process, told apart from all others, also from later ones of its number.

    Attributes:
        host: the boot of its machine, and its namespace of pids; None if its /proc shows another namespace.
        pid: its number there.
        started: when, in ticks since that boot.
    """

    host: tuple[bytes, int] | None
    pid: int
    started: int


def this_process() -> Process:
    _, started = _look_up("self")
    return Process(_host(), os.getpid(), started)


def has_ended(process: Process, mine: Process) -> bool:
    """Whether it surely has: of one on another host, or in another namespace, nobody here can know.

    Args:
        mine: this process.
    """
    if process.host is None or process.host != mine.host:
        return False
    try:
        os.kill(process.pid, 0)
        state, started = _look_up(str(process.pid))
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or hidden in /proc
        return False
    return started != process.started or state in "ZX"  # dead, and nobody has waited for it yet


def _host() -> tuple[bytes, int] | None:
    if os.readlink("/proc/self") != str(os.getpid()):
        return None
    return boot_id(), syscalls.pid_namespace()


def _look_up(process: str) -> tuple[str, int]:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[_STATE], int(fields[_STARTED])
