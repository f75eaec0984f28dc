"""The first 192 bytes of a connection, without I/O. Decision 016, "Frames and messages", has the table.

1. The server greets: 64 bytes, with a nonce.
2. The client introduces itself: 64 bytes, with a nonce of its own, and proves by an HMAC over all 128 that it knows the
   secret. The server compares that before it reads anything else in them.
3. The server proves the same. 32 zeros in its place say that the client's proof was wrong, so that a client can tell
   a wrong secret from a server that died.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import NamedTuple

from memstore.errors import LinkRefusedError

MAGIC = b"memstor1"
PROTOCOL = 1
CLIENT, INDEX, STREAM = 1, 2, 3  # kinds of connections: of a client, of an index process, of bytes as they are
HAS_SECRET = 1  # a flag
ANYBODY = bytes(16)  # as the store id that a client wants

GREETING_SIZE = 64
INTRODUCTION_SIZE = 96
PROOF_SIZE = 32
WRONG_PROOF = bytes(PROOF_SIZE)

_GREETING = struct.Struct(">8sHH4s32s16s")
_NO_SECRET = b"memstore"


class Greeting(NamedTuple):
    """The 64 bytes of either side. `word`: flags of the server, or the kind that the client asks for."""

    magic: bytes
    protocol: int
    word: int
    zeros: bytes
    nonce: bytes
    member: bytes

    @staticmethod
    def decode(greeting: bytes) -> Greeting:
        return Greeting(*_GREETING.unpack_from(greeting))


# --- server -----------------------------------------------------------------------------------------------------------


def greet(member: bytes, secret: bytes | None) -> bytes:
    return _GREETING.pack(MAGIC, PROTOCOL, HAS_SECRET if secret else 0, bytes(4), os.urandom(32), member)


def is_proven(secret: bytes | None, greeting: bytes, introduction: bytes) -> bool:
    """Whether the client knows the secret. In constant time."""
    told, proof = introduction[:GREETING_SIZE], introduction[GREETING_SIZE:]
    return hmac.compare_digest(proof, _client_proof(secret, greeting + told))


def kind_asked_for(introduction: bytes, member: bytes) -> int | None:
    """The kind of connection that a client wants, which has proven itself. None: it wants what isn't here."""
    told = Greeting.decode(introduction)
    is_known = told.magic == MAGIC and told.protocol == PROTOCOL and told.word in (CLIENT, INDEX, STREAM)
    return told.word if is_known and told.member in (member, ANYBODY) else None


def server_proof(secret: bytes | None, greeting: bytes, introduction: bytes) -> bytes:
    return _proof(secret, b"server" + greeting + introduction)


# --- client -----------------------------------------------------------------------------------------------------------


def check_greeting(address: str, greeting: bytes, member: bytes | None, secret: bytes | None) -> bytes:
    """The store id of the server that has greeted so.

    Raises:
        LinkRefusedError: it is not the one that this process wants, or not for this process.
    """
    found = Greeting.decode(greeting)
    if found.magic != MAGIC:
        raise LinkRefusedError(f"{address} answers {greeting[:16]!r}: no memstore serves there; look at the address")
    if found.protocol != PROTOCOL:
        raise LinkRefusedError(
            f"{address} speaks protocol {found.protocol}, and this process protocol {PROTOCOL}: "
            "run versions of memstore on both hosts that speak the same one"
        )
    if bool(found.word & HAS_SECRET) != bool(secret):
        theirs, ours = ("a", "none") if found.word & HAS_SECRET else ("no", "one")
        raise LinkRefusedError(
            f"{address} has {theirs} secret, and this process has {ours}: set MEMSTORE_SECRET_FILE to the same on all"
        )
    check_member(address, found.member, member)
    return found.member


def check_member(address: str, found: bytes, wanted: bytes | None) -> None:
    """Raises LinkRefusedError if another member than `wanted` is at the address. None: any will do."""
    if wanted is not None and found != wanted:
        raise LinkRefusedError(
            f"the member {found.hex()} serves at {address}, and {wanted.hex()} was expected there: another root is "
            "served under its address"
        )


def introduce(greeting: bytes, kind: int, member: bytes | None, secret: bytes | None) -> bytes:
    told = _GREETING.pack(MAGIC, PROTOCOL, kind, bytes(4), os.urandom(32), member or ANYBODY)
    return told + _client_proof(secret, greeting + told)


def check_proof(address: str, proof: bytes, secret: bytes | None, greeting: bytes, introduction: bytes) -> None:
    """Raises LinkRefusedError if the server has another secret."""
    if not hmac.compare_digest(proof, server_proof(secret, greeting, introduction)):
        raise LinkRefusedError(
            f"{address} has another secret than this process (pid {os.getpid()}): MEMSTORE_SECRET_FILE must name the "
            "same bytes on all hosts"
        )


def _client_proof(secret: bytes | None, told: bytes) -> bytes:
    return _proof(secret, b"client" + told)


def _proof(secret: bytes | None, told: bytes) -> bytes:
    return hmac.digest(secret or _NO_SECRET, told, "sha256")
