"""One store on three hosts, as processes of these see it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.distributed.hosts import actions
from tests.distributed.hosts.clusters import LONG, ROOT, ServedHosts, wait_until


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


def test_versions_that_were_replaced_are_read_on_each_host_until_their_key_is_deleted(cluster: ServedHosts) -> None:
    key = f"{cluster.group_of(1)}/k"
    versions = [cluster.call(number % 3, actions.put_version, key, number, 3) for number in range(5)]
    for number in range(3):
        assert cluster.call(number, actions.versions_of, key) == dict(zip(versions[-3:], (2, 3, 4), strict=True))
    cluster.call(2, actions.delete_all)
    for number in range(3):
        assert cluster.call(number, actions.versions_of, key) == {}


@pytest.mark.full
def test_replaced_versions_while_their_owner_is_killed_again_and_again(cluster: ServedHosts) -> None:
    """Readers on the third host get whole values; and the putter's host frees what is beyond the last three."""
    key = f"{cluster.group_of(1)}/k"
    with cluster.start(0, actions.put_versions_until_killed, ROOT, key) as putter:
        assert putter.recv(LONG) == "there are some"
        with cluster.start(2, actions.with_store, ROOT, actions.read_versions, (key, 6.0)) as reader:
            for _ in range(5):
                before = cluster.index_process(1)
                os.kill(before, signal.SIGKILL)
                wait_until(lambda before=before: cluster.index_process(1) != before, "it is started again")
            assert reader.recv(LONG) > 20
        putter.send("end")
        count = putter.recv(LONG)
    found = cluster.call(1, actions.versions_of, key)
    assert list(found.values()) == list(range(count - 3, count))
    size = 4 * actions.WHOLE
    wait_until(lambda: cluster.call(0, actions.live_bytes) < 3.5 * size, "what isn't kept is freed")
