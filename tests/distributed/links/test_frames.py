"""Messages become frames and messages again, however the bytes are cut; and what is no frame is refused."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.distributed.links.frames import (
    FRAME_LIMIT,
    GIVEN_UP,
    HEADER,
    MESSAGE_LIMIT,
    MORE,
    NO_LIMIT,
    PIECE_LIMIT,
    FrameError,
    Inbox,
    Message,
    Outbox,
    frame,
)
from tests.examples import examples

sizes = st.sampled_from([0, 1, 100, PIECE_LIMIT - 1, PIECE_LIMIT, PIECE_LIMIT + 1, 2 * PIECE_LIMIT, 600_000])


def message(call: int, milliseconds: int, size: int, byte: int) -> Message:
    return Message(call, milliseconds, bytes([byte]) * size)


messages = st.lists(
    st.builds(message, st.integers(1, (1 << 64) - 1), st.integers(0, NO_LIMIT), sizes, st.integers(0, 255)),
    max_size=6,
    unique_by=lambda one: one.call,
)


def drained(outbox: Outbox, portions: list[int]) -> list[bytes]:
    """What is sent, where the kernel takes as much as `portions` say, and then all."""
    sent: list[bytes] = []
    todo = list(portions)
    while parts := outbox.next_parts():
        whole = b"".join(parts)
        taken = whole[: todo.pop()] if todo else whole
        outbox.sent(len(taken))
        sent.append(taken)
    assert outbox.nbytes == 0
    return sent


def taken_in(inbox: Inbox, portions: list[bytes]) -> list[Message]:
    return [message for portion in portions for message in inbox.feed(memoryview(portion))]


@given(messages, st.lists(st.integers(0, 300_000), max_size=20), st.lists(st.integers(1, 300_000), max_size=20))
@settings(max_examples=examples(60))
def test_messages_survive_any_cuts(sent: list[Message], writes: list[int], reads: list[int]) -> None:
    outbox = Outbox()
    for message in sent:
        outbox.add(*message)
    stream = b"".join(drained(outbox, writes))
    portions: list[bytes] = []
    start = 0
    for size in reads:
        portions.append(stream[start : start + size])
        start += size
    received = taken_in(Inbox(), [*portions, stream[start:]])
    assert sorted(received) == sorted(sent)
    short = [message for message in sent if len(message.body) <= PIECE_LIMIT]
    assert [message for message in received if message in short] == short


def test_single_bytes_make_messages() -> None:
    stream = frame(1, 5, b"one") + frame(2, NO_LIMIT, b"") + frame(3, 0, b"three")
    expected = [Message(1, 5, b"one"), Message(2, NO_LIMIT, b""), Message(3, 0, b"three")]
    assert taken_in(Inbox(), [bytes([byte]) for byte in stream]) == expected


def test_a_short_message_passes_a_long_one_on_its_way() -> None:
    outbox = Outbox()
    outbox.add(1, 7, bytes(5 * PIECE_LIMIT))
    first = b"".join(outbox.next_parts())
    outbox.sent(len(first))
    outbox.add(2, 0, b"short")
    received = taken_in(Inbox(), [first, *drained(outbox, [])])
    assert [message.call for message in received] == [2, 1]
    assert received[1].milliseconds == 7


@pytest.mark.parametrize("pieces_sent", [0, 1, 2])
def test_a_long_message_that_is_given_up_makes_room_for_the_next(pieces_sent: int) -> None:
    outbox = Outbox()
    outbox.add(1, 0, bytes(3 * PIECE_LIMIT))
    outbox.add(2, 0, b"2" * PIECE_LIMIT * 2)
    stream = b""
    for _ in range(pieces_sent):
        part = b"".join(outbox.next_parts())
        outbox.sent(len(part))
        stream += part
    outbox.give_up(1)
    outbox.give_up(77)
    received = taken_in(Inbox(), [stream, *drained(outbox, [])])
    assert received == [Message(2, 0, b"2" * PIECE_LIMIT * 2)]


def test_a_message_that_is_all_but_sent_is_not_given_up() -> None:
    outbox = Outbox()
    outbox.add(1, 0, bytes(PIECE_LIMIT + 1))
    stream = b"".join(outbox.next_parts())
    outbox.sent(len(stream))
    outbox.next_parts()  # its last piece is a frame now
    outbox.give_up(1)
    assert taken_in(Inbox(), [stream, *drained(outbox, [])])[0].call == 1


BAD = {
    "shorter than a header": HEADER.pack(12, 1, 0, 0),
    "of no length": bytes(100),
    "longer than a frame": HEADER.pack(FRAME_LIMIT + 1, 1, 0, 0),
    "2^63 bytes long": (1 << 63).to_bytes(8, "big"),
    "2^32 - 1 bytes long": b"\xff\xff\xff\xff",
    "of an unknown flag": HEADER.pack(14, 1, 0, 4) + b"x",
    "of both flags": HEADER.pack(13, 1, 0, MORE | GIVEN_UP),
    "an empty piece of more": HEADER.pack(13, 1, 0, MORE),
    "given up before it began": HEADER.pack(13, 1, 0, GIVEN_UP),
    "given up with bytes": HEADER.pack(14, 1, 0, MORE) + b"x" + HEADER.pack(14, 1, 0, GIVEN_UP) + b"x",
    "of a second long message": HEADER.pack(14, 1, 0, MORE) + b"x" + HEADER.pack(14, 2, 0, MORE) + b"x",
}


@pytest.mark.parametrize("stream", BAD.values(), ids=BAD.keys())
def test_what_is_no_frame_is_refused(stream: bytes) -> None:
    with pytest.raises(FrameError):
        Inbox().feed(memoryview(stream))
    inbox = Inbox()
    with pytest.raises(FrameError):
        taken_in(inbox, [bytes([byte]) for byte in stream])


@pytest.mark.parametrize("size", [1000, 999])
def test_a_message_longer_than_the_limit_is_refused_before_it_is_whole(size: int) -> None:
    inbox = Inbox(message_limit=size)
    assert inbox.feed(memoryview(frame(1, 0, bytes(size)))) != []
    with pytest.raises(FrameError):
        inbox.feed(memoryview(frame(2, 0, bytes(size + 1))))
    inbox = Inbox(message_limit=size)
    piece = HEADER.pack(13 + 500, 1, 0, MORE) + bytes(500)
    inbox.feed(memoryview(piece))
    with pytest.raises(FrameError):
        taken_in(inbox, [piece, piece])


def test_an_answer_that_is_too_long_is_not_taken() -> None:
    outbox = Outbox()
    with pytest.raises(ValueError, match="it may have"):
        outbox.add(1, 0, bytes(MESSAGE_LIMIT + 1))
    assert outbox.nbytes == 0


@given(
    st.binary(max_size=200) | st.lists(st.sampled_from([frame(1, 0, b"x"), *BAD.values()]), max_size=4).map(b"".join)
)
def test_garbage_is_refused_or_waited_for(stream: bytes) -> None:
    tracemalloc.start()
    try:
        Inbox().feed(memoryview(stream))
    except FrameError:
        pass
    finally:
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert used < 1 << 20  # no length is believed
