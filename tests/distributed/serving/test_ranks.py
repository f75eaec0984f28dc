"""memstore.join, in processes as a launcher starts them."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from memstore.distributed.links import secret_of
from memstore.distributed.serving import standing_at
from memstore.distributed.serving.joining import LOG
from memstore.distributed.serving.questions import Asker, Halt
from tests.children import Child, Wire, children, in_child
from tests.distributed.serving.agents import LONG, Agents, eventually

RANKS = 4


@pytest.fixture
def launched(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A root, in an environment as torchrun makes it. Its agent is ended."""
    root = f"{agents.folder}/store"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = {
        "MEMSTORE_SECRET_FILE": str(agents.secret),
        "MASTER_ADDR": "localhost",
        "MEMSTORE_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "PYTHONPATH": agents.environment["PYTHONPATH"],
    }
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    yield root
    for pid in agents.processes():
        os.kill(pid, signal.SIGKILL)


def rank(wire: Wire, number: int, root: str) -> Any:
    wire.receive()  # all at once
    cluster = memstore.join(root, timeout=LONG)
    assert memstore.join(root, timeout=LONG).hosts == cluster.hosts  # again
    wire.send((cluster.hosts, cluster.status().hosts[0].incarnation))
    wire.receive()
    if number == 0:
        cluster.stop()
        cluster.stop()
    return "done"


def test_ranks_that_come_at_once_start_one_agent(agents: Agents, launched: str) -> None:
    with children(RANKS, rank, launched) as ranks:
        for child in ranks:
            child.send()
        found = {child.receive() for child in ranks}
        ((hosts, incarnation),) = found
        assert len(hosts) == 1 and hosts[0].startswith("tcp://127.0.0.1:") and incarnation == 1
        assert len(agents.processes()) == 2  # the agent, and its index process
        for child in ranks:
            child.send()
        assert [child.receive() for child in ranks] == ["done"] * RANKS
    eventually(lambda: agents.processes() == [], "no process is left")
    assert Path(f"{launched}/{LOG}").read_text().count(" serves ") == 1


def stop_and_join_again(wire: Wire, root: str) -> None:
    cluster = memstore.join(root, timeout=LONG)
    wire.send()
    wire.receive()
    with Asker(secret_of(root)) as asker:
        (member,) = standing_at(root, LONG).roster.members  # type: ignore[union-attr]
        asker.ask(member, Halt(), time.monotonic() + LONG)
    wire.send()
    wire.send(memstore.join(root, timeout=LONG).hosts == cluster.hosts and cluster.status().hosts[0].alive)


def test_who_joins_while_an_agent_ends_gets_the_next_one(agents: Agents, launched: str) -> None:
    with Child(stop_and_join_again, launched) as child:
        child.receive()
        agent = min(agents.processes())  # its index process is its child
        os.kill(agent, signal.SIGSTOP)
        child.send()
        child.receive()
        eventually(lambda: agents.processes() == [agent], "the index process has ended")
        os.kill(agent, signal.SIGCONT)
        assert child.receive() is True


def stay(wire: Wire, root: str) -> None:
    memstore.join(root, timeout=LONG)
    wire.send(os.getpid())
    wire.receive()


def test_an_agent_outlives_the_rank_that_started_it_and_serves_the_next(agents: Agents, launched: str) -> None:
    with Child(stay, launched) as child:
        child.receive()
        before = sorted(agents.processes())
        child.kill()
    assert len(before) == 2
    cluster = memstore.join(launched, timeout=LONG)
    assert sorted(agents.processes()) == before and cluster.root == launched
    assert in_child(status_in_child, cluster) == [True]  # in a forked process too
    cluster.stop()
    eventually(lambda: agents.processes() == [], "no process is left")
    other = str(agents.folder / "other")
    memstore.open(other).close()
    with pytest.raises(memstore.NotServedError, match="was never served"):
        memstore.Cluster(other)


def status_in_child(cluster: memstore.Cluster) -> list[bool]:
    return [host.alive for host in cluster.status().hosts]


def test_hosts_of_a_launcher_join_the_one_that_is_named(
    agents: Agents, launched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = memstore.join(launched, timeout=LONG)
    monkeypatch.setenv("MEMSTORE_ADDRESS", first.hosts[0].replace("127.0.0.1", "127.0.0.2"))
    second = memstore.join(f"{agents.folder}/second", cluster=first.hosts[0], timeout=LONG)
    assert len(second.hosts) == 2 and first.hosts[0] in second.hosts
    eventually(lambda: first.hosts == second.hosts, "both know it")
    stranger = agents.serve("stranger")
    with pytest.raises(memstore.NotServedError, match="is served already, in the cluster of the seed"):
        memstore.join(launched, cluster=stranger.address, timeout=30.0)
    stranger.terminate()
    second.stop()
    eventually(lambda: agents.processes() == [], "no process is left")


def test_open_joins_the_cluster_that_is_named(agents: Agents, launched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = memstore.join(launched, timeout=LONG)
    seed = first.hosts[0]
    monkeypatch.setenv("MEMSTORE_ADDRESS", seed.replace("127.0.0.1", "127.0.0.2"))
    second = f"{agents.folder}/second"
    for wrong in ("127.0.0.1:7411", 7411):
        with pytest.raises(memstore.InvalidAddressError, match="an address is tcp://IP:PORT"):
            memstore.open(second, cluster=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="secret= is that of the cluster"):
        memstore.open(second, secret="s" * 32)
    with pytest.raises(ValueError, match="mode 'x' creates a store, and cluster= joins one"):
        memstore.open(second, "x", cluster=seed)
    assert not os.path.exists(second)

    with memstore.open(second, "r", cluster=seed, checksum=True, wait=LONG) as reader, memstore.open(launched) as there:
        there.put("policy", 1)
        assert reader.get("policy") == 1
        with pytest.raises(memstore.ReadOnlyError):
            reader.put("policy", 2)
    with pytest.raises(ValueError, match="checksum"):  # it was created as it was wished
        memstore.open(second, checksum=False)
    assert len(first.hosts) == 2
    secret = Path(os.environ["MEMSTORE_SECRET_FILE"]).read_bytes()
    with memstore.open(second, cluster=first, secret=secret) as writer, memstore.open(launched) as there:  # it is one
        writer.put("policy", 2)
        assert there.get("policy") == 2
    assert asyncio.run(get_in_a_task(f"{agents.folder}/third", seed, monkeypatch)) == 2
    first.stop()
    eventually(lambda: agents.processes() == [], "no process is left")


async def get_in_a_task(root: str, seed: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MEMSTORE_ADDRESS", seed.replace("127.0.0.1", "127.0.0.3"))
    async with memstore.aio.open(root, "r+", cluster=seed, wait=LONG) as store:
        return await store.get("policy")


def test_what_stands_in_the_way_is_told(agents: Agents, launched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="an address is tcp://IP:PORT"):
        memstore.join(launched, cluster="host:1")
    for variable in ("WORLD_SIZE", "SLURM_JOB_NUM_NODES"):  # torchrun's, and that of srun alone
        with monkeypatch.context() as patch:
            patch.setenv(variable, "8")
            with pytest.raises(memstore.NotServedError, match="other hosts can't reach"):
                memstore.join(launched)
    with monkeypatch.context() as patch:
        patch.delenv("MASTER_ADDR")
        with pytest.raises(ValueError, match="Neither cluster= nor MASTER_ADDR"):
            memstore.join(launched)
    with monkeypatch.context() as patch:
        patch.setenv("MEMSTORE_PORT", "many")
        with pytest.raises(ValueError, match="MEMSTORE_PORT is a port"):
            memstore.join(launched)
    assert not os.path.exists(launched)
    agents.secret.chmod(0o644)
    with pytest.raises(memstore.NotServedError, match="mode 0644"):
        memstore.join(launched, timeout=LONG)
    eventually(lambda: agents.processes() == [], "no process is left")
    assert not os.path.exists(launched)


def test_a_seed_that_does_not_answer_is_named_in_time(
    agents: Agents, launched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.3", 0))
        seed = f"tcp://127.0.0.3:{silent.getsockname()[1]}"
    monkeypatch.setenv("MEMSTORE_ADDRESS", seed.replace("127.0.0.3", "127.0.0.4"))
    os.mkdir(launched)
    for kind in ("join", "open"):
        with pytest.raises(memstore.StoreTimeoutError, match=seed) as late:
            if kind == "join":
                memstore.join(launched, cluster=seed, timeout=1.5)
            else:
                memstore.open(launched, "r", cluster=seed, wait=1.5)
        assert "see whether that host is served" in str(late.value)
        assert "SIGTERM" not in str(late.value)  # neither by this call nor by the one before
        assert os.listdir(launched) == []  # the folder was there before, and the store wasn't
    eventually(lambda: agents.processes() == [], "no process is left")


def put_soon(root: str) -> None:
    with memstore.open(root, "r", wait=LONG), memstore.open(root) as store:
        store.put("key", "kept")


@pytest.mark.parametrize(
    "was_there", [pytest.param(True, id="there before", marks=pytest.mark.full), pytest.param(False, id="put into")]
)
def test_a_store_that_is_somebodys_stays_when_a_join_fails(
    was_there: bool, agents: Agents, launched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`put into`: while this host tried to become a member."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.3", 0))
        seed = f"tcp://127.0.0.3:{silent.getsockname()[1]}"
    monkeypatch.setenv("MEMSTORE_ADDRESS", seed.replace("127.0.0.3", "127.0.0.4"))
    if was_there:
        memstore.open(launched).close()
    putting = threading.Thread(target=put_soon, args=(launched,))
    if not was_there:
        putting.start()
    with pytest.raises(memstore.StoreTimeoutError, match=seed):
        memstore.open(launched, cluster=seed, wait=1.5)
    with memstore.open(launched, "r") as store:
        assert list(store) == ([] if was_there else ["key"])
    if not was_there:
        putting.join()


def test_a_host_joins_by_a_cluster_that_was_sent_with_its_secret_and_a_stop_removes_all(
    launched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMSTORE_SECRET_FILE")
    secret = "it-is-given-to-the-first-one-and-sent"
    first = memstore.join(launched, secret=secret, timeout=LONG)
    sent = pickle.loads(pickle.dumps(first))
    port = first.hosts[0].rpartition(":")[2]
    monkeypatch.setenv("MEMSTORE_ADDRESS", f"tcp://127.0.0.7:{port}")
    second = f"{launched}-2"
    with pytest.raises(memstore.SecretError, match="that was given has 5 bytes"):
        memstore.join(second, cluster=sent, secret="short", timeout=LONG)
    joined = memstore.join(second, cluster=sent, owner=False, timeout=LONG)
    assert memstore.join(second, cluster=sent, timeout=LONG).hosts == joined.hosts, "again"
    assert secret_of(second, and_environment=False) == secret.encode()
    with memstore.open(second) as store, memstore.open(launched) as other:
        store.put("group/key", torch.arange(9))
        assert other.get("group/key").sum() == 36
    with pytest.raises(memstore.NotServedError, match="with another secret or none"):
        memstore.join(second, cluster=sent, secret="another-one-that-is-as-long-as-that", timeout=LONG)
    gone = pickle.dumps(joined)
    joined.stop(remove=True)
    eventually(lambda: not os.path.exists(launched) and not os.path.exists(second), "both are removed")
    with pytest.raises(memstore.HomeUnavailableError, match="not ended, as far as can be seen"):
        pickle.loads(gone).stop(timeout=1.0)
    assert repr(pickle.loads(gone)) == f"memstore.Cluster({second!r})" and len(pickle.loads(gone).hosts) == 2
