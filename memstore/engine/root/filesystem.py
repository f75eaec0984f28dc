"""File systems, by the kernel's account: which can hold a store, what their locks depend on, and who holds a file.

`check_filesystem` goes by the number that statfs(2) has for each kind. `holders_of` reads /proc/locks, and for segments
/proc/*/maps: for errors and `stats` only. A shared lock is listed under the pid that took it. A forked child that keeps
its parent's mapping keeps the lock too, after the parent's death as well: the maps of all processes tell of that. They
take a while to read.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Literal

from memstore.engine import syscalls
from memstore.engine.files.mapping import OwnedFile, map_file
from memstore.errors import UnsupportedFilesystemError

log = logging.getLogger("memstore")

Durability = Literal["process", "disk"]

TMPFS = 0x01021994
_LOCAL = {
    TMPFS: "tmpfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0x794C7630: "overlay",
}
_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x0BD00BD0: "Lustre",
    0x00C36400: "CephFS",
    0x47504653: "GPFS",
    0x01021997: "9p",
    0x65735546: "FUSE",
    0x5346414F: "AFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x19830326: "BeeGFS",
}


def check_filesystem(root: str, durability: Durability | None) -> int:
    """Refuses network file systems, "disk" on tmpfs, and what is no Linux. Returns the type, as statfs has it.

    (A store on storage that hosts share has its catalog elsewhere: see `shared.py`.)
    """
    if not os.path.exists(syscalls.BOOT_ID):
        raise UnsupportedFilesystemError(
            f"{root}: this machine has no {syscalls.BOOT_ID}: a memstore store needs Linux, with /proc mounted"
        )
    kind = syscalls.filesystem_type(root)
    if kind in _NETWORK:
        raise UnsupportedFilesystemError(
            f"{root} is on {_NETWORK[kind]}, which has neither shared mappings nor locks that memstore could rely on: "
            "put the root on /dev/shm or a local disk; to share it, serve it: memstore serve ROOT --shared, see "
            "docs/shared-storage.md"
        )
    if kind == TMPFS and durability == "disk":
        raise UnsupportedFilesystemError(
            f'{root} is on tmpfs, which no disk holds: durability="disk" needs a local disk'
        )
    if kind not in _LOCAL:
        log.warning("%s is on an unknown file system (type %#x); it must have flock, mmap and fallocate", root, kind)
    return kind


def mappings_lose_locks(path: str) -> bool:
    """Returns whether mappings may keep no locks where a path lies, by the type of its file system; False: nowhere."""
    try:
        return _LOCAL.get(syscalls.filesystem_type(path), "overlay") == "overlay"
    except FileNotFoundError:
        return False


def mappings_keep_locks(path: str) -> bool:
    """Finds out on `path`, which nobody locks, whether a mapping keeps a file's lock when the file is closed.

    Not so on overlay: a lock is that of overlay's file, and a mapping refers to the file in the layer below. Other
    file systems that are stacked on one may do likewise, so all are asked. A process that is being started, by
    whatever thread, has the file open until its exec, which looks like a lock that is kept: hence twice. Call it
    while the store's folder is locked, and where no fork can come between.
    """
    return _keeps_lock(path) and _keeps_lock(path)


def _keeps_lock(path: str) -> bool:
    with OwnedFile(path, os.O_RDONLY) as first, OwnedFile(path, os.O_RDONLY) as other:
        if not syscalls.lock_exclusive(first.fd):  # somebody's who has no business there: nothing can be told
            return False
        mapping = map_file(first.fd, syscalls.PAGE)
        first.close()
        if syscalls.lock_exclusive(other.fd):
            return False
        del mapping
        return syscalls.lock_exclusive(other.fd)


def is_network(path: str) -> bool:
    """Returns whether a file system is known as one that several hosts can mount."""
    return syscalls.filesystem_type(path) in _NETWORK


def is_in_memory(path: str) -> bool:
    """Returns whether files there are memory, for which the kernel may have huge pages."""
    return syscalls.filesystem_type(path) == TMPFS


def filesystem_name(kind: int) -> str:
    return {**_LOCAL, **_NETWORK}.get(kind, f"type {kind:#x}")


# --- who holds a file ------------------------------------------------------------------------------------------------


Identity = tuple[int, int]  # device, inode


def lock_holders() -> dict[Identity, set[int]]:
    """Returns the pids that hold a flock on each file, as /proc/locks tells: who took it, if in our pid namespace."""
    holders: dict[Identity, set[int]] = defaultdict(set)
    for _ in range(2):  # a lock that comes or goes meanwhile may hide others from one reading
        _read_locks(holders)
    return holders


def lockers_of(fd: int) -> list[int]:
    """Returns the pids that hold a flock on an open file, sorted."""
    found = syscalls.status(fd)
    return sorted(lock_holders().get((found.st_dev, found.st_ino), ()))


def _read_locks(holders: dict[Identity, set[int]]) -> None:
    try:
        with open("/proc/locks") as file:
            for line in file:
                fields = line.split()
                if len(fields) > 5 and fields[1] == "FLOCK":
                    major, minor, inode = fields[5].split(":")
                    holders[os.makedev(int(major, 16), int(minor, 16)), int(inode)].add(int(fields[4]))
    except OSError:
        pass


def holders_of(files: Collection[Identity]) -> dict[Identity, set[int]]:
    """Returns the pids that hold each of these files, by a mapping or a lock. A file that nobody holds is left out.

    Who only took the lock is named where its maps can't be read, or nobody is known to map the file. A file whose lock
    is listed under the dead alone is in, with no pid.
    """
    if not files:
        return {}
    takers = lock_holders()
    mapped, readable = _map_holders(files)
    found: dict[Identity, set[int]] = {}
    for file in files:
        taken = takers.get(file, set())
        pids = mapped.get(file, set()) | (taken - readable)
        pids = {pid for pid in pids or taken if pid in readable or os.path.exists(f"/proc/{pid}")}
        if pids or taken:
            found[file] = pids
    return found


def _map_holders(files: Collection[Identity]) -> tuple[dict[Identity, set[int]], set[int]]:
    """Returns who maps these files privately, as readers do, and whose maps could be read.

    What writers keep mapped holds no lock.
    """
    devices = {f"{os.major(device):02x}:{os.minor(device):02x}": device for device, _ in files}
    private = re.compile(rf" r[-w][-x]p [0-9a-f]+ ({'|'.join(devices)}) ([0-9]+) ".encode())
    wanted, mapped, readable = set(files), defaultdict[Identity, set[int]](set), set[int]()
    for pid, maps in all_maps():
        readable.add(pid)
        for device, inode in private.findall(maps):
            file = devices[device.decode()], int(inode)
            if file in wanted:
                mapped[file].add(pid)
    return mapped, readable


def all_maps() -> Iterator[tuple[int, bytes]]:
    """Yields each process whose maps this one may read: its pid, and what /proc/PID/maps says."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/maps", "rb") as file:
                    yield int(name), file.read()
            except OSError:  # ended, or another user's
                continue


def mappers_of(file: Identity) -> set[int]:
    """Returns the pids that map a file, whichever way, as far as their maps can be read."""
    device, inode = file
    wanted = re.compile(rf" [0-9a-f]+ {os.major(device):02x}:{os.minor(device):02x} {inode} ".encode())
    return {pid for pid, maps in all_maps() if wanted.search(maps)}
