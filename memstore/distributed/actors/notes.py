"""What an index actor is given and gives back, as bytes: a message of the listener's, or a piece of a longer one.

A *note* to the actor: protocol (2), what it wants (2), milliseconds left (4; 2^32 - 1: no limit), the store id that it
is for (16), the ticket of the request (16), where the piece begins (8), how long the whole message is (8), the piece.
A *reply*: its kind (2), how long the whole answer is (8), a piece of it; or a text. Numbers are big-endian.

Monarch pickles the bytes, and nothing but bytes: what is in them is looked at as if it had come over a socket.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from memstore.distributed.links import MESSAGE_LIMIT, NO_LIMIT, PROTOCOL

PIECE = 1 << 18  # bytes: what is longer goes in several pieces, and others pass between them
_NOTE = struct.Struct(">HHI16s16sQQ")
_REPLY = struct.Struct(">HQ")
_TEXT = 4096  # characters


class Want(IntEnum):
    ASK = 1  # here is a piece of a request; the last one is answered
    MORE = 2  # the piece of the answer that begins there
    DROP = 3  # nobody waits for the answer any more
    PING = 4  # is anybody there?


class Kind(IntEnum):
    ANSWER = 1  # a piece of the answer
    TAKEN = 2  # the piece was taken, or: somebody is there
    NOTHING = 3  # no answer in time, or nothing is known of this request; nobody knows what became of it
    REFUSED = 4  # what was sent is no note, or not for this actor: a text says why


class NoteError(Exception):
    """Bytes that are no note for this actor."""


class Note(NamedTuple):
    """Attributes:
    start, total: bytes; of MORE the start counts, of DROP and PING neither.
    """

    want: Want
    ticket: bytes
    milliseconds: int = 0
    start: int = 0
    total: int = 0
    piece: bytes = b""


class Reply(NamedTuple):
    kind: Kind
    total: int = 0
    piece: bytes = b""

    @property
    def text(self) -> str:
        return self.piece.decode(errors="replace")


def encode_note(note: Note, member: bytes) -> bytes:
    head = _NOTE.pack(PROTOCOL, note.want, note.milliseconds, member, note.ticket, note.start, note.total)
    return head + note.piece


def decode_note(data: object, member: bytes) -> Note:
    """Raises NoteError."""
    if not isinstance(data, bytes) or not _NOTE.size <= len(data) <= _NOTE.size + PIECE:
        size = f"{len(data):,} bytes" if isinstance(data, bytes) else type(data).__name__
        raise NoteError(f"{size}: expected bytes, {_NOTE.size} to {_NOTE.size + PIECE:,} of them")
    protocol, want, milliseconds, asked, ticket, start, total = _NOTE.unpack_from(data)
    if protocol != PROTOCOL:
        raise NoteError(f"it speaks protocol {PROTOCOL}, and was asked in protocol {protocol}")
    if asked != member:
        raise NoteError(f"it is the member {member.hex()}, and {asked.hex()} was asked")
    if want not in Want.__members__.values():
        raise NoteError(f"it was asked for {want}, which it doesn't know")
    piece = data[_NOTE.size :]
    if total > MESSAGE_LIMIT or (want == Want.ASK and start + len(piece) > total):
        raise NoteError(f"{len(piece):,} bytes at {start:,} of a message of {total:,}: it may have {MESSAGE_LIMIT:,}")
    return Note(Want(want), ticket, milliseconds, start, total, piece)


def encode_reply(reply: Reply) -> bytes:
    return _REPLY.pack(reply.kind, reply.total) + reply.piece


def decode_reply(data: object) -> Reply:
    """Raises NoteError."""
    if not isinstance(data, bytes) or not _REPLY.size <= len(data) <= _REPLY.size + PIECE:
        raise NoteError("an answer that is none")
    kind, total = _REPLY.unpack_from(data)
    piece = data[_REPLY.size :]
    if kind not in Kind.__members__.values() or total > MESSAGE_LIMIT or (kind == Kind.ANSWER and len(piece) > total):
        raise NoteError(f"an answer of kind {kind}, with {len(piece):,} of {total:,} bytes")
    return Reply(Kind(kind), total, piece)


def refused(why: str) -> Reply:
    return Reply(Kind.REFUSED, 0, why[:_TEXT].encode())


def milliseconds_of(left: float) -> int:
    """Seconds, as a note has them."""
    return NO_LIMIT if left >= NO_LIMIT / 1000 else max(0, int(left * 1000))
