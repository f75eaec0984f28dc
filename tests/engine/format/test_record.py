"""Records: what the catalog stores comes back, or a typed error does."""

from __future__ import annotations

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from memstore.engine.format.records import (
    LIVE,
    Record,
    SegmentRow,
    decode_record,
    decode_row,
    encode_record,
    encode_row,
)
from memstore.errors import CorruptionError

u63 = st.integers(0, 2**63 - 1)
records = st.builds(
    Record,
    version=u63,
    put_id=u63,
    segment=u63,
    size=u63,
    start=u63,
    nbytes=u63,
    created=st.floats(allow_nan=False),
    description=st.binary(max_size=80),
    objects=st.binary(max_size=80),
    inline=st.none() | st.binary(max_size=200),
    checksums=st.none() | st.binary(max_size=64),
)
keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=80).map(
    str.encode
)
EXAMPLE = Record(7, 9, 3, 8192, 4096, 1024, 1.5, b"description", b"objects", b"inline", b"checksums")


@given(keys, records)
def test_a_record_comes_back(key: bytes, record: Record) -> None:
    assert decode_record(key, memoryview(encode_record(key, record))) == record


@given(
    keys,
    records,
    st.integers(0, 9000),
    st.none() | st.just((b"1" * 16,)),
    st.none() | st.just((3, 0)),
    st.none() | st.just(b"origins"),
)
def test_a_large_record_is_written_as_a_small_one(
    key: bytes,
    record: Record,
    nbytes: int,
    hosts: tuple[bytes, ...] | None,
    history: tuple[int, int] | None,
    origins: bytes | None,
) -> None:
    """It is put together in place, and the bytes are the same: an array of 15 to 18 fields, without the last that are
    None."""
    record = msgspec.structs.replace(record, inline=bytes(nbytes), hosts=hosts, history=history, origins=origins)
    body = msgspec.msgpack.encode(record)
    lacking = 0 if origins else 1 if history else 2 if hosts else 3
    if lacking:
        head = b"\x9f" if lacking == 3 else b"\xdc\x00" + bytes([18 - lacking])
        body = head + body[3:-lacking]
    assert encode_record(key, record) == xxhash.xxh3_64_digest(key + body) + body
    assert decode_record(key, bytes(encode_record(key, record))) == record


def test_every_flipped_bit_is_found() -> None:
    stored = encode_record(b"key", EXAMPLE)
    for position in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptionError, match="'key'"):
            decode_record(b"key", damaged)


def test_every_truncation_is_found() -> None:
    stored = encode_record(b"key", EXAMPLE)
    for size in range(len(stored)):
        with pytest.raises(CorruptionError):
            decode_record(b"key", stored[:size])


def test_another_keys_record_is_found() -> None:
    with pytest.raises(CorruptionError) as caught:
        decode_record(b"other", encode_record(b"key", EXAMPLE))
    assert caught.value.key == "other"


@given(keys, st.binary(max_size=60))
def test_a_fitting_checksum_on_garbage_is_no_record(key: bytes, body: bytes) -> None:
    import xxhash

    try:
        decode_record(key, xxhash.xxh3_64_digest(key + body) + body)
    except CorruptionError as error:
        assert error.key == key.decode()


@given(st.binary(max_size=60))
def test_garbage_is_no_row(stored: bytes) -> None:
    try:
        row = decode_row(b"id", stored)
    except CorruptionError:
        return
    assert isinstance(row, SegmentRow)


def test_a_row_comes_back() -> None:
    row = SegmentRow(b"key", 5, LIVE, 4096)
    assert decode_row(b"id", memoryview(encode_row(b"id", row))) == row
    with pytest.raises(CorruptionError):
        decode_row(b"di", encode_row(b"id", row))


def test_a_record_is_small() -> None:
    record = Record(2**40, 2**40, 2**40, 2**34, 8192, 2**34, 1.7e9, b"d" * 60, b"")
    assert len(encode_record(b"k" * 64, record)) + 64 <= 300
