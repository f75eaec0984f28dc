"""The rules of slots, explored: nothing forbidden is reached, every step is taken, and faults would be found."""

from __future__ import annotations

import functools
import inspect
import re

import pytest

from tests.examples import one_in
from tests.replay import slots_model
from tests.replay.slots_model import MUTATIONS, Model, Process, check, is_end, start
from tests.support.explore import Explored, Fault, explore, is_bad_luck

FULL = [pytest.mark.full, pytest.mark.timeout(1800)]


def writer(rows: int = 1, batches: int = 1, *, small: bool = False) -> Process:
    return Process("writer", rows, batches, small)


def sampler(rows: int = 1) -> Process:
    return Process("sampler", rows)


def consumer(rows: int = 1) -> Process:
    return Process("consumer", rows)


SCENES: dict[str, tuple[list[Process], dict[str, int]]] = {
    "a writer laps a sampler": ([writer(1, 3), sampler()], {"capacity": 1, "claims": 1, "kills": 1}),
    "two writers": ([writer(1, 2), writer()], {"kills": 1, "stops": 1}),
    "batches": ([writer(2, 2), writer()], {"capacity": 3, "kills": 1}),
    "two writers and a sampler": ([writer(1, 2), writer(), sampler()], {}),
    "a stopped writer": ([writer(), writer(), sampler()], {"capacity": 1, "kills": 1, "stops": 1}),
    "an interrupted writer": ([writer(2), writer(1, 2)], {"interrupts": 1, "kills": 1}),
    "one claim for two writers": ([writer(), writer(1, 2)], {"claims": 1, "kills": 2}),
    "a writer of small rows": (
        [writer(1, 2, small=True), writer(), sampler()],
        {"capacity": 1, "kills": 1, "interrupts": 1},
    ),
    "writers of small batches": ([writer(2, 2, small=True), writer(1, 1, small=True)], {"capacity": 3, "kills": 2}),
    "small rows for a consumer": ([writer(1, 2, small=True), writer(), consumer(2)], {"kills": 1}),
    "a consumer": ([writer(1, 3), consumer(2)], {"kills": 1}),
    "two consumers": ([writer(2, 1), consumer(), consumer()], {"kills": 1, "late": True}),
    "a consumer is cancelled": ([writer(1, 3), consumer()], {"kills": 1, "cancels": 1}),
    "a writer is passed over": ([writer(), writer(1, 2), consumer()], {}),
    "a consumer passes a slow writer": ([writer(), writer(), consumer(3)], {}),
}
LARGE_SCENES: dict[str, tuple[list[Process], dict[str, int]]] = {
    "a consumer passes a stopped writer": (
        [writer(), writer(1, 2), consumer(3)],
        {"stops": 1, "kills": 1, "capacity": 3},
    ),
    "two writers and a sampler, all that can happen": (
        [writer(1, 2), writer(), sampler()],
        {"kills": 1, "stops": 1, "interrupts": 1},
    ),
    "a writer is passed over, a death": ([writer(), writer(1, 2), consumer(2)], {"kills": 1}),
    "three writers": ([writer(), writer(), writer(1, 2)], {"kills": 1, "stops": 1, "claims": 3}),
    "batches and a sampler": ([writer(2, 2), writer(2), sampler()], {"capacity": 3, "kills": 1}),
    "two writers and two consumers": ([writer(1, 2), writer(), consumer(), consumer(2)], {"kills": 1}),
}
SLOW = {"a writer of small rows", "small rows for a consumer", "a writer is passed over", "two writers and a sampler"}
FOUND_IN = {
    "take what the living write": "two writers",
    "leave what the dead claimed": "one claim for two writers",
    "free a claim before its words": "two writers",
    "no word says that it is written": "a writer laps a sampler",
    "claim without a note": "two writers",
    "publish without a note": "batches",
    "small rows without the mutex": "a writer of small rows",
    "publish before the last cell": "a writer laps a sampler",
    "recovery leaves a claim": "two writers",
    "recovery leaves a publication": "two writers",
    "no look again": "a writer laps a sampler",
    "look at the state alone": "a writer laps a sampler",
    "the cursor stays": "a consumer passes a slow writer",
    "nobody looks for late rows": "a writer is passed over",
    "the cursor alone": "a consumer passes a slow writer",
    "the cursor skips rows": "a consumer passes a slow writer",
    "take without the mutex": "two consumers",
    "put back behind the cursor": "a consumer is cancelled",
    "put back what is written over": "a consumer is cancelled",
}


def look(scene: str, *mutations: str) -> Explored:
    processes, limits = {**SCENES, **LARGE_SCENES}[scene]
    model = Model(*mutations)
    return explore(start(*processes, **limits), model.successors, check, is_end=is_end, is_bad_luck=is_bad_luck)


whole = functools.cache(look)


@pytest.mark.parametrize(
    "scene",
    [
        *(pytest.param(scene, marks=FULL if scene in SLOW else ()) for scene in SCENES),
        *(pytest.param(scene, marks=FULL) for scene in LARGE_SCENES),
    ],
)
def test_nothing_forbidden_is_reached(scene: str) -> None:
    found = whole(scene) if scene in SCENES else look(scene)
    print(f"{found.states:,} states, {found.steps:,} steps")
    assert found.states > 500, "this tests nothing"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_step_is_taken() -> None:
    source = inspect.getsource(slots_model)
    steps = set(re.findall(r'(?:step|finish)\(\s*"([^"]+)"', source))
    taken = {name.strip("()").partition(": ")[2] for scene in SCENES for name in whole(scene).names}
    assert len(steps) > 30
    assert steps - taken == set()


@pytest.mark.parametrize("mutation", one_in(4, MUTATIONS))
def test_a_fault_in_the_code_would_be_found(mutation: str) -> None:
    with pytest.raises(Fault) as found:
        look(FOUND_IN[mutation], mutation)
    print(MUTATIONS[mutation], found.value, sep=": ")
    assert found.value.steps
