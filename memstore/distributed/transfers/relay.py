"""Whether this host's index process brings bytes of other hosts, by registered memory: a process asks it then.

The index process says so in ROOT/transport, which is read for each large transfer, in a few microseconds. What stands
there may be old: then whoever asks is told so, or reaches nobody, asks for the bytes over TCP, and leaves the index
process alone for a while.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from memstore.distributed.rules import Member
from memstore.engine import Root, create_file, syscalls

NAME = "transport"  # the file's
LEAST = 2 << 20  # bytes: less comes sooner over TCP, since a round trip of Monarch takes as long as to send as much
AWAY = 30.0  # seconds for which a host is asked over TCP only
_TCP = b"tcp"


def announce(root: Root, transport: str) -> None:
    """The index process brings bytes by this transport; "tcp": it brings none. Raises OSError."""
    if transport == "tcp":
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(_path(root))
    else:
        create_file(root.state, NAME, transport.encode(), root.settings)


def announced(root: Root) -> str:
    """What was said last."""
    try:
        fd = syscalls.open_file(_path(root), os.O_RDONLY)
    except OSError:
        return "tcp"
    try:
        return (syscalls.read_at(fd, 16, 0) or _TCP).decode(errors="replace")
    except OSError:
        return "tcp"
    finally:
        syscalls.close(fd)


def _path(root: Root) -> str:
    return f"{root.state}/{NAME}"


class Relay:
    """Thread-safe.

    Args:
        members: finds a member of the cluster by its id; None: there is none any more.
    """

    def __init__(self, root: Root, members: Callable[[bytes], Member | None]) -> None:
        self._root, self._members = root, members
        self._away: dict[bytes, float] = {}  # by member: until when it is asked over TCP only (monotonic)

    def way_to(self, member: Member, nbytes: int) -> Member | None:
        """This host, if its index process is to bring so many bytes of the other one; None: ask that one."""
        if nbytes < LEAST or self._away.get(member.id, 0.0) > time.monotonic() or announced(self._root) == "tcp":
            return None
        own = self._members(self._root.member_id())
        return own if own is not None and own.id != member.id else None

    def leave(self, member: Member) -> None:
        """It did not work: the next transfers of that host go over TCP."""
        self._away[member.id] = time.monotonic() + AWAY
