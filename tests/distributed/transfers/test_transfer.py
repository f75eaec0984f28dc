"""Ranges of segments travel from one store's files into another process's memory: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstore
from memstore.distributed.transfers import receiving, sending
from memstore.distributed.transfers.messages import HEAD, LENGTH, REQUEST_LIMIT, Fetch, Wanted, encode
from memstore.distributed.transfers.receiving import CannotSendError, SegmentRanges, Stream, Streams, read_ranges
from memstore.errors import CorruptionError, HomeUnavailableError
from tests.children import Child, Wire
from tests.distributed.transfers.wires import PlainLinks, Serving, Target, extent_of, file_of, ranges_of, serving
from tests.examples import examples
from tests.inside import root_of
from tests.patience import give_back_until

_BIG = 1 << 62


@pytest.fixture
def served(store: memstore.Store) -> Iterator[Serving]:
    store.put("value", torch.arange(1 << 16, dtype=torch.int32))
    with serving(store) as found:
        yield found


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams(PlainLinks())
    yield made
    made.close()


def _soon() -> float:
    return time.monotonic() + 20


_PAIRS = st.lists(
    st.tuples(st.integers(0, 300_000), st.one_of(st.integers(1, 8), st.integers(200, 300), st.integers(1, 300_000))),
    max_size=40,
)


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_PAIRS)
def test_any_ranges_come_as_they_lie_there(
    store: memstore.Store, served: Serving, streams: Streams, pairs: list[tuple[int, int]]
) -> None:
    extent = extent_of(store, "value")
    ranges = ranges_of([(start, min(start + size, extent.size)) for start, size in pairs])
    target = Target(extent.size)
    assert read_ranges(streams, [(served.member, [target.part(extent, ranges)])], _soon())
    assert target.holds(file_of(store, extent), ranges)
    assert served.streams <= 1, "a kept stream is used again"


def test_a_column_is_many_small_ranges(store: memstore.Store, served: Serving, streams: Streams) -> None:
    store.put("wide", torch.arange(300_000, dtype=torch.int32).view(-1, 3))
    extent = extent_of(store, "wide")
    ranges = ranges_of([(extent.start + 12 * row, extent.start + 12 * row + 4) for row in range(100_000)])
    target = Target(extent.size)
    assert read_ranges(streams, [(served.member, [target.part(extent, ranges)])], _soon())
    assert target.holds(file_of(store, extent), ranges)


def test_a_large_transfer_is_split_over_two_streams(
    store: memstore.Store, served: Serving, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "LARGE", 1 << 12)
    both, take = threading.Barrier(2), streams.take

    def take_with_the_other(*arguments: Any, **options: Any) -> Stream:
        stream = take(*arguments, **options)
        both.wait(20)  # else the second thread may begin when the first is done, and use its stream again
        return stream

    monkeypatch.setattr(streams, "take", take_with_the_other)
    store.put("other", torch.ones(5000))
    extents = [extent_of(store, key) for key in ("value", "other")]
    targets = [Target(extent.size) for extent in extents]
    whole = [ranges_of([(0, extent.size)]) for extent in extents]
    parts = [target.part(extent, one) for target, extent, one in zip(targets, extents, whole, strict=True)]
    assert read_ranges(streams, [(served.member, parts)], _soon())
    for target, extent, one in zip(targets, extents, whole, strict=True):
        assert target.holds(file_of(store, extent), one)
    assert served.streams == 2


@pytest.mark.parametrize("size", [100, 1000, 5000])  # packed, and not, and in several batches
def test_each_range_comes_to_where_it_is_wanted(
    store: memstore.Store, served: Serving, streams: Streams, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(receiving, "LARGE", 1 << 10)
    monkeypatch.setattr(receiving, "RANGES_LIMIT", 7)
    extent = extent_of(store, "value")
    ranges = ranges_of([(start, start + size) for start in range(100, 140_000, 7000)])
    count = len(ranges.starts)
    order = np.random.default_rng(size).permutation(count)
    target = Target(count * size)
    part = SegmentRanges(extent, ranges, target.origin + order * size - ranges.starts)
    assert read_ranges(streams, [(served.member, [part])], _soon())
    content, found = file_of(store, extent), bytes(target.bytes)
    for place, start in zip(order.tolist(), ranges.starts.tolist(), strict=True):
        assert found[place * size : (place + 1) * size] == content[start : start + size]
    assert served.streams == 2


def test_a_replaced_value_is_gone(store: memstore.Store, served: Serving, streams: Streams) -> None:
    extent = extent_of(store, "value")
    ranges = ranges_of([(0, 4096)])
    store.delete("value")
    give_back_until(store, lambda: not os.listdir(f"{store.root}/segments"))
    assert not read_ranges(streams, [(served.member, [Target(extent.size).part(extent, ranges)])], _soon())
    store.put("value", torch.arange(1 << 16, dtype=torch.int32))
    again = extent_of(store, "value")
    assert not read_ranges(streams, [(served.member, [Target(extent.size).part(extent, ranges)])], _soon())
    assert read_ranges(streams, [(served.member, [Target(again.size).part(again, ranges)])], _soon())
    assert served.streams == 1, "that it is gone is an answer like others"


def test_a_reused_file_is_gone(store: memstore.Store, served: Serving, streams: Streams) -> None:
    extent = extent_of(store, "value")
    for _ in range(20):
        store.put("value", torch.zeros(1 << 16, dtype=torch.int32))
        if extent_of(store, "value").segment == extent.segment:
            break
    else:
        pytest.fail("the file was never used again")
    part = Target(extent.size).part(extent, ranges_of([(0, 4096)]))
    assert not read_ranges(streams, [(served.member, [part])], _soon())


def test_a_value_that_is_replaced_meanwhile_comes_whole(
    store: memstore.Store, served: Serving, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's mapping keeps the file from being used again."""
    extent = extent_of(store, "value")
    content = file_of(store, extent)
    send_all = sending.send_all
    replaced: list[bool] = []

    def replace_first(stream: socket.socket, parts: list[memoryview]) -> None:
        if not replaced:
            replaced.append(True)
            for _ in range(5):
                store.put("value", torch.zeros(1 << 16, dtype=torch.int32))
        send_all(stream, parts)

    monkeypatch.setattr(sending, "send_all", replace_first)
    ranges = ranges_of([(extent.start, extent.size)])
    target = Target(extent.size)
    assert read_ranges(streams, [(served.member, [target.part(extent, ranges)])], _soon())
    assert replaced and target.holds(content, ranges)


def test_a_put_id_that_changes_meanwhile_is_gone(
    store: memstore.Store, served: Serving, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody does that who keeps to the locks; it is looked at all the same."""
    extent = extent_of(store, "value")
    send_all = sending.send_all

    def overwrite(stream: socket.socket, parts: list[memoryview]) -> None:
        with open(f"{store.root}/segments/{extent.segment:016x}.safetensors", "r+b") as file:
            file.seek(40)
            file.write(b"0" * 8)
        send_all(stream, parts)

    monkeypatch.setattr(sending, "send_all", overwrite)
    part = Target(extent.size).part(extent, ranges_of([(extent.start, extent.start + 64)]))
    assert not read_ranges(streams, [(served.member, [part])], _soon())


def test_a_cut_file_is_damage(scratch: str, streams: Streams) -> None:
    with memstore.open(scratch) as store:
        store.put("value", torch.arange(1 << 14))
        extent = extent_of(store, "value")
        with open(f"{store.root}/segments/{extent.segment:016x}.safetensors", "r+b") as file:
            file.truncate(extent.size - 1)
        with serving(store) as served:
            part = Target(extent.size).part(extent, ranges_of([(0, 10)]))
            with pytest.raises(CorruptionError, match="host at tcp://127"):
                read_ranges(streams, [(served.member, [part])], _soon())


def test_a_sender_without_files_says_so(
    store: memstore.Store, served: Serving, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    extent = extent_of(store, "value")
    monkeypatch.setattr(root_of(store).storage, "map_segment", none_left)
    with pytest.raises(CannotSendError, match="Too many open files"):
        read_ranges(streams, [(served.member, [Target(extent.size).part(extent, ranges_of([(0, 10)]))])], _soon())


# --- what others do ---------------------------------------------------------------------------------------------------


def _wanted(extent: object, ranges: bytes, **changes: int) -> bytes:
    fields = {name: getattr(extent, name) for name in ("segment", "put_id", "size", "start")} | changes
    return encode(Fetch((Wanted(**fields, ranges=ranges),)))


def _range(offset: int, size: int) -> bytes:
    return struct.pack(">QQ", offset, size)


@pytest.mark.parametrize(
    "ranges",
    [
        _range(1 << 63, 1),
        _range(0, 1 << 63),
        _range((1 << 64) - 1, 2),
        _range(1, (1 << 64) - 1),
        _range(0, 0),
        _range(100, 10) + _range(105, 10),
        _range(100, 10) + _range(0, 10),
        _range(0, 10)[:-1],
    ],
)
def test_ranges_that_can_not_be_end_the_stream(store: memstore.Store, served: Serving, ranges: bytes) -> None:
    extent = extent_of(store, "value")
    _ends(served, _wanted(extent, ranges))
    _ends(served, _wanted(extent, _range(0, extent.size + 1)))
    _is_served(store, served)


@pytest.mark.parametrize("field", ["segment", "put_id", "size", "start"])
def test_numbers_beyond_63_bits_end_the_stream(store: memstore.Store, served: Serving, field: str) -> None:
    values = {"segment": 1, "put_id": 1, "size": 1, "start": 0} | {field: 1 << 63}
    text = msgspec.msgpack.encode([1, [[*values.values(), _range(0, 1)]]])
    _ends(served, text)
    _is_served(store, served)


def test_garbage_and_what_is_too_long_end_the_stream(store: memstore.Store, served: Serving) -> None:
    _ends(served, b"\xc1garbage")
    _ends(served, b"", length=REQUEST_LIMIT + 1)
    _ends(served, b"", length=(1 << 32) - 1)
    _ends(served, encode(Fetch(())))
    _is_served(store, served)


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_bytes_do_no_harm(store: memstore.Store, served: Serving, data: bytes) -> None:
    wire = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    with wire, contextlib.suppress(OSError):  # it may be closed before all was sent
        wire.sendall(data)
        wire.shutdown(socket.SHUT_WR)
        assert wire.recv(1 << 16) == b""
    _is_served(store, served)


def _ends(served: Serving, text: bytes, length: int | None = None) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
        wire.sendall(LENGTH.pack(len(text) if length is None else length) + text)
        with contextlib.suppress(ConnectionResetError):
            assert wire.recv(1) == b""


def _is_served(store: memstore.Store, served: Serving) -> None:
    streams = Streams(PlainLinks())
    extent = extent_of(store, "value")
    ranges = ranges_of([(0, extent.size)])
    target = Target(extent.size)
    assert read_ranges(streams, [(served.member, [target.part(extent, ranges)])], _soon())
    assert target.holds(file_of(store, extent), ranges)
    streams.close()


def test_a_request_that_never_ends_is_dropped(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "STALLED", 0.3)
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
        wire.sendall(LENGTH.pack(100) + b"x")
        assert wire.recv(1) == b""


def test_a_reader_that_takes_nothing_is_dropped(
    store: memstore.Store, served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALLED", 0.3)
    store.put("large", torch.zeros(16 << 20, dtype=torch.uint8))
    extent = extent_of(store, "large")
    text = _wanted(extent, _range(0, extent.size))
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
        wire.sendall(LENGTH.pack(len(text)) + text)
        _wait_until(lambda: len(served.senders) == 0)


def test_streams_beyond_the_limit_end_the_one_that_was_idle_for_longest(store: memstore.Store) -> None:
    with serving(store, most=2) as served:
        wires = [socket.create_connection(("127.0.0.1", served.port), timeout=20) for _ in range(2)]
        _wait_until(lambda: len(served.senders) == 2)
        wires.append(socket.create_connection(("127.0.0.1", served.port), timeout=20))
        assert wires[0].recv(1) == b""
        _wait_until(lambda: len(served.senders) == 2)
        for wire in wires:
            wire.close()


def test_a_reader_that_is_killed_harms_nobody(store: memstore.Store, served: Serving) -> None:
    store.put("large", torch.zeros(16 << 20, dtype=torch.uint8))
    extent = extent_of(store, "large")
    text = _wanted(extent, _range(0, extent.size))

    def read_some(wire: Wire) -> None:
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
        connection.sendall(LENGTH.pack(len(text)) + text)
        connection.recv(HEAD.size, socket.MSG_WAITALL)
        wire.send()
        wire.receive()

    with Child(read_some) as child:
        child.receive()
        child.kill()
    _wait_until(lambda: len(served.senders) == 0)
    _is_served(store, served)


def test_a_host_that_closed_its_streams_is_asked_over_a_new_one(
    store: memstore.Store, served: Serving, streams: Streams
) -> None:
    extent = extent_of(store, "value")
    ranges = ranges_of([(0, extent.size)])
    for count in (1, 2):
        target = Target(extent.size)
        assert read_ranges(streams, [(served.member, [target.part(extent, ranges)])], _soon())
        assert target.holds(file_of(store, extent), ranges)
        assert served.streams == count
        served.end_streams()
        _wait_until(lambda: len(served.senders) == 0)


def test_a_host_that_is_away_is_named_at_the_deadline(store: memstore.Store, streams: Streams) -> None:
    store.put("value", torch.arange(1 << 14))
    with serving(store) as served:
        member = served.member
    extent = extent_of(store, "value")
    start = time.monotonic()
    with pytest.raises(HomeUnavailableError, match=f"host at {member.address}"):
        read_ranges(streams, [(member, [Target(extent.size).part(extent, ranges_of([(0, 9)]))])], start + 0.6)
    assert time.monotonic() - start < 30


def test_a_host_that_falls_silent_is_named_at_the_deadline(store: memstore.Store, streams: Streams) -> None:
    store.put("value", torch.arange(1 << 14))
    extent = extent_of(store, "value")
    with serving(store) as served, socket.create_server(("127.0.0.1", 0)) as silent:
        member = msgspec.structs.replace(served.member, address=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(HomeUnavailableError):
            part = Target(extent.size).part(extent, ranges_of([(0, 9)]))
            read_ranges(streams, [(member, [part])], time.monotonic() + 0.6)


def test_a_fork_makes_streams_of_its_own(store: memstore.Store, served: Serving, streams: Streams) -> None:
    extent = extent_of(store, "value")
    ranges = ranges_of([(0, extent.size)])
    content = file_of(store, extent)

    def read(_: Wire | None = None) -> bool:
        target = Target(extent.size)
        return read_ranges(streams, [(served.member, [target.part(extent, ranges)])], _soon()) and target.holds(
            content, ranges
        )

    assert read()
    with Child(read) as child:
        assert read()
        assert child.receive()
    assert read()
    assert served.streams == 2


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
