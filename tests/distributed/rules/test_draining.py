"""Hosts that are drained by hand: who may leave, who takes what, and what is said of what can't be taken."""

from __future__ import annotations

import pytest

from memstore.distributed.rules import Change, Entry, Gather, Place, Send, Steps, Transact
from memstore.distributed.rules.messages import Drain, IsRoster, Refused, Serve
from memstore.distributed.rules.steps import side_by_side, transact
from tests.distributed.rules.scripts import Play, has_left, lend
from tests.distributed.rules.test_membership import run
from tests.distributed.rules.world import Weather


def asked(play: Play, host: int, to: int | None = None) -> IsRoster | Refused:
    """What the seed says of a host that is to leave, once it says it for good."""
    for _ in range(50):
        answer = play.answer(0, Drain(play.hosts[host].id, None if to is None else play.hosts[to].id))
        if isinstance(answer, IsRoster | Refused):
            return answer
        play.world.run(0.1)
    raise TimeoutError


def test_groups_and_bytes_of_a_host_go_elsewhere_and_their_versions_stay() -> None:
    play = Play(4)
    own = play.put(3, b"own/k", b"x")
    play.put(1, b"away/k")
    lend(play, 3, b"away/k")
    before = play.get(0, b"away/k")
    left = play.hosts[3].id
    play.drain(3, 20)
    assert has_left(play, 3) and play.get(0, b"own/k") == Entry(own, b"x")
    found = play.get(0, b"away/k")
    assert found is not None and before is not None and found.version == before.version
    assert {place.host for place in found.places} == {play.hosts[1].id}
    standing = play.hosts[0].tables.standing()
    assert standing is not None and left not in standing.roster.ids and not standing.roster.leavers
    assert play.hosts[3].id in standing.roster.ids, "another root is a member at its address"


def test_a_named_host_takes_all_groups_and_one_that_leaves_gets_none() -> None:
    play = Play(4)
    for number in range(8):
        play.put(3, b"own%d/k" % number)
    assert isinstance(asked(play, 3, to=2), IsRoster)
    play.put(3, b"new/k")  # in between: another host owns it
    play.world.run(20)
    assert has_left(play, 3)
    assert {group for group in play.hosts[2].tables.own_groups if group.startswith(b"own")} == {
        b"own%d" % number for number in range(8)
    }
    assert play.get(0, b"new/k") is not None


def test_the_seed_and_the_last_owner_can_not_leave() -> None:
    play = Play(3)
    for host, to, why in ((0, None, "the seed can't leave"), (1, 1, "leaves, too, or may own none")):
        answer = asked(play, host, to)
        assert isinstance(answer, Refused) and why in answer.why
    one = Play(0)
    for number in range(2):
        one.add_host(is_owner=number == 1, seed="h0")
    one.world.run(10)
    answer = asked(one, 1)
    assert isinstance(answer, Refused) and "the last host that may own groups" in answer.why


def test_two_hosts_are_drained_at_once() -> None:
    play = Play(4)
    for host in (2, 3):
        play.put(host, b"of%d/k" % host)
        lend(play, 5 - host, b"of%d/k" % host)
    for host in (2, 3):
        assert isinstance(asked(play, host), IsRoster)
    play.world.run(30)
    assert has_left(play, 2) and has_left(play, 3)
    assert all(play.get(0, b"of%d/k" % host) is not None for host in (2, 3))


def test_what_can_not_be_taken_is_named_and_the_drain_goes_on_when_it_is_gone() -> None:
    play = Play(3)
    process = play.processes[2]
    place = Place(process.host.id, process.host.tables.fill(7), 1)
    rows = Change(b"rows/k", b"", (place,), is_mutable=True)
    run(play.world, process, process.client.commit([rows], 1 << 62))
    play.drain(2, 10)
    index = play.hosts[2].index
    assert index is not None and index.leaver.trouble is not None
    failed = index.leaver.trouble.failed
    assert (failed.error, failed.key) == ("MutableEntryError", b"rows/k") and "seal or delete it" in failed.text
    assert b"rows" in play.hosts[2].tables.own_groups
    other = play.processes[1]
    run(play.world, other, other.client.commit([Change(b"rows/k", None)], 1 << 62))
    play.world.run(15)
    assert has_left(play, 2)


@pytest.mark.parametrize("dead", [1, 3])
def test_a_host_that_gives_no_answer_is_named_and_waited_for(dead: int) -> None:
    """It may have records that name what is here."""
    play = Play(4)
    play.put(2, b"g/k")
    play.world.kill_index(play.hosts[dead])
    play.drain(2, 15)
    index = play.hosts[2].index
    assert index is not None and index.leaver.trouble is not None
    assert f"h{dead} at h{dead} does not answer" in index.leaver.trouble.failed.text
    assert play.get(0, b"g/k") is not None
    play.world.serve(play.hosts[dead], "h0")
    play.world.run(15)
    assert has_left(play, 2)


def test_groups_are_handed_over_side_by_side() -> None:
    """A message takes a tenth of a second: one after the other they would take a minute."""
    play = Play(3)
    for number in range(64):
        play.put(2, b"own%d/k" % number)
    play.world.weather = Weather(0, 0, 0, 0, delay=0.1)
    play.drain(2)
    seconds = 0
    while play.hosts[2].tables.own_groups and seconds < 120:
        play.world.run(1)
        seconds += 1
    assert seconds < 30


def test_steps_side_by_side_go_on_as_far_as_each_has_to() -> None:
    def several(messages: int) -> Steps[int]:
        answers = 0
        for number in range(messages):
            yield from transact(done.append)
            answers += yield Send("there", None, Serve(b"g", number))
        return answers

    done: list[object] = []
    steps = side_by_side([several(2), several(0), several(3)])
    rounds, value = list[int](), None
    while True:
        try:
            action = steps.send(value)
        except StopIteration as end:
            assert end.value == [2, 0, 3] and rounds == [2, 2, 1] and len(done) == 5
            return
        value = None
        if isinstance(action, Send):  # one alone: it goes as any other
            rounds.append(1)
            value = 1
        elif isinstance(action, Gather):
            rounds.append(len(action.sends))
            value = [1] * len(action.sends)
        elif isinstance(action, Transact):
            action.action(None)  # pyright: ignore[reportArgumentType]
