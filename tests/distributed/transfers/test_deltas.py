"""A delta of another host: a host that has a copy of an earlier version fetches what changed, and else the whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memstore
from memstore import contents
from memstore.distributed.catalog import entry_of, record_of
from memstore.distributed.transfers.copies import find_copy, places_of
from memstore.distributed.transfers.messages import Ranges, Referral, merged, one_range
from memstore.distributed.transfers.relays import Origin, SlotRead, Slots, passed_on
from memstore.engine import (
    OriginRange,
    Record,
    carry,
    decode_origins,
    encode_origins,
    hold,
    in_both,
    origins_of,
    put,
)
from memstore.errors import CorruptionError, HomeUnavailableError
from tests.distributed.transfers.hosts import Hosts, two_hosts
from tests.distributed.transfers.test_relays import Cluster, Reader, cluster_of, sent
from tests.inside import root_of

LEAVES, LEAF = 50, 1 << 17  # bytes of a leaf; of values that relays pass on, LARGE
LARGE = 1 << 19
WHOLE = LEAVES * LEAF


@pytest.fixture
def hosts(root: str) -> Iterator[Hosts]:
    with two_hosts(root) as made:
        yield made


@pytest.fixture
def five(root: str) -> Iterator[Cluster]:
    with cluster_of(root, 5) as made:
        yield made


def model(changed: dict[int, float] | None = None, size: int = LEAF) -> dict[str, torch.Tensor]:
    values = {i: float(i) for i in range(LEAVES)} | (changed or {})
    return {f"layer.{i}": torch.full((size // 4,), value) for i, value in values.items()}


def is_equal(found: dict[str, torch.Tensor], value: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(value) and all(torch.equal(found[name], value[name]) for name in value)


def put_delta(store: memstore.Store, key: str, value: Any) -> None:
    """As a store of several hosts puts it with `delta_of=True`."""
    root, name = root_of(store), key.encode()
    (base,) = hold(root, [name], time.monotonic() + 20, may_lock=True)
    assert base is not None
    flat = contents.flatten(key, value, root, limit=0, allow_pickle=False)
    draft = contents.with_origins(root, contents.draft(root, name, flat, 0, None), flat, base)
    put(root, [draft], time.monotonic() + 20)


def fetched(hosts: Hosts, key: str, value: dict[str, torch.Tensor]) -> int:
    """The bytes that come for a get, which compares checksums."""
    before = hosts.served.traffic.moved().sent
    assert is_equal(hosts.get(key, verify=True), value)
    return hosts.served.traffic.moved().sent - before


def test_changed_leaves_come_and_no_others(hosts: Hosts) -> None:
    hosts.there.put("key", model())
    assert fetched(hosts, "key", model()) > WHOLE
    put_delta(hosts.there, "key", model({7: -1.0}))
    assert fetched(hosts, "key", model({7: -1.0})) < WHOLE * 0.04
    assert hosts.copies() == ["key"] and hosts.here.verify().ok
    put_delta(hosts.there, "key", model({7: -1.0}))
    assert fetched(hosts, "key", model({7: -1.0})) < WHOLE * 0.02, "nothing has changed"


def test_a_reader_may_have_missed_versions(hosts: Hosts) -> None:
    """What it has of the first of them is known by its origin."""
    changed: dict[int, float] = {}
    hosts.there.put("key", model())
    fetched(hosts, "key", model())
    for step in range(4):
        changed[step] = -1.0 - step
        put_delta(hosts.there, "key", model(changed))
        hosts.there.gc()
    assert 3.9 * LEAF < fetched(hosts, "key", model(changed)) < 4.5 * LEAF
    changed[0] = 9.0
    put_delta(hosts.there, "key", model(changed))
    assert fetched(hosts, "key", model(changed)) < 1.5 * LEAF


def test_leaves_may_come_and_go_and_lie_elsewhere(hosts: Hosts) -> None:
    value = model()
    hosts.there.put("key", value)
    fetched(hosts, "key", value)
    del value["layer.3"]
    value = {"first": torch.ones(LEAF // 2), **value, "odd": torch.ones(5, dtype=torch.uint8)}
    put_delta(hosts.there, "key", value)
    assert fetched(hosts, "key", value) < 3 * LEAF
    value = {name: value[name] for name in reversed(value)}
    put_delta(hosts.there, "key", value)
    assert fetched(hosts, "key", value) < LEAF


@pytest.mark.parametrize("who", ["reader", "owner", "both"])
def test_a_base_that_is_gone(hosts: Hosts, who: str) -> None:
    """At the owner it doesn't matter: who has put the delta has compared them."""
    hosts.there.put("key", model())
    fetched(hosts, "key", model())
    put_delta(hosts.there, "key", model({7: -1.0}))
    if who != "owner":
        hosts.here.gc()
        assert hosts.copies() == []
    if who != "reader":
        hosts.there.gc()
    moved = fetched(hosts, "key", model({7: -1.0}))
    assert moved < WHOLE * 0.04 if who == "owner" else moved > WHOLE


def test_a_base_that_goes_while_it_is_copied(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is mapped, so that no other put has its file."""
    from memstore.distributed.transfers import copies

    hosts.there.put("key", model())
    fetched(hosts, "key", model())
    put_delta(hosts.there, "key", model({7: -1.0}))
    read = copies.read_ranges

    def slow(*arguments: Any) -> bool:
        hosts.here.gc()
        for number in range(3):
            hosts.here.put(f"own.{number}", torch.full((WHOLE // 4,), 3.0))
            hosts.here.delete(f"own.{number}")
        return read(*arguments)

    monkeypatch.setattr(copies, "read_ranges", slow)
    assert fetched(hosts, "key", model({7: -1.0})) < WHOLE * 0.04


def test_a_file_that_holds_another_put_is_no_base(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is found in the table, and dropped, and its file used again, before it is mapped."""
    from memstore.distributed.transfers import copies

    hosts.there.put("key", model())
    fetched(hosts, "key", model())
    put_delta(hosts.there, "key", model({7: -1.0}))
    find = copies.find_copy

    def old(*arguments: Any) -> Any:
        found = find(*arguments)
        hosts.here.gc()
        for number in range(3):
            hosts.here.put(f"own.{number}", torch.full((WHOLE // 4,), 3.0))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(copies, "find_copy", old)
        assert fetched(hosts, "key", model({7: -1.0})) > WHOLE


def test_a_plain_put_names_no_origin(hosts: Hosts) -> None:
    hosts.there.put("key", model())
    fetched(hosts, "key", model())
    hosts.there.put("key", model({7: -1.0}))
    assert hosts.record("key").origins is None
    assert fetched(hosts, "key", model({7: -1.0})) > WHOLE
    put_delta(hosts.there, "key", model({8: -1.0}))
    assert fetched(hosts, "key", model({8: -1.0})) < WHOLE * 0.06


def test_a_copy_says_where_its_bytes_were_first_put(hosts: Hosts) -> None:
    hosts.there.put("key", model())
    fetched(hosts, "key", model())
    first = hosts.record("key")
    put_delta(hosts.there, "key", model({7: -1.0}))
    fetched(hosts, "key", model({7: -1.0}))
    second, here = hosts.record("key"), root_of(hosts.here)
    copy = find_copy(here, b"key", time.monotonic() + 20)
    assert copy is not None and copy.record.origins is not None
    origins = decode_origins(copy.record.origins, copy.record.nbytes)
    assert {one.put_id for one in origins} == {places_of(one)[0].put_id for one in (first, second)}
    assert {one.host for one in origins} == {root_of(hosts.there).member_id()}
    assert sum(one.nbytes for one in origins) == copy.record.nbytes


def test_a_record_that_names_bytes_beyond_its_own_is_damaged(hosts: Hosts) -> None:
    hosts.there.put("key", model())
    put_delta(hosts.there, "key", model({7: -1.0}))
    there = root_of(hosts.there)
    found = there.catalog.read(b"key")
    assert found is not None
    for lies in ([(0, WHOLE + 1, b"h", 1, 0)], [(8, 8, b"h", 1, 0), (8, 8, b"h", 1, 0)], [(0, 8, b"h", 1, -1)], "lies"):
        lying = msgspec.structs.replace(found, origins=msgspec.msgpack.encode(lies))
        with pytest.raises(CorruptionError):
            record_of(entry_of(lying, there.member_id()), root_of(hosts.here).member_id())


# --- relays -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_was_fetched_in_part_is_passed_on(five: Cluster) -> None:
    """To hosts that have the base, and to one that has not."""
    size = LARGE
    five.origin.put("key", model(size=size))
    followers = five.readers[:4]
    for reader in followers:
        five.get("key", reader)
    changed = dict.fromkeys(range(8), -1.0) | {20: -2.0, 40: -3.0}
    put_delta(five.origin, "key", model(changed, size))
    before = sent(five.served)
    for reader in followers:
        assert is_equal(five.get("key", reader), model(changed, size))
    unit = LEAVES * size / (16 << 20)  # of `sent`
    assert sent(five.served) - before < 2.2 * 10 / LEAVES * unit, "two hosts had the ten leaves from here"
    before = sent(five.served)
    assert is_equal(five.get("key", five.readers[4]), model(changed, size))
    assert sent(five.served) - before < 0.1


@pytest.mark.full
def test_followers_at_once(five: Cluster) -> None:
    size = LARGE
    five.origin.put("key", model(size=size))
    five.get_at_once("key")
    for step in range(3):
        changed = dict.fromkeys(range(step, step + 30, 3), -1.0 - step)
        put_delta(five.origin, "key", model(changed, size))
        assert all(is_equal(found, model(changed, size)) for found in five.get_at_once("key"))


def slot_of(reader: Reader, record: Record, ranges: Ranges, depths: list[int]) -> SlotRead:
    """The slot of a copy that is filled over so many streams, each of which waits with that depth."""
    root, (place,) = root_of(reader.store), places_of(record)
    whole = one_range(record.start, record.start + record.nbytes)
    slots = Slots(root)
    try:
        with passed_on(root, b"key", place, whole) as filling:
            assert filling is not None
            for number, depth in enumerate(depths):
                one = Ranges(ranges.starts[number :: len(depths)], ranges.stops[number :: len(depths)])
                filling.begin(one, depth)
            found = slots.find(place)
            assert found is not None
            return found
    finally:
        slots.close()


def test_bytes_that_no_stream_brings_are_there_once_all_streams_have_ended(five: Cluster) -> None:
    """So who waits for them waits for all that this host waits for: else two hosts could wait for each other."""
    five.origin.put("key", model())
    reader, record = five.readers[0], five.record("key", five.readers[0])
    at = record.start
    ranges = merged(torch.tensor([at, at + 4 * LEAF]).numpy(), torch.tensor([at + LEAF, at + 5 * LEAF]).numpy())
    for offset in (2 * LEAF, 6 * LEAF):
        slot = slot_of(reader, record, ranges, [1, 3])
        assert slot.is_coming(at + offset, 4) and not slot.is_coming(at + offset, 2)
    assert slot_of(reader, record, ranges, [1, 3]).is_coming(at, 2), "the stream that brings it waits with less"
    several = slot_of(reader, record, ranges, [3])
    assert not any(several.is_coming(at + offset, 3) for offset in (0, 2 * LEAF, 4 * LEAF))
    assert all(several.is_coming(at + offset, 4) for offset in (0, 2 * LEAF, 4 * LEAF))
    assert several.arrived(at + 2 * LEAF) == at + 2 * LEAF, "of several ranges it isn't told how far they are"


@pytest.mark.parametrize("is_left_out", [False, True])
def test_two_hosts_that_each_name_the_other_and_one_has_the_base(
    five: Cluster, monkeypatch: pytest.MonkeyPatch, is_left_out: bool
) -> None:
    """As after a restart of the origin. If depths were not compared, both would wait."""
    size = LARGE
    five.origin.put("key", model(size=size))
    bare, follower = five.readers[:2]
    five.get("key", follower)
    changed = dict.fromkeys(range(0, 50, 5), -1.0)
    put_delta(five.origin, "key", model(changed, size))
    ids = [reader.served.member.id for reader in (bare, follower)]

    have_asked, both = set[bytes](), threading.Event()

    def referral(self: Origin, segment: int, put_id: int, reader: bytes, lost: bytes) -> Referral | None:
        have_asked.add(reader)
        if len(have_asked) == 2:
            both.set()
        assert both.wait(20)
        return None if lost else Referral(ids[reader == ids[0]], 1 + (reader == ids[1]))

    compare = SlotRead.is_coming
    monkeypatch.setattr(Origin, "referral", referral)
    if is_left_out:
        monkeypatch.setattr(SlotRead, "is_coming", lambda self, first, depth: compare(self, first, 1 << 32))
    record, found = five.record("key", bare), dict[int, Any]()

    def get(number: int) -> None:
        reader = (bare, follower)[number]
        try:
            held = reader.hold("key", record, 2 if is_left_out else 30)
            found[number] = held and five.value(reader, "key", held)
        except HomeUnavailableError as error:
            found[number] = error

    threads = [threading.Thread(target=get, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if is_left_out:
        assert any(isinstance(one, HomeUnavailableError) for one in found.values()), found
    else:
        assert all(is_equal(one, model(changed, size)) for one in found.values())


# --- origins ----------------------------------------------------------------------------------------------------------

SIZE = 64 << 10  # bytes: less isn't carried


@st.composite
def versions(draw: st.DrawFn) -> list[tuple[bool, list[int]]]:
    """Versions of a value of units: whether each is a delta of the one before, and its units by their contents."""
    count = draw(st.integers(1, 6))
    unit = st.integers(0, 8)
    return [(draw(st.booleans()), draw(st.lists(unit, min_size=1, max_size=7, unique=True))) for _ in range(count)]


@given(versions())
def test_bytes_of_one_origin_are_the_same(made: list[tuple[bool, list[int]]]) -> None:
    """Of any two versions, whatever was a delta of what; and all is found that deltas have kept."""
    known: list[tuple[list[int], list[OriginRange]]] = []
    for number, (is_delta, units) in enumerate(made):
        kept: list[tuple[int, int, int]] = []
        base: list[OriginRange] = []
        if is_delta and known:
            before, base = known[-1]
            kept = [(i * SIZE, before.index(unit) * SIZE, SIZE) for i, unit in enumerate(units) if unit in before]
        origins = encode_origins(carry(base, kept))
        record = Record(1, number + 1, 1, 0, 0, len(units) * SIZE, 0.0, b"", b"", origins=origins)
        found = origins_of(record, b"host")
        assert sum(one.nbytes for one in found) == record.nbytes
        known.append((units, found))
    for wanted, origins in known:
        for there, others in known:
            for offset, at, nbytes in in_both(origins, others):
                first, last = offset // SIZE, (offset + nbytes) // SIZE
                assert wanted[first:last] == there[at // SIZE : (at + nbytes) // SIZE] and last > first
    for (before, earlier), (units, later), (is_delta, _) in zip(known, known[1:], made[1:], strict=False):
        if is_delta:
            assert sum(nbytes for *_, nbytes in in_both(later, earlier)) == SIZE * len(set(units) & set(before))
