"""Seals that are cut off: what becomes of them is found out, and rows that are acknowledged later are not lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from memstore.distributed.rules import directory, owning
from memstore.distributed.rules.client import look_at
from memstore.distributed.rules.messages import Commit, Later
from memstore.distributed.rules.nouns import Change
from memstore.distributed.rules.reading import look_up
from memstore.distributed.rules.steps import view
from tests.distributed.rules.scenes import CALM
from tests.distributed.rules.scripts import Play
from tests.distributed.rules.sealed_rows import SealedRows
from tests.distributed.rules.world import Host, Weather, World
from tests.support.explore import Fault

BAD = Weather(loss=0.05, twice=0.1, late=0.3, stalls=0.01)
SECONDS = 40.0
QUICK, MANY = 10, 1000


def run(seed: int) -> None:
    """One dataset, an owner that changes, kills, and a network that is cut now and then."""
    world = World(seed, CALM)
    chance = world.random
    hosts = [world.add_host(f"h{number}") for number in range(3)]
    world.serve(hosts[0], "h0")
    world.serve(hosts[1], "h0")
    world.run(10)
    rows = SealedRows(world, hosts[1], b"rows/k")
    rows.create()
    world.run(5)
    world.weather = BAD
    world.at(chance.uniform(0, SECONDS / 4), lambda: world.serve(hosts[2], "h0"))
    for _ in range(6):
        world.at(chance.uniform(0, SECONDS), lambda: hand_over(world, chance.choice(hosts)))
    for _ in range(60):
        seals, seconds = chance.random() < 0.3, chance.choice([0.5, 3, 20])
        world.at(
            chance.uniform(0, SECONDS),
            lambda seals=seals, seconds=seconds: rows.take_turn(seals=seals, seconds=seconds),
        )
    for _ in range(15):
        world.at(chance.uniform(0, SECONDS), rows.kill)
    for _ in range(2):
        at = chance.uniform(0, SECONDS)
        world.at(at, lambda: world.cut("h1", "h0", one_way=chance.random() < 0.5))
        world.at(at + chance.uniform(0, 8), world.heal)
    world.run(SECONDS)
    world.heal()
    world.weather = CALM
    world.serve(hosts[2], "h0")
    world.run(30)  # what was sent before is here by now
    rows.take_turn(seals=False, seconds=20)
    world.run(20)
    rows.check()


def hand_over(world: World, taker: Host) -> None:
    for host in world.hosts.values():
        directory.begin(host.tables, b"rows", taker.id)


def test_rows_are_acknowledged_until_they_are_sealed_and_none_is_lost() -> None:
    for seed in range(QUICK):
        print(f"seed {seed}")
        run(seed)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_schedules() -> None:
    first = random.SystemRandom().randrange(1 << 30)
    for seed in range(first, first + MANY):
        print(f"seed {seed}")
        run(seed)


def _only_look(client: Any, key: bytes, place: Any, until: int) -> Any:
    (entry,) = yield from look_up(client, [key])
    return entry is not None and entry.is_mutable


def _trust_this_host(client: Any, key: bytes, place: Any, until: int) -> Any:
    look = yield from view(lambda tables: (look_at(tables, [key]), tables.is_there(place)))
    return look[1]


def _a_seal_is_cut_off(*, comes_late: bool) -> None:
    """Its process is killed, and the next one adds a row; the owner of the key hears of the seal before, or after."""
    play = Play(3)
    play.put(0, b"rows/other")
    rows = SealedRows(play.world, play.hosts[1], b"rows/k")
    rows.create()
    play.world.run(5)
    answer, late = play.world.answer, list[Commit]()

    def hold(host: Host, index: Any, request: Any) -> Any:
        if isinstance(request, Commit) and not request.changes[0].is_mutable:
            late.append(request)
            if not comes_late:
                answer(host, index, request)
            return Later()
        return answer(host, index, request)

    play.world.answer = hold
    rows.take_turn(seals=True, seconds=20)
    while not late:
        play.world.run(0.01)
    rows.kill()
    rows.take_turn(seals=False, seconds=20)
    play.world.run(5)
    answer(play.hosts[0], play.hosts[0].index, late[0])
    rows.check()
    assert rows.rows == comes_late


@pytest.mark.parametrize("comes_late", [False, True])
def test_a_seal_that_was_cut_off_is_made_or_refused(comes_late: bool) -> None:
    _a_seal_is_cut_off(comes_late=comes_late)


@pytest.mark.parametrize(("broken", "comes_late"), [(_only_look, True), (_trust_this_host, False)])
def test_a_rule_that_is_left_out_would_be_found(broken: Any, comes_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.rules.sealed_rows.is_unsealed", broken)
    with pytest.raises(Fault):
        _a_seal_is_cut_off(comes_late=comes_late)


def test_a_seal_that_names_no_version_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = owning.refused_change

    def refused(change: Change, old: Any) -> Any:
        return real(change if change.renews or not change.seals else _of_any_version(change), old)

    monkeypatch.setattr(owning, "refused_change", refused)
    with pytest.raises(Fault):
        _a_seal_is_cut_off(comes_late=True)


def _of_any_version(change: Change) -> Change:
    return Change(change.key, change.body, change.places, seals=change.seals)
