"""One store on three hosts, as processes of these see it."""

from __future__ import annotations

from tests.distributed.hosts import actions
from tests.distributed.hosts.clusters import ServedHosts


def test_each_host_gets_what_the_others_have_put(cluster: ServedHosts) -> None:
    for number in range(3):
        cluster.call(number, actions.put_all, number)
    for number in range(3):
        assert cluster.call(number, actions.get_all)[0] == "from0-0/k"


def test_what_is_owned_here_goes_on_while_every_index_process_is_dead(cluster: ServedHosts) -> None:
    owned = [[f"{cluster.group_of(number)}/k"] for number in range(3)]
    for number in range(3):
        cluster.kill_agent(number)
    for number, own in enumerate(owned):
        away, nobodys = owned[(number + 1) % 3], [f"nobodys{number}/k"]
        assert cluster.call(number, actions.put_and_get, own + away + nobodys, 0.5) == own


def test_a_host_that_is_cut_off_is_named_within_the_timeout(cluster: ServedHosts) -> None:
    away = f"{cluster.group_of(1)}/k"
    cluster.call(1, actions.put_rows, away)
    cluster.hosts.cut(0, 1)
    error, text = cluster.call(0, actions.trouble_with, away, 0.6, timeout=10.0)
    assert error == "HomeUnavailableError" and cluster.address(1) in text
