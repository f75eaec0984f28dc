"""What a host that has lost its state folder has left on storage that hosts share: its next life removes it.

Beside the folder of a host's files there is a file of the same name that says at which address the host is served. An
address is one member's for life: so what another id has left at this host's address is that of a former life, once the
seed has removed that from the members. Nobody else may know that a host won't come back.
"""

from __future__ import annotations

import contextlib
import os
import shutil

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.distributed.rules import Member, View
from memstore.engine import Root, syscalls

_END = ".json"
_LONGEST = 4096  # bytes


class Owner(msgspec.Struct, frozen=True):
    """Attributes:
    address: where the host is served.
    name: its host name, for people.
    """

    address: str
    name: str


def note_owner(root: Root, member: Member) -> None:
    """Whole, or not at all: a rename within one folder. Raises OSError."""
    path = f"{root.segments}{_END}"
    temporary = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        syscalls.unlink(temporary)
    fd = syscalls.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        syscalls.write_at(fd, msgspec.json.encode(Owner(member.address, member.name)), 0)
    finally:
        syscalls.close(fd)
    syscalls.rename(temporary, path)


def remove_former_lives(root: Root, member: Member, view: View) -> list[str]:
    """Removes the files of hosts that were served at this one's address, and are members no more. Returns their ids.

    Raises OSError.
    """
    folder, own = os.path.split(root.segments)
    removed: list[str] = []
    for name in os.listdir(folder):
        former = name.removesuffix(_END)
        if former in (name, own) or any(former == one.id.hex() for one in view.members):
            continue
        if _address(f"{folder}/{name}") == member.address:
            shutil.rmtree(f"{folder}/{former}", ignore_errors=True)
            syscalls.unlink(f"{folder}/{name}")  # last: what was left of the folder is found again
            removed.append(former)
    return removed


def _address(path: str) -> str | None:
    try:
        fd = syscalls.open_file(path, os.O_RDONLY)
        try:
            return msgspec.json.decode(syscalls.read_at(fd, _LONGEST, 0), type=Owner).address
        finally:
            syscalls.close(fd)
    except (OSError, *UNDECODABLE):
        return None
