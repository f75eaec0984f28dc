"""Memory into which a read may still come is nobody's until it can't any more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from memstore.distributed.transfers import rdma, receiving
from memstore.distributed.transfers.messages import FOLLOWS, HEAD, LENGTH, Bring, Wanted, encode
from memstore.distributed.transfers.rdma import (
    MOST_DOUBTED,
    MOST_TRANSFERS,
    SLOT,
    SLOTS_OF_TRANSFER,
    EngineError,
    Slots,
)
from memstore.engine import syscalls
from tests.distributed.rdma.engines import HeldEngine, HeldReading
from tests.distributed.rdma.planes import Planes, two_planes
from tests.distributed.rdma.test_planes import numbers, put_and_get
from tests.distributed.serving.agents import eventually
from tests.distributed.transfers.wires import extent_of


@pytest.fixture
def planes(root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planes]:
    """That try again at once, and give up soon."""
    for module in (receiving, rdma):
        monkeypatch.setattr(module, "AWAY", 0.0)
    monkeypatch.setattr(rdma, "PIECE_WITHIN", 0.3)
    monkeypatch.setattr(rdma, "ENDED_WITHIN", 0.05)
    with two_planes(root) as made:
        yield made


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "WAITS", 0.02)


def new_slots() -> Slots:
    return Slots(HeldEngine({}).register, (SLOT,))


def test_memory_whose_registration_fails_is_registered_further_by_the_next_try() -> None:
    """The engine keeps what it has registered: with new memory for each try, tries would fill the host's."""
    registered: list[int] = []
    tries = 0

    def register(memory: memoryview) -> bytes:
        nonlocal tries
        tries += 1
        if tries % 3 == 0:
            raise EngineError("no memory is left to register")
        registered.append(syscalls.buffer_address(memory))
        return b"%d" % len(memory)

    made = Slots(register, (1, SLOT // 2, SLOT))
    failed, lane = 0, None
    while lane is None:
        try:
            lane = made.take()
        except EngineError:
            failed += 1
    assert failed == 4 and len(registered) == SLOTS_OF_TRANSFER * 3 and len(set(registered)) == SLOTS_OF_TRANSFER
    assert all(slot.handles == (b"1", b"%d" % (SLOT // 2), b"%d" % SLOT) for slot in lane.slots)


def reading_into(memory: memoryview) -> HeldReading:
    return HeldReading(memoryview(b"late" * 4), memory, 1.0)


def test_a_late_read_lands_in_memory_that_nobody_has_got(planes: Planes) -> None:
    planes.engine.holds = True
    assert put_and_get(planes, 20), "over TCP"
    late = list(planes.engine.readings)
    assert len(late) == rdma.AT_ONCE and planes.plane.brought.doubted == len(late)
    planes.engine.holds = False
    planes.there.put("other", numbers(24))

    def come_late() -> None:
        for reading in late:
            reading.come()

    during = threading.Thread(target=come_late)
    during.start()
    assert torch.equal(planes.get("other", verify=True), numbers(24))
    during.join()
    assert planes.brought == 24 << 20
    used = {id(reading._into) for reading in planes.engine.readings[len(late) :]}  # pyright: ignore[reportPrivateUsage]
    assert used.isdisjoint(id(reading._into) for reading in late)  # pyright: ignore[reportPrivateUsage]


def test_doubted_slots_come_back_when_their_reads_are_over_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "DOUBTED_FOR", 0.05)
    made = new_slots()
    lane = made.take()
    assert lane is not None
    with lane:
        reading = reading_into(lane.slots[0].memory)
        lane.doubt(lane.slots[0], reading)
    doubted = lane.slots[0].address
    time.sleep(0.1)
    assert len(taken(made)) == MOST_TRANSFERS * SLOTS_OF_TRANSFER, "no slot is in two lanes"
    assert doubted not in taken(made), "its read is not over"
    reading.come()
    assert doubted not in taken(made), "it was not over for long"
    time.sleep(0.1)
    assert made.doubted == 1 and doubted in taken(made) | taken(made) and made.doubted == 0


def taken(made: Slots) -> set[int]:
    """The addresses of all slots that there are now; given back."""
    lanes = list(iter(made.take, None))
    found = {slot.address for lane in lanes for slot in lane.slots}
    for lane in lanes:
        lane.__exit__()
    return found


def test_too_many_doubted_slots_end_it_until_they_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_slots()
    readings: list[HeldReading] = []
    while (lane := made.take()) is not None:
        with lane:
            for slot in lane.slots:
                readings.append(reading_into(slot.memory))
                lane.doubt(slot, readings[-1])
    assert MOST_DOUBTED <= made.doubted < MOST_DOUBTED + SLOTS_OF_TRANSFER
    monkeypatch.setattr(rdma, "DOUBTED_FOR", 0.0)
    for reading in readings:
        reading.fail("it is over")
    assert made.take() is not None and made.doubted == 0


def test_a_process_that_ends_in_the_middle_leaves_nothing_to_doubt(planes: Planes) -> None:
    planes.there.put("key", numbers(40))
    extent = extent_of(planes.there, "key")
    pairs = np.array([[extent.start, 40 << 20]], ">u8").tobytes()
    wanted = Wanted(extent.segment, extent.put_id, extent.size, extent.start, pairs)
    asked = encode(Bring(planes.served.member.id, 20_000, (wanted,)))
    with socket.create_connection(("127.0.0.1", planes.own.port)) as stream:
        stream.sendall(LENGTH.pack(len(asked)) + asked)
        assert HEAD.unpack(stream.recv(HEAD.size, socket.MSG_WAITALL)) == (FOLLOWS, 40 << 20)
        stream.recv(1 << 20, socket.MSG_WAITALL)
    eventually(
        lambda: len(taken(planes.plane.brought)) == MOST_TRANSFERS * SLOTS_OF_TRANSFER, "its slots are there again"
    )
    assert planes.plane.brought.doubted == 0
    assert put_and_get(planes, 20) and planes.brought == 20 << 20


@pytest.mark.full
def test_a_reader_that_ends_gives_its_slots_back(planes: Planes) -> None:
    """Those of the other host, which hears of nothing but the end of its stream."""
    planes.engine.holds = True
    for number in range(MOST_TRANSFERS + 1):
        assert put_and_get(planes, 8 + number)
    for reading in planes.engine.readings:
        reading.fail("its time is over")
    planes.engine.holds = False
    assert put_and_get(planes, 30) and planes.brought == 30 << 20
    eventually(lambda: len(taken(planes.far.staged)) == MOST_TRANSFERS * SLOTS_OF_TRANSFER, "its slots are there again")
