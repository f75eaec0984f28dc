"""Hosts on one machine, and what lies between them."""

from __future__ import annotations

import contextlib
import functools
import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from memstore.testing.hosts import cables, holding, switching
from memstore.testing.hosts.cables import MOST_HOSTS, Cable
from memstore.testing.hosts.host import KINDS, Host
from memstore.testing.hosts.namespaces import Holder, HostGoneError, HostsUnavailableError, find_command

_LOCALHOST = "127.0.0.1 localhost\n::1 localhost\n"


class Hosts:
    """Makes hosts, and takes them away: use it in a `with`. `hosts[0]` is the first `Host`.

    Args:
        count: how many, 1 to 100.
        shm_bytes: what fits into each one's `/dev/shm`.

    Raises:
        HostsUnavailableError: on entering the `with`, as `why_unavailable` says.
    """

    def __init__(self, count: int, *, shm_bytes: int = 256 << 20) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise ValueError(f"{count} hosts: there may be 1 to {MOST_HOSTS}")
        self._count = count
        self._shm_bytes = shm_bytes
        self._hosts: list[Host] = []
        self._cables: dict[tuple[int, int], Cable] = {}
        self._stack = contextlib.ExitStack()

    def cut(self, first: int, second: int, *, one_way: bool = False) -> None:
        """What these two hosts send each other vanishes from now on.

        Args:
            first: the number of one host.
            second: the number of the other host.
            one_way: only what the first sends the second; what the second sends arrives.
        """
        for way in self._ways(first, second, one_way):
            self._lay(way, is_cut=True)

    def heal(self, first: int, second: int, *, one_way: bool = False) -> None:
        """Undoes `cut`, both ways or one."""
        for way in self._ways(first, second, one_way):
            self._lay(way, is_cut=False)

    def delay(self, first: int, second: int, seconds: float, *, one_way: bool = False) -> None:
        """What these two hosts send each other takes so long from now on, both ways or one; 0 ends that.

        A Python process forwards the bytes in order, at some hundred MB/s.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a delay of {seconds} s: it must be 0 or more, and finite")
        for way in self._ways(first, second, one_way):
            self._switch.ask(f"{way[0]} {way[1]} {seconds}")
            self._lay(way, delay=seconds)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            try:
                self._make(stack)
            except (HostGoneError, OSError) as error:
                raise HostsUnavailableError(f"hosts can't be made here: {error}") from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make(self, stack: contextlib.ExitStack) -> None:
        for command in ("ip", "mount"):
            find_command(command)  # before anything is made
        self._switch = Holder(Path(switching.__file__), ["--net"])
        stack.callback(self._switch.close)
        self._switch.ask("", expected="ready")
        stack.callback(self._forget)
        for number in range(self._count):
            holder = Holder(Path(holding.__file__), KINDS, inside=self._switch)
            self._hosts.append(Host(number, holder))
            stack.callback(holder.close)
        for host in self._hosts:
            stack.callback(host.holder.end)  # called before the first `close`: they all end at once
        for host in self._hosts:
            stack.callback(host.kill_started)
        self._furnish()

    def _furnish(self) -> None:
        names = "".join(f"{one} {host.name}\n" for host in self._hosts for one in cables.addresses(host.number))
        for host in self._hosts:
            settings = {"name": host.name, "shm_bytes": self._shm_bytes, "boot_id": str(uuid.uuid4())}
            host.holder.ask(json.dumps({**settings, "names": f"{_LOCALHOST}{names}"}), expected="ready")
        self._switch.set_links(cables.join([host.holder.pid for host in self._hosts]))
        self._switch.ask(cables.DELAY_PORT)
        for host in self._hosts:
            host.holder.set_links(cables.furnish(host.number, self._count))

    def _forget(self) -> None:
        self._hosts.clear()
        self._cables.clear()

    def _ways(self, first: int, second: int, one_way: bool) -> list[tuple[int, int]]:
        for number in (first, second):
            if not 0 <= number < len(self):
                raise IndexError(f"no host {number}: there are {len(self)}, from 0")
        if first == second:
            raise ValueError(f"host {first} and itself: nothing lies between them")
        return [(first, second)] if one_way else [(first, second), (second, first)]

    def _lay(self, way: tuple[int, int], **changes: Any) -> None:
        before = self._cables.get(way, Cable())
        cable = self._cables[way] = replace(before, **changes)
        if cable != before:
            self._hosts[way[0]].holder.set_links(cables.aim(way[1], cable))


@functools.cache
def why_unavailable() -> str | None:
    """Why there can be no hosts here, for skips of tests; None if there can. It makes one, and takes it away."""
    try:
        with Hosts(1):
            return None
    except HostsUnavailableError as error:
        return str(error)
