"""Connections between hosts, and who listens. Blocking calls, threads, no event loop; no torch, no pickle.

    listener = Listener(address, secret=..., member=store_id, hello=..., serve=..., stream=...)
    links = Links(secret=..., kind=CLIENT, hello=...)
    links.send(listener.address, store_id, b"request", deadline)   # b"answer"; None: there was none

address     where a host listens
secret      what the hosts of a cluster share
handshake   the first 192 bytes, which prove that both sides know the secret
frames      messages as frames, and back
hello       the first message both ways: versions
forks       what a forked child closes
outgoing    the sending half of a connection
dialing     a connection is made
connection  requests of many threads over one connection
begun       requests that no thread waits for
links       Links: a connection for each address, made again when it has broken
traffic     how many bytes they move
gate        who is let in
guest       a connection at the listener: requests, their answers, and bounds of both
listener    Listener: the thread that accepts and reads
"""

from __future__ import annotations

from memstore.distributed.links.client import Begun, Links
from memstore.distributed.links.frames import MESSAGE_LIMIT, NO_LIMIT
from memstore.distributed.links.handshake import (
    CLIENT,
    INDEX,
    PROTOCOL,
    STREAM,
    Hello,
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
    "MESSAGE_LIMIT",
    "PROTOCOL",
    "STREAM",
    "Address",
    "Asked",
    "Begun",
    "Hello",
    "Links",
    "Listener",
    "NO_LIMIT",
    "Moved",
    "Traffic",
    "check_size",
    "hello_of_this_process",
    "parse_address",
    "parse_own_address",
    "read_secret",
    "secret_of",
    "write_secret",
]
