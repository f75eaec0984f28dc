"""`memstore status` and `memstore remove`, as people and scripts meet them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from typing import NamedTuple

import pytest
import torch

import memstore
import memstore.aio
from memstore._info import ClusterStatus
from memstore.cli import main
from memstore.distributed.rules import Member, Roster
from memstore.distributed.serving import Cluster, cluster
from memstore.distributed.serving.index_process import CountedSeldom
from memstore.engine import gone_if_new
from tests.children import Child, Wire, in_child
from tests.distributed.serving.agents import LONG, Agents, eventually

CLOSED = str(1 << 24)  # a descriptor that no process has: more than the kernel lets it open


class Done(NamedTuple):
    returncode: object
    stdout: str
    stderr: str


def command(agents: Agents, *words: str, **environment: str) -> Done:
    """Forked from this process: to import what a command needs takes longer than the command."""
    return in_child(run, {**agents.environment, **environment}, words)


def run(environment: dict[str, str], words: tuple[str, ...]) -> Done:
    os.environ.update(environment)
    sys.argv = ["memstore", *words]
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
    return Done(code, output.getvalue(), errors.getvalue())


def started(agents: Agents, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a fresh process, which has nothing of this one."""
    return subprocess.run(
        [sys.executable, "-m", "memstore", *words],
        env={**agents.environment, **environment},
        capture_output=True,
        text=True,
        timeout=LONG,
    )


def test_a_root_that_was_never_served_is_told_so(agents: Agents) -> None:
    root = f"{agents.folder}/a"
    with memstore.open(root) as store:
        store.put("key", 1)
    text, as_json = started(agents, "status", root), command(agents, "status", root, "--json")
    assert (text.returncode, text.stdout) == (1, f"{root} is not served\n")
    assert json.loads(as_json.stdout) == {"served": False}
    removed = command(agents, "remove", root, "tcp://127.0.0.1:1")
    assert removed.returncode == 3 and "was never served" in removed.stderr


@pytest.mark.full
def test_status_tells_of_all_hosts_and_remove_forgets_a_dead_one(agents: Agents) -> None:
    root = f"{agents.folder}/a"
    with memstore.open(root) as store:
        store.put("one/key", 1)
        store.put("two/key", large())
    seed = agents.serve("a")
    other = agents.serve("b", "--no-owner", join=seed, members=2)
    eventually(lambda: seed.view()["epoch"] == other.view()["epoch"], "one view")

    found = json.loads(command(agents, "status", root, "--json").stdout)
    assert found["served"] and found["seed"] == seed.address and found["epoch"] == seed.view()["epoch"]
    first, second = found["hosts"]
    assert (first["address"], second["address"]) == (seed.address, other.address)
    assert first["alive"] and second["alive"] and first["transport"] == "tcp"
    assert (first["keys"], second["keys"]) == (2, 0)
    assert first["live_bytes"] > 1 << 16 and second["live_bytes"] == 0
    assert first["incarnation"] == second["incarnation"] == 1
    assert first["memstore"] == memstore.__version__ and first["torch"] == metadata.version("torch")

    code, text, _ = command(agents, "status", root)
    assert code == 0 and "received" in text and "…" not in text
    drawn = in_child(cluster_in, agents.environment, root)
    assert f"memstore.Cluster(&#x27;{root}&#x27;): 2 hosts; status() asks them how they are" in drawn
    assert f">{other.address}<" in drawn
    assert f"seed {seed.address}, deputies {other.address}: 2 of 2 hosts answer" in " ".join(text.split())
    assert f"memstore {memstore.__version__}, torch {metadata.version('torch')}" in text

    for folder in (root, f"{agents.folder}/b"):  # what other commands show of a store that is served
        watched = json.loads(command(agents, "watch", folder, "--count", "1", "--json").stdout)
        assert [one["key"] for one in watched["entries"]] == ["one/key", "two/key"]
        assert "two/key w  dict of 1 leaf, float32 [32768]" in command(agents, "get", folder, "two/key").stdout

    told = " ".join(command(agents, "stats", root).stdout.split())
    assert told.startswith("keys 2 that this host owns live")

    other.process.kill()
    other.process.wait()
    first, second = json.loads(command(agents, "status", root, "--json").stdout)["hosts"]
    assert first["alive"] and not second["alive"] and second["trouble"] == "Connection refused"
    code, text, _ = command(agents, "status", root)
    assert code == 1 and command(agents, "status", root, "--json").returncode == 1
    assert ": 1 of 2 hosts answer" in text and f"{other.address} does not answer: {second['trouble']}" in text

    shown = in_child(status_in, agents.environment, root)
    assert repr(shown).startswith(f"memstore.ClusterStatus: 1 of 2 hosts alive, seed {seed.address}\n  address")
    assert "no: Connection refused" in repr(shown) and "no: Connection refused" in shown._repr_html_()

    refused = command(agents, "remove", root, seed.address)
    assert refused.returncode == 3 and "memstore promote" in refused.stderr
    bare = other.address.removeprefix("tcp://").rpartition(":")[0]
    removed = command(agents, "remove", root, bare)
    assert removed.returncode == 0 and removed.stdout == f"{other.address} removed\n", removed.stderr
    assert len(json.loads(command(agents, "status", root, "--json").stdout)["hosts"]) == 1


def status_in(environment: dict[str, str], root: str) -> ClusterStatus:
    os.environ.update(environment)
    return Cluster(root).status()


def cluster_in(environment: dict[str, str], root: str) -> str:
    os.environ.update(environment)
    return Cluster(root)._repr_html_()


def large() -> dict[str, object]:
    return {"w": torch.zeros(1 << 15)}


@pytest.mark.full
def test_a_cell_shows_a_store_whose_hosts_do_not_answer(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.serve("b", "--no-owner", join=seed, members=2)
    seed.terminate()
    with memstore.open(other.root) as store:
        assert "did not answer within the timeout" in store._repr_html_()


def test_with_another_secret_no_host_is_alive_and_the_reason_is_told(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.new_secret("other")
    (host,) = json.loads(command(agents, "status", seed.root, "--json", MEMSTORE_SECRET_FILE=str(other)).stdout)[
        "hosts"
    ]
    assert not host["alive"] and "secret" in host["trouble"]


def test_a_host_is_named_by_its_address_its_name_or_the_ip_alone() -> None:
    def member(number: int, address: str, name: str) -> Member:
        return Member(bytes([number]) * 16, address, name)

    def found(host: str) -> Member:
        return cluster._only(roster, cluster._named(roster, host), host)

    first, second = member(1, "tcp://10.0.0.1:7411", "a"), member(2, "tcp://10.0.0.2:7411", "b")
    third, fourth = member(3, "tcp://10.0.0.3:7411", "c"), member(4, "tcp://10.0.0.3:7412", "d")
    last = member(5, "tcp://[fd00::2]:7411", "e")
    roster = Roster(b"C" * 16, 1, 1, (first, second, third, fourth, last), first.id)
    for host in ("tcp://10.0.0.2:7411", "10.0.0.2:7411", "10.0.0.2", "b", second.id.hex()):
        assert found(host) == second
    assert found("[fd00::2]") == found("fd00::2") == last and found("10.0.0.3:7412") == fourth
    with pytest.raises(memstore.NotServedError, match="of several hosts: give the id.*10.0.0.3:7412"):
        found("10.0.0.3")
    with pytest.raises(memstore.NotServedError, match="'10.0.0' is no host of the cluster; it has tcp://10.0.0.1:7411"):
        found("10.0.0")


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("serve", "/x"), "--address"),
        (("serve", "/x", "--address", "tcp://127.0.0.1:1", "--maps"), "say --shared too, or leave --maps out"),
        (
            ("serve", "/x", "--address", "tcp://127.0.0.1:1", "--ready-fd", CLOSED),
            f"{CLOSED} is no open file descriptor",
        ),
        (("serve", "/x", "--address", "tcp://127.0.0.1:1", "--hang-after", "0"), "not in the range x>=0.5"),
        (("remove", "/x"), "HOST"),
    ],
)
def test_a_wrong_call_is_told_so(agents: Agents, words: tuple[str, ...], missing: str) -> None:
    done = command(agents, *words)
    assert done.returncode == 2 and missing in done.stderr


def test_what_is_no_address_is_a_wrong_call(agents: Agents) -> None:
    done = command(agents, "serve", f"{agents.folder}/a", "--address", "host:1")
    assert done.returncode == 2 and "an address is tcp://IP:PORT" in done.stderr


def test_a_host_with_another_secret_is_refused_with_one_line(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.new_secret("other")
    agent = agents.start("b", join=seed, MEMSTORE_SECRET_FILE=str(other))
    code, text = agent.ended()
    assert code == 3 and text.count("has another secret than this process") == 1


def test_status_says_what_a_get_and_a_slice_have_moved(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE_SECRET_FILE", str(agents.secret))
    seed = agents.serve("a")
    other = agents.serve("b", join=seed, members=2)

    def sent() -> int:
        hosts = memstore.Cluster(other.root).status().hosts
        return next(host.sent for host in hosts if host.address == seed.address)

    with memstore.open(seed.root, "r+") as here, memstore.open(other.root, "r+") as there:
        here.put("value/k", torch.arange(1 << 18, dtype=torch.int32).view(-1, 64))
        begin = sent()
        assert there.view("value/k")[100:140].sum() == sum(range(6400, 8960))
        part = sent()
        assert there.get("value/k").numel() == 1 << 18
        whole = sent()
        assert there.get("value/k").numel() == 1 << 18  # the copy is there
        again = sent()
    mebibyte, a_little = 1 << 20, 1 << 16
    assert 40 * 256 <= part - begin < 40 * 256 + a_little
    assert mebibyte <= whole - part < mebibyte + a_little
    assert again - whole < a_little


# --- calls that fail leave nothing ------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which somebody else listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.209", 0))
        listening.listen()
        yield f"tcp://127.0.0.209:{listening.getsockname()[1]}"


async def open_in_a_task(root: str, address: str) -> None:
    async with memstore.aio.open(root, cluster=address, wait=20.0):
        pass


JOINS: dict[str, Callable[[str, str], object]] = {
    "open": lambda root, address: memstore.open(root, cluster=address, wait=20.0),
    "aio.open": lambda root, address: asyncio.run(open_in_a_task(root, address)),
    "join": lambda root, address: memstore.join(root, cluster=address, timeout=20.0),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name != "open")) for name in JOINS])
def test_a_host_that_can_not_join_has_no_folder_of_it(scratch: str, taken: str, name: str) -> None:
    with pytest.raises(memstore.NotServedError, match="Address already in use"):
        JOINS[name](scratch, taken)
    assert not os.path.lexists(scratch)


@pytest.mark.full
def test_an_agent_that_can_not_listen_leaves_no_folder(agents: Agents, taken: str) -> None:
    done = command(agents, "serve", f"{agents.folder}/a", "--address", taken)
    assert done.returncode == 3 and "Address already in use" in done.stderr
    assert not os.path.lexists(f"{agents.folder}/a")


def test_what_was_there_before_a_call_that_fails_stays(agents: Agents, taken: str) -> None:
    with memstore.open(f"{agents.folder}/a") as store:
        store.put("key", 7)
    os.mkdir(f"{agents.folder}/b", 0o700)
    for name in "ab":
        assert command(agents, "serve", f"{agents.folder}/{name}", "--address", taken).returncode == 3
    with memstore.open(f"{agents.folder}/a", "r") as store:
        assert store.get("key") == 7
    assert os.listdir(f"{agents.folder}/b") == []


def test_a_store_that_another_process_uses_by_then_stays(scratch: str) -> None:
    def fail(meanwhile: Callable[[], object]) -> None:
        with pytest.raises(ZeroDivisionError), gone_if_new(scratch):
            memstore.open(scratch).close()
            meanwhile()
            raise ZeroDivisionError

    fail(lambda: None)
    assert not os.path.lexists(scratch)
    with Child(_hold_open, scratch) as child:
        fail(child.receive)
        assert os.path.lexists(f"{scratch}/memstore.json")
    memstore.destroy(scratch)
    fail(lambda: in_child(_put_one, scratch))
    with memstore.open(scratch, "r") as store:
        assert store.get("key") == 7
    memstore.destroy(scratch)
    fail(lambda: (in_child(_put_one, scratch), os.truncate(f"{scratch}/lock", 0)))
    assert os.path.lexists(f"{scratch}/memstore.json"), "a copy has come, as far as to an empty lock page"


def _hold_open(wire: Wire, root: str) -> None:
    with memstore.open(root, "r+", wait=60.0):
        wire.send("open")
        wire.receive()


def _put_one(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", 7)


def test_what_a_look_must_count_is_counted_for_a_twentieth_of_the_time_at_most() -> None:
    now, counted = [0.0], [0]

    def count() -> int:
        counted[0] += 1
        now[0] += 0.1
        return 7 * counted[0]

    copies = CountedSeldom(count, lambda: now[0])
    for _ in range(200):
        assert copies.value() == 7 * counted[0]
        now[0] += 0.1
    assert counted[0] == 11 and 20 <= now[0] < 22
