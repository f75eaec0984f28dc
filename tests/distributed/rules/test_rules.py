"""The rules under a scheduler: what must hold holds in all schedules, and broken rules are found."""

from __future__ import annotations

import itertools
import random
from typing import Any, get_args

import pytest

from memstore.distributed.rules import Answer, directory, draining, owning, promotion, roster
from memstore.distributed.rules.messages import Announced, Forgotten, Met, PartsChanged, Refused
from tests.distributed.rules.scenes import SCENES
from tests.distributed.rules.schedule import Schedule
from tests.distributed.rules.sharing import MUTATIONS, SCRIPTS
from tests.examples import one_in
from tests.support.explore import Fault

FULL = [pytest.mark.full, pytest.mark.timeout(1800)]
QUICK, MANY = 2, 100  # schedules of each scene
TRIES = 3000  # schedules in which a broken rule has to be found
SOON = 60  # the same in the fast run, where those are tried that are found soon
FOUND_SOON = {  # with a schedule that finds it, which is tried first; where the steps have changed, the others are
    "a repeated call is made again": 2,
    "a grant is good whatever its number": 1,
    "absence is remembered": 0,
    "who waits for any key is told of those that were there": 1,
    "a claim is answered before the deputies have it": 25,
    "numbers of grants begin anew when the seed is killed": 3,
    "anybody may be the seed": 0,
    "records are sent once": 0,
    "a host isn't told what nothing names any more": 1,
    "keepers aren't told": 0,
    "a put returns before its host keeps it": 0,
    "an heir doesn't know who keeps what it has got": 0,
    "a put returns before a second host has its value": 0,
    "who has put a value is believed to keep it": 349,
    "a release takes a replica": 9,
    "older attempts go on after a publication": 0,
    "bytes of replaced versions that go stay": 1,
    "replaced versions stay whatever the history says": 1,
    "any version of a key is the present one": 1,
    "a host that is drained waits for what replaced versions name": 0,
    "who gives up without a part leaves no outcome": 0,
}


@pytest.mark.parametrize("scene", one_in(3, SCENES))
def test_histories_are_linearizable_and_no_byte_is_lost_or_left(scene: str) -> None:
    for seed in range(QUICK):
        print(f"scene {scene!r}, seed {seed}")
        Schedule(SCENES[scene], seed).run()


@pytest.mark.parametrize(
    "scene",
    one_in(
        2,
        ["hand-overs twice", "forced promotions", "losses twice", "roots with keys", "roots with many keys", "drains"],
    ),
)
def test_pages_may_have_one_row(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (directory, draining, owning, promotion, roster):
        for limit in {"ROWS_LIMIT", "PORTION"} & vars(module).keys():
            monkeypatch.setattr(module, limit, 1)
    for seed in range(QUICK):
        print(f"scene {scene!r}, seed {seed}")
        Schedule(SCENES[scene], seed).run()


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", SCENES)
def test_many_schedules(scene: str) -> None:
    first = random.SystemRandom().randrange(1 << 30)
    for seed in range(first, first + MANY):
        print(f"scene {scene!r}, seed {seed}")
        Schedule(SCENES[scene], seed).run()


@pytest.mark.parametrize("name", one_in(2, SCRIPTS))
def test_what_schedules_seldom_come_to(name: str) -> None:
    SCRIPTS[name]()


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(name, marks=() if number % 2 == 0 and (name in FOUND_SOON or scene in SCRIPTS) else FULL)
        for number, (name, (scene, _)) in enumerate(MUTATIONS.items())
    ],
)
def test_a_rule_that_is_left_out_would_be_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, leave_out = MUTATIONS[mutation]
    leave_out(monkeypatch)
    with pytest.raises(Fault) as found:
        if scene in SCRIPTS:
            SCRIPTS[scene]()
            return
        for seed in (FOUND_SOON.get(mutation, 0), *range(SOON if mutation in FOUND_SOON else TRIES)):
            Schedule(SCENES[scene], seed).run()
    print(found.value)


def test_schedules_reach_every_answer() -> None:
    seen: set[type[Any]] = {Forgotten, PartsChanged, Announced, Met, Refused}  # of these there are scripts and tests
    scenes = (
        "storm",
        "hand-overs",
        "losses",
        "promotions by themselves",
        "roots with keys",
        "shards in a storm",
        "returns",
        "replicas",
    )
    for seed, scene in itertools.product(range(8), scenes):
        schedule = Schedule(SCENES[scene], seed)
        schedule.run()
        seen |= schedule.world.answers
        if seen >= set(get_args(Answer)):
            return
    assert set(get_args(Answer)) - seen == set()


def test_a_schedule_is_replayed_by_its_seed() -> None:
    one, other = Schedule(SCENES["all"], 7), Schedule(SCENES["all"], 7)
    one.run()
    other.run()
    assert one.world.trace == other.world.trace
    assert len(one.world.trace) > 30
