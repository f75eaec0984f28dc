"""The rules of datasets, explored: nothing forbidden is reached, every step is taken, and faults would be found."""

from __future__ import annotations

import functools
import inspect
import re

import pytest

from tests.datasets import rows_model
from tests.datasets.rows_model import MUTATIONS, Model, Process, State, check, is_end
from tests.examples import one_in
from tests.support.explore import Explored, Fault, explore, is_bad_luck

SCENES: dict[str, tuple[list[str], dict[str, int]]] = {
    "appends": (["extender", "extender", "reader"], {"kills": 2, "rows": 3}),
    "a seal": (["extender", "writer", "sealer"], {"kills": 1, "failures": 1}),
    "two seals": (["writer", "sealer", "sealer"], {"kills": 1, "failures": 1}),
    "a deletion": (["writer", "deleter", "sealer"], {"kills": 1, "failures": 1}),
}
FOUND_IN = {
    "the length first": "appends",
    "extend without the mutex": "appends",
    "look once": "a seal",
    "no fence": "a seal",
    "no fence of the sealer": "a seal",
    "seal without the mutex": "a seal",
    "leave it sealing": "a seal",
    "open it whatever was committed": "a seal",
    "one word for both": "a deletion",
}


def look(scene: str, *mutations: str) -> Explored:
    roles, limits = SCENES[scene]
    model, start = Model(*mutations), State.of(*map(Process, roles), **limits)
    return explore(start, model.successors, check, is_end=is_end, is_bad_luck=is_bad_luck)


whole = functools.cache(look)


@pytest.mark.parametrize("scene", SCENES)
def test_nothing_forbidden_is_reached(scene: str) -> None:
    found = whole(scene)
    print(f"{found.states:,} states, {found.steps:,} steps")
    assert found.states > 500, "this tests nothing"


def test_every_step_is_taken() -> None:
    source = inspect.getsource(rows_model)
    steps = set(re.findall(r'(?:step|store|fence|finish)\(\s*"([^"]+)"', source))
    taken = {name.strip("()").partition(": ")[2] for scene in SCENES for name in whole(scene).names}
    assert len(steps) > 25
    assert steps - taken == set()


@pytest.mark.parametrize("mutation", one_in(4, MUTATIONS))
def test_a_fault_in_the_code_would_be_found(mutation: str) -> None:
    with pytest.raises(Fault) as found:
        look(FOUND_IN[mutation], mutation)
    print(MUTATIONS[mutation], found.value, sep=": ")
    assert found.value.steps
