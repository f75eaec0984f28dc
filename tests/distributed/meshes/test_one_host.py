"""memstore.serve on this host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import memstore
from tests.distributed.meshes.owners import Owner, environment, needs_monarch
from tests.distributed.serving.agents import Agents, agents_in, eventually

pytestmark = needs_monarch


@pytest.fixture
def agents(scratch: str, tmp_path: Path) -> Iterator[Agents]:
    """None of its own: it looks after those that are started in its folder."""
    with agents_in(Path(scratch).parent, tmp_path) as made:
        yield made
        for pid in made.processes():
            os.kill(pid, 9)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_agents_outlive_a_killed_owner_and_actors_open_the_store_by_its_root(
    agents: Agents, scratch: str, tmp_path: Path
) -> None:
    port = str(free_port())
    with Owner(environment(MEMSTORE_PORT=port), tmp_path / "owner") as owner:
        owner.call("take_this_host")
        assert owner.call("serve", scratch) == (f"tcp://127.0.0.1:{port}",)
        before = agents.processes()
        assert len(before) == 2  # the agent, and its index process
        assert owner.call("serve", scratch) == (f"tcp://127.0.0.1:{port}",)  # again
        assert agents.processes() == before
        owner.call("spawn")
        assert owner.call("put_in_actors", scratch, "a/w") == [scratch]
        found = owner.call("get_in_actors", scratch, "a/w")
        assert [total for _, total in found] == [1000.0] and owner.process.pid not in dict(found)
        owner.kill()
        assert agents.processes() == before
    assert agents.processes() == before  # nor do Monarch's own processes matter
    cluster = memstore.Cluster(scratch)
    assert [host.alive for host in cluster.status().hosts] == [True]
    with memstore.open(scratch) as store:
        assert store.get("a/w")["w"].sum() == 1000
    cluster.stop()
    eventually(lambda: not agents.processes(), "no process is left")
