"""Namespaces of the kernel, for tests: mounts that one process alone sees, processes that are numbered anew."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.children import in_child

MOUNTS, PIDS, NETWORK = 0x20000, 0x20000000, 0x40000000  # CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET
_CLONE_NEWUSER, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x10000000, 0x1000, 0x4000, 1 << 18
_MS_READ_ONLY, _MS_REMOUNT = 1, 32
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """This process may not have what the test needs."""


def in_namespaces(kinds: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function(*arguments)` in a child process in namespaces of its own; skips the test if it may not."""
    try:
        return in_child(_enter_and_call, kinds, function, arguments)
    except Refused as refused:
        pytest.skip(f"this process may not {refused}")


def _enter_and_call(kinds: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    _enter(kinds)
    if kinds & MOUNTS:
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    if not kinds & PIDS:
        return function(*arguments)
    return in_child(_mount_proc_and_call, function, arguments)  # who enters is numbered as before, its children anew


def _mount_proc_and_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    assert os.getpid() == 1
    _mount("proc", "/proc", "proc")
    return function(*arguments)


def _enter(kinds: int) -> None:
    """Root may; others need a user namespace around it, which some systems refuse too."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _check(_libc.unshare(kinds), "enter a namespace")
        return
    _check(_libc.unshare(kinds | _CLONE_NEWUSER), "enter a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def start_loopback(ports: tuple[int, int] | None = None) -> None:
    """In a network namespace of one's own, which begins without.

    Args:
        ports: the first and the last one that connections are made from.
    """
    with socket.socket() as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))
    if ports is not None:
        try:
            with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
                file.write(f"{ports[0]} {ports[1]}")
        except OSError as error:
            raise Refused(f"choose its network's ports: {error}") from None


def mount_tmpfs(folder: str, options: str = "") -> None:
    """In a mount namespace of one's own."""
    _mount("tmpfs", folder, "tmpfs", 0, options)


def mount_overlay(folder: str, lower: str, upper: str, work: str, options: str = "") -> None:
    """As containers have it: `folder` shows the files of `lower`; what is written goes to `upper`."""
    _mount("overlay", folder, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}{options}")


def bind_mount(folder: str, source: str) -> None:
    """`folder` shows what is in `source`."""
    _mount(source, folder, None, _MS_BIND)


def make_read_only(folder: str) -> None:
    """Remounts what is mounted there."""
    _mount("none", folder, None, _MS_REMOUNT | _MS_READ_ONLY)


def unmount(folder: str) -> None:
    _libc.umount2(folder.encode(), 2)  # detach: what is mapped stays until it is not


def _mount(source: str, folder: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    result = _libc.mount(source.encode(), folder.encode(), kind.encode() if kind else None, flags, options.encode())
    _check(result, f"mount {kind}")


def _check(result: int, what: str) -> None:
    code = ctypes.get_errno()
    if result and code in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENODEV):
        raise Refused(f"{what}: {os.strerror(code)}")
    if result:
        raise OSError(code, os.strerror(code))
