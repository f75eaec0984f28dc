"""The rules of attempts, explored: nothing forbidden is reached, every step is taken, and faults would be found."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest

from tests.engine.protocols import attempts_model
from tests.engine.protocols.attempts_model import MUTATIONS, Model
from tests.engine.protocols.attempts_state import Process, check, is_end, start
from tests.examples import one_in
from tests.support.explore import Explored, Fault, explore, is_bad_luck

FULL = [pytest.mark.full, pytest.mark.timeout(1800)]


def rank(rank: int, attempt: str = "A", **options: Any) -> Process:
    return Process("rank", attempt, rank, **options)


SWEEPER, WRITER, DELETER, ABORTER = (Process(role, "A") for role in ("sweeper", "writer", "deleter", "aborter"))

SCENES: dict[str, tuple[list[Process], dict[str, int]]] = {
    "two ranks": ([rank(0), rank(1)], {"kills": 2}),
    "three ranks": ([rank(0, world=3), rank(1, world=3), rank(2, world=3)], {}),
    "a sweep": ([rank(0), rank(1), SWEEPER], {"kills": 1, "expiries": 1, "drops": 1}),
    "ranks that put and exit": (
        [rank(0, waits=False), rank(1, waits=False), SWEEPER],
        {"kills": 2, "expiries": 1, "drops": 1},
    ),
    "failures": ([rank(0), rank(1)], {"kills": 1, "failures": 2}),
    "a restarted rank": ([rank(0), rank(1), rank(0)], {}),
    "a restarted rank mends its part": ([rank(0, shape="x"), rank(1, shape="y"), rank(0, shape="y")], {"kills": 0}),
    "another world size": ([rank(0), rank(1), rank(0, world=1)], {}),
    "leases that differ": ([rank(0, lease=1), rank(1), SWEEPER], {"expiries": 1, "drops": 1, "kills": 1}),
    "an abort": ([rank(0), rank(1), ABORTER], {"kills": 1}),
    "an older attempt": ([rank(0), rank(1), rank(0, "B", world=1)], {}),
    "an older attempt that waits": ([rank(0), rank(0, "B", world=1), SWEEPER], {"kills": 1}),
    "a version is expected": ([rank(0, expect=1), rank(1), WRITER, DELETER], {}),
    "all are gone": ([rank(0), rank(1), SWEEPER], {"reboots": 1}),
}
LARGE_SCENES: dict[str, tuple[list[Process], dict[str, int]]] = {
    "three ranks, a sweep": (
        [rank(0, world=3), rank(1, world=3), rank(2, world=3), SWEEPER],
        {"kills": 1, "expiries": 1, "drops": 1},
    ),
    "two attempts": ([rank(0), rank(1), rank(0, "B"), rank(1, "B")], {"kills": 1}),
    "two attempts, two expected versions": (
        [rank(0, expect=1), rank(1), rank(0, "B", expect=1), rank(1, "B", expect=1)],
        {},
    ),
    "two attempts and a sweep": (
        [rank(0), rank(1), rank(0, "B", world=1), SWEEPER],
        {"kills": 1, "expiries": 1, "drops": 1},
    ),
    "a restarted rank of an older attempt": ([rank(0), rank(1), rank(0), rank(0, "B", world=1)], {}),
    "begun anew": ([rank(0), rank(1), rank(0), SWEEPER], {"expiries": 1, "drops": 1}),
    "a restarted rank, two deaths": ([rank(0), rank(1), rank(0)], {"kills": 2}),
    "a restarted rank fails": ([rank(0, shape="x"), rank(1), rank(0)], {"kills": 1, "failures": 1}),
    "an expected version, a death": ([rank(0, expect=1), rank(1), WRITER, DELETER], {"kills": 1}),
    "an older attempt, two deaths": ([rank(0), rank(1), rank(0, "B", world=1)], {"kills": 2}),
    "parts from before all were gone": ([rank(0), rank(1), rank(0)], {"kills": 1, "reboots": 1}),
    "all were gone twice": ([rank(0), rank(1), SWEEPER], {"kills": 1, "reboots": 2}),
}

FOUND_IN = {
    "publish without a look": "two ranks",
    "prepare without a look at outcomes": "two ranks",
    "give up without a look": "two ranks",
    "give up in silence": "two ranks",
    "end without an outcome": "two ranks",
    "end by an old merge": "a restarted rank mends its part",
    "publish any version": "a version is expected",
    "keep a replaced part": "a restarted rank",
    "leave older attempts": "an older attempt",
    "older by the put id": "an older attempt",
    "a new number with a new part": "a restarted rank",
    "no number of the attempt": "a sweep",
    "sleep until it rings": "two ranks",
    "an end is no publication": "an abort",
    "a completing part is no publication": "a sweep",
    "a publication is not counted": "an older attempt that waits",
    "the expiry of the newest": "leases that differ",
    "forget the leases": "leases that differ",
    "no note": "two ranks",
    "recover by `filling` only": "two ranks",
    "no look at a new page": "all are gone",
    "unlock the file after the mutex": "two ranks",
    "parts outlive a reboot": "parts from before all were gone",
    "sweep what is prepared": "a sweep",
}


def look(scene: str, *mutations: str) -> Explored:
    processes, limits = {**SCENES, **LARGE_SCENES}[scene]
    model = Model(*mutations)
    return explore(start(*processes, **limits), model.successors, check, is_end=is_end, is_bad_luck=is_bad_luck)


whole = functools.cache(look)


@pytest.mark.parametrize("scene", [*SCENES, *(pytest.param(scene, marks=FULL) for scene in LARGE_SCENES)])
def test_nothing_forbidden_is_reached(scene: str) -> None:
    found = whole(scene) if scene in SCENES else look(scene)
    print(f"{found.states:,} states, {found.steps:,} steps")
    assert found.states > 500, "this tests nothing"


def test_every_step_is_taken() -> None:
    source = inspect.getsource(attempts_model)
    steps = {*re.findall(r'(?:step|ring|finish)\(\s*"([^"]+)"', source), *re.findall(r'yield "(\([^"]+)"', source)}
    steps |= {f"({name} fails)" for name in re.findall(r'fails\("([^"]+)"', source)}
    steps |= {"timeout", "(timeout)", "after_death: drop what is of another boot", "sweeper", "(killed: rank)"}
    steps |= {f"raise: {error}" for error in ENDS}
    steps -= {"give up in silence"}  # only a broken one does
    taken = set[str]().union(*(whole(scene).names for scene in SCENES))
    assert len(steps) > 50
    assert steps - taken == set()


ENDS = ("timeout", "failed", "mismatch", "conflict", "superseded", "expired", "aborted", "world size")


@pytest.mark.parametrize("mutation", one_in(4, MUTATIONS))
def test_a_fault_in_the_code_would_be_found(mutation: str) -> None:
    with pytest.raises(Fault) as found:
        look(FOUND_IN[mutation], mutation)
    print(MUTATIONS[mutation], found.value, sep=": ")
    assert found.value.steps
