"""What index actors are given and give back: bytes that may be anybody's."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.distributed.actors.notes import (
    PIECE,
    Kind,
    Note,
    NoteError,
    Reply,
    Want,
    decode_note,
    decode_reply,
    encode_note,
    encode_reply,
    milliseconds_of,
)
from memstore.distributed.links import MESSAGE_LIMIT, PROTOCOL

MEMBER = bytes(range(16))
TICKET = bytes(16)


@given(st.sampled_from(Want), st.integers(0, (1 << 32) - 1), st.binary(max_size=100), st.integers(0, 1000))
def test_notes_come_back_as_they_were(want: Want, milliseconds: int, piece: bytes, start: int) -> None:
    note = Note(want, TICKET, milliseconds, start, start + len(piece), piece)
    assert decode_note(encode_note(note, MEMBER), MEMBER) == note


@given(st.sampled_from(Kind), st.binary(max_size=100), st.integers(0, 1000))
def test_replies_come_back_as_they_were(kind: Kind, piece: bytes, more: int) -> None:
    reply = Reply(kind, len(piece) + more, piece)
    assert decode_reply(encode_reply(reply)) == reply


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_read(data: bytes) -> None:
    for decode in (lambda: decode_note(data, MEMBER), lambda: decode_reply(data)):
        try:
            decode()
        except NoteError as error:
            assert str(error)


def head(protocol: int, want: int, member: bytes, start: int, total: int) -> bytes:
    return struct.pack(">HHI16s16sQQ", protocol, want, 0, member, TICKET, start, total)


BAD = {
    "no bytes": (3, "int: expected bytes"),
    "too short": (bytes(55), "55 bytes: expected bytes"),
    "too long": (bytes(56 + PIECE + 1), "expected bytes"),
    "another protocol": (
        head(PROTOCOL + 1, 1, MEMBER, 0, 0),
        f"speaks protocol {PROTOCOL}, and was asked in protocol {PROTOCOL + 1}",
    ),
    "another member": (head(PROTOCOL, 1, bytes(16), 0, 0), f"the member {MEMBER.hex()}, and {bytes(16).hex()} was"),
    "an unknown wish": (head(PROTOCOL, 9, MEMBER, 0, 0), "asked for 9"),
    "a length of 2^63": (head(PROTOCOL, 1, MEMBER, 0, 1 << 63), f"it may have {MESSAGE_LIMIT:,}"),
    "a piece beyond the end": (head(PROTOCOL, 1, MEMBER, 8, 9) + b"xy", "2 bytes at 8 of a message of 9"),
    "a start of 2^63": (head(PROTOCOL, 1, MEMBER, 1 << 63, 1), "0 bytes at 9,223"),
}


@pytest.mark.parametrize(("data", "expected"), BAD.values(), ids=BAD.keys())
def test_a_note_that_is_none_is_refused_and_said_why(data: object, expected: str) -> None:
    with pytest.raises(NoteError, match="."):
        decode_note(data, MEMBER)
    try:
        decode_note(data, MEMBER)
    except NoteError as error:
        assert expected in str(error)


def test_an_answer_that_is_none_is_refused() -> None:
    for data in (None, b"", struct.pack(">HQ", 9, 0), struct.pack(">HQ", 1, 0) + b"x", struct.pack(">HQ", 1, 1 << 63)):
        with pytest.raises(NoteError):
            decode_reply(data)


def test_times_fit_into_a_note() -> None:
    assert [milliseconds_of(left) for left in (-1.0, 0.0, 1.5, float("inf"), 1e12)] == [
        0,
        0,
        1500,
        (1 << 32) - 1,
        (1 << 32) - 1,
    ]
