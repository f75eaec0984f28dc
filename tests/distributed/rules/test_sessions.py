"""Sessions of clients that are gone end, and nobody else's: whatever clocks, index processes and clients do."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.distributed.rules import Change
from memstore.distributed.rules.owning import LAST, LOOK, Sessions
from memstore.errors import UnknownOutcomeError
from tests.distributed.rules.tables import SimTables
from tests.distributed.rules.test_membership import cluster, key_at, put, run
from tests.distributed.rules.world import World


class Host:
    """An index process that looks at sessions once a LOOK.

    Attributes:
        connected: the sessions that have a connection.
        asleep: nanoseconds that the clock goes on by itself before the next look.
    """

    def __init__(self) -> None:
        self.tables = SimTables(b"h" * 16)
        self.now, self.asleep = 1 << 50, 0
        self.connected: set[int] = set()
        self.sessions = Sessions(lambda: self.now)

    def restart(self) -> None:
        self.sessions = Sessions(lambda: self.now)

    def look(self, looks: int = 1) -> None:
        for _ in range(looks):
            self.now += LOOK + self.asleep
            steps: Any = self.sessions.run(lambda: self.connected)
            answer = None
            while True:
                try:
                    answer = steps.send(answer).action(self.tables)
                except StopIteration:
                    break


HOUR = LAST // LOOK


def test_who_has_no_connection_for_an_hour_has_no_session_any_more() -> None:
    host = Host()
    gone, here = host.tables.new_session(), host.tables.new_session()
    host.connected = {here}
    host.look(HOUR)
    assert host.tables.sessions(0, 10) == [gone, here]
    host.look()
    assert host.tables.sessions(0, 10) == [here]
    host.connected = set()
    host.look(HOUR)
    assert host.tables.sessions(0, 10) == [here]
    host.look(2)
    assert host.tables.sessions(0, 10) == []


def test_who_comes_back_has_another_hour() -> None:
    host = Host()
    session = host.tables.new_session()
    host.look(HOUR - 1)
    host.connected = {session}
    host.look()
    host.connected = set()
    host.look(HOUR - 1)
    assert host.tables.has_session(session)
    host.look(3)
    assert not host.tables.has_session(session)


def test_who_comes_back_in_the_last_moment_keeps_it() -> None:
    host = Host()
    session = host.tables.new_session()
    host.look(HOUR)
    looks = 0

    def connected() -> set[int]:
        nonlocal looks
        looks += 1
        return {session} if looks > 1 else set()  # between the look and the transaction

    host.now += LOOK
    steps: Any = host.sessions.run(connected)
    answer = None
    with pytest.raises(StopIteration):
        while True:
            answer = steps.send(answer).action(host.tables)
    assert looks == 2 and host.tables.has_session(session)
    host.look(HOUR - 1)
    assert host.tables.has_session(session), "its hour has begun anew"


@pytest.mark.parametrize("jump", [10 * LAST, -10 * LAST], ids=["on", "back"])
def test_a_clock_that_jumps_ends_no_session(jump: int) -> None:
    """As when the host slept, or the index process was stopped: clients could not come then either."""
    host = Host()
    session = host.tables.new_session()
    host.look(HOUR // 2)
    host.now += jump
    host.look(HOUR // 2 - 2)
    assert host.tables.has_session(session)
    host.look(5)
    assert not host.tables.has_session(session)


def test_what_an_index_process_has_counted_is_lost_with_it() -> None:
    host = Host()
    session = host.tables.new_session()
    for _ in range(3):
        host.look(HOUR - 1)
        host.restart()
    assert host.tables.has_session(session)


def test_many_sessions_and_their_calls_go() -> None:
    host = Host()
    for _ in range(3000):
        host.tables.new_session()
    host.look(HOUR + 1)
    assert host.tables.sessions(0, 10) == []


def forget_sessions(world: World) -> None:
    tables = world.hosts["h0"].tables
    for session in tables.sessions(0, 100):
        tables.end_session(session)


def test_a_client_whose_session_has_ended_begins_another_and_its_user_hears_nothing() -> None:
    world = cluster(2)
    home, process = world.hosts["h0"], world.start_process(world.hosts["h1"])
    key = key_at(world, home)
    run(world, process, put(process, key, b"1"))
    forget_sessions(world)
    (version,) = run(world, process, put(process, key, b"2"))
    assert home.tables.records[key].version == version and home.tables.records[key].body == b"2"


def test_nobody_knows_what_became_of_a_call_that_was_sent_before_its_session_ended() -> None:
    world = cluster(2)
    home, process = world.hosts["h0"], world.start_process(world.hosts["h1"])
    key = key_at(world, home)
    run(world, process, put(process, key, b"1"))
    world.cut("h0", "h1", one_way=True)  # no answer comes
    ends: list[Any] = []
    steps = process.client.commit([Change(key, b"2")], 1 << 62)
    world.call(process, steps, 60, lambda result, error: ends.append(error))
    while home.tables.records[key].body != b"2":  # a link may be refused first
        world.run(0.1)
    assert not ends
    forget_sessions(world)
    world.heal()
    world.run(10)
    assert [type(error) for error in ends] == [UnknownOutcomeError]
    assert home.tables.records[key].body == b"2"
    run(world, process, put(process, key, b"3"))
