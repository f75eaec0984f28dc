"""Huge pages are asked for while they cost no more than small ones: in one file, in the next ones, by all who ask."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable

import pytest

import memstore
from memstore.engine import SharedMemory, syscalls
from memstore.engine.files import mapping
from memstore.engine.files.mapping import COLLAPSE_STEP, PagePrices
from memstore.snapshot.chunks import FilePart
from memstore.snapshot.storage import FileStorage
from tests.children import in_child
from tests.segments import of_size
from tests.support import faults

MIB = 1 << 20
EXTENT = syscalls.HUGE_PAGE
FAST, SLOW = 0.0001, 0.006  # seconds for 2 MiB; of small pages, 0.0008


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prices(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> PagePrices:
    """Those of this process, for one test, by a clock that stands."""
    made = PagePrices(clock)
    monkeypatch.setattr(mapping, "prices", made)
    return made


class Kernel:
    """What memory costs is what a test says, and not what it takes here. All else is real.

    Attributes:
        huge, small: seconds that 2 MiB of such pages take from now on.
        asked: bytes of each collapse that was asked for.
    """

    def __init__(self) -> None:
        self.huge, self.small = FAST, 0.0008
        self.asked: list[int] = []
        self._own = threading.local()  # what the call that is timed has asked for: other threads ask meanwhile

    def timed(self, call: Callable[[], object]) -> tuple[float, object]:
        """As `huge_pages._timed`."""
        self._own.size = 0
        result = call()
        size: int = self._own.size
        return (self.huge * size / EXTENT if size else self.small), result

    def note(self, size: int) -> None:
        self._own.size = size
        self.asked.append(size)


@pytest.fixture
def kernel(prices: PagePrices, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made, real = Kernel(), syscalls.collapse

    def collapse(address: int, size: int) -> bool:
        made.note(size)
        return real(address, size) or True  # a kernel that refuses is another test's subject

    monkeypatch.setattr(syscalls, "collapse", collapse)
    monkeypatch.setattr(mapping, "_timed", made.timed)
    return made


def allocate(size: int = 64 * MIB) -> None:
    """Of a new file, all of which must be allocated, whatever its pages are."""
    memory = SharedMemory(size)
    mapping.allocate_pages(memory.fd, memory.address, size)
    assert syscalls.status(memory.fd).st_blocks * 512 >= size


# --- which ones are asked for -----------------------------------------------------------------------------------------


def test_while_they_are_cheap_all_of_a_file_is_asked_for(kernel: Kernel) -> None:
    allocate(64 * MIB + 5000)
    assert kernel.asked == [EXTENT, *[COLLAPSE_STEP] * 15, EXTENT], "one extent, two, and then 4 MiB at a time"


def test_the_rest_of_a_file_and_the_next_files_do_without_those_that_were_slow(kernel: Kernel) -> None:
    kernel.huge = SLOW
    allocate()
    assert kernel.asked == [EXTENT], "one extent tells it"
    allocate()
    allocate(4 * MIB)
    assert kernel.asked == [EXTENT]


def test_they_may_become_slow_in_the_middle_of_a_file(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernel.timed

    def timed(call: Callable[[], object]) -> tuple[float, object]:
        kernel.huge = SLOW if len(kernel.asked) == 3 else FAST
        return real(call)

    monkeypatch.setattr(mapping, "_timed", timed)
    allocate()
    assert kernel.asked == [EXTENT, COLLAPSE_STEP, COLLAPSE_STEP, COLLAPSE_STEP], "the last one cost too much"


def test_what_slow_tries_lose_is_a_tenth_of_the_time_and_less_and_less(prices: PagePrices, clock: Clock) -> None:
    prices.note_small(EXTENT, 0.001)
    tried: list[float] = []
    for hundredth in range(30_000):
        clock.now = 1000 + hundredth / 100
        if prices.prefers_huge():
            prices.note_huge(EXTENT, 0.023)  # 0.020 more than small pages cost in the end
            tried.append(clock.now)
    pauses = [round(after - before, 1) for before, after in itertools.pairwise(tried)]
    assert pauses[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4] and pauses[-1] == 60.0
    prices.note_huge(EXTENT, FAST)
    assert prices.prefers_huge()
    prices.note_huge(EXTENT, 0.023)
    clock.now += 59
    assert not prices.prefers_huge(), "a few that are cheap don't make up for it"
    for _ in range(32):
        prices.note_huge(EXTENT, FAST)
    prices.note_huge(EXTENT, 0.023)
    clock.now += 0.19
    assert not prices.prefers_huge()
    clock.now += 0.02
    assert prices.prefers_huge(), "the first pause is short again"


def test_where_small_pages_cost_as_much_huge_ones_are_made_at_any_price(kernel: Kernel) -> None:
    """Memory that a virtual machine touches for the first time costs the same in either kind."""
    kernel.huge = kernel.small = SLOW
    allocate()
    assert sum(kernel.asked) == 62 * MIB, "one extent told what small ones cost"
    kernel.asked.clear()
    allocate()
    assert sum(kernel.asked) == 64 * MIB


def test_small_pages_that_become_as_dear_end_the_pause(kernel: Kernel) -> None:
    kernel.huge = SLOW
    allocate()
    assert kernel.asked == [EXTENT]
    kernel.small = SLOW
    allocate()
    assert sum(kernel.asked[1:]) >= 54 * MIB, "after a few small ones"


@pytest.mark.parametrize("size", [5 * MIB, 64 * MIB])
def test_a_kernel_that_makes_none_is_asked_once(
    size: int, prices: PagePrices, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(syscalls, "collapse", lambda address, size: bool(asked.append(size)))
    for _ in range(3):
        allocate(size)
    assert asked == [EXTENT]
    clock.now += 10
    allocate(size)
    assert asked == [EXTENT, EXTENT]


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_kernel_that_waits_is_slow(prices: PagePrices, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that really passes: of a collapse that waits, be it for other processes' pages or for a disk."""
    asked: list[int] = []

    def wait() -> None:
        asked.append(0)
        time.sleep(0.5)

    memory = SharedMemory(64 * MIB)
    with faults.at_step(1, wait, names=frozenset({"collapse"})):
        end = mapping.allocate_huge(memory.fd, memory.address, 0, memory.size)
    assert asked and end <= 2 * EXTENT and not prices.prefers_huge()


def test_a_kernel_that_computes_is_slow(prices: PagePrices) -> None:
    memory = SharedMemory(64 * MIB)

    def compute() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    with faults.at_step(1, compute, names=frozenset({"collapse"})):
        end = mapping.allocate_huge(memory.fd, memory.address, 0, memory.size)
    assert end <= 2 * EXTENT and not prices.prefers_huge()


def test_what_is_huge_already_tells_nothing_of_new_pages(kernel: Kernel) -> None:
    """A file that is used again costs microseconds: the next new one mustn't be tried for that."""
    kernel.huge = SLOW
    allocate()
    memory = SharedMemory(8 * MIB)
    memory.populate(0, memory.size)
    kernel.huge = 0.000003
    memory.make_huge(0, memory.size)
    allocate()
    assert kernel.asked == [EXTENT]


# --- who asks ---------------------------------------------------------------------------------------------------------


def test_a_put_does_without_what_an_earlier_one_has_found_slow(store: memstore.Store, kernel: Kernel) -> None:
    kernel.huge = SLOW
    for number in range(3):
        store.put(f"key/{number}", of_size(24 * MIB, number))
        assert (store.get(f"key/{number}") == number).all()
    assert kernel.asked == [EXTENT]


def test_a_file_that_is_used_again_has_its_pages_moved_once_they_are_cheap(
    store: memstore.Store, kernel: Kernel
) -> None:
    kernel.huge = SLOW
    in_child(put_some, store)  # whose mappings this process doesn't have
    kernel.huge = FAST
    store.put("key", of_size(8 * MIB, 9))
    assert kernel.asked == [EXTENT, 2 * EXTENT, EXTENT]
    assert (store.get("key") == 9).all()


def test_a_file_that_a_process_fills_again_and_again_has_them_moved_a_part_at_a_time(
    store: memstore.Store, kernel: Kernel, clock: Clock
) -> None:
    kernel.huge = SLOW
    for number in range(4):  # two files take turns, and this process keeps their mappings
        store.put("key", of_size(16 * MIB, number))
    assert kernel.asked == [EXTENT]
    kernel.huge = FAST
    clock.now += 60.0
    asked: list[int] = []
    for number in range(12):
        before = len(kernel.asked)
        store.put("key", of_size(16 * MIB, number))
        assert (store.get("key") == number).all()
        asked.append(sum(kernel.asked[before:]))
    assert max(asked) == COLLAPSE_STEP and sum(asked) == 2 * 16 * MIB
    assert not any(asked[-2:]), "what was looked at is huge, and isn't looked at again"


def put_some(store: memstore.Store) -> None:
    for number in range(4):
        store.put("key", of_size(8 * MIB, number))


def test_the_files_of_a_snapshot_share_that_memory(kernel: Kernel) -> None:
    kernel.huge = SLOW
    data = os.urandom(20 * MIB + 5)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as folder:
        storage = FileStorage(folder)
        for number in range(3):
            storage.write(f"{number}", len(data), [FilePart(0, data)], durable=False)
            assert storage.read_bytes(f"{number}", len(data)) == data
        assert set(kernel.asked) == {EXTENT} and len(kernel.asked) <= 2, (
            "one of each thread that began at the same time"
        )


def test_staged_memory_is_moved_while_that_costs_little_and_then_where_it_ended(kernel: Kernel, clock: Clock) -> None:
    memory = SharedMemory(32 * MIB)
    memory.populate(0, memory.size)
    kernel.huge = 2 * SLOW
    assert memory.make_huge(0, 8 * MIB) == EXTENT, "the first extent tells it"
    assert memory.make_huge(EXTENT, 8 * MIB) == EXTENT
    kernel.huge = FAST
    clock.now += 1.0
    assert memory.make_huge(EXTENT, memory.size) == memory.size


def test_a_child_goes_on_with_what_its_parent_has_found(kernel: Kernel) -> None:
    kernel.huge = SLOW
    allocate()

    def allocate_in_child() -> list[int]:
        allocate()
        return kernel.asked

    assert in_child(allocate_in_child) == [EXTENT]
