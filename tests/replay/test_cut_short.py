"""Calls that are killed or interrupted at each of their instructions: a batch is whole or absent, and others go on."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import memstore
from memstore.replay import sample_rows
from tests.replay import points
from tests.replay.rows import SPEC, check_priorities, check_whole, numbers_of, ring_of, rows, there, writer_of
from tests.support import faults

CAPACITY, BEFORE = 8, 6
OLD = {position: position for position in range(BEFORE)}
ADDED = {position: 100 + position - BEFORE for position in range(BEFORE, BEFORE + 4)}
_keys = itertools.count()


@dataclass(frozen=True)
class Operation:
    """`may_be`: which rows there are afterwards, at whatever point it was cut short."""

    sampler: str
    run: Callable[[memstore.ReplayBuffer], object]
    may_be: tuple[dict[int, int], ...]


def one(number: int) -> dict[str, Any]:
    return {name: leaf[0] for name, leaf in rows(number, 1).items()}


def large(buffer: memstore.ReplayBuffer) -> memstore.ReplayBuffer:
    """Its batches are written by two holds of the mutex, as large ones are."""
    writer_of(buffer).small_batch = 0
    return buffer


_SURVIVORS = {position: OLD[position] for position in range(2, BEFORE)}
_ANY = (OLD, _SURVIVORS, {**_SURVIVORS, **ADDED})

OPERATIONS = {
    "extend": Operation("uniform", lambda buffer: buffer.extend(rows(100, 4)), _ANY),
    "extend, with priorities": Operation("prioritized", lambda buffer: buffer.extend(rows(100, 4), priority=2.0), _ANY),
    "extend, large": Operation("uniform", lambda buffer: large(buffer).extend(rows(100, 4)), _ANY),
    "extend, large, with priorities": Operation(
        "prioritized", lambda buffer: large(buffer).extend(rows(100, 4), priority=2.0), _ANY
    ),
    "add": Operation("uniform", lambda buffer: buffer.add(one(100)), (OLD, {**OLD, BEFORE: 100})),
    "add, large": Operation("uniform", lambda buffer: large(buffer).add(one(100)), (OLD, {**OLD, BEFORE: 100})),
    "fifo": Operation("fifo", lambda buffer: buffer.sample(3), (OLD,)),
    "lifo": Operation("lifo", lambda buffer: buffer.sample(3), (OLD,)),
    "put back": Operation("fifo", lambda buffer: sample_rows(buffer, 3).put_back(), (OLD,)),
    "update": Operation("prioritized", lambda buffer: buffer.update_priority([0, 3, 5], [4.0, 5.0, 6.0]), (OLD,)),
    "sample": Operation("prioritized", lambda buffer: buffer.sample(3), (OLD,)),
    "open": Operation(
        "uniform", lambda buffer: memstore.ReplayBuffer(memstore.open(ring_root(buffer)), buffer.key), (OLD,)
    ),
}


HANDED_OUT = ("fifo", "lifo", "put back")


def ring_root(buffer: memstore.ReplayBuffer) -> str:
    return ring_of(buffer).entry.root.path


def prepare(store: memstore.Store, operation: Operation) -> memstore.ReplayBuffer:
    sampler: Any = operation.sampler
    key = f"replay {next(_keys)}"
    buffer = memstore.ReplayBuffer(store, key, SPEC, capacity=CAPACITY, sampler=sampler, seed=0)
    buffer.extend(rows(0, BEFORE))
    return buffer


def check(store: memstore.Store, name: str, buffer: memstore.ReplayBuffer) -> None:
    """After it was cut short."""
    other = memstore.ReplayBuffer(store, buffer.key)
    assert there(store, buffer.key) in OPERATIONS[name].may_be
    if name in HANDED_OUT:
        check_handed_out(store, buffer)
    check_priorities(other)
    check_whole(store, other)
    store.delete(buffer.key)


def check_handed_out(store: memstore.Store, buffer: memstore.ReplayBuffer) -> None:
    """What was not taken is handed out, each row once; the others are gone."""
    consumer = memstore.ReplayBuffer(store, buffer.key, sampler="fifo")
    left: list[int] = []
    while True:
        try:
            left += numbers_of(consumer.sample(1, timeout=0))
        except memstore.StoreTimeoutError:
            break
    assert left == sorted(set(left)) and len(left) in (BEFORE, BEFORE - 3)


def some(count: int, part: int) -> list[int]:
    """So many of them, strewn over all."""
    return sorted(random.Random(count).sample(range(count), min(part, count)))


SLOW = [pytest.mark.full, pytest.mark.timeout(1200)]
PARTS = [pytest.param(3, id="some"), pytest.param(150, id="more", marks=SLOW)]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_leaves_all_or_nothing(store: memstore.Store, name: str, part: int) -> None:
    operation = OPERATIONS[name]
    buffer = prepare(store, operation)
    number = points.count(lambda: operation.run(buffer))
    store.delete(buffer.key)
    killed = 0
    for point in some(number, part):
        buffer = prepare(store, operation)
        killed += points.kill(lambda buffer=buffer: operation.run(buffer), point)
        check(store, name, buffer)
    assert killed >= min(part, number) - 1, "this tests nothing"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_leaves_all_or_nothing_and_its_thread_goes_on(store: memstore.Store, name: str, part: int) -> None:
    operation = OPERATIONS[name]
    buffer = prepare(store, operation)
    number = points.count(lambda: operation.run(buffer), signals=True)
    store.delete(buffer.key)
    interrupted = 0
    for point in some(number, part):
        buffer = prepare(store, operation)
        interrupted += points.interrupt(lambda buffer=buffer: operation.run(buffer), point)
        if name in HANDED_OUT:
            check_handed_out(store, buffer)
        assert there(store, buffer.key) in operation.may_be
        check_whole(store, buffer)
        store.delete(buffer.key)
    assert interrupted


@pytest.mark.parametrize("name", ["extend", "extend, with priorities", "fifo", "update"])
def test_a_failure_of_each_call_into_the_kernel(store: memstore.Store, name: str) -> None:
    operation = OPERATIONS[name]
    buffer = prepare(store, operation)
    steps = faults.record(lambda: operation.run(buffer))
    for number, step in enumerate(steps, 1):
        if step in faults.CLEANUPS:
            continue
        buffer = prepare(store, operation)
        with (
            pytest.raises(OSError, match="injected"),
            faults.at_step(number, faults.raising(OSError(errno.EIO, "injected"))),
        ):
            operation.run(buffer)
        assert there(store, buffer.key) in operation.may_be
        check_whole(store, buffer)
        store.delete(buffer.key)
