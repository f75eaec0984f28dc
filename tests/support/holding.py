"""The program of the process that holds a host: run as a file, with the standard library alone.

It makes the host's file systems and name, and says "ready". From then on it holds the host's namespaces, which live as
long as a process is in them. To "kill" on its standard input it kills all other processes of the host, and says "done".
When its standard input ends, or the process that started it, it kills them too, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def hold(owner: int) -> None:
    process = os.pidfd_open(owner)  # a fork of the owner keeps the pipe open; this tells of the owner itself
    if os.getppid() != owner:
        return
    settings = json.loads(sys.stdin.readline())
    furnish(settings["name"], settings["shm_bytes"], settings["names"], settings["boot_id"])
    answer("ready")
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(0, select.POLLIN)
    while process not in (fds := [fd for fd, _ in poll.poll()]):
        if fds and not os.read(0, 100):
            break
        kill_all()
        answer("done")
    kill_all()


def furnish(name: str, shm_bytes: int, names: str, boot_id: str) -> None:
    """Args: see `Hosts`; `names` is a text as in /etc/hosts."""
    mount("-t", "tmpfs", "-o", f"size={shm_bytes},mode=1777", "tmpfs", "/dev/shm")
    show("/etc/hosts", names)
    show(BOOT_ID, f"{boot_id}\n")  # what tells hosts, and a host before and after its restart, apart
    socket.sethostname(name)


def show(path: str, text: str) -> None:
    """On this host, and nowhere else, the file at `path` has this text."""
    source = "/dev/shm/shown"
    with open(source, "w") as file:
        file.write(text)
    os.chmod(source, 0o444)
    mount("--bind", source, path)
    os.unlink(source)  # what is mounted stays


def mount(*arguments: str) -> None:
    pid = os.posix_spawnp("mount", ["mount", *arguments], os.environ)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        sys.exit(f"mount {' '.join(arguments)} ended with {code}")


def kill_all() -> None:
    """Until none is left: what is killed may have started others meanwhile."""
    while found := pids_of(os.getpid()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                kill(os.pidfd_open(pid))


def kill(process: int) -> None:
    """Returns when it has ended, whether or not its parent has looked."""
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll()
    finally:
        os.close(process)


def pids_of(holder: int) -> list[int]:
    """The processes of the host that `holder` holds, but for itself; also those that enter it, once they have begun."""
    network = os.readlink(f"/proc/{holder}/ns/net")
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != holder and is_on(pid, network, holder)]


def is_on(pid: int, network: str, holder: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if f"--target={holder}".encode() in file.read().split(b"\0")[:2]:  # nsenter's
                return True
        return os.readlink(f"/proc/{pid}/ns/net") == network
    except OSError:  # it has ended, or may not be looked at: then it is outside
        return False


def answer(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    hold(int(sys.argv[1]))
