"""Connections between hosts, and who listens. Blocking calls, threads, no event loop; no torch, no pickle.

    listener = Listener(address, secret=..., member=store_id, hello=..., serve=..., stream=...)
    links = Links(secret=..., kind=CLIENT, hello=...)
    links.send(listener.address, store_id, b"request", deadline)   # b"answer"; None: there was none

sockets    addresses, options of sockets, what a forked child does with them, how many bytes they move
handshake  the secret of a cluster, the first 192 bytes of a connection, which prove it, and the first message
frames     messages as frames, and back; the sending half of a connection
client     Links: a connection for each address, which threads share, made again when it has broken
server     Listener: the thread that accepts, shakes hands and reads
"""

from __future__ import annotations

from memstore.distributed.links.client import Begun, Links
from memstore.distributed.links.handshake import (
    CLIENT,
    INDEX,
    Hello,
    OtherMemberError,
    check_size,
    hello_of_this_process,
    read_secret,
    secret_of,
    write_secret,
)
from memstore.distributed.links.server import Asked, Listener
from memstore.distributed.links.sockets import Address, Moved, Traffic, parse_address, parse_own_address

__all__ = [
    "CLIENT",
    "INDEX",
    "Address",
    "Asked",
    "Begun",
    "Hello",
    "Links",
    "Listener",
    "Moved",
    "OtherMemberError",
    "Traffic",
    "check_size",
    "hello_of_this_process",
    "parse_address",
    "parse_own_address",
    "read_secret",
    "secret_of",
    "write_secret",
]
