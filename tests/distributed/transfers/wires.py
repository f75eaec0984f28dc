"""Hosts of one process for tests of transfers: a store each, and real sockets between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

import memstore
from memstore.distributed.links import Traffic
from memstore.distributed.rules import Member
from memstore.distributed.transfers import sending
from memstore.distributed.transfers.messages import Ranges, merged
from memstore.distributed.transfers.receiving import SegmentRanges
from memstore.distributed.transfers.sending import Senders
from memstore.engine import SegmentExtent, syscalls
from memstore.errors import HomeUnavailableError
from tests.inside import root_of


class Serving:
    """A store that sends its segments on loopback.

    Attributes:
        traffic: what went out and came in, of all streams.
        streams: how many were made.
    """

    def __init__(self, store: memstore.Store, *, most: int = 64) -> None:
        self.root = root_of(store)
        self.traffic = Traffic()
        self.senders = Senders(self.root, most=most, traffic=self.traffic)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.streams = 0
        self._streams: list[socket.socket] = []
        self.member = Member(bytes.fromhex(self.root.settings.store), f"tcp://127.0.0.1:{self.port}", "host")
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self.streams += 1
                self._streams.append(accepted)
                self.senders.serve(accepted)

    def end_streams(self) -> None:
        """As a host does that has too many."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close_listener(self) -> None:
        """As an index process that has ended, and its streams with it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.senders.close()

    def close(self) -> None:
        self.close_listener()
        del self.senders, self.root  # a test's arguments live longer than its store


@contextmanager
def serving(store: memstore.Store, *, most: int = 64) -> Generator[Serving]:
    served = Serving(store, most=most)
    try:
        yield served
    finally:
        served.close()


def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns how many bytes of answers go out from now on: one number for each time."""
    found: list[int] = []
    send_all = sending.send_all

    def count(stream: socket.socket, parts: Sequence[memoryview]) -> None:
        found.append(sum(map(len, parts)))
        send_all(stream, parts)

    monkeypatch.setattr(sending, "send_all", count)
    return found


class PlainLinks:
    """Streams without a handshake, and how many bytes came over them."""

    def __init__(self) -> None:
        self.made: list[socket.socket] = []

    def stream(self, address: str, member: bytes | None, deadline: float) -> socket.socket:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            made = socket.create_connection((host, int(port)), timeout=5.0)
        except OSError as error:
            raise HomeUnavailableError(f"{address} can't be reached: {error}") from None
        self.made.append(made)
        return made


def extent_of(store: memstore.Store, key: str) -> SegmentExtent:
    record = root_of(store).catalog.read(key.encode())
    assert record is not None, key
    (extent,) = record.segments
    return extent


def file_of(store: memstore.Store, extent: SegmentExtent) -> bytes:
    with open(f"{store.root}/segments/{extent.segment:016x}.safetensors", "rb") as file:
        return file.read()


def ranges_of(pairs: Sequence[tuple[int, int]]) -> Ranges:
    starts, stops = zip(*pairs, strict=True) if pairs else ((), ())
    return merged(np.array(starts, np.int64), np.array(stops, np.int64))


_received = deque[bytearray](maxlen=64)  # a Part names an address: its memory outlives the Target, and the test


class Target:
    """Memory as large as a file, of bytes that no test stores, to be received into."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(b"\xa5" * size)
        _received.append(self.bytes)
        self.origin = syscalls.buffer_address(self.bytes)

    def part(self, extent: SegmentExtent, ranges: Ranges) -> SegmentRanges:
        return SegmentRanges(extent, ranges, self.origin)

    def holds(self, content: bytes, ranges: Ranges) -> bool:
        """Whether it has these ranges of the content, and nothing else was written."""
        expected = bytearray(b"\xa5" * len(content))
        for start, stop in zip(ranges.starts.tolist(), ranges.stops.tolist(), strict=True):
            expected[start:stop] = content[start:stop]
        return self.bytes == expected
