"""Values that several hosts fetch: the origin sends few of the bytes, and relays the others, as they arrive."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import memstore
from memstore import TensorShard, contents
from memstore.distributed.catalog import Copy, entry_of, record_of
from memstore.distributed.rules import Member
from memstore.distributed.transfers import Transfers
from memstore.distributed.transfers.copies import find_copy, places_of
from memstore.distributed.transfers.messages import (
    CHUNK,
    ENDED,
    FOLLOWS,
    HEAD,
    LACKING,
    LENGTH,
    FetchCopy,
    Referral,
    Wanted,
    framed,
    one_range,
)
from memstore.distributed.transfers.receiving import Stream
from memstore.distributed.transfers.relays import Origin, Slots, passed_on
from memstore.engine import MappedEntry, Record, need_cluster
from tests.children import Child, Wire
from tests.distributed.transfers.wires import PlainLinks, Serving, extent_of, serving
from tests.inside import root_of

SIZE = 16 << 20


class Reader:
    """A host that fetches what the origin has, and passes it on."""

    def __init__(self, store: memstore.Store, served: Serving, transfers: Transfers) -> None:
        self.store, self.served, self.transfers = store, served, transfers

    def hold(self, key: str, record: Record, seconds: float = 30) -> MappedEntry | None:
        return self.transfers.hold(key.encode(), record, time.monotonic() + seconds)


class Cluster:
    """Hosts of one process. The first one, the origin, has put all values."""

    def __init__(self, origin: memstore.Store, served: Serving, readers: list[Reader]) -> None:
        self.origin, self.served, self.readers = origin, served, readers

    def record(self, key: str, reader: Reader) -> Record:
        found = root_of(self.origin).catalog.read(key.encode())
        assert found is not None
        return record_of(entry_of(found, root_of(self.origin).member_id()), root_of(reader.store).member_id())

    def get(self, key: str, reader: Reader) -> Any:
        held = reader.hold(key, self.record(key, reader))
        assert held is not None
        return self.value(reader, key, held)

    def value(self, reader: Reader, key: str, held: MappedEntry) -> Any:
        return contents.read(root_of(reader.store), key, held, contents.PLAIN_READ, verify=True, allow_pickle=False)

    def get_at_once(self, key: str) -> list[Any]:
        found: list[Any] = [None] * len(self.readers)

        def get(number: int) -> None:
            found[number] = self.get(key, self.readers[number])

        threads = [threading.Thread(target=get, args=(number,)) for number in range(len(self.readers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@contextmanager
def cluster_of(root: str, count: int) -> Generator[Cluster]:
    with ExitStack() as stack:
        members: dict[bytes, Member] = {}
        origin = stack.enter_context(memstore.open(f"{root}-origin", checksum=True))
        served = stack.enter_context(serving(origin))
        members[served.member.id] = served.member
        readers: list[Reader] = []
        for number in range(count):
            store = stack.enter_context(memstore.open(f"{root}-{number}", timeout=10.0))
            need_cluster(root_of(store), time.monotonic() + 20)
            serves = stack.enter_context(serving(store))
            members[serves.member.id] = serves.member
            transfers = Transfers(root_of(store), PlainLinks(), members.get)
            stack.callback(transfers.close)
            readers.append(Reader(store, serves, transfers))
        yield Cluster(origin, served, readers)
        readers.clear()  # a test's arguments live longer than its stores


@pytest.fixture
def five(root: str) -> Iterator[Cluster]:
    with cluster_of(root, 5) as made:
        yield made


def begun(five: Cluster, key: str) -> None:
    """The first two hosts have it, and are the parents of those that come."""
    for reader in five.readers[:2]:
        five.get(key, reader)


def sent(served: Serving) -> float:
    """What a host has sent, in values of `SIZE` bytes."""
    return served.traffic.moved().sent / SIZE


def copy_of(reader: Reader, key: str) -> Copy:
    found = find_copy(root_of(reader.store), key.encode(), time.monotonic() + 20)
    assert found is not None
    return found


VALUE = torch.arange(SIZE // 8)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_origin_sends_a_value_twice_whoever_reads_it(five: Cluster, at_once: bool) -> None:
    five.origin.put("key", VALUE)
    found = five.get_at_once("key") if at_once else [five.get("key", reader) for reader in five.readers]
    assert all(torch.equal(one, VALUE) for one in found)
    assert 1.9 < sent(five.served) < 2.1
    assert all(sent(reader.served) < 2.1 for reader in five.readers)
    assert sum(sent(reader.served) for reader in five.readers) == pytest.approx(3, abs=0.1)


def test_a_value_that_one_host_reads_costs_what_it_did(five: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[bytes] = []
    send = Stream.send
    monkeypatch.setattr(Stream, "send", lambda self, data: (requests.append(data), send(self, data))[1])
    five.origin.put("key", VALUE)
    five.get("key", five.readers[0])
    assert len(requests) == 3, "the header, and two halves"


def test_small_values_come_from_their_origin(five: Cluster) -> None:
    five.origin.put("key", torch.arange(100_000))
    for reader in five.readers:
        assert torch.equal(five.get("key", reader), torch.arange(100_000))
    assert all(reader.served.traffic.moved().sent == 0 for reader in five.readers)


def test_parts_of_a_sharded_value_are_passed_on(five: Cluster) -> None:
    halves = VALUE.chunk(2)
    for rank, half in enumerate(halves):
        shard = TensorShard(half, tuple(VALUE.shape), (rank * len(half),))
        five.origin.put_sharded("key", {"w": shard}, attempt="one", rank=rank, world_size=2, wait=rank == 1)
    for found in five.get_at_once("key"):
        assert torch.equal(found["w"], VALUE)
    assert 1.9 < sent(five.served) < 2.1
    assert sum(sent(reader.served) for reader in five.readers) == pytest.approx(3, abs=0.1)


def test_a_relay_that_is_down_is_gone_round(five: Cluster) -> None:
    five.origin.put("key", VALUE)
    begun(five, "key")
    five.readers[0].served.close_listener()
    for reader in five.readers[2:]:
        assert torch.equal(five.get("key", reader), VALUE)
    assert sent(five.served) < 3.1, "the host that is down leaves room for one"


def test_a_relay_that_dropped_its_copy_is_gone_round(five: Cluster) -> None:
    five.origin.put("key", VALUE)
    begun(five, "key")
    five.readers[0].store.gc()
    for reader in five.readers[2:]:
        assert torch.equal(five.get("key", reader), VALUE)
    assert sent(five.readers[0].served) < 0.1 and sent(five.served) < 3.1


def test_what_a_relay_sends_wrong_is_found_and_what_was_right_comes_once(
    five: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memstore")
    value = torch.arange(5 * CHUNK // 8)
    five.origin.put("key", value)
    begun(five, "key")
    before = five.served.traffic.moved().sent
    for reader in five.readers[:2]:
        (extent,) = copy_of(reader, "key").record.segments
        with open(f"{reader.store.root}/segments/{extent.segment:016x}.safetensors", "r+b") as file:
            file.seek(extent.start + 5 * CHUNK - 1)
            file.write(b"\x77")
    for reader in five.readers[2:4]:
        assert torch.equal(five.get("key", reader), value)
    assert "it has sent others" in caplog.text
    assert five.served.traffic.moved().sent - before < 2 * CHUNK, "the last chunk, which is the half of one"


def test_a_relay_that_is_stopped_in_the_middle_is_gone_round(five: Cluster) -> None:
    """Its process gives no sign, and still has its slot."""
    five.origin.put("key", VALUE)
    record = five.record("key", five.readers[0])
    (place,), stopped = places_of(record), root_of(five.readers[0].store)
    begun(five, "key")
    five.readers[0].store.gc()
    wanted = one_range(record.start, record.start + SIZE)
    with passed_on(stopped, b"key", place, wanted) as filling:
        assert filling is not None
        filling.begin(wanted, 1)
        for reader in five.readers[2:]:
            assert torch.equal(five.get("key", reader), VALUE)
    assert sent(five.readers[0].served) < 0.1


def test_a_filling_that_was_killed_leaves_its_slot_free(five: Cluster) -> None:
    five.origin.put("key", VALUE)
    (place,), root = places_of(five.record("key", five.readers[0])), root_of(five.readers[0].store)
    slots = Slots(root)

    def fill(wire: Wire) -> None:
        with passed_on(root, b"key", place, one_range(4096, 4096 + SIZE)):
            wire.send(None)
            wire.receive()

    child = Child(fill)
    child.receive()
    assert slots.find(place) is not None
    child.kill()
    assert slots.find(place) is None
    slots.close()


def test_a_reader_whose_version_was_replaced_at_its_parent_and_its_origin_looks_it_up_again(five: Cluster) -> None:
    five.origin.put("key", VALUE)
    begun(five, "key")
    old = five.record("key", five.readers[2])
    five.origin.put("key", VALUE + 1)
    five.origin.gc()
    for reader in five.readers[:2]:
        five.get("key", reader)
        reader.store.gc()
    assert five.readers[2].hold("key", old) is None
    assert torch.equal(five.get("key", five.readers[2]), VALUE + 1)


def test_a_parent_that_has_the_next_version_already_goes_on_with_the_one_it_sends(five: Cluster) -> None:
    """A copy that is being sent is mapped, so that its file isn't used again."""
    five.origin.put("key", VALUE)
    begun(five, "key")
    parent = five.readers[0]
    extent = extent_of(five.origin, "key")
    wanted = Wanted(extent.segment, extent.put_id, extent.size, extent.start, _pairs(extent.start, SIZE))
    stream = PlainLinks().stream(parent.served.member.address, None, 0.0)
    stream.settimeout(None)
    stream.sendall(framed(FetchCopy(five.served.member.id, b"key", 2, wanted)))
    assert stream.recv(9, socket.MSG_WAITALL) == HEAD.pack(FOLLOWS, SIZE)
    first = stream.recv(LENGTH.size, socket.MSG_WAITALL)
    five.origin.put("key", VALUE + 1)
    for _ in range(4):  # files are used again
        five.get("key", parent)
        parent.store.put("own", VALUE - 1)
    data = bytearray()
    while (size := LENGTH.unpack(first)[0]) < LACKING:
        data += stream.recv(size, socket.MSG_WAITALL)
        first = stream.recv(LENGTH.size, socket.MSG_WAITALL)
    assert size == ENDED and torch.equal(torch.frombuffer(data, dtype=torch.int64), VALUE)
    stream.close()


@pytest.mark.parametrize("lie", ["size", "start", "part"])
def test_who_asks_for_more_than_a_copy_has_is_cut_off(five: Cluster, lie: str) -> None:
    """A peer that knows the secret may say anything: nothing else of the host's memory is read."""
    shard = TensorShard(VALUE, tuple(VALUE.shape), (0,))
    five.origin.put_sharded("part", {"w": shard}, attempt="one", rank=0, world_size=1)
    five.origin.put("key", VALUE)
    parent = five.readers[0]
    five.get("key", parent)
    five.get("part", parent)
    key = b"part" if lie == "part" else b"key"
    ((place, extent),) = zip(places_of(record := five.record(key.decode(), parent)), record.segments, strict=True)
    size = extent.size if lie == "start" else 1 << 40
    start = 0 if lie == "start" else extent.start
    first = 0 if lie == "start" else size - SIZE
    wanted = Wanted(place.segment, place.put_id, size, start + (1 << 30) * (lie == "start"), _pairs(first, SIZE // 2))
    name = b"part\x1f0" if lie == "part" else key
    with PlainLinks().stream(parent.served.member.address, None, 0.0) as stream:
        stream.settimeout(20)
        stream.sendall(framed(FetchCopy(place.host, name, 2, wanted)))
        assert stream.recv(9, socket.MSG_WAITALL) == HEAD.pack(FOLLOWS, SIZE // 2)
        assert stream.recv(1) == b"", "the stream ends"
    assert torch.equal(five.get("key", five.readers[1]), VALUE)


def _pairs(start: int, size: int) -> bytes:
    return struct.pack(">QQ", start, size)


def test_two_hosts_that_each_name_the_other_both_get_it(five: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart of the origin, which knows nothing of what it has told readers before."""
    five.origin.put("key", VALUE)
    first, second = (reader.served.member.id for reader in five.readers[:2])
    told: list[bytes] = []

    def referral(self: Origin, segment: int, put_id: int, reader: bytes, lost: bytes) -> Referral | None:
        told.append(reader)
        return None if lost else Referral({first: second, second: first}[reader], 1 + (reader == second))

    monkeypatch.setattr(Origin, "referral", referral)
    five.readers = five.readers[:2]
    assert all(torch.equal(one, VALUE) for one in five.get_at_once("key"))
    assert sent(five.served) < 2.1 and len(told) > 2


def test_an_origin_that_is_started_again_makes_a_new_tree(five: Cluster) -> None:
    five.origin.put("key", VALUE)
    for reader in five.readers[:3]:
        five.get("key", reader)
    with serving(five.origin) as again:  # at another port
        members = {again.member.id: again.member} | {one.served.member.id: one.served.member for one in five.readers}
        for reader in five.readers[3:]:
            transfers = Transfers(root_of(reader.store), PlainLinks(), members.get)
            assert transfers.hold(b"key", five.record("key", reader), time.monotonic() + 20) is not None
            transfers.close()
        assert 1.9 < sent(again) < 2.1


def test_a_publisher_that_is_faster_than_the_tree_stops_no_reader(five: Cluster) -> None:
    """Each reader gets some version, whole, though there is another one before it has come."""
    five.origin.put("key", VALUE)
    ends = threading.Event()

    def put() -> None:
        number = 0
        while not ends.is_set():
            number += 1
            five.origin.put("key", VALUE + number)

    publisher = threading.Thread(target=put)
    publisher.start()
    try:
        found: list[Any] = []

        def follow(reader: Reader) -> None:
            until = time.monotonic() + 60
            for _ in range(3):
                while (held := reader.hold("key", five.record("key", reader))) is None:
                    assert time.monotonic() < until
                found.append(five.value(reader, "key", held))

        threads = [threading.Thread(target=follow, args=(reader,)) for reader in five.readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ends.set()
        publisher.join()
    assert len(found) == 3 * len(five.readers)
    assert all(torch.equal(one - one[0], VALUE) for one in found)
