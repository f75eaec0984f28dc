"""What grows with the number of hosts, and how: messages, bytes and rounds, and no times."""

from __future__ import annotations

import math

import msgspec
import pytest

from memstore.distributed.rules import Index, relays
from tests.simulation.costs import Costs, Ends, measure, measure_rows
from tests.simulation.figures import Change, broadcast, deaths, joins, rest
from tests.simulation.large import LargeWorld, Network
from tests.simulation.page import DATA, DOCS, PAGE, Found, tables, with_tables

FEW, MORE = 20, 50
MANY = 1000
NETWORK = Network()
VALUE = 140 * 10**9  # bytes


def costs(hosts: int) -> Costs:
    """Round ones: nothing here depends on them."""
    return Costs(hosts, 2e-4, 2e-4, 1e-6, 1e-5, 2e-9)


def check_rest(few: int, more: int) -> None:
    """The seed's traffic grows with the hosts, and a member's doesn't."""
    first, second = rest(costs(few), NETWORK), rest(costs(more), NETWORK)
    assert second.member == pytest.approx(first.member, rel=0.1)
    assert second.most == pytest.approx(first.most, rel=0.1)
    per_host = (second.messages - first.messages) / (more - few)
    assert 0.09 < per_host < 0.11, "one answer in ten seconds"


def check_joins(hosts: int, come: int) -> None:
    """Rosters don't grow with those that come, and so the bytes grow with the square of the hosts, not the cube."""
    found = joins(costs(hosts), NETWORK, come)
    assert found.rosters <= 14
    whole = come * (hosts + come) * 90  # bytes of the list of members, to newcomers alone
    assert found.nbytes < 4 * whole + found.rosters * hosts * 2000
    assert found.most <= 24


def check_broadcast(hosts: int) -> None:
    found = broadcast(costs(hosts), NETWORK, VALUE)
    assert found.origin == relays.CHILDREN
    assert found.with_deaths < 6
    assert found.rounds <= found.chunks + hosts.bit_length()
    least = relays.CHILDREN * VALUE / NETWORK.bandwidth  # a host that has two children
    assert least <= found.sending < least * (1 + 2 * math.log2(hosts) / found.chunks)


def check_deaths(hosts: int) -> Change:
    found = deaths(costs(hosts), NETWORK)
    assert found.changed == hosts // 10
    assert found.rosters <= 2 * found.changed + 8
    return found


def test_a_member_at_rest_sends_what_it_sends_however_many_there_are() -> None:
    check_rest(FEW, MORE)


def test_hosts_that_come_at_once_are_few_rosters() -> None:
    check_joins(MORE, MORE - 1)


def test_more_hosts_than_there_are_come_in_a_few_rosters() -> None:
    world = LargeWorld(3, costs(3), NETWORK)
    world.run(1)
    world.forget_meters()
    world.join(60)
    world.seconds_until_settled(60)
    assert 5 <= len(world.rosters) < 16, "each at most doubles them: most of a roster must have heard of the one before"


def test_hosts_that_die_at_once_leave_by_few_rosters() -> None:
    check_deaths(FEW)


def test_a_broadcast_takes_as_long_as_two_copies_and_a_little_for_each_doubling() -> None:
    for hosts in (2, 50, 100):
        check_broadcast(hosts)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_thousand_hosts() -> None:
    check_rest(MANY // 4, MANY)
    check_joins(MANY, MANY // 2)
    check_broadcast(MANY)
    check_broadcast(4 * MANY)
    assert check_deaths(MANY // 4).most < 8 * MANY


def test_newcomers_that_come_one_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule left out that makes one roster of many changes."""
    monkeypatch.setattr(Index, "_propose_together", lambda *_: None)
    with pytest.raises(AssertionError):
        check_joins(FEW, FEW - 1)


def test_costs_are_measured() -> None:
    found = measure(100, Ends(1.0, 1.0))
    assert 0 < found.decode < 1e-6 and 0 < found.write < 1
    rows = measure_rows(1000)
    assert 0 < rows.claim_many < 1 and 50 < rows.nbytes < 1000


def test_the_page_has_the_tables_of_its_data() -> None:
    found = msgspec.json.decode((DOCS / DATA).read_bytes(), type=Found)
    assert set(tables(found)) == {"costs", "rest", "joins", "deaths", "broadcast", "groups"}
    page = (DOCS / PAGE).read_text()
    assert with_tables(page, found) == page
