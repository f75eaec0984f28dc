"""Large values come by registered memory where both hosts have it, and over TCP where anything is in the way."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore.distributed.transfers import announce, rdma, receiving
from memstore.distributed.transfers.messages import (
    FAILED,
    FOLLOWS,
    HEAD,
    LENGTH,
    STAGED_UNIT,
    Bring,
    Stage,
    Staged,
    encode,
)
from memstore.engine import PinOptions
from memstore.errors import CorruptionError
from memstore.view import view
from tests.distributed.rdma.planes import Planes, two_planes
from tests.examples import examples
from tests.inside import root_of

MIB = STAGED_UNIT


@pytest.fixture
def planes(root: str) -> Iterator[Planes]:
    with two_planes(root) as made:
        yield made


def numbers(mib: float) -> torch.Tensor:
    return torch.arange(int(mib * MIB) // 8)


def put_and_get(planes: Planes, mib: float = 20.5, key: str = "key") -> bool:
    planes.there.put(key, numbers(mib))
    return torch.equal(planes.get(key, verify=True), numbers(mib))


def lazily(planes: Planes, key: str) -> Any:
    held = planes.transfers.hold(key.encode(), planes.record(key), time.monotonic() + 20, lazily=True)
    assert held is not None
    return view(root_of(planes.here), key, held, PinOptions("r+", 20.0, False, False))


# --- what comes by it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mib", [2, 2.75, 8, 20.5, pytest.param(64, marks=pytest.mark.full)])
def test_a_large_value_is_copied_to_this_host_by_it(planes: Planes, mib: float) -> None:
    assert put_and_get(planes, mib)
    assert planes.brought == planes.far.settled().sent == int(mib) * MIB, "all whole units"
    assert planes.copies() == ["key"] and planes.here.stats().filling_bytes == 0


def test_several_transfers_at_once_don_t_meet(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are lanes: the others wait, and none is asked over TCP from then on."""
    monkeypatch.setattr(rdma, "WAITS", 60.0)  # on a busy machine a lane may be taken for longer than a second
    keys = [f"key{number}" for number in range(rdma.MOST_TRANSFERS + 2)]
    for number, key in enumerate(keys):
        planes.there.put(key, numbers(9) + number)
    with ThreadPoolExecutor(len(keys)) as threads:
        got = list(threads.map(planes.get, keys))
    assert all(torch.equal(one, numbers(9) + number) for number, one in enumerate(got))
    assert planes.brought == 9 * MIB * len(keys)


def test_who_has_waited_for_others_takes_tcp_this_time(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "WAITS", 0.1)
    for side in (planes.plane.brought, planes.far.staged):
        before, lanes = planes.brought, list(iter(side.take, None))
        assert len(lanes) == rdma.MOST_TRANSFERS
        assert put_and_get(planes, 3) and planes.brought == before
        lanes[0].__exit__()
        assert put_and_get(planes, 4) and planes.brought == before + 4 * MIB


def test_a_small_value_comes_over_tcp(planes: Planes) -> None:
    assert put_and_get(planes, 1.9)
    assert planes.brought == 0 and planes.own.streams == 0


def test_memory_is_registered_once_and_kept(planes: Planes) -> None:
    for mib in (20, 25, 17):
        assert put_and_get(planes, mib)
    assert planes.engine.sizes == [rdma.SLOT] * rdma.SLOTS_OF_TRANSFER


def test_columns_are_gathered_by_their_host(planes: Planes) -> None:
    value = torch.arange(1 << 20).view(1 << 10, 1 << 10)
    planes.there.put("key", value)
    assert torch.equal(lazily(planes, "key")[:, 100:600].clone(), value[:, 100:600])
    assert planes.brought == (500 << 13) // MIB * MIB


_SLICES = st.tuples(st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 1000), st.integers(1, 1000))


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_SLICES)
def test_any_slice_comes_as_it_lies_there(planes: Planes, part: tuple[int, int, int, int]) -> None:
    value = torch.arange(1 << 20).view(1 << 10, 1 << 10)
    planes.there.put("key", value)
    row, rows, column, columns = part
    found = lazily(planes, "key")[row : row + rows, column : column + columns]
    assert torch.equal(found.clone(), value[row : row + rows, column : column + columns])


def test_small_pieces_are_packed(planes: Planes) -> None:
    value = torch.arange(1 << 20).view(1 << 15, 32)
    planes.there.put("key", value)
    assert torch.equal(lazily(planes, "key")[:, :16].clone(), value[:, :16])
    assert planes.brought == 4 * MIB


def test_a_full_store_takes_it_into_memory(root: str) -> None:
    with two_planes(root, capacity=8 * MIB) as planes:
        assert put_and_get(planes)
        assert planes.brought == 20 * MIB and planes.copies() == []


# --- what is in the way -----------------------------------------------------------------------------------------------


def test_hosts_of_two_transports_take_tcp(root: str) -> None:
    with two_planes(root, transports=("rdma", "monarch")) as planes:
        assert put_and_get(planes) and planes.brought == 0
        asked = planes.own.streams
        assert put_and_get(planes, 21) and planes.own.streams == asked, "it is not asked again for a while"


def no_plane_there(planes: Planes) -> None:
    planes.served.senders.plane = None


def no_plane_here(planes: Planes) -> None:
    """What ROOT/transport says is old."""
    planes.own.senders.plane = None


def nobody_here(planes: Planes) -> None:
    """The index process has been killed, and said nothing."""
    planes.own.close_listener()


def no_memory_here(planes: Planes) -> None:
    planes.engine.refuses = "no memory is left to register"


def no_memory_there(planes: Planes) -> None:
    far: Any = planes.far.staged
    far._register = planes.plane.staged._register  # pyright: ignore[reportPrivateUsage]
    planes.engine.refuses = "no memory is left to register"


def reads_fail(planes: Planes) -> None:
    planes.engine.fails = "the actor is gone"


def lanes_are_taken(planes: Planes) -> None:
    while planes.plane.brought.take() is not None:
        pass


def far_lanes_are_taken(planes: Planes) -> None:
    while planes.far.staged.take() is not None:
        pass


def nothing_comes(planes: Planes) -> None:
    planes.engine.holds = True


TROUBLES = [no_plane_there, nobody_here, reads_fail, nothing_comes]
RARER = [no_plane_here, no_memory_here, no_memory_there, lanes_are_taken, far_lanes_are_taken]


@pytest.mark.parametrize(
    "trouble",
    [*TROUBLES, *(pytest.param(one, marks=pytest.mark.full) for one in RARER)],
    ids=lambda trouble: trouble.__name__,
)
def test_whatever_is_in_the_way_it_comes_over_tcp(
    planes: Planes, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[Planes], None]
) -> None:
    monkeypatch.setattr(rdma, "PIECE_WITHIN", 0.3)
    monkeypatch.setattr(rdma, "WAITS", 0.1)
    trouble(planes)
    assert put_and_get(planes) and planes.brought == 0
    assert planes.copies() == ["key"] and planes.here.stats().filling_bytes == 0
    assert put_and_get(planes, 3), "and so do the next"
    for reading in planes.engine.readings:
        if not reading.has_come and reading.error is None:
            reading.fail("its time is over")


def staged(handle: bytes, nbytes: int) -> bytes:
    said = encode(Staged(handle, nbytes))
    return HEAD.pack(FOLLOWS, 20 * MIB) + LENGTH.pack(len(said)) + said


# What a host says that keeps to no rule; then it ends the stream.
LIES = {
    "nothing": b"",
    "another kind": HEAD.pack(9, 0),
    "more bytes than were asked for": HEAD.pack(FOLLOWS, 1 << 50),
    "a long failure": HEAD.pack(FAILED, 1 << 40),
    "no failure": HEAD.pack(FAILED, 4) + b"\xff" * 4,
    "a long piece": HEAD.pack(FOLLOWS, 20 * MIB) + LENGTH.pack(1 << 30),
    "no piece": HEAD.pack(FOLLOWS, 20 * MIB) + LENGTH.pack(4) + b"\xff" * 4,
    "an empty piece": staged(b"1", 0),
    "a piece larger than a slot": staged(b"1", rdma.SLOT + MIB),
    "a part of a unit": staged(b"1", MIB + 1),
    "nobody's handle": staged(b"nobody's", rdma.SLOT),
    "a handle that is no text": staged(b"\xff", rdma.SLOT),
    "one piece": HEAD.pack(FOLLOWS, 20 * MIB),
}


class Liar:
    def __init__(self, lie: bytes) -> None:
        self._lie = lie

    def stage(self, stream: socket.socket, request: Stage) -> None:
        stream.sendall(self._lie)
        raise ConnectionError

    def bring(self, stream: socket.socket, request: Bring) -> None:
        raise NotImplementedError


def test_a_host_that_keeps_to_no_rule_costs_a_transfer(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (receiving, rdma):
        monkeypatch.setattr(module, "AWAY", 0.0)
    planes.there.put("key", numbers(20))
    for what, lie in LIES.items():
        planes.served.senders.plane = Liar(lie)
        assert torch.equal(lazily(planes, "key").clone(), numbers(20)), what
        assert planes.brought == 0, what
    planes.served.senders.plane = planes.far
    assert torch.equal(planes.get("key", verify=True), numbers(20)) and planes.brought == 20 * MIB


def test_a_host_that_fails_again_is_left_alone_for_longer(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "AWAY", 0.0)
    monkeypatch.setattr(rdma, "AWAY", 0.15)
    planes.engine.fails = "the actor is gone"
    readings = planes.engine.readings
    while len(readings) < 3:
        assert put_and_get(planes, 2)
    assert readings[1].begun - readings[0].begun >= 0.15 and readings[2].begun - readings[1].begun >= 0.3
    planes.engine.fails = None
    while not planes.brought:
        assert put_and_get(planes, 2)


@pytest.mark.full
def test_a_get_with_little_time_has_half_of_it_left_for_tcp(planes: Planes) -> None:
    planes.engine.holds = True
    planes.there.put("key", numbers(20))
    started = time.monotonic()
    held = planes.hold("key", seconds=10)
    assert held is not None and 2 < time.monotonic() - started < 10
    for reading in planes.engine.readings:
        reading.fail("its time is over")


def test_it_is_used_again_after_a_while(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (receiving, rdma):
        monkeypatch.setattr(module, "AWAY", 0.0)
    planes.engine.fails = "the actor is gone"
    assert put_and_get(planes) and planes.brought == 0
    planes.engine.fails = None
    assert put_and_get(planes, 21) and planes.brought == 21 * MIB


def test_where_nothing_is_announced_nobody_is_asked(planes: Planes) -> None:
    announce(root_of(planes.here), "tcp")
    assert put_and_get(planes) and planes.own.streams == 0
    announce(root_of(planes.here), "tcp")  # as often as one likes


def test_a_replaced_value_is_gone(planes: Planes) -> None:
    planes.there.put("key", numbers(20))
    record = planes.record("key")
    planes.there.delete("key")
    planes.there.gc()
    assert planes.transfers.hold(b"key", record, time.monotonic() + 20) is None
    assert planes.copies() == [] and planes.here.stats().filling_bytes == 0
    assert put_and_get(planes) and planes.brought == 20 * MIB, "its slots are there again"


def test_a_damaged_file_is_told_by_its_type(planes: Planes) -> None:
    planes.there.put("key", numbers(20))
    (path,) = planes.there.info("key").files
    with open(path, "r+b") as file:
        file.truncate(4 * MIB)
    with pytest.raises(CorruptionError):
        planes.get("key")
    assert put_and_get(planes, key="other") and planes.brought == 20 * MIB


def test_a_copy_that_came_so_is_mapped_by_others(planes: Planes) -> None:
    assert put_and_get(planes)
    held = planes.hold("key")
    assert held is not None and held.record.hosts is None
    assert planes.own.streams == 1 and planes.brought == 20 * MIB
