"""Hostile headers, digest and all: `read_header` is right or refuses, in bounded time and memory."""

from __future__ import annotations

import base64
import json
import resource
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.engine.format import headers
from memstore.engine.format.headers import SLACK, Header, HeaderSlots, Span, lay_out, read_header
from memstore.engine.format.records import LIVE, STATE_NAMES
from memstore.errors import CorruptionError
from tests.children import in_a_child

STORE = "0123456789abcdef" * 2
KEY = 'a key "quoted" \N{SNOWMAN}'
SLOTS = HeaderSlots(7, LIVE, 9, 7, 1)


def forge(entries: bytes, *, slots: bytes = SLOTS.encode(), key: bytes | None = None, more: bytes = b"") -> bytes:
    """A header with any text for its entries, and a digest that fits. `more` goes into the metadata."""
    start = b'{"__metadata__":{"memstore":"' + slots + b'","store":' + json.dumps(STORE).encode() + b',"digest":"'
    named = b'","key":' + (json.dumps(KEY).encode() if key is None else key)
    rest = named + b',"checksums":"","objects":"","description":"' + base64.b64encode(b"plan") + b'"' + more + b"}"
    text = start + b"0" * 16 + rest + entries
    content = bytearray(struct.pack("<Q", len(text)) + text)
    at = 8 + len(start)
    content[at : at + 16] = headers.digest_of(content, at)
    return bytes(content)


def entry(name: str, dtype: Any, shape: Any, start: Any, stop: Any) -> bytes:
    return (
        f",{json.dumps(name)}:".encode()
        + json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}).encode()
    )


def refused(content: bytes, room: int = 0) -> CorruptionError:
    started = time.process_time()
    with pytest.raises(CorruptionError) as caught:
        read_header(content, len(content) + room)
    assert time.process_time() - started < 20
    assert caught.value.detail
    return caught.value


def test_what_a_put_writes_is_read() -> None:
    spans = [
        Span(("a",), "float32", 4, (3, 5), 60),
        Span(("b", 1), "uint8", 1, (7,), 7),
        Span(("c",), "int64", 8, (), 8),
    ]
    layout = lay_out(spans)
    made = Header(KEY, STORE, b"plan", b"objects", layout.header, checksums=24)
    for slack in (0, 1, 100_000):
        content = made.finish(5, layout.nbytes, slack, b"c" * 24)
        found = read_header(bytes(content), len(content) + layout.nbytes + slack)
        assert (found.put_id, found.key, found.store, found.nbytes) == (5, KEY, STORE, layout.nbytes)
        assert (found.description, found.objects, found.checksums) == (b"plan", b"objects", b"c" * 24)
        assert found.start == len(content)


def test_a_forged_one_can_be_right() -> None:
    """Else none of the refusals here would say anything."""
    content = forge(
        entry("a", "F32", [2, 3], 0, 24) + entry("b", "U8", [0, 5], 24, 24) + entry(SLACK, "U8", [6], 24, 30) + b"}  "
    )
    found = read_header(content, len(content) + 30)
    assert (found.nbytes, found.key, found.version, found.state) == (24, KEY, 9, LIVE)


PLACES = {
    "overlap": entry("a", "U8", [8], 0, 8) + entry("b", "U8", [8], 4, 12),
    "hole": entry("a", "U8", [8], 0, 8) + entry("b", "U8", [4], 12, 16),
    "hole in front": entry("a", "U8", [8], 8, 16),
    "too short": entry("a", "U8", [8], 0, 8),
    "too long": entry("a", "U8", [17], 0, 17),
    "backwards": entry("a", "U8", [8], 8, 0),
    "negative": entry("a", "U8", [-16], 0, 16),
    "negative twice": entry("a", "U8", [-4, -4], 0, 16),
    "negative offset": entry("a", "U8", [16], -16, 0),
    "overflow": entry("a", "U8", [1 << 32, 1 << 32, 16], 0, 16),
    "beyond 64 bits": entry("a", "U8", [16], 0, 1 << 70),
    "shape beyond 64 bits": entry("a", "U8", [1 << 70], 0, 16),
    "wrong size": entry("a", "F32", [16], 0, 16),
    "no such dtype": entry("a", "F4", [16], 0, 16),
    "not a dtype": entry("a", 3, [16], 0, 16),
    "not a shape": entry("a", "U8", "16", 0, 16),
    "floating shape": entry("a", "U8", [16.5], 0, 16),
    "no offsets": b',"a":{"dtype":"U8","shape":[16]}',
    "three offsets": b',"a":{"dtype":"U8","shape":[16],"data_offsets":[0,8,16]}',
    "one name twice": entry("a", "U8", [8], 0, 8) + entry("a", "U8", [8], 8, 16),
    "slack too short": entry("a", "U8", [8], 0, 8) + entry(SLACK, "U8", [4], 8, 12),
    "slack in front": entry(SLACK, "U8", [8], 0, 8) + entry("a", "U8", [8], 8, 16),
    "slack of a shape": entry("a", "U8", [8], 0, 8) + entry(SLACK, "U8", [], 8, 16),
    "huge slack": entry("a", "U8", [8], 0, 8) + entry(SLACK, "U8", [1 << 62], 8, 1 << 62),
    "an empty one out of place": entry("a", "U8", [16], 0, 16) + entry("b", "U8", [0], 3, 3),
    "not an object": b',"a":3',
    "nothing": b"",
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_dont_fill_the_data(name: str) -> None:
    refused(forge(PLACES[name] + b"}"), 16)


TEXTS = {
    "cut": b',"a":{"dtype":"U8"',
    "trailing": b'},"b":{}',
    "garbage": b"}garbage",
    "not UTF-8": b',"\xff\xfe":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}}',
    "a NUL": b"}\0",
    "deep": b',"a":' + b'{"x":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "deep lists": b',"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_no_header(name: str) -> None:
    refused(forge(TEXTS[name]), 16)


@pytest.mark.parametrize("key", [b'""', b'"\\u0000"', b'"\\ud800"', b"3", b"null", b'"' + b"x" * 501 + b'"', b'["a"]'])
def test_what_cant_be_a_key(key: bytes) -> None:
    refused(forge(b"}", key=key))


@pytest.mark.parametrize(
    "slots",
    [
        SLOTS.encode().replace(b"live   ", b"gone   "),
        SLOTS.encode().replace(b"live   ", b"live\0\0\0"),
        SLOTS.encode()[:-1] + b"x",
        b" " * headers.SLOTS_SIZE,
        b"=" * headers.SLOTS_SIZE,
        HeaderSlots(1 << 63, LIVE, 1, 1, 1).encode(),
        HeaderSlots(1, LIVE, 1 << 63, 1, 1).encode(),
        SLOTS.encode().replace(b"put=0", b"put=+"),
        SLOTS.encode().replace(b"put=00", b"put=0_"),
        SLOTS.encode().upper(),
    ],
    ids=range(10),
)
def test_slots_without_a_meaning(slots: bytes) -> None:
    refused(forge(b"}", slots=slots))


def test_slots_of_each_state_are_read() -> None:
    for state in STATE_NAMES:
        content = forge(b"}", slots=HeaderSlots(3, state, 5, 3, 2).encode())
        found = read_header(content, len(content))
        assert (found.put_id, found.state, found.version, found.batch, found.count) == (3, state, 5, 3, 2)


def test_an_erased_put_id_is_told_without_its_check() -> None:
    text = bytearray(SLOTS.encode())
    text[4:20] = b"0" * 16
    content = forge(b"}", slots=bytes(text))
    assert read_header(content, len(content)).put_id == 0


@pytest.mark.parametrize(
    "more", [b',"memstore":"x"', b',"store":"x"', b',"digest":"x"', b',"key":3', b',"objects":"&"']
)
def test_a_second_entry_in_the_metadata(more: bytes) -> None:
    refused(forge(b"}", more=more))


@pytest.mark.parametrize("length", [0, 1, 100, 2**31, 2**32, 2**62, 2**63, 2**64 - 8, 2**64 - 1, 200_000_000])
def test_lengths(length: int) -> None:
    content = forge(b"}")
    spoiled = struct.pack("<Q", length) + content[8:]
    refused(spoiled)
    refused(spoiled, 1 << 40)
    refused(content[:-1])
    refused(content + b" ", 10)
    for size in (0, 1, 7, 8, 60, 150):
        refused(content[:size])


def test_the_file_is_another_size() -> None:
    content = forge(entry("a", "U8", [16], 0, 16) + b"}")
    assert read_header(content, len(content) + 16).nbytes == 16
    for size in (0, len(content) - 1, len(content), len(content) + 15, len(content) + 17, 1 << 62):
        with pytest.raises(CorruptionError):
            read_header(content, size)


names = st.text(max_size=5) | st.sampled_from(["a", "b", SLACK, "__metadata__", "__pad__"])
sizes = st.integers(-3, 40) | st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63)])
entries_of_any_kind = st.tuples(
    names, st.sampled_from(["U8", "F32", "BOOL", "F8_E4M3", "F4", ""]), st.lists(sizes, max_size=3), sizes, sizes
)


@given(entries=st.lists(entries_of_any_kind, max_size=4), room=st.integers(0, 60))
def test_any_places(entries: list[tuple[Any, ...]], room: int) -> None:
    """What is accepted fills the data exactly: checked in the simplest way there is, a byte at a time."""
    content = forge(b"".join(entry(*one) for one in entries) + b"}")
    try:
        found = read_header(content, len(content) + room)
    except CorruptionError:
        return
    taken = [0] * room
    for _, _, _, start, stop in {one[0]: one for one in entries}.values():
        for i in range(start, stop):
            taken[i] += 1
    assert taken == [1] * room
    slack = sum(stop - start for name, _, _, start, stop in entries if name == SLACK)
    assert found.nbytes == room - slack


@given(st.data())
def test_any_damage(data: st.DataObject) -> None:
    """Of a whole header, without a digest that fits."""
    content = bytearray(forge(entry("a", "U8", [16], 0, 16) + b"}   "))
    before = read_header(bytes(content), len(content) + 16)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if kind == "cut":
            del content[at : at + data.draw(st.integers(1, 50))]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        else:
            content[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
    try:
        found = read_header(bytes(content), len(content) + 16)
    except CorruptionError:
        return
    if found.put_id:
        assert found == before


@given(st.binary(max_size=400))
def test_any_bytes(content: bytes) -> None:
    refused(content, 100)
    refused(forge(content[:100], key=b'"k"')[: 8 + 100])


@in_a_child
def test_200_megabytes() -> None:
    content = forge(b"}" + b" " * 200_000_000)
    _limit(64 << 20)
    started = time.process_time()
    refused(content)
    assert time.process_time() - started < 1


@in_a_child
def test_many_entries() -> None:
    """As large as a header may be: a few times its size in memory, and seconds."""
    one = b',"%08d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    content = forge(b"".join(one % i for i in range(300_000)) + b"}")
    _limit(16 * len(content))
    started = time.process_time()
    assert read_header(content, len(content)).nbytes == 0
    assert time.process_time() - started < 20


def test_a_shape_that_takes_all_day_to_multiply() -> None:
    lengths = ",".join(["9223372036854775807"] * 200_000)
    started = time.process_time()
    refused(forge(b',"a":{"dtype":"U8","shape":[' + lengths.encode() + b'],"data_offsets":[0,16]}}'), 16)
    assert time.process_time() - started < 5


def _limit(room: int) -> None:
    with open("/proc/self/status") as file:
        (used,) = (int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, -1))
