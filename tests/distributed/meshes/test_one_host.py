"""memstore.serve on this host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memstore
from tests.distributed.meshes.owners import Owner, environment, needs_monarch
from tests.distributed.serving.agents import Agents, eventually, is_alive

pytestmark = needs_monarch


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.full
def test_an_agent_outlives_a_killed_owner_and_an_actor_opens_the_store_by_its_root(
    agents: Agents, scratch: str, tmp_path: Path
) -> None:
    port = str(free_port())
    with Owner(environment(MEMSTORE_PORT=port), tmp_path / "owner") as owner:
        owner.call("take_this_host")
        assert owner.call("serve", scratch) == (f"tcp://127.0.0.1:{port}",)
        before = agents.processes()
        assert len(before) == 2  # the agent, and its index process
        owner.call("spawn")
        assert owner.call("put_in_actors", scratch, "a/w") == [scratch]
        ((pid, total),) = owner.call("get_in_actors", scratch, "a/w")
        assert total == 1000.0 and pid != owner.process.pid
        owner.kill()
        assert agents.processes() == before
    assert agents.processes() == before  # nor do Monarch's own processes matter
    cluster = memstore.Cluster(scratch)
    assert [host.alive for host in cluster.status().hosts] == [True]
    with memstore.open(scratch) as store:
        assert store.get("a/w")["w"].sum() == 1000
    cluster.stop()
    eventually(lambda: not agents.processes(), "no process is left")


@pytest.mark.full
def test_hosts_of_a_job_of_processes_are_one_host(agents: Agents, scratch: str, tmp_path: Path) -> None:
    """They share its folders. Workers, and agents, that the job has started end with it, and the store's don't."""
    with Owner(environment(MEMSTORE_PORT=str(free_port())), tmp_path / "owner") as owner:
        owner.call("start_job", 3)
        (host,) = owner.call("serve", scratch)
        before = agents.processes()
        assert host.startswith("tcp://127.0.0.1:") and len(before) == 2
        owner.call("spawn")
        assert owner.call("put_in_actors", scratch, "a/w") == [scratch] * 3
        owner.call("end_job")
        assert agents.processes() == before
        owner.call("stop")
    eventually(lambda: not agents.processes(), "no process is left")


@pytest.mark.full
def test_a_value_that_is_too_large_for_monarchs_messages_passes_by_its_key(
    agents: Agents, scratch: str, tmp_path: Path
) -> None:
    """Who sends the value itself is ended by Monarch."""
    limit = environment(MEMSTORE_PORT=str(free_port()), HYPERACTOR_CODEC_MAX_FRAME_LENGTH=str(2 << 20))
    with Owner(limit, tmp_path / "owner") as owner:
        owner.call("take_this_host")
        owner.call("serve", scratch)
        owner.call("spawn")
        with memstore.open(scratch) as store:
            store.put("a/w", {"w": torch.ones(4 << 20)})
        ((_, total),) = owner.call("get_in_actors", scratch, "a/w")
        assert total == 4 << 20
        with pytest.raises(RuntimeError, match="rejecting oversize frame"):
            owner.call("send_to_actors", 16 << 20)
    memstore.Cluster(scratch).stop()


@pytest.mark.full
def test_meshes_of_one_host_have_one_agent_which_the_last_of_them_ends(
    agents: Agents, scratch: str, tmp_path: Path
) -> None:
    with Owner(environment(MEMSTORE_PORT=str(free_port())), tmp_path / "owner") as owner:
        owner.call("take_this_host")
        for name in ("first", "second"):
            owner.call("spawn_procs", name, procs=2)
            owner.call("serve", scratch, name)
        before = agents.processes()
        assert len(before) == 2
        owner.call("stop_procs", "first")
        assert agents.processes() == before
        owner.call("stop_procs", "second")
        eventually(lambda: not agents.processes(), "no process is left")


@pytest.mark.full
def test_a_killed_index_actor_leaves_the_agent_and_the_next_one_supervises_it(
    agents: Agents, scratch: str, tmp_path: Path
) -> None:
    with Owner(environment(MEMSTORE_PORT=str(free_port())), tmp_path / "owner") as owner:
        owner.call("take_this_host")
        owner.call("spawn_procs", "first")
        owner.call("serve", scratch, "first")
        before = agents.processes()
        (pid,) = owner.call("pids_of", "first")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_alive(pid), "the index actor is gone")
        owner.call("spawn_procs", "second")
        owner.call("serve", scratch, "second")
        assert agents.processes() == before, "it goes on with what runs"
        for agent in before:
            os.kill(agent, signal.SIGKILL)
        eventually(lambda: len(set(agents.processes()) - set(before)) == 2, "it is started again")
        owner.call("stop_procs", "second")
        eventually(lambda: not agents.processes(), "no process is left")


@pytest.mark.full
@pytest.mark.parametrize("has_secret", [True, False], ids=["with a secret", "without one"])
def test_an_agent_that_a_person_has_started_goes_on_when_the_mesh_is_stopped(
    agents: Agents, scratch: str, tmp_path: Path, has_secret: bool
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    variables = environment(MEMSTORE_SECRET_FILE=str(secret)) if has_secret else environment()
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "memstore", "serve", scratch, "--address", address]
    agent = subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: Path(scratch, "cluster").exists(), "it serves")
        with Owner(variables, tmp_path / "owner") as owner:
            owner.call("take_this_host")
            owner.call("spawn_procs", "procs")
            assert owner.call("serve", scratch, "procs") == (address,)
            before = agents.processes()
            owner.call("stop_procs", "procs")
            assert agents.processes() == before and agent.poll() is None
        agent.terminate()
        assert agent.wait(30) == 0
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.full
def test_the_agent_of_a_job_that_ends_as_its_script_does_ends_with_it(
    agents: Agents, scratch: str, tmp_path: Path
) -> None:
    with Owner(environment(MEMSTORE_PORT=str(free_port())), tmp_path / "owner") as owner:
        owner.call("take_this_host")
        owner.call("serve", scratch)
        assert len(agents.processes()) == 2
        assert owner.process.stdin is not None
        owner.process.stdin.close()
        owner.process.wait(60)
        eventually(lambda: not agents.processes(), "no process is left")


@pytest.mark.full
@pytest.mark.parametrize("in_a_thread", [False, True])
@pytest.mark.parametrize("who", ["serve_by_an_actor", "serve_in_a_loop"])
def test_it_may_be_called_where_an_asyncio_loop_runs(
    agents: Agents, scratch: str, tmp_path: Path, who: str, in_a_thread: bool
) -> None:
    """In an actor's asynchronous endpoint, a script or a notebook. Its loop waits, or goes on where a thread does."""
    with Owner(environment(MEMSTORE_PORT=str(free_port())), tmp_path / "owner") as owner:
        (host,) = owner.call(who, scratch, in_a_thread=in_a_thread)
    assert [one.address for one in memstore.Cluster(scratch).status().hosts if one.alive] == [host]
    assert len(agents.processes()) == 2, "they outlive who has served"
    memstore.Cluster(scratch).stop()
    eventually(lambda: not agents.processes(), "no process is left")
