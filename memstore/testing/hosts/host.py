"""One host: its addresses, and the processes on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from memstore.testing.hosts import cables, holding
from memstore.testing.hosts.namespaces import Holder

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
        self.address = cables.address(number)
        self.address6 = cables.address6(number) if cables.HAS_IPV6 else None
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
