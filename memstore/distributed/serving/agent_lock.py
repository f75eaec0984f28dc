"""ROOT/agent.lock: who serves a root holds it. The index process inherits it, so it is free when both are dead.

Of a store on storage that hosts share, it lies in the state folder.

In it stands a line: the boot in which the root was served last, as long as there was no clean end (else `-`), and how
often its index process was started. Behind it a mark, once that process was told to end: who would join waits then.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.engine import lock_holders, state_folder, syscalls
from memstore.errors import NotServedError

NAME = "agent.lock"
CLUSTER_FILE = "cluster"  # what the index process writes for people: `cluster_file.py`
_PATIENCE = 2.0  # seconds: an agent that was killed takes its index process with it, but not in the same moment
_NO_BOOT = "-"
_LINE = 61  # bytes
_ENDS, _GOES_ON = b"ending\n", b"       "


class Note(NamedTuple):
    """`boot`: hexadecimal; empty: the last service had a clean end, or there was none."""

    boot: str
    incarnation: int


class AgentLock:
    """Held until it is closed, and by whoever has inherited `fd`.

    Raises:
        NotServedError: somebody else serves the root.
    """

    def __init__(self, root: str, *, patience: float = _PATIENCE) -> None:
        self.path = f"{state_folder(root)}/{NAME}"
        self.fd = syscalls.open_file(self.path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + patience
        while not syscalls.lock_exclusive(self.fd):
            pids = holders(self.path)
            if any(map(_lives, pids)) or time.monotonic() > deadline:
                self.close()
                raise NotServedError(f"{root} is served already, by {describe(pids)}: end that agent first (SIGTERM)")
            time.sleep(0.01)

    def read(self) -> Note:
        return _note_of(syscalls.read_at(self.fd, _LINE, 0))

    def write(self, note: Note) -> None:
        """Also to the disk, if there is one."""
        line = f"{note.boot or _NO_BOOT} {note.incarnation}"
        mark = _GOES_ON if note.boot else b""  # else it stays as it is
        syscalls.write_at(self.fd, f"{line:<{_LINE - 1}}\n".encode() + mark, 0)
        syscalls.sync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            syscalls.close(self.fd)
            self.fd = -1


def _note_of(line: bytes) -> Note:
    with contextlib.suppress(ValueError):
        boot, number = line.decode(errors="replace").split()
        return Note("" if boot == _NO_BOOT else boot, int(number))
    return Note("", 0)


def is_served(root: str) -> bool:
    """Whether an agent or its index process lives. It takes the lock for a moment, if it is free."""
    try:
        fd = syscalls.open_file(f"{state_folder(root)}/{NAME}", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        if not syscalls.lock_exclusive(fd):
            return True
        syscalls.unlock(fd)  # a child that is forked meanwhile has the file open too
        return False
    finally:
        syscalls.close(fd)


def note_end(root: str) -> None:
    """Whoever serves it is about to end. Nothing happens where its folder is gone."""
    with contextlib.suppress(OSError):
        fd = syscalls.open_file(f"{state_folder(root)}/{NAME}", os.O_RDWR)
        try:
            syscalls.write_at(fd, _ENDS, _LINE)
        finally:
            syscalls.close(fd)


def is_about_to_end(root: str) -> bool:
    """Whether that was noted, and no index process was started since."""
    try:
        fd = syscalls.open_file(f"{state_folder(root)}/{NAME}", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return syscalls.read_at(fd, len(_ENDS), _LINE) == _ENDS
    finally:
        syscalls.close(fd)


def has_ended_well(root: str) -> bool:
    """Returns whether who served the root last has ended as it was told to. The root may be gone: that is as well."""
    try:
        fd = syscalls.open_file(f"{state_folder(root)}/{NAME}", os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        return _note_of(syscalls.read_at(fd, _LINE, 0)).boot == ""
    finally:
        syscalls.close(fd)


def agent_of(root: str) -> int:
    """Returns the pid of the agent that serves the root; 0: there is none, or it doesn't say so just now."""
    state = state_folder(root)
    try:
        with open(f"{state}/{CLUSTER_FILE}", "rb") as file:
            pid = msgspec.json.decode(file.read(), type=_Serving).agent
    except (OSError, *UNDECODABLE):
        return 0
    # Others take the lock for a moment, to see whether it is free; and the file may be of an agent that was killed.
    return pid if pid in holders(f"{state}/{NAME}") and _lives(pid) else 0


class _Serving(msgspec.Struct, frozen=True):
    agent: int


def holders(path: str) -> list[int]:
    """The pids that have taken the lock, as far as the kernel tells."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return []
    return sorted(lock_holders().get((status.st_dev, status.st_ino), ()))


def _lives(pid: int) -> bool:
    """The kernel goes on to name who has taken a lock, when only a child of it has it still."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def describe(pids: list[int]) -> str:
    return f"pid {', '.join(map(str, pids))}" if pids else "a process that can't be seen from here"
