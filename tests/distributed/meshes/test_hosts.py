"""memstore.serve on meshes of several hosts: workers of Monarch that run already, and are attached to by TCP."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import memstore
from tests.distributed.meshes.conftest import HOSTS, MeshHosts, words_of
from tests.distributed.meshes.owners import SOURCES, environment, needs_monarch
from tests.distributed.serving.agents import eventually

pytestmark = [needs_monarch, pytest.mark.full]

STOP = "memstore.Cluster(sys.argv[1]).stop()"


@pytest.fixture
def root(mesh: MeshHosts, request: pytest.FixtureRequest) -> Iterator[str]:
    """A path on the hosts. Afterwards no agent runs, and nothing is left there."""
    path = f"/dev/shm/{request.node.name}"[:60]
    yield path
    for number in range(HOSTS):
        for pid in mesh.agents(number, path):  # where the test has failed
            os.kill(pid, signal.SIGKILL)
    for host in mesh.hosts:
        host.run(["rm", "-rf", path])


def nothing_runs(mesh: MeshHosts, root: str) -> bool:
    return not any(mesh.agents(number, root) for number in range(HOSTS))


def nothing_is_left(mesh: MeshHosts, path: str) -> bool:
    return all(host.run(["test", "-e", path]).returncode == 1 for host in mesh.hosts)


def stop(mesh: MeshHosts, number: int, root: str) -> None:
    mesh.run(number, STOP, root)
    eventually(lambda: nothing_runs(mesh, root), "no agent is left")


def test_actors_on_all_hosts_have_one_store_and_agents_outlive_the_killed_owner(mesh: MeshHosts, root: str) -> None:
    workers = [mesh.work(number) for number in range(HOSTS)]
    with mesh.another_owner(0) as owner:
        mesh.attach(*workers, owner=owner)
        hosts = owner.call("serve", root)
        assert hosts[0].startswith(f"tcp://{mesh[0].address}:")  # the seed
        assert sorted(host[len("tcp://") :].partition(":")[0] for host in hosts) == [one.address for one in mesh.hosts]
        owner.call("spawn", 1)
        assert owner.call("put_in_actors", root, "a/w") == [root] * HOSTS
        assert [total for _, total in owner.call("get_in_actors", root, "a/w")] == [1000.0] * HOSTS
        assert owner.call("serve", root) == hosts  # again
        before = [mesh.agents(number, root) for number in range(HOSTS)]
        assert list(map(len, before)) == [2] * HOSTS
    assert [mesh.agents(number, root) for number in range(HOSTS)] == before
    got = "with memstore.open(sys.argv[1]) as store: print(int(store.get('a/w')['w'].sum()))"
    assert mesh.run(2, got, root) == "1000"
    alive = "print(*[host.alive for host in memstore.Cluster(sys.argv[1]).status().hosts])"
    assert mesh.run(1, alive, root) == "True True True"
    stop(mesh, 1, root)


def test_the_secret_is_in_a_file_of_ones_own_on_each_host_and_nowhere_else(mesh: MeshHosts, root: str) -> None:
    root, secret = "/dev/shm/secret", "it-is-known-to-nobody-else-0123456789"
    mesh.attach(*mesh.workers).call("serve", root, secret=secret)
    mode = "import os; print(oct(os.stat(sys.argv[1]).st_mode))"
    for number in range(HOSTS):
        assert mesh.read(number, f"{root}/secret") == secret
        assert mesh.run(number, mode, f"{root}/secret") == oct(stat.S_IFREG | 0o600)
        agents = mesh.agents(number, root)
        assert len(agents) == 2
        for pid in agents:
            told = words_of(pid) + Path(f"/proc/{pid}/environ").read_bytes()
            assert secret.encode() not in told
        assert secret not in mesh.read(number, f"{root}/agent.log")
    monarchs = Path("/tmp", os.environ.get("USER", "root"), "monarch_log.log")
    assert not monarchs.exists() or secret.encode() not in monarchs.read_bytes()
    with pytest.raises(memstore.NotServedError, match="with another secret than the one that was given"):
        mesh.owner.call("serve", root, secret="another-one-that-is-as-long-as-that")
    assert len(mesh.owner.call("serve", root)) == HOSTS  # the one that they have
    stop(mesh, 0, root)
    mesh.owner.call("serve", root)  # also when they run no longer
    assert mesh.read(2, f"{root}/secret") == secret
    stop(mesh, 0, root)


def test_two_workers_of_one_host_are_one_host(mesh: MeshHosts, root: str) -> None:
    hosts = mesh.attach(mesh.workers[1], mesh.workers[0], mesh.work(1)).call("serve", root)
    assert len(hosts) == 2 and f"//{mesh[1].address}:" in hosts[0]  # the mesh's first host is the seed
    assert len(mesh.agents(1, root)) == 2
    stop(mesh, 0, root)


def test_a_mesh_of_other_hosts_is_refused_and_one_with_more_of_them_joins(mesh: MeshHosts, root: str) -> None:
    two = mesh.attach(*mesh.workers[:2]).call("serve", root)
    with pytest.raises(memstore.NotServedError, match=rf"has other hosts than the mesh: {two[1]} too"):
        mesh.attach(mesh.workers[0]).call("serve", root)
    three = mesh.attach(*reversed(mesh.workers)).call("serve", root)
    assert sorted(three) == sorted({*two, f"tcp://{mesh[2].address}:7411"}) and three[0] == two[0]
    stop(mesh, 2, root)


def test_a_host_that_lost_its_folder_takes_its_place_again(mesh: MeshHosts, root: str) -> None:
    hosts = mesh.attach(*mesh.workers).call("serve", root)
    for pid in mesh.agents(2, root):
        os.kill(pid, signal.SIGKILL)
    mesh.run(2, "import shutil; shutil.rmtree(sys.argv[1])", root)
    assert sorted(mesh.owner.call("serve", root)) == sorted(hosts)
    assert mesh.run(2, "print(len(memstore.open(sys.argv[1])))", root) == "0"
    stop(mesh, 2, root)


def test_processes_are_served_and_a_later_mesh_joins_by_the_cluster(mesh: MeshHosts, root: str) -> None:
    with mesh.another_owner(0) as owner:
        mesh.attach(*mesh.workers[:2], owner=owner)
        owner.call("spawn_procs", "trainers", procs=2)
        two = owner.call("serve", root, "trainers")
        assert len(two) == 2 and [len(mesh.agents(number, root)) for number in (0, 1)] == [2, 2]
        mesh.attach(mesh.workers[2], owner=owner, name="generators")
        with pytest.raises(
            memstore.NotServedError, match=rf"has served {root} on other hosts, {two[0]}, {two[1]}, and"
        ):
            owner.call("serve", root, "generators")
        assert not mesh.agents(2, root)
        three = owner.call("join", root, "generators", owner=False)
        assert sorted(three) == sorted({*two, f"tcp://{mesh[2].address}:7411"})
        owners = {one["address"]: one["is_owner"] for one in json.loads(mesh.read(2, f"{root}/cluster"))["members"]}
        assert owners == {**dict.fromkeys(two, True), f"tcp://{mesh[2].address}:7411": False}
        owner.call("spawn", 1)
        owner.call("put_in_actors", root, "a/w")
        got = "with memstore.open(sys.argv[1]) as store: print(int(store.get('a/w')['w'].sum()))"
        assert mesh.run(2, got, root) == "1000"
        assert owner.call("serve", root, "trainers", join=owner.call("cluster")) == three, "again, a part of them"
        owner.call("stop", remove=True)
        eventually(lambda: nothing_runs(mesh, root) and nothing_is_left(mesh, root), "their agents remove the stores")


def test_meshes_are_served_at_once_and_another_job_joins_by_a_cluster_that_was_sent(mesh: MeshHosts, root: str) -> None:
    with mesh.another_owner(0) as owner, mesh.another_owner(1) as other:
        mesh.attach(*mesh.workers[:2], owner=owner)
        owner.call("slice_hosts", "first", "mesh", 0, 1)
        owner.call("slice_hosts", "second", "mesh", 1, 2)
        owner.call("spawn_procs", "second", "second")
        assert len(owner.call("serve", root, "first", "second", keep=True)) == 2
        owner.call("stop_procs", "second")
        sent: memstore.Cluster = pickle.loads(pickle.dumps(owner.call("cluster")))
        assert not os.path.exists(root) and sent.hosts == owner.call("cluster").hosts
        mesh.attach(mesh.workers[2], owner=other, number=1)
        assert len(other.call("serve", root, join=sent)) == 3
        secret = "print(open(sys.argv[1], 'rb').read().hex())"
        assert mesh.run(2, secret, f"{root}/secret") == mesh.run(0, secret, f"{root}/secret")
    assert [len(mesh.agents(number, root)) for number in range(2)] == [2, 2], "they were to be kept"
    stop(mesh, 0, root)


def test_two_jobs_that_serve_one_root_at_once_make_one_store_or_are_told(mesh: MeshHosts, root: str) -> None:
    """Each begins with another host, which is to be the seed."""
    with mesh.another_owner(0) as one, mesh.another_owner(1) as other:
        mesh.attach(*mesh.workers, owner=one)
        mesh.attach(*reversed(mesh.workers), owner=other, number=1)
        for owner in (one, other):
            owner.begin("serve", root, keep=True)
        found, told = list[tuple[str, ...]](), list[str]()
        for owner in (one, other):
            try:
                found.append(owner.end())
            except (memstore.NotServedError, memstore.StoreTimeoutError) as error:
                assert root in str(error) or "host" in str(error)
                told.append(str(error))
        assert len({frozenset(hosts) for hosts in found}) <= 1
        hosts = one.call("serve", root, keep=True)  # neither has left a host that is a cluster by itself
        assert len(hosts) == HOSTS and all(set(hosts) == set(before) for before in found)
        assert len({json.loads(mesh.read(number, f"{root}/cluster"))["cluster"] for number in range(HOSTS)}) == 1
    stop(mesh, 0, root)


def test_two_jobs_join_a_cluster_at_once(mesh: MeshHosts, root: str) -> None:
    with mesh.another_owner(0) as first, mesh.another_owner(1) as one, mesh.another_owner(2) as other:
        mesh.attach(mesh.workers[0], owner=first)
        assert len(first.call("serve", root, keep=True)) == 1
        sent: memstore.Cluster = pickle.loads(pickle.dumps(first.call("cluster")))
        for number, owner in ((1, one), (2, other)):
            mesh.attach(mesh.workers[number], owner=owner, number=number)
            owner.begin("serve", root, join=sent, keep=True)
        for owner in (one, other):
            assert len(owner.end()) >= 2
        eventually(lambda: len(first.call("status").hosts) == HOSTS, "all are members")
    stop(mesh, 0, root)


PUTTING = """
import torch
number = 0
with memstore.open(sys.argv[1], "r+", timeout=3.0) as store:
    while True:
        number += 1
        try:
            store.put("theirs/k", torch.full((200_000,), number))
            print("put", number, flush=True)
        except memstore.MemstoreError as error:
            print(type(error).__name__, number, flush=True)
"""


def test_a_mesh_that_is_stopped_in_the_middle_of_puts_leaves_whole_values(mesh: MeshHosts, root: str) -> None:
    """The putting process is no part of the mesh, and goes on when the hosts are served again."""
    with mesh.another_owner(0) as owner:
        mesh.attach(*mesh.workers[:2], owner=owner)
        owner.call("spawn_procs", "procs")
        hosts = owner.call("serve", root, "procs")
        mesh.run(1, "with memstore.open(sys.argv[1]) as store: store.put('theirs/k', 0)", root)
        process = mesh[0].popen(
            [sys.executable, "-c", f"import sys, memstore\n{PUTTING}", root],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            lines = (line.split() for line in process.stdout)
            assert [next(lines)[0] for _ in range(5)] == ["put"] * 5
            owner.call("stop_procs", "procs")
            while (error := next(lines)[0]) == "put":
                pass
            assert error in ("HomeUnavailableError", "UnknownOutcomeError")
            assert sorted(owner.call("serve", root)) == sorted(hosts)
            last = max(int(number) for kind, number in (next(lines) for _ in range(20)) if kind == "put")
        finally:
            process.kill()
            process.wait()
        got = "with memstore.open(sys.argv[1]) as store: print(store.get('theirs/k').unique().tolist())"
        for number in range(2):
            (found,) = json.loads(mesh.run(number, got, root))
            assert found >= last
        owner.call("stop", remove=True)
        eventually(lambda: nothing_is_left(mesh, root), "their agents remove the stores")


def test_an_agent_that_was_killed_is_started_again_until_its_mesh_is_stopped(mesh: MeshHosts, root: str) -> None:
    with mesh.another_owner(0) as owner:
        mesh.attach(*mesh.workers[:2], owner=owner)
        owner.call("spawn_procs", "procs")
        hosts = owner.call("serve", root, "procs")
        before = mesh.agents(1, root)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(set(mesh.agents(1, root)) - set(before)) == 2, "another agent, and its index process")
        eventually(lambda: all(host.alive for host in owner.call("status").hosts), "it is a member")
        owner.call("stop_procs", "procs")
        eventually(lambda: nothing_runs(mesh, root), "the agents end with the mesh")
        assert sorted(owner.call("serve", root)) == sorted(hosts), "their stores are there"
        owner.call("stop", remove=True)


def test_an_owner_on_no_host_of_the_mesh_has_the_cluster_too(mesh: MeshHosts, root: str) -> None:
    owner = mesh.attach(*mesh.workers[1:])
    hosts = owner.call("serve", root)
    assert [host.address for host in owner.call("status").hosts if host.alive] == list(hosts) and len(hosts) == 2
    assert mesh.run(0, "import os; print(os.path.exists(sys.argv[1]))", root) == "False"
    owner.call("stop")
    eventually(lambda: nothing_runs(mesh, root), "no agent is left")


# --- what can't be started, and what is left of it --------------------------------------------------------------------


def test_a_root_that_one_host_cannot_make_names_it(mesh: MeshHosts, root: str) -> None:
    for number in (0, 1):
        mesh.run(number, "import os; os.mkdir(sys.argv[1])", root)
    with pytest.raises(memstore.NotAStoreError, match=f"host2: .*{root}"):
        mesh.attach(*mesh.workers).call("serve", f"{root}/store")
    assert nothing_runs(mesh, root) and nothing_is_left(mesh, f"{root}/store")
    mesh.run(2, "open(sys.argv[1], 'w')", root)
    with pytest.raises(memstore.MemstoreError, match=f"host2: .*{root}"):
        mesh.owner.call("serve", f"{root}/store")
    assert nothing_runs(mesh, root)


def test_a_host_with_another_version_is_named(mesh: MeshHosts, root: str) -> None:
    with pytest.raises(memstore.FormatVersionError, match=r"host.*: memstore 99\.9 here"):
        mesh.attach(*mesh.workers[:2], mesh.work(2, FAKE_VERSION="99.9")).call("serve", root)
    assert nothing_runs(mesh, root) and nothing_is_left(mesh, root)


def test_a_host_without_memstore_is_named(mesh: MeshHosts, root: str) -> None:
    with pytest.raises(memstore.NotServedError, match="host 1 of the mesh: .*No module named 'memstore"):
        mesh.attach(mesh.workers[0], mesh.work(1, FAKE_NO_MEMSTORE="1"), mesh.workers[2]).call("serve", root)
    assert nothing_runs(mesh, root)
    assert len(mesh.attach(*mesh.workers).call("serve", root)) == HOSTS  # nothing stands in the way
    stop(mesh, 0, root)


def test_a_port_that_is_taken_is_named_and_what_was_started_is_ended(mesh: MeshHosts, root: str) -> None:
    listen = "import socket; s = socket.create_server((sys.argv[1], 7500)); print(flush=True); sys.stdin.read()"
    taken = mesh[2].popen(
        [sys.executable, "-c", f"import sys; {listen}", mesh[2].address],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert taken.stdout is not None and taken.stdout.readline()
    workers = [mesh.work(number, MEMSTORE_PORT="7500") for number in range(HOSTS)]
    with pytest.raises(memstore.AddressUnavailableError, match=rf"host2: .*{mesh[2].address}:7500: Address already"):
        mesh.attach(*workers).call("serve", root)
    eventually(lambda: nothing_runs(mesh, root), "no agent is left")
    taken.kill()
    taken.wait()
    hosts = mesh.owner.call("serve", root)  # the same mesh, once nothing is in the way
    assert sorted(hosts) == [f"tcp://{one.address}:7500" for one in mesh.hosts]
    stop(mesh, 0, root)


def test_a_host_that_cannot_reach_the_first_one_is_named(mesh: MeshHosts, root: str) -> None:
    """As where a host has an address that only it can reach."""
    first = mesh.work(0, MEMSTORE_ADDRESS="tcp://127.0.0.1:7600")
    with pytest.raises(memstore.NotServedError, match=r"no address at which all others reach it \(.*host1: tcp://127"):
        mesh.attach(first, *mesh.workers[1:]).call("serve", root)
    assert nothing_runs(mesh, root) and nothing_is_left(mesh, root)


def test_a_worker_that_does_not_run_ends_the_call_in_time(mesh: MeshHosts, root: str) -> None:
    with mesh.another_owner(0) as owner:
        mesh.attach(mesh.workers[0], f"tcp://{mesh[1].address}:9", owner=owner)
        started = time.monotonic()
        with pytest.raises(memstore.StoreTimeoutError, match="Monarch has not reached all hosts"):
            owner.call("serve", root, timeout=4.0)
        assert time.monotonic() - started < 25
    assert nothing_runs(mesh, root)


def test_a_mesh_that_was_shut_down_is_told(mesh: MeshHosts, root: str) -> None:
    with mesh.another_owner(0) as owner:
        mesh.attach(mesh.work(1), owner=owner)
        owner.call("shut_down")
        with pytest.raises(memstore.NotServedError, match="Monarch could not .*shut down"):
            owner.call("serve", root, timeout=10.0)


def test_a_host_that_dies_in_the_middle_is_named_in_time(mesh: MeshHosts, root: str) -> None:
    with mesh.another_owner(0) as owner:
        mesh.attach(*mesh.workers[:2], mesh.work(2), owner=owner)
        owner.call("wait_for_mesh")
        mesh[2].kill()
        started = time.monotonic()
        with pytest.raises(memstore.MemstoreError, match="host 2 of the mesh|host2"):
            owner.call("serve", root, timeout=6.0)
        assert time.monotonic() - started < 25
    eventually(lambda: nothing_runs(mesh, root), "no agent is left")
    mesh.workers = (*mesh.workers[:2], mesh.work(2))


def test_addresses_that_are_named_may_be_of_ipv6(mesh: MeshHosts, root: str) -> None:
    if mesh[0].address6 is None:
        pytest.skip("this machine has no IPv6")
    named = [f"tcp://[{host.address6}]:7700" for host in mesh.hosts]
    workers = [mesh.work(number, MEMSTORE_ADDRESS=named[number]) for number in range(HOSTS)]
    assert sorted(mesh.attach(*workers).call("serve", root)) == sorted(named)
    stop(mesh, 1, root)


def test_the_example_learns_on_several_hosts(mesh: MeshHosts) -> None:
    pytest.importorskip("gymnasium")
    command = [sys.executable, "examples/monarch_rl.py", "--until", "30", "--generators", "1", "--workers"]
    done = mesh[0].run(
        [*command, *mesh.workers[:2]], env=environment(), cwd=SOURCES, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed through the store of 2 hosts" in done.stdout, done.stdout
    assert re.search(r"generator 1 +host1 ", done.stdout), done.stdout
    eventually(lambda: nothing_is_left(mesh, "/dev/shm/memstore-rl"), "the agents remove the stores")


def test_the_cluster_file_names_all_hosts(mesh: MeshHosts, root: str) -> None:
    hosts = mesh.attach(*mesh.workers).call("serve", root)
    found = json.loads(mesh.read(1, f"{root}/cluster"))
    assert [member["address"] for member in found["members"]] == list(hosts) and found["seed"] == hosts[0]
    stop(mesh, 1, root)
