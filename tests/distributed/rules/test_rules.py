"""The rules of decision 016 under a scheduler: what must hold holds in all schedules, and broken rules are found."""

from __future__ import annotations

import itertools
import random
from typing import Any, get_args

import pytest

from memstore.distributed.rules import Answer
from memstore.distributed.rules.attempt_messages import Forgotten, PartsChanged
from memstore.testing.explore import Fault
from tests.distributed.rules import attempt_mutations
from tests.distributed.rules.mutations import MUTATIONS
from tests.distributed.rules.scenes import SCENES
from tests.distributed.rules.schedule import Schedule

assert attempt_mutations, "it adds to MUTATIONS"
FULL = [pytest.mark.full, pytest.mark.timeout(1800)]
QUICK, MANY = 3, 300  # schedules of each scene
TRIES = 3000  # schedules in which a broken rule has to be found
SOON = 60  # the same in the fast run, where those are tried that are found soon
FOUND_SOON = {
    "a repeated call is made again",
    "an old duplicate is made again",
    "a call that was interrupted leaves its number to the next one",
    "a call that wasn't answered is made anew",
    "requests of any epoch are answered",
    "a new home begins at once",
    "versions go on from where the new home was",
    "records are written whenever they come",
    "'given' is said before the records are deleted",
    "records are sent once",
    "what lies on no member stays in the index",
    "a page of keys may be of another epoch, or short",
    "the view changes before all have settled",
    "a removal counts as settled",
    "a stranger is heard whatever epoch it names",
    "a member says that it has settled before it has",
    "a host isn't told what nothing names any more",
    "a root with keys becomes a home at once",
    "a part is taken in though its attempt is over",
    "the bytes of parts that are given up are nobody's",
    "older attempts go on after a publication",
    "a part is not lent before the home hears of it",
    "the sessions of clients that are gone stay",
    "sessions end though their clients are there",
    "who gives up without a part leaves no outcome",
    "who gives up asks the home of today",
    "a part's lease isn't renewed while its rank waits",
}


@pytest.mark.parametrize("scene", SCENES)
def test_histories_are_linearizable_and_no_byte_is_lost_or_left(scene: str) -> None:
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


@pytest.mark.parametrize(
    "mutation", [pytest.param(name, marks=() if name in FOUND_SOON else FULL) for name in MUTATIONS]
)
def test_a_rule_that_is_left_out_would_be_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, leave_out = MUTATIONS[mutation]
    leave_out(monkeypatch)
    with pytest.raises(Fault) as found:
        for seed in range(SOON if mutation in FOUND_SOON else TRIES):
            Schedule(SCENES[scene], seed).run()
    print(found.value)


def test_schedules_reach_every_answer() -> None:
    seen: set[type[Any]] = {Forgotten, PartsChanged}  # of these, test_attempts.py has the schedules
    scenes = ("storm", "homes", "losses", "roots with keys", "shards in a storm", "shards while homes move")
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
