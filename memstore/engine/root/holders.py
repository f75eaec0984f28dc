"""Who holds files, by the kernel's account: /proc/locks, and for segments /proc/*/maps. For errors and `stats` only.

A shared lock is listed under the pid that took it. A forked child that keeps its parent's mapping keeps the lock too,
after the parent's death as well: the maps of all processes tell of that. They take a while to read.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator

Identity = tuple[int, int]  # device, inode


def lock_holders() -> dict[Identity, set[int]]:
    """(device, inode) -> pids that hold a flock on it, as /proc/locks tells: who took it, if in our pid namespace."""
    holders: dict[Identity, set[int]] = defaultdict(set)
    for _ in range(2):  # a lock that comes or goes meanwhile may hide others from one reading
        _read_locks(holders)
    return holders


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
    """The pids that hold each of these files, by a mapping or a lock; held by nobody, it is left out.

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
    """Who maps these files privately, as readers do: what writers keep mapped holds no lock. And whose maps we saw."""
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
    """Each process whose maps this one may read: its pid, and what /proc/PID/maps says."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/maps", "rb") as file:
                    yield int(name), file.read()
            except OSError:  # ended, or another user's
                continue


def mappers_of(file: Identity) -> set[int]:
    """The pids that map a file, whichever way, as far as their maps can be read."""
    device, inode = file
    wanted = re.compile(rf" [0-9a-f]+ {os.major(device):02x}:{os.minor(device):02x} {inode} ".encode())
    return {pid for pid, maps in all_maps() if wanted.search(maps)}
