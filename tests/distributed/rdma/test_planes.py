"""Large values come by registered memory where both hosts have it, and over TCP where anything is in the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore.distributed.rdma import bringing, slots
from memstore.distributed.transfers import announce, relay
from memstore.distributed.transfers.messages import STAGED_UNIT
from memstore.engine import PinOptions
from memstore.errors import CorruptionError
from memstore.view import view
from tests.distributed.rdma.planes import Planes, two_planes
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
    held = planes.transfers.hold_lazily(key.encode(), planes.record(key), time.monotonic() + 20)
    assert held is not None
    return view(root_of(planes.here), key, held, PinOptions("r+", 20.0, False, False))


# --- what comes by it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mib", [2, 2.75, 8, 20.5, pytest.param(64, marks=pytest.mark.full)])
def test_a_large_value_is_copied_to_this_host_by_it(planes: Planes, mib: float) -> None:
    assert put_and_get(planes, mib)
    assert planes.brought == planes.far.moved().sent == int(mib) * MIB, "all whole units"
    assert planes.copies() == ["key"] and planes.here.stats().filling_bytes == 0


def test_a_small_value_comes_over_tcp(planes: Planes) -> None:
    assert put_and_get(planes, 1.9)
    assert planes.brought == 0 and planes.own.streams == 0


def test_memory_is_registered_once_and_kept(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    register = planes.engine.register

    def count(memory: memoryview) -> bytes:
        made.append(len(memory))
        return register(memory)

    monkeypatch.setattr(planes.engine, "register", count)
    for mib in (20, 25, 17):
        assert put_and_get(planes, mib)
    assert made == [slots.SLOT] * slots.LANE


def test_columns_are_gathered_by_their_host(planes: Planes) -> None:
    value = torch.arange(1 << 20).view(1 << 10, 1 << 10)
    planes.there.put("key", value)
    assert torch.equal(lazily(planes, "key")[:, 100:600].clone(), value[:, 100:600])
    assert planes.brought == (500 << 13) // MIB * MIB


_SLICES = st.tuples(st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 1000), st.integers(1, 1000))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


TROUBLES = [
    no_plane_there,
    no_plane_here,
    nobody_here,
    no_memory_here,
    no_memory_there,
    reads_fail,
    lanes_are_taken,
    far_lanes_are_taken,
    nothing_comes,
]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_whatever_is_in_the_way_it_comes_over_tcp(
    planes: Planes, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[Planes], None]
) -> None:
    monkeypatch.setattr(bringing, "STALLED", 0.3)
    trouble(planes)
    assert put_and_get(planes) and planes.brought == 0
    assert planes.copies() == ["key"] and planes.here.stats().filling_bytes == 0
    assert put_and_get(planes, 3), "and so do the next"
    for reading in planes.engine.readings:
        if not reading.has_come and reading.error is None:
            reading.fail("its time is over")


def test_it_is_used_again_after_a_while(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (relay, bringing):
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
