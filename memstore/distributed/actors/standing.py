"""An index process starts Monarch, and its actor on it: once, and beside its listener, which needs nothing of both.

Bytes of values may go by Monarch without an actor of ours (memstore/distributed/rdma).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from memstore._threads import between_forks
from memstore.distributed.actors.asked import Asked
from memstore.distributed.actors.reference import NAME, Reference, bytes_of, encode_reference, need_monarch
from memstore.distributed.links import Address, Hello, parse_address

_START_WITHIN = 30.0  # seconds
# A host that is cut off for a minute must not end, by Monarch's defaults, who has a message for it.
_SETTINGS = {"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1h", "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "1h"}


def start_actor(
    member: bytes, address: str, hello: Hello, serve: Callable[[Asked], None], failed: Callable[[str], None]
) -> bytes:
    """Starts the actor of this process. It takes a second, and more where Monarch comes from a cold disk.

    Args:
        member: the store id of this host.
        address: of its listener; Monarch listens at the same IP, at a port of its own.
        hello: what this process says of itself.
        serve: gets each request, on the actor's event loop: it must not wait.
        failed: told once the actor can't go on.

    Returns: an encoded `Reference` to it.

    Raises:
        MissingPackageError: Monarch isn't installed.
        RuntimeError, and what else Monarch raises.
    """
    proc = start_monarch(address, hello.monarch, failed)
    with between_forks():
        from memstore.distributed.actors.desk import Desk
        from memstore.distributed.actors.index_actor import IndexActor, stand_at

    stand_at(Desk(member, serve))
    actor = proc.spawn(NAME, IndexActor)
    actor.initialized.get(_START_WITHIN)
    return encode_reference(Reference(member, hello, bytes_of(actor)))


def start_monarch(address: str, version: str, failed: Callable[[str], None]) -> Any:
    """Starts Monarch in this process, as often as it is called. It listens to whoever can connect.

    Args:
        address: as of `start_actor`.
        version: of Monarch; empty: it isn't installed.
        failed: as of `start_actor`; that of the last call.

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
