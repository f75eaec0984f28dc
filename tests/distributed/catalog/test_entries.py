"""Records as entries and back; and bodies that another host may send, which are checked as anything from a socket."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.distributed.catalog import entry_of, record_of
from memstore.distributed.rules import Entry, Place
from memstore.engine import Record, SegmentExtent, encode_extents
from memstore.engine.format.records import decode_record, encode_record, replaced_by
from memstore.errors import CorruptionError
from tests.examples import examples

HERE, THERE, THIRD = b"h" * 16, b"t" * 16, b"3" * 16
PART = encode_extents((SegmentExtent(7, 8, 12_288, 4096, 0), SegmentExtent(9, 10, 8192, 4096, 1 << 16)))
FILES = msgspec.msgpack.encode([["/data/a", 8192, 1, 2, 0]])
INLINE = Record(5, 6, 0, 0, 0, 3, 1.5, b"d", b"", inline=b"abc")
PLAIN = Record(5, 8, 7, 12_288, 4096, 5000, 1.5, b"d", b"objects", checksums=b"c" * 8)
SHARDED = Record(5, 8, 0, 2, 0, 90_000, 1.5, b"d", b"", parts=PART, boxes=b"boxes")
EMPTY = Record(5, 8, 0, 0, 0, 0, 1.5, b"d", b"", parts=encode_extents(()), boxes=b"boxes")
ADOPTED = Record(5, 8, 0, 0, 0, 8192, 1.5, b"d", b"", adopted=FILES)
NOTHING = Record(5, 8, 0, 0, 0, 0, 1.5, b"d", b"objects")
MUTABLE = msgspec.structs.replace(PLAIN, description=b"\xc1rows" + b"d")
ALL = [INLINE, PLAIN, SHARDED, EMPTY, ADOPTED, NOTHING]


@pytest.mark.parametrize("record", ALL)
def test_a_record_of_this_host_comes_back_as_it_was(record: Record) -> None:
    entry = entry_of(record, HERE)
    assert all(place.host == HERE for place in entry.places)
    assert record_of(entry, HERE) == record
    assert entry_of(record_of(entry, HERE), HERE) == entry


@pytest.mark.parametrize("record", ALL)
def test_a_record_of_another_host_names_it_and_comes_back(record: Record) -> None:
    entry = entry_of(record, THERE)
    here = record_of(entry, HERE)
    assert here.version == record.version and here.segment == 0
    assert (here.hosts is None) == (not entry.places)
    assert here.here(HERE) == () and len(here.elsewhere(HERE)) == len(here.segments)
    assert here.kind == record.kind
    assert entry_of(here, HERE) == entry, "so it can be given on"
    assert record_of(entry_of(here, HERE), THERE) == record, "at home it is as it was put"


def test_a_sharded_record_may_lie_on_several_hosts() -> None:
    entry = entry_of(SHARDED, HERE)
    spread = Entry(5, entry.body, (entry.places[0], Place(THIRD, 10, 9)))
    record = record_of(spread, HERE)
    assert record.hosts == (HERE, THIRD)
    assert [one.segment for one in record.here(HERE)] == [7]
    assert [(host, one.segment) for host, one in record.elsewhere(HERE)] == [(THIRD, 9)]
    assert entry_of(record, HERE) == spread


@pytest.mark.parametrize("record", ALL)
def test_records_without_hosts_are_encoded_as_ever(record: Record) -> None:
    """As an array of fifteen, which is what a store has that was never served."""
    stored = encode_record(b"k", record)
    fields = msgspec.msgpack.decode(stored[8:])
    assert (stored[8], len(fields)) == (0x9F, 15)
    assert fields == list(msgspec.to_builtins(record, builtin_types=(bytes,)))[:15]
    assert decode_record(b"k", stored) == record


def test_a_put_over_a_record_of_other_hosts_gets_it_whole() -> None:
    record = record_of(entry_of(PLAIN, THERE), HERE)
    replaced = replaced_by(b"k", encode_record(b"k", record))
    assert (replaced.segments, replaced.record) == ((), record)


def sent(**changed: object) -> bytes:
    """A body of a plain value, with other fields."""
    body = msgspec.msgpack.decode(entry_of(PLAIN, THERE).body, type=Record)
    return msgspec.msgpack.encode(msgspec.structs.replace(body, **changed))


def extents(*rows: tuple[int, int, int, int, int]) -> bytes:
    return msgspec.msgpack.encode(rows)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode({"version": 1}),
        sent(version=4),
        sent(segment=7),
        sent(hosts=(HERE,)),
        sent(size=2),
        sent(nbytes=-1),
        sent(nbytes=8193),
        sent(nbytes=1 << 62),
        sent(start=-1),
        sent(start=8192),
        sent(start=1 << 40, parts=encode_extents((SegmentExtent(7, 8, 1 << 41, 1 << 40, 0),))),  # a header of a TiB
        sent(put_id=-1),
        sent(put_id=1 << 63),
        sent(created=float("nan")),
        sent(created=float("inf")),
        sent(inline=b"abc"),
        sent(adopted=FILES),
        sent(parts=None),
        sent(parts=None, inline=b"x" * 5000),
        sent(checksums=b"123"),
        sent(objects_checksum=b"123"),
        sent(parts=b"garbage"),
        sent(parts=extents((7, 8, 4095, 4096, 0))),
        sent(parts=extents((7, 8, -1, 4096, 0))),
        sent(parts=extents((7, 8, 12_288, 4096, 4096))) if False else sent(parts=extents((7, 8, 12_288, 8192, 0))),
        sent(parts=extents((7, 8, 1 << 63, 4096, 0))),
        sent(parts=extents((0, 8, 12_288, 4096, 0))),
        sent(parts=extents((8, 8, 12_288, 4096, 0))),
        sent(parts=extents((7, 9, 12_288, 4096, 0))),
        sent(start=0, parts=extents((7, 8, 12_288, 4096, 0), (9, 10, 12_288, 4096, 4096)), size=2),  # they overlap
        sent(start=0, nbytes=1 << 40),
    ],
)
@pytest.mark.parametrize("member", [HERE, THERE])
def test_what_cannot_be_a_record_is_refused(body: bytes, member: bytes) -> None:
    with pytest.raises(CorruptionError):
        record_of(Entry(5, body, entry_of(PLAIN, THERE).places), member)


@pytest.mark.parametrize(
    "places",
    [(), (Place(THERE, 8, 7), Place(THERE, 8, 7)), (Place(THERE, 8, 6),), (Place(THERE, 9, 7),), (Place(THERE, 8),)],
)
def test_places_are_those_of_the_segments(places: tuple[Place, ...]) -> None:
    with pytest.raises(CorruptionError, match="places"):
        record_of(Entry(5, sent(), places), HERE)


@pytest.mark.parametrize("places", [(), (Place(THERE, 8, 7),), (Place(THERE, 8), Place(HERE, 8))])
def test_files_of_others_lie_on_one_host(places: tuple[Place, ...]) -> None:
    with pytest.raises(CorruptionError, match="one host"):
        record_of(Entry(5, entry_of(ADOPTED, THERE).body, places), HERE)


@settings(max_examples=examples(200))
@given(st.data())
def test_no_bytes_do_more_than_be_refused(data: st.DataObject) -> None:
    body = bytearray(entry_of(data.draw(st.sampled_from(ALL)), THERE).body)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    places = data.draw(st.sampled_from([entry_of(record, THERE).places for record in ALL]))
    try:
        record = record_of(Entry(5, bytes(body), places), HERE)
    except CorruptionError:
        return
    assert record.nbytes >= 0 and len(record.segments) == len([place for place in places if place.segment])
