"""All interleavings of a few processes that share a few files, with kills at every step: nothing forbidden is reached.

And the model is worth something: each fault that one could make in the code is found by it.
"""

from __future__ import annotations

import functools
import inspect
import re
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from memstore.engine import syscalls
from memstore.engine.files import mapping, segments
from memstore.engine.format import headers
from memstore.engine.protocols import get as lookup
from memstore.engine.protocols import recovery, reuse, sweep
from tests.engine.protocols import reuse_model, reuse_state
from tests.engine.protocols.reuse_model import GETS, MUTATIONS, PUTS, Model
from tests.engine.protocols.reuse_state import check, is_end, start
from tests.examples import one_in
from tests.support.explore import Explored, Fault, explore, is_bad_luck

put = import_module("memstore.engine.protocols.put")

FULL = pytest.mark.full
MODEL: list[ModuleType] = [reuse_model, reuse_state]
CODE = [lookup, put, recovery, reuse, sweep, headers, mapping, segments, syscalls]

SCENES: dict[str, dict[str, Any]] = {
    "overwrites under a reader": {"roles": "writer writer reader", "files": 3, "retired": 1, "kills": 2},
    "a reader always too late": {"roles": "writer writer writer reader", "files": 2, "kills": 1},
    "a reader without the mutex": {"roles": "writer writer writer watcher", "files": 2, "kills": 1},
    "overwrite and delete": {"roles": "writer reader deleter", "files": 2, "kills": 2},
    "two deletes": {"roles": "writer deleter deleter", "files": 2, "kills": 1, "failures": 1},
    "two readers": {"roles": "writer reader reader", "files": 2, "kills": 1},
    "a sweep and two deaths": {"roles": "writer writer sweeper reader", "files": 2, "kills": 2},
    "a file that was held": {"roles": "writer writer sweeper reader", "files": 3, "kills": 0},
    "two sweeps": {"roles": "writer sweeper sweeper", "files": 3, "retired": 1, "kills": 2, "failures": 1},
    "a conflict, a failed commit": {"roles": "writer swapper", "files": 3, "retired": 1, "kills": 2, "failures": 1},
    "two failures": {"roles": "writer sweeper", "files": 3, "retired": 1, "kills": 1, "failures": 2},
    "a lease": {"roles": "writer sender sweeper", "files": 3, "kills": 1},
    "a lease, a failed commit": {"roles": "writer sender", "files": 3, "retired": 1, "kills": 2, "failures": 1},
    "put_many under a reader": {"roles": "batcher reader sweeper", "files": 5, "keys": 2, "retired": 1, "kills": 1},
    "put_many and a put": {"roles": "batcher writer", "files": 5, "keys": 2, "kills": 2, "failures": 1},
    "put_many fails": {"roles": "batcher sweeper", "files": 5, "keys": 2, "retired": 1, "kills": 2, "failures": 2},
    "two puts and a watcher": {"roles": "repeater watcher", "files": 2, "kills": 1},
    "two puts under a reader": {"roles": "repeater reader", "files": 3, "kills": 2, "failures": 1},
    "two puts and a lease": {"roles": "repeater sender", "files": 3, "kills": 2, "failures": 1},
    "two puts and a delete": {"roles": "repeater deleter", "files": 3, "kills": 2, "failures": 1},
    "two puts and a sweep": {"roles": "repeater sweeper reader", "files": 3, "kills": 1},
}
LARGE_SCENES: dict[str, dict[str, Any]] = {
    "two of each": {"roles": "writer writer reader reader deleter", "files": 2, "kills": 1},
    "a sweep and a watcher": {"roles": "writer writer sweeper watcher deleter", "files": 2, "kills": 1},
    "a conflict under a reader": {"roles": "writer swapper sweeper reader", "files": 3, "retired": 1, "kills": 1},
    "a sweep, room for two, two deaths": {
        "roles": "writer writer sweeper reader", "files": 3, "retired": 1, "kills": 2,
    },
    "a lease and two writers": {"roles": "writer writer sender sweeper", "files": 3, "kills": 1},
    "two puts and a writer": {"roles": "repeater writer reader", "files": 3, "kills": 1},
    "two puts, a sweep, a lease": {"roles": "repeater sender sweeper", "files": 3, "kills": 1, "failures": 1},
    "put_many, a put and a get": {"roles": "batcher writer reader", "files": 5, "keys": 2, "kills": 1},
}  # fmt: skip
SLOW = {"a sweep and two deaths", "a file that was held", "a reader always too late", "a reader without the mutex"}

FOUND_IN = {
    "claim without the lock": "overwrites under a reader",
    "keep the put id": "overwrites under a reader",
    "compare before the lock": "overwrites under a reader",
    "no compare": "overwrites under a reader",
    "map without the lock": "overwrites under a reader",
    "unlink with the put id": "a sweep and two deaths",
    "unlock after the commit": "a reader without the mutex",
    "unlock after the mutex": "a reader always too late",
    "go live after the commit": "a sweep and two deaths",
    "a batch for each": "put_many fails",
    "no note": "overwrite and delete",
    "no ring": "overwrite and delete",
    "row before the unlink": "a sweep and two deaths",
    "sweep without the lock": "a sweep and two deaths",
    "sweep what is leased": "a lease",
    "claim what is leased": "a lease and two writers",
    "no lock on a new file": "a sweep and two deaths",
    "sweep by the wrong table": "a sweep and two deaths",
    "acknowledge before the commit": "overwrite and delete",
    "look before the commit": "two puts and a watcher",
    "lock before the commit": "two puts and a watcher",
    "erase without the lock": "two puts under a reader",
    "keep the put id ahead": "two puts under a reader",
    "leave it booked": "two puts under a reader",
    "book what is leased": "two puts and a lease",
    "no undo": "two puts under a reader",
    "let go of it": "two puts under a reader",
}


def look(scene: str, *mutations: str) -> Explored:
    options = {**SCENES, **LARGE_SCENES}[scene]
    model, first = Model(*mutations), start(**{**options, "roles": options["roles"].split()})
    return explore(first, model.successors, check, is_end=is_end, is_bad_luck=is_bad_luck)


whole = functools.cache(look)


@pytest.mark.parametrize(
    "scene",
    [
        *(pytest.param(scene, marks=FULL if scene in SLOW else ()) for scene in SCENES),
        *(pytest.param(scene, marks=[FULL, pytest.mark.timeout(900)]) for scene in LARGE_SCENES),
    ],
)
def test_nothing_forbidden_is_reached(scene: str) -> None:
    found = whole(scene)
    print(f"{found.states:,} states, {found.steps:,} steps")
    assert found.states > 1000, "this tests nothing"


@pytest.mark.full
def test_every_step_is_taken() -> None:
    """And every actor is killed, also while it recovers, if it ever takes the mutex."""
    source = "".join(map(inspect.getsource, MODEL))
    steps = {*re.findall(r'(?:step|marks)\("([^"]+)"', source), *re.findall(r'yield "(\([^"]+)"', source)}
    steps |= {f"({name} fails)" for name in re.findall(r'fails\("([^"]+)"', source)}
    steps |= {"abandon: it is swept already", "abandon: a claim that failed"}
    roles = {*PUTS, *GETS, "sweeper", "deleter"}
    steps |= {f"(killed: {role})" for role in roles}
    steps |= {f"(killed: {role} while it recovers)" for role in roles - {"watcher", "receiver"}}
    assert len(steps) > 90
    assert set[str]().union(*(whole(scene).names for scene in SCENES)) == steps


@pytest.mark.parametrize("mutation", one_in(4, MUTATIONS))
def test_a_fault_in_the_code_would_be_found(mutation: str) -> None:
    with pytest.raises(Fault) as found:
        look(FOUND_IN[mutation], mutation)
    print(MUTATIONS[mutation], found.value, sep=": ")
    assert found.value.steps


def test_a_state_without_a_way_on_is_found() -> None:
    with pytest.raises(Fault, match="no way on") as found:
        explore(0, lambda n: [("on", n + 1), ("(end)", 9)] if n < 3 else [], lambda n: None, is_end=lambda n: n == 9)
    assert found.value.steps == ("on", "on", "on")
    with pytest.raises(Fault, match="no way on"):  # bad luck is no way
        explore(0, lambda n: [("(end)", 9)], lambda n: None, is_end=lambda n: n == 9, is_bad_luck=is_bad_luck)


def test_the_model_speaks_of_what_the_code_has() -> None:
    """A reader of either finds the other: what is renamed there is renamed here."""
    assert reuse_model.__doc__ is not None
    texts = [
        *MUTATIONS.values(),
        *re.findall(
            r'"((?:claim|commit|get|sweep|abandon|after_death): [^"]*|Reuse[^"]*)"',
            "".join(map(inspect.getsource, MODEL)),
        ),
        reuse_model.__doc__,
    ]
    named = {word for text in texts for word in re.findall(r"\b[a-z]*_[a-z_]+\b", text)}
    source = "".join(map(inspect.getsource, CODE))
    assert len(named) > 12
    assert [word for word in sorted(named) if not re.search(rf"\bdef {word}\b", source)] == []
