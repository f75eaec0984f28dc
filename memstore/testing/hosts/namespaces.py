"""The commands that make namespaces and enter them, and the processes that hold them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
