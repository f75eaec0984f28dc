"""A host is drained while its agent, and processes on all hosts, go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import memstore
from memstore.distributed.catalog import look, run
from memstore.distributed.serving import Cluster
from memstore.engine import Creation, Transaction, close_root, open_root, tables
from memstore.errors import (
    CorruptionError,
    CrossHostError,
    HomeUnavailableError,
    MemstoreError,
    MutableEntryError,
    NotServedError,
    StoreFullError,
    StoreTimeoutError,
)
from tests.distributed.serving.agents import LONG, Agent, Agents, eventually
from tests.distributed.serving.test_agent import REFUSED

HALF, COLUMNS = 300, 300  # rows of a part, and columns
LARGE = 100_000  # elements: more than a record has room for
NUMBER = 8  # keys


def three(agents: Agents, *options: str) -> tuple[Agent, Agent, Agent]:
    seed = agents.serve("a")
    second = agents.serve("b", join=seed, members=2)
    return seed, second, agents.serve("c", *options, join=seed, members=3)


def value(number: int) -> dict[str, Any]:
    return {"weights": torch.full((LARGE,), float(number)), "step": number}


def check(store: memstore.Store, key: str, number: int) -> None:
    found = store.get(key, timeout=30.0)
    assert found["step"] == number and bool((found["weights"] == number).all())


def test_groups_and_bytes_go_elsewhere_and_a_host_that_comes_back_is_a_new_one(agents: Agents) -> None:
    seed, other, leaver = three(agents)
    versions: dict[str, int] = {}
    with memstore.open(leaver.root) as store, memstore.open(other.root) as theirs:
        for number in range(NUMBER):
            versions[f"own{number}/k"] = store.put(f"own{number}/k", value(number))
            theirs.put(f"away{number}/first", number)
            versions[f"away{number}/k"] = store.put(f"away{number}/k", value(number))
        kept = [(store, theirs)[number % 2].put("own0/kept", value(number), history=3) for number in range(4)]
        kept += [(store, theirs)[number % 2].put("away0/kept", value(number), history=3) for number in range(4)]
        versions["own0/small"] = store.put("own0/small", 7)
        held = store.get("own1/k")
        reference = theirs.ref("own2/k")
    said: list[tuple[int, int]] = []
    cluster = Cluster(leaver.root)  # as a hook before the end of its host does
    assert cluster.drain(leaver.address, timeout=60.0, progress=lambda *left: said.append(left)) == leaver.address
    assert leaver.ended()[0] == 0 and not os.path.exists(leaver.root)
    assert "is drained" in leaver.log()
    assert Cluster(seed.root).hosts == (seed.address, other.address)
    assert bool((held["weights"] == 1).all()), "a value that is held stays"
    for agent in (seed, other):
        with memstore.open(agent.root) as store:
            for number in range(NUMBER):
                check(store, f"own{number}/k", number)
                check(store, f"away{number}/k", number)
            assert store.get("own0/small") == 7
            for key, these in (("own0/kept", kept[1:4]), ("away0/kept", kept[5:])):
                assert store.versions(key) == tuple(these)
                for number, version in enumerate(these, 1):
                    found = store.get(key, version=version)
                    assert found["step"] == number and bool((found["weights"] == number).all())
            assert {key: store.info(key).version for key in versions} == versions
            assert not store.verify().damaged
            store.put("own0/k", value(0))
            check(store, "own0/k", 0)
            versions["own0/k"] = store.info("own0/k").version
    assert reference.get()["step"] == 2
    again = agents.serve("c", join=seed, address=leaver.address, members=3)
    with memstore.open(again.root) as store:
        check(store, "own3/k", 3)
    for agent in agents.started:
        assert "Traceback" not in agent.log()


def test_the_seed_is_drained_once_another_host_is_the_seed_and_the_last_owner_never(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.serve("b", join=seed, members=2)
    with memstore.open(seed.root) as store:
        store.put("g/k", value(1))
    with pytest.raises(NotServedError, match="is no host of the cluster"):
        Cluster(seed.root).drain("tcp://127.0.0.9:1")
    done = command(agents, "drain", seed.root, seed.address, "--to", other.address, "--json")
    assert done.returncode == 0 and f'"drained": "{seed.address}"' in done.stdout, done.stderr
    assert seed.ended()[0] == 0
    with memstore.open(other.root) as store:
        check(store, "g/k", 1)
    with pytest.raises(NotServedError, match="is the seed, and no other host"):
        Cluster(other.root).drain(other.address)
    visitor = agents.serve("c", "--no-owner", join=other, members=2)
    assert visitor.view()["seed"] == other.address
    done = command(agents, "drain", other.root, other.address)
    assert done.returncode != 0 and "the last host that may own groups" in done.stderr


@pytest.mark.full
def test_the_next_deputy_is_made_the_seed_where_the_first_one_is_silent(agents: Agents) -> None:
    seed, *others = three(agents)
    eventually(lambda: len(seed.view()["deputies"]) == 2, "two deputies")
    first = Cluster(seed.root).status().deputies[0]
    silent, other = sorted(others, key=lambda one: one.address != first)
    stopped = [silent.pid, silent.index_process()]
    with ThreadPoolExecutor() as threads:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            drained = threads.submit(Cluster(other.root).drain, seed.address, timeout=100.0)
            eventually(lambda: other.view()["seed"] == other.address or drained.done(), "another seed", 60.0)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert drained.result() == seed.address


def command(agents: Agents, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memstore", *words],
        env=agents.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_puts_and_gets_go_on_while_their_host_and_their_owner_is_drained(agents: Agents) -> None:
    """Each put that was acknowledged is there, wherever it was made; and nothing is left of the host that has left."""
    seed, other, leaver = three(agents)
    gone = id_of(leaver)
    with memstore.open(leaver.root) as store, memstore.open(other.root) as theirs:
        for number in range(200):
            store.put(f"flat{number}", number)
        store.put("busy/k", value(0))
        theirs.put("other/own", 1)
        for number in range(NUMBER):
            store.put(f"other/big{number}", value(number))
            store.put(f"other/small{number}", number)
            theirs.put(f"mine{number}/k", value(number))
            store.put(f"busy/{number}", value(number))
            theirs.put(f"busy/theirs{number}", value(number))
            assert theirs.get(f"busy/{number}")["step"] == number
    over, put, troubles = threading.Event(), [0], list[BaseException]()

    def go_on(agent: Agent, key: str) -> None:
        try:
            with memstore.open(agent.root, timeout=30.0) as store:
                while not over.is_set():
                    store.put(key, value(put[0] + 1))
                    put[0] += 1
                    check(store, key, put[0])
                    assert len(list(store.keys())) >= 201
        except BaseException as error:
            troubles.append(error)

    def wait(agent: Agent) -> int | str:
        try:
            with memstore.open(agent.root, timeout=60.0) as store:
                return store.wait("flat7", newer_than=store.info("flat7").version, timeout=60.0)
        except MemstoreError as error:
            return type(error).__name__

    with ThreadPoolExecutor() as threads:
        going = threads.submit(go_on, other, "busy/k")
        elsewhere, there = threads.submit(wait, other), threads.submit(wait, leaver)
        try:
            eventually(lambda: put[0] > 3 or troubles, "it puts")
            Cluster(seed.root).drain(leaver.address, timeout=100.0)
            at = put[0]
            eventually(lambda: put[0] > at + 3 or troubles, "it goes on")
        finally:
            over.set()
            going.result()
        with memstore.open(seed.root) as store:
            version = store.put("flat7", 7)
        assert elsewhere.result() == version, "a wait goes on at the next owner"
        # One on the host that has left had asked the next owner before, or hears that it is no member.
        assert there.result() in (version, "StaleMembershipError", "NotAStoreError")
    assert not troubles, troubles
    with memstore.open(seed.root) as store:
        check(store, "busy/k", put[0])
        assert [store.get(f"flat{number}") for number in range(200)] == list(range(200))
        for number in range(NUMBER):
            check(store, f"other/big{number}", number)
            check(store, f"busy/theirs{number}", number)
    assert leaver.ended()[0] == 0
    folder, name = os.path.split(leaver.root)
    assert [one for one in os.listdir(folder) if one.startswith(name)] == []
    for agent in (seed, other):
        eventually(
            lambda agent=agent: not naming(agent, gone), f"nothing of it at {agent.address}: {naming(agent, gone)}"
        )
    assert not Cluster(seed.root).status().lost


def id_of(agent: Agent) -> bytes:
    return next(bytes.fromhex(one["id"]) for one in agent.view()["members"] if one["address"] == agent.address)


def naming(agent: Agent, member: bytes) -> dict[str, int]:
    """By table, how many rows of a host's catalog name a member.

    Not those of the directory, which say who has given a group to its owner, and those of segments of the host itself,
    which say who was asked once to name them.
    """
    use = open_root(agent.root, "r", Creation(), LONG)
    try:
        use.root.catalog.view(Transaction.counters)

        def count(transaction: Transaction) -> dict[str, int]:
            found = {
                table: sum(member in bytes(key) + bytes(row) for key, row in transaction.rows(table))
                for table in ("entries", *tables.SERVED)
                if table not in (tables.DIRECTORY, tables.LENT)
            }
            return {table: number for table, number in found.items() if number}

        named = use.root.catalog.view(count)
        if look(use.root, lambda tables: [row for row in tables.ownerships(0, 1 << 20) if row.owner == member], inf):
            named[tables.DIRECTORY] = 1
        return named
    finally:
        close_root(use)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["agent", "index process", "taker"])
def test_whoever_is_killed_a_drain_goes_on_when_it_is_back(agents: Agents, victim: str) -> None:
    seed, other, leaver = three(agents)
    with memstore.open(leaver.root) as store:
        for number in range(60):
            store.put(f"own{number}/k", value(number))
    cluster = Cluster(seed.root)
    with pytest.raises(StoreTimeoutError, match="goes on"):
        cluster.drain(leaver.address, timeout=0.5)
    silent = (HomeUnavailableError, StoreTimeoutError)  # it may be back
    errors = {"agent": HomeUnavailableError, "index process": silent, "taker": StoreTimeoutError}
    with pytest.raises(errors[victim]):
        killed = {"agent": leaver, "index process": leaver, "taker": other}[victim]
        if victim == "index process":
            os.kill(killed.index_process(), signal.SIGKILL)
        else:
            killed.process.kill()
            killed.process.wait()
        cluster.drain(leaver.address, timeout=0.3)
    if victim == "agent":
        agents.serve("c", join=seed, address=leaver.address, members=3)
    elif victim == "taker":
        agents.serve("b", join=seed, address=other.address, members=3)
    cluster.drain(leaver.address, timeout=100.0)
    with memstore.open(seed.root) as store:
        for number in range(60):
            check(store, f"own{number}/k", number)
    assert not os.path.exists(leaver.root)


@pytest.mark.full
def test_a_taker_without_room_is_named_and_the_drain_goes_on_when_there_is_some(agents: Agents) -> None:
    with memstore.open(f"{agents.folder}/b", capacity=4 << 20):
        pass
    seed = agents.serve("a")
    full = agents.serve("b", join=seed, members=2)
    leaver = agents.serve("c", join=seed, members=3)
    with memstore.open(leaver.root) as store, memstore.open(full.root) as theirs:
        theirs.put("theirs/k", torch.zeros(600_000))
        for number in range(NUMBER):
            store.put(f"own{number}/k", value(number))
    cluster = Cluster(seed.root)
    with pytest.raises(StoreFullError, match="goes on when it can") as found:
        cluster.drain(leaver.address, to=full.address, timeout=60.0)
    assert found.value.host == full.address
    with memstore.open(seed.root) as store:  # nothing is lost, and all can be changed
        for number in range(NUMBER):
            check(store, f"own{number}/k", number)
        store.put("own0/k", value(50))
        for number in range(4, NUMBER):
            store.delete(f"own{number}/k")
        store.delete("theirs/k")
    cluster.drain(leaver.address, to=full.address, timeout=60.0)
    with memstore.open(seed.root) as store:
        check(store, "own0/k", 50)
        check(store, "own3/k", 3)


@pytest.mark.full
def test_what_can_not_be_moved_is_named_and_stays_until_it_is_sealed_or_deleted(agents: Agents, tmp_path: Path) -> None:
    """A file that was attached under a group of another host, and rows that are written in place."""
    seed, other, leaver = three(agents)
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(10, 10)}, str(path))
    cluster = Cluster(seed.root)
    with memstore.open(leaver.root) as store, memstore.open(other.root) as theirs:
        theirs.put("files/first", 1)
        store.attach("files/k", str(path))
        data = store.create_dataset("rows/k", {"x": ((2,), torch.float32)}, capacity=10)
        data.extend({"x": torch.ones(3, 2)})
        with pytest.raises(MutableEntryError, match="seal or delete it") as rows:
            cluster.drain(leaver.address, timeout=60.0)
        assert rows.value.key == "rows/k"
        data.seal()
        with pytest.raises(CrossHostError, match="attach") as file:
            cluster.drain(leaver.address, timeout=60.0)
        assert file.value.key == "files/k"
        theirs.delete("files/k")
    cluster.drain(leaver.address, timeout=60.0)
    assert path.exists()
    with memstore.open(other.root) as theirs:
        assert bool((theirs.get("rows/k")["x"] == 1).all())


@pytest.mark.full
def test_parts_on_the_host_go_to_the_owner_and_an_attempt_is_waited_for(agents: Agents) -> None:
    """Of two ranks one is on the host. An attempt that has begun gets its second part while the host is drained."""
    seed, other, leaver = three(agents)
    cluster = Cluster(seed.root)
    with memstore.open(leaver.root) as here, memstore.open(other.root) as theirs, ThreadPoolExecutor() as threads:
        theirs.put("sharded/first", 1)
        for key in ("sharded/done", "sharded/late"):
            ours = threads.submit(put_half, here, key, 0)
            if key.endswith("done"):
                put_half(theirs, key, 1)
                ours.result()
        drained = threads.submit(cluster.drain, leaver.address, timeout=60.0)
        eventually(lambda: "is drained" in leaver.log(), "it has begun")
        time.sleep(1.0)  # long enough for all else
        assert not drained.done()
        versions = put_half(theirs, "sharded/late", 1), ours.result()
        drained.result()
        assert versions[0] == versions[1]
    for agent in (seed, other):
        with memstore.open(agent.root) as store:
            for key in ("sharded/done", "sharded/late"):
                found = store.get(key, timeout=30.0)["w"]
                assert bool((found[:HALF] == 0).all()) and bool((found[HALF:] == 1).all())
                assert bool((store.view(key)["w"][HALF - 1 : HALF + 1].sum(1) == torch.tensor([0.0, COLUMNS])).all())
            assert not store.verify().damaged


def put_half(store: memstore.Store, key: str, rank: int) -> int:
    part = torch.full((HALF, COLUMNS), float(rank))
    shard = memstore.TensorShard(part, (2 * HALF, COLUMNS), (rank * HALF, 0))
    return store.put_sharded(key, {"w": shard}, rank=rank, world_size=2, attempt="only", timeout=60.0)


def test_a_command_that_is_interrupted_says_that_the_drain_goes_on(agents: Agents) -> None:
    seed, other, leaver = three(agents)
    with memstore.open(leaver.root) as store:
        data = store.create_dataset("rows/k", {"x": ((2,), torch.float32)}, capacity=10)
        words = [sys.executable, "-m", "memstore", "drain", seed.root, leaver.address]
        words = ["env", "--default-signal=INT", *words]  # this process may have been started with it ignored
        process = subprocess.Popen(words, env=agents.environment, stderr=subprocess.PIPE, text=True)
        eventually(lambda: "is drained" in leaver.log(), "it has begun")
        process.send_signal(signal.SIGINT)  # at once: it gives up by itself after a while
        assert process.wait(60) == 130
        assert process.stderr is not None and "is drained all the same" in process.stderr.read()
        eventually(lambda: "seal or delete it" in command(agents, "status", seed.root).stdout, "it says what is left")
        assert f"{leaver.address} is drained: 1 group and" in command(agents, "status", seed.root).stdout
        data.extend({"x": torch.ones(3, 2)})
        data.seal()
    assert leaver.ended()[0] == 0
    with memstore.open(other.root) as store:
        assert store.get("rows/k")["x"].shape == (3, 2)


def test_a_drain_is_cancelled_and_the_host_goes_on_as_an_owner(agents: Agents) -> None:
    """A dataset holds it up; the other groups have gone by then, and stay where they are."""
    seed, other, leaver = three(agents)
    cluster = Cluster(seed.root)
    assert cluster.cancel_drain(leaver.address) == leaver.address  # it isn't drained
    with memstore.open(leaver.root) as store:
        data = store.create_dataset("rows/k", {"x": ((2,), torch.float32)}, capacity=10)
        version = store.put("own/k", value(1))
        with pytest.raises(StoreTimeoutError, match="goes on"):
            cluster.drain(leaver.address, to=other.address, timeout=1.0)
        eventually(lambda: "1 group and" in cluster.status().hosts[2].draining, "one is left")
        stays = command(agents, "drain", leaver.root, leaver.address, "--cancel")
        assert stays.returncode == 0 and f"{leaver.address} stays" in stays.stdout, stays.stderr
        eventually(lambda: "stays: its drain is cancelled" in leaver.log(), "people are told")
        assert len(cluster.hosts) == 3 and not any(host.draining for host in cluster.status().hosts)
        data.extend({"x": torch.ones(3, 2)})
        assert store.info("own/k").version == version
        store.put("new/k", value(2))
    assert {group for group in owned(leaver) if not group.startswith("flat")} == {"rows", "new"}
    assert owned(other) == {"own"}
    both = command(agents, "drain", leaver.root, leaver.address, "--cancel", "--to", other.address)
    assert both.returncode == 2 and "--to" in both.stderr
    with pytest.raises(NotServedError, match="is no host of the cluster"):
        cluster.cancel_drain("tcp://127.0.0.9:1")
    with memstore.open(leaver.root) as store:
        store.delete("rows/k")
    cluster.drain(leaver.address, timeout=60.0)
    with memstore.open(other.root) as store:
        check(store, "new/k", 2)


def owned(agent: Agent) -> set[str]:
    """The groups that a host owns."""
    use = open_root(agent.root, "r", Creation(), LONG)
    try:
        rows = look(use.root, lambda tables: tables.all_owned(None, 1000), inf)
        return {group.decode() for group, _ in rows}
    finally:
        close_root(use)


@pytest.mark.full
def test_a_record_that_can_not_be_read_stays_in_the_folder_and_keeps_nothing_else(agents: Agents) -> None:
    seed, other, leaver = three(agents)
    with memstore.open(leaver.root) as store:
        for number in range(NUMBER):
            store.put(f"own{number}/k", value(number))
        store.put("own0/damaged", 7)
    use = open_root(leaver.root, "r+", Creation(), LONG)
    try:
        run(use.root, lambda tables: (tables.delete_record(b"own0/damaged"), tables.put_damaged(b"own0/damaged")), inf)
    finally:
        close_root(use)
    Cluster(seed.root).drain(leaver.address, timeout=60.0)
    code, text = leaver.ended()
    assert code == REFUSED and "was removed from its cluster" in text and os.path.exists(leaver.root)
    with memstore.open(other.root) as store:
        for number in range(NUMBER):
            check(store, f"own{number}/k", number)
        with pytest.raises(CorruptionError):
            store.get("own0/damaged")
    assert not memstore.open(leaver.root, "r").verify().ok


@pytest.mark.full
def test_references_show_a_version_that_has_moved_and_views_what_they_have_fetched(agents: Agents) -> None:
    seed, other, leaver = three(agents)
    with memstore.open(leaver.root) as store, memstore.open(other.root, timeout=20.0) as theirs:
        store.put("own/k", value(3))
        whole, reference = theirs.view("own/k"), theirs.ref("own/k")
        first = whole["weights"][:10]
        assert bool((first.clone() == 3).all())
        Cluster(seed.root).drain(leaver.address, timeout=60.0)
        assert bool((first.clone() == 3).all())
        began = time.monotonic()
        with pytest.raises(HomeUnavailableError, match="left the cluster"):
            whole["weights"][50_000:].clone()
        assert time.monotonic() - began < 15
        assert reference.get()["step"] == 3 and bool((theirs.view("own/k")["weights"][50_000:].clone() == 3).all())
