"""Monarch in a process of ours: whether it is installed, and how an index process starts it for bytes of values.

This imports no Monarch, which takes seconds, until it is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from memstore._threads import between_forks
from memstore.distributed.links import Address, parse_address
from memstore.errors import MissingPackageError

# A host that is cut off for a minute must not end, by Monarch's defaults, who has a message for it.
_SETTINGS = {"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1h", "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "1h"}


def need_monarch(version: str) -> None:
    """Raises MissingPackageError if Monarch isn't installed.

    Args:
        version: as `Hello.monarch` has it.
    """
    if not version:
        advice = "pip install 'torchmonarch>=0.7,<0.8'"
        raise MissingPackageError(f"this needs torchmonarch (Linux, Python 3.10 to 3.13): {advice}")


def start_monarch(address: str, version: str, failed: Callable[[str], None]) -> Any:
    """Starts Monarch in this process, as often as it is called. It listens to whoever can connect.

    Args:
        address: of this process's listener; Monarch listens at the same IP, at a port of its own.
        version: of Monarch; empty: it isn't installed.
        failed: told once Monarch can't go on; that of the last call.

    Returns: this process, for Monarch.

    Raises:
        MissingPackageError: Monarch isn't installed.
        RuntimeError, and what else Monarch raises.
    """
    need_monarch(version)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    with between_forks():
        import monarch.actor

    def fail(failure: Any) -> None:
        failed(str(failure.report()))

    if address not in _started:
        place = parse_address(address)
        monarch.actor.enable_transport(str(Address(place.ip, 0, place.scope)))
        _started.add(address)
    monarch.actor.unhandled_fault_hook = fail
    return monarch.actor.this_proc()


_started: set[str] = set()  # addresses at which Monarch listens in this process: it is told once


def first_line(error: Exception) -> str:
    """Returns the first line of one of Monarch's errors, which may have a hundred."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:500]
