"""Hosts for tests: several on one machine, each with its own network, `/dev/shm`, hostname and boot id.

::

    from tests.support.hosts import Hosts

    with Hosts(3) as hosts:
        server = hosts[0].popen(["python", "serve.py", hosts[0].address])
        done = hosts[1].run(["python", "client.py", hosts[0].address], capture_output=True, timeout=10)
        hosts.cut(0, 1)                    # packets vanish, as when a cable is pulled
        hosts.heal(0, 1)
        hosts.delay(0, 2, 0.01)            # 10 ms each way
        hosts[0].kill()                    # all of its processes

They are namespaces of the kernel, joined by virtual cables and a switch. Root may make them; others may where the
system permits user namespaces. The commands `ip` (iproute2), `unshare`, `nsenter` and `mount` (util-linux) are needed:
`why_unavailable` says what is missing. When the `with` ends, or the process that made them, however it ends, then all
that runs on the hosts is killed, and nothing is left.

`Hosts` makes them, and cuts, heals and delays what is sent. `Host` runs commands on one of them. `Holder` is a process
that holds namespaces; its programs are holding.py and switching.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support import holding, switching
from tests.support.switching import DELAYED, HOST, NOWHERE

# --- All hosts -------------------------------------------------------------------------------------------------------


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
        names = "".join(f"{one} {host.name}\n" for host in self._hosts for one in addresses_of(host.number))
        for host in self._hosts:
            settings = {"name": host.name, "shm_bytes": self._shm_bytes, "boot_id": str(uuid.uuid4())}
            host.holder.ask(json.dumps({**settings, "names": f"{_LOCALHOST}{names}"}), expected="ready")
        self._switch.set_links(join_links([host.holder.pid for host in self._hosts]))
        self._switch.ask(DELAY_PORT)
        for host in self._hosts:
            host.holder.set_links(furnish_links(host.number, self._count))

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
            self._hosts[way[0]].holder.set_links(aim_link(way[1], cable))


def need_hosts() -> None:
    """Skips the test that calls it, or whose fixture does, where hosts can't be made."""
    import pytest

    reason = why_unavailable()
    if reason:
        pytest.skip(reason)


@functools.cache
def why_unavailable() -> str | None:
    """Why there can be no hosts here, for skips of tests; None if there can. It makes one, and takes it away."""
    try:
        with Hosts(1):
            return None
    except HostsUnavailableError as error:
        return str(error)


# --- One host --------------------------------------------------------------------------------------------------------


KINDS = ("--net", "--mount", "--uts")  # of its namespaces
_IN_FOLDER = 'cd -- "$0" && exec "$@"'  # who enters a mount namespace is in its root


class Host:
    """A host. Made by `Hosts`.

    It sees the machine's files, but for `/dev/shm`, and the machine's processes: pids are the same on all hosts. It
    reaches the other hosts, by address or by name, and nothing else.

    Attributes:
        number: its index in `Hosts`.
        name: its hostname, "host0", ...
        address: its IPv4 address.
        address6: its IPv6 address; None where the machine has no IPv6.
    """

    def __init__(self, number: int, holder: Holder) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = ipv4_address(number)
        self.address6 = ipv6_address(number) if HAS_IPV6 else None
        self.holder = holder
        self._started: list[subprocess.Popen[Any]] = []

    def popen(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process on the host.

        Args:
            command: the program and its arguments. One that isn't there ends with the exit code 127.
            options: those of `subprocess.Popen`, except `shell` and `executable`.

        Returns:
            The process itself. Signals, `pid` and exit code are its own. It is killed when the host goes.
        """
        full, options = self._entering(command, options)
        process = subprocess.Popen(full, **options)
        self._started = [one for one in self._started if one.poll() is None]
        self._started.append(process)
        return process

    def run(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs a command on the host, and waits for its end, as `subprocess.run` with these options does."""
        full, options = self._entering(command, options)
        return subprocess.run(full, **options)

    def entering(self) -> list[str]:
        """The prefix of a command line that runs a command on the host. The command begins in the root folder there."""
        return self.holder.enter(*KINDS)

    def namespaces(self) -> list[str]:
        """The files of its namespaces, in the order in which a process may enter them: see `enter`."""
        return self.holder.namespaces(*KINDS)

    def processes(self) -> list[int]:
        """The pids of what runs on the host."""
        return holding.pids_of(self.holder.pid)

    def kill(self) -> None:
        """Kills all processes on the host, also those that these started, and returns when none is left.

        Their connections are closed by the kernel, as when processes die. For the loss of a whole host, cut it off
        from the others first. `/dev/shm` keeps its files.
        """
        self.kill_started()
        self.holder.ask("kill")

    def kill_started(self) -> None:
        """Kills what `popen` started, also what has not entered the host yet, where its holder would not find it."""
        for process in self._started:
            process.kill()
            process.wait()
        self._started.clear()

    def _entering(
        self, command: Sequence[str | os.PathLike[str]], options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, Any]]:
        if isinstance(command, str) or not command:
            raise ValueError(f"{command!r} is no command: give a list, as in ['sh', '-c', ...]")
        refused = {"shell", "executable"} & set(options)
        if refused:
            raise ValueError(f"{sorted(refused)} can't be had on a host: give a list, as in ['sh', '-c', ...]")
        folder = os.path.abspath(options.get("cwd") or os.getcwd())
        words = [os.fspath(word) for word in command]
        rest = {name: value for name, value in options.items() if name != "cwd"}
        return [*self.entering(), "/bin/sh", "-c", _IN_FOLDER, folder, *words], rest

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address})"


# --- Namespaces ------------------------------------------------------------------------------------------------------


_TIMEOUT = 30.0
_PACKAGES = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}  # Debian's names
_ADMIN = (1 << 21) | (1 << 12)  # CAP_SYS_ADMIN, CAP_NET_ADMIN


class HostsUnavailableError(RuntimeError):
    """This machine, or this user, can't have hosts for tests; the message says why."""


class HostGoneError(RuntimeError):
    """The process that holds a host, or the switch, has been killed, or does not answer."""


class Holder:
    """A process that runs one of this package's programs in namespaces of its own, which live as long as it does.

    Args:
        program: the file.
        kinds: options of unshare: "--net", ...
        inside: a holder whose user namespace, if it has one, is this one's too.
    """

    def __init__(self, program: Path, kinds: Sequence[str], inside: Holder | None = None) -> None:
        self._has_user = inside._has_user if inside else not _may_administrate()
        around = inside.enter() if inside and self._has_user else []
        user = ["--user", "--map-root-user"] if self._has_user and not inside else []
        python = [sys.executable, "-I", "-S", str(program), str(os.getpid())]
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_TIMEOUT)
        with theirs:
            self._process = subprocess.Popen(
                [*around, find_command("unshare"), *user, *kinds, "--", *python],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=theirs.fileno(),  # why it ended is read as its answer
                start_new_session=True,  # a Ctrl-C in the terminal, or the end of `timeout`, is the owner's to handle
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def enter(self, *kinds: str) -> list[str]:
        """What to put before a command that is to run in its namespaces of these kinds."""
        user = ["--user", "--preserve-credentials"] if self._has_user else []
        return [find_command("nsenter"), f"--target={self.pid}", *user, *kinds, "--"]

    def namespaces(self, *kinds: str) -> list[str]:
        """The files of its namespaces of these kinds, behind that of its user namespace, if it has one."""
        names = {"--user": "user", "--net": "net", "--mount": "mnt", "--uts": "uts"}
        return [f"/proc/{self.pid}/ns/{names[kind]}" for kind in (("--user",) if self._has_user else ()) + kinds]

    def set_links(self, lines: Sequence[str]) -> None:
        """Runs lines of `ip -batch` in its network."""
        command = [*self.enter("--net"), find_command("ip"), "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=_TIMEOUT)
        if done.returncode:
            raise HostGoneError(f"ip ended with {done.returncode} in the network of {self.pid}: {done.stderr.strip()}")

    def ask(self, line: str, *, expected: str = "done") -> None:
        """Sends a line, if there is one, and waits for the answer."""
        if line:
            with contextlib.suppress(BrokenPipeError):  # it has ended: what it wrote says why
                self._channel.sendall(f"{line}\n".encode())
        found = self._receive(f"{expected}\n".encode())
        if found != f"{expected}\n":
            reason = found.strip() or "it was killed"
            raise HostGoneError(f"the process {self.pid}, which holds namespaces, ended: {reason}")

    def _receive(self, expected: bytes) -> str:
        """What it writes, up to what is expected, or its end."""
        found = b""
        while found != expected:
            try:
                more = self._channel.recv(1000)
            except ConnectionResetError:  # told once: it ended with lines unread
                continue
            except TimeoutError:
                message = f"the process {self.pid}, which holds namespaces, gave no answer in {_TIMEOUT:g} s"
                raise HostGoneError(message) from None
            if not more:
                break
            found += more
        return found.decode(errors="replace")

    def end(self) -> None:
        """Tells it to end; `close` waits for that too."""
        with contextlib.suppress(OSError):  # it has ended already
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        try:
            self._process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()


def enter(namespaces: Sequence[str]) -> None:
    """Moves this process, which has one thread, to a host. What it has open stays open; its folder is that host's root.

    Args:
        namespaces: `Host.namespaces`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        for file in [stack.enter_context(open(path)) for path in namespaces]:  # those of the machine's /proc
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file.name)


def find_command(name: str) -> str:
    """Raises HostsUnavailableError."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        raise HostsUnavailableError(f"the command {name} is missing; it comes with the package {_PACKAGES[name]}")
    return path


def _may_administrate() -> bool:
    """Whether this process may make namespaces as it is; otherwise a user namespace around them may permit it."""
    with open("/proc/self/status") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return int(effective, 16) & _ADMIN == _ADMIN


# --- Cables ----------------------------------------------------------------------------------------------------------
# Who reaches whom: the addresses of hosts, and the lines of `ip -batch` that join, cut, heal and delay.
#
# All hosts hang on one switch (a bridge). Where a host's packets for another go is told by one entry of its table of
# neighbours, which is permanent, so that nobody asks for hardware addresses. A cut is an address that no one has: the
# packets vanish, with no RST and no ICMP, one way only, and between these two only. A delay is an address at the holder
# of the switch, which sends on what it gets.


MOST_HOSTS = 100  # numbers are parts of addresses
DELAY_PORT = "delays"  # of the switch: its holder has it open
HAS_IPV6 = os.path.exists("/proc/net/if_inet6")
_PORT = "eth0"


@dataclass(frozen=True)
class Cable:
    """One way from one host to another."""

    is_cut: bool = False
    delay: float = 0.0  # seconds


def ipv4_address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def ipv6_address(number: int) -> str:
    return f"fd77::{number + 1:x}"


def addresses_of(number: int) -> list[str]:
    return [ipv4_address(number), ipv6_address(number)] if HAS_IPV6 else [ipv4_address(number)]


def join_links(holders: Sequence[int]) -> list[str]:
    """In the switch's network: a port for each host, by the pid of its holder."""
    lines = [
        "link add switch up type bridge mcast_snooping 0",
        f"link add {DELAY_PORT} up type veth peer name delayed",
        "link set delayed up master switch",
    ]
    for number, pid in enumerate(holders):
        peer = f"peer name {_PORT} address {_hardware(HOST, number)} netns {pid}"
        lines += [f"link add port{number} type veth {peer}", f"link set port{number} up master switch"]
    return lines


def furnish_links(number: int, count: int) -> list[str]:
    """In a host's network: its addresses, and its neighbours."""
    lines = ["link set lo up", f"link set {_PORT} up addrgenmode none"]  # no addresses but those that can be cut
    lines += [
        f"address add {one}/{64 if ':' in one else 24} dev {_PORT}{_at_once(one)}" for one in addresses_of(number)
    ]
    return lines + [line for other in range(count) if other != number for line in aim_link(other, Cable())]


def aim_link(target: int, cable: Cable) -> list[str]:
    """In the sender's network: where what it sends to `target` goes."""
    kind = NOWHERE if cable.is_cut else DELAYED if cable.delay else HOST
    to = f"lladdr {_hardware(kind, target)} dev {_PORT} nud permanent"
    return [f"neighbour replace {one} {to}" for one in addresses_of(target)]


def _at_once(one: str) -> str:
    return " nodad" if ":" in one else ""  # duplicates would be looked for, for seconds


def _hardware(kind: bytes, number: int) -> str:
    return ":".join(f"{byte:02x}" for byte in (*kind, number))
