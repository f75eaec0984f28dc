"""systemd, or what speaks as it does, is told how a service of `Type=notify` is (sd_notify(3))."""

from __future__ import annotations

import contextlib
import os
import socket

READY, STOPPING = "READY=1", "STOPPING=1"
_VARIABLE = "NOTIFY_SOCKET"


def notify(*states: str) -> None:
    """Nothing happens where nobody wants to hear it."""
    path = os.environ.get(_VARIABLE, "")
    if path[:1] not in ("/", "@"):
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto("\n".join(states).encode(), address)
