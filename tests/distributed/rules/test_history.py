"""The check of histories: what no order explains is refused, what one explains is accepted."""

from __future__ import annotations

import math
import random

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from memstore.distributed.rules import Entry
from memstore.distributed.rules.nouns import EPOCH_BITS
from tests.distributed.rules.history import DELETE, GET, LOSS, PUT, Operation, check_history
from tests.distributed.rules.scenes import Scene
from tests.distributed.rules.test_membership import cluster
from tests.distributed.rules.workload import Workload
from tests.examples import examples


def put(start: float, end: float, value: int, version: int | None = None, old: int | None = None) -> Operation:
    return Operation(PUT, start, end, value, version, old)


def get(start: float, end: float, value: int | None, version: int) -> Operation:
    return Operation(GET, start, end, value, version)


BAD = {
    "an acknowledged put is lost": [put(0, 1, 1, 5), get(2, 3, None, 0)],
    "a value that was never put": [put(0, 1, 1, 5), get(2, 3, 9, 6)],
    "an older value": [put(0, 1, 1, 5), put(2, 3, 2, 6), get(4, 5, 1, 5)],
    "back to the older value": [put(0, 1, 1, 5), put(2, 9, 2, 6), get(3, 4, 2, 6), get(5, 6, 1, 5)],
    "one value with two versions": [put(0, 1, 1, 5), get(2, 3, 1, 6)],
    "versions that go back": [put(0, 1, 1, 5), put(2, 3, 2, 4)],
    "a deleted value": [put(0, 1, 1, 5), Operation(DELETE, 2, 3, old=5), get(4, 5, 1, 5)],
    "it was there and was said to be missing": [put(0, 1, 1, 5), Operation(GET, 2, 3, version=0)],
    "two created it": [put(0, 1, 1, 5, old=0), put(2, 3, 2, 6, old=0)],
    "a wait for a version that nobody put": [put(0, 1, 1, 5), Operation(GET, 2, 3, version=7)],
    "an unknown put comes and goes": [put(0, 1, 1, 5), put(2, math.inf, 2), get(3, 4, 2, 6), get(5, 6, 1, 5)],
    "a deleted value comes back after a loss": [
        put(0, 1, 1, 5),
        Operation(DELETE, 2, 3, old=5),
        Operation(LOSS, 4, 4, undoes=True),
        get(5, 6, 1, 5),
    ],
    "an acknowledged put is undone by a loss": [
        put(0, 1, 1, 5),
        put(2, 3, 2, 6),
        Operation(LOSS, 4, 4, undoes=True),
        get(5, 6, 1, 5),
    ],
    "a loss undoes what comes after it": [
        put(0, 1, 1, 5),
        Operation(LOSS, 2, 2, undoes=True),
        put(3, math.inf, 2),
        get(4, 5, 2, 6),
        get(6, 7, 1, 5),
    ],
    "a value is lost that lay elsewhere": [
        put(0, 1, 1, 5),
        Operation(LOSS, 2, math.inf, lost=frozenset({2})),
        get(3, 4, None, 0),
    ],
}
GOOD = {
    "nothing": [get(0, 1, None, 0)],
    "while a put goes on, either value": [put(0, 1, 1, 5), put(2, 9, 2, 6), get(3, 4, 1, 5), get(5, 6, 2, 6)],
    "an unknown put may come late": [put(0, math.inf, 1), get(5, 6, None, 0), get(7, 8, 1, 3)],
    "or never": [put(0, math.inf, 1), get(5, 6, None, 0)],
    "an unknown put explains a conflict": [put(0, math.inf, 1), Operation(GET, 2, 3, version=8)],
    "a loss": [put(0, 1, 1, 5), Operation(LOSS, 2, math.inf, lost=frozenset({1})), get(3, 4, None, 0)],
    "a loss undoes what was not acknowledged, though it was seen": [
        put(0, 1, 1, 5),
        put(2, math.inf, 2),
        get(3, 4, 2, 6),
        Operation(LOSS, 5, 5, undoes=True),
        get(6, 7, 1, 5),
    ],
    "or both versions are lost": [
        put(0, 1, 1, 5),
        put(2, math.inf, 2),
        Operation(LOSS, 5, 5, undoes=True),
        get(6, 7, None, 0),
    ],
    "a loss need not lose anything": [
        put(0, 1, 1, 5),
        Operation(LOSS, 2, 2, lost=frozenset({1}), undoes=True),
        get(3, 4, 1, 5),
    ],
    "a deletion, and it is created again": [
        put(0, 1, 1, 5, old=0),
        Operation(DELETE, 2, 3, old=5),
        put(4, 5, 2, 6, old=0),
        get(6, 7, 2, 6),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_order_explains_is_refused(name: str) -> None:
    assert check_history(BAD[name]) is not None


@pytest.mark.parametrize("name", GOOD)
def test_what_an_order_explains_is_accepted(name: str) -> None:
    assert check_history(GOOD[name]) is None


@hypothesis.settings(max_examples=examples(50))
@hypothesis.given(st.integers(0, 1 << 32), st.integers(1, 14))
def test_what_a_register_does_is_accepted(seed: int, count: int) -> None:
    """Each operation has its effect at a moment that is drawn, and is seen to take longer than that."""
    chance = random.Random(seed)
    at: tuple[int | None, int] = (None, 0)
    history: list[Operation] = []
    for moment in range(count):
        start, end = moment - chance.random() * 3, moment + chance.random() * 3
        kind = chance.choice([PUT, GET, DELETE])
        if kind == PUT:
            expected = at[1] if chance.random() < 0.3 else None
            at = (moment, moment + 1)
            unknown = chance.random() < 0.2
            history.append(put(start, math.inf if unknown else end, moment, None if unknown else moment + 1, expected))
        elif kind == GET:
            history.append(get(start, end, *at))
        else:
            history.append(Operation(DELETE, start, end, old=at[1]))
            at = (None, 0)
    assert check_history(history) is None


def test_versions_that_a_joining_root_shows_may_grow_without_a_put() -> None:
    """Its admission was begun anew, after its records had got versions of an epoch. The value counts all the same."""
    key, world = b"h1-0/k", cluster(2)
    workload = Workload(Scene(hosts=2), world)
    tables = world.hosts["h1"].tables
    process = world.start_process(world.hosts["h1"])
    workload.histories[key] = [Operation(PUT, 0, math.inf, 7)]
    tables.put_record(key, Entry(5 << EPOCH_BITS, b"7"))

    def read_once(*, is_joining: bool, version: int) -> str | None:
        standing = tables.standing()
        assert standing is not None
        tables.put_standing(msgspec.structs.replace(standing, is_joining=is_joining))
        tables.put_record(key, Entry(version, b"7"))
        before = len(workload.histories[key])
        workload.get(process, key, lambda: None)
        world.run(0.04)  # less than until a duty of the host looks
        assert len(workload.histories[key]) == before + 1
        return check_history(workload.histories[key])

    assert read_once(is_joining=True, version=5 << EPOCH_BITS) is None
    assert read_once(is_joining=True, version=6 << EPOCH_BITS) is None
    assert read_once(is_joining=False, version=7 << EPOCH_BITS) is None
    assert read_once(is_joining=False, version=8 << EPOCH_BITS) is not None
