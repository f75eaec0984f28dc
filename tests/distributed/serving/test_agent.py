"""An agent and its index process: started, killed, stopped, refused; and nothing is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memstore
from memstore.distributed.rules.messages import Open, Opened
from memstore.distributed.serving.agent import serve
from memstore.distributed.serving.questions import Halt
from memstore.distributed.serving.supervision import AgentLock, Note, is_served
from memstore.errors import MemstoreError, NotServedError
from tests.children import Child, Wire, in_child
from tests.distributed.serving.agents import LONG, Agent, Agents, Caller, eventually, is_alive, stopped
from tests.inside import root_of
from tests.patience import least_seconds

REFUSED = 3


def test_a_clean_end_leaves_nothing(agents: Agents) -> None:
    agent = agents.serve("a")
    index = agent.index_process()
    assert is_served(agent.root)
    agent.terminate()
    assert not is_alive(index) and agents.processes() == []
    assert not is_served(agent.root) and agent.view() == {}
    left = sorted(os.listdir(agent.root))
    assert left == ["agent.lock", "catalog", "doorbell", "lock", "memstore.json", "segments"]
    with memstore.open(agent.root, "r+") as store:
        assert list(store.keys()) == []
    memstore.destroy(agent.root)  # nobody serves it any more
    assert not os.path.exists(agent.root)


def test_a_killed_index_process_is_back_within_a_second(kept_agent: Agent, kept_caller: Caller) -> None:
    agent, caller = kept_agent, kept_caller

    def kill_and_ask() -> None:
        before = caller.report(agent)
        os.kill(before.pid, signal.SIGKILL)
        after = caller.report(agent)
        assert after.incarnation == before.incarnation + 1 and after.epoch == before.epoch == 1

    assert least_seconds(kill_and_ask, 1.0, tries=8) < 1.0
    assert "was ended by SIGKILL: started again at once" in agent.log()


@pytest.mark.full
def test_what_keeps_being_killed_is_started_later_and_later(agents: Agents) -> None:
    agent = agents.serve("a")
    deadline = time.monotonic() + LONG
    while "started again in 0.4 s" not in agent.log():
        assert time.monotonic() < deadline, agent.log()
        with contextlib.suppress(ProcessLookupError):  # killed just now, and reaped
            os.kill(agent.index_process(), signal.SIGKILL)
    agent.wait_until_serving()
    agent.terminate()


def test_a_killed_agent_takes_its_index_process_with_it_and_another_takes_over(agents: Agents, caller: Caller) -> None:
    agent = agents.serve("a")
    index = agent.index_process()
    agent.process.kill()
    agent.process.wait()
    again = agents.start("a", address=agent.address)
    eventually(lambda: not is_alive(index), "the index process is gone")
    report = caller.report(again)
    assert report.incarnation == 2 and report.epoch == 1
    assert again.index_process() == report.pid


@pytest.mark.full
def test_an_agent_killed_before_its_child_has_begun_leaves_none(agents: Agents) -> None:
    for _ in range(3):
        agent = agents.start("a", address="tcp://127.0.0.1:7999")
        agent.index_process()
        agent.process.kill()
        agent.process.wait()
    eventually(lambda: agents.processes() == [], "no process is left")


def test_an_agent_can_be_forked_at_any_time(kept_agent: Agent) -> None:
    """It has one thread, no catalog, and no library that would start threads; the fork has no child of its own."""
    maps = Path(f"/proc/{kept_agent.pid}/maps").read_text()
    assert os.listdir(f"/proc/{kept_agent.pid}/task") == [str(kept_agent.pid)]
    assert not [name for name in ("numpy", "libtorch", "monarch", "data.mdb") if name in maps]


def test_a_stopped_index_process_goes_on(kept_agent: Agent, kept_caller: Caller) -> None:
    agent, caller = kept_agent, kept_caller
    before = caller.report(agent)
    with stopped(before.pid):
        assert caller.try_call(agent, Open(), 0.5) is None
    assert isinstance(caller.call(agent, Open()), Opened)
    assert caller.report(agent).pid == before.pid


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (memstore.destroy, "is served to other hosts by .*pid {pid}.*: end that agent first"),
        (lambda root: memstore.open(root, "w"), "isn't begun anew by one of them"),
    ],
    ids=["destroy", "w"],
)
def test_a_served_root_is_neither_destroyed_nor_begun_anew(
    end: Callable[[str], object], why: str, kept_agent: Agent, kept_caller: Caller
) -> None:
    root = kept_agent.root
    with memstore.open(root, "r+") as store:
        version = store.put("stays", torch.arange(5000))
        files, segments = set(os.listdir(root)), sorted(os.listdir(f"{root}/segments"))
        pid = kept_caller.report(kept_agent).pid
        with pytest.raises(NotServedError, match=why.format(pid=kept_agent.pid)):
            end(root)
        assert files <= set(os.listdir(root)), "the agent may make further ones meanwhile"
        assert (segments, pid) == (sorted(os.listdir(f"{root}/segments")), kept_caller.report(kept_agent).pid)
        assert store.version("stays") == version and torch.equal(store.get("stays"), torch.arange(5000))
        assert store.put("stays", 1) > version


def hold_mutex(wire: Wire, path: str) -> None:
    with memstore.open(path, "r+") as store:
        root = root_of(store)
        root.mutex.run(lambda: (wire.send("held"), wire.receive()), time.monotonic() + LONG)


def test_who_holds_the_mutex_delays_changes_and_no_reads(kept_agent: Agent, kept_caller: Caller) -> None:
    agent, caller = kept_agent, kept_caller
    before = caller.report(agent)
    with Child(hold_mutex, agent.root) as child:
        assert child.receive() == "held"
        with stopped(child.pid):
            assert caller.try_call(agent, Open(), 1.0) is None
            assert caller.report(agent).pid == before.pid
        child.send()
        assert isinstance(caller.call(agent, Open()), Opened)
    assert caller.report(agent).pid == before.pid


def test_a_second_agent_of_a_root_is_refused_and_told_who_serves_it(
    kept_agents: Agents, kept_agent: Agent, kept_caller: Caller
) -> None:
    before = kept_caller.report(kept_agent).incarnation
    code, text = kept_agents.start("a").ended()
    assert code == REFUSED and f"is served already, by pid {kept_agent.pid}" in text
    assert kept_caller.report(kept_agent).incarnation == before


@pytest.mark.parametrize("ip", ["127.0.0.77", "192.0.2.1"])
def test_an_address_that_is_taken_or_not_here_is_named(agents: Agents, ip: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.77", 0))
        taken.listen()
        address = f"tcp://{ip}:{taken.getsockname()[1]}"
        code, text = agents.start("a", address=address).ended()
    assert code == REFUSED and address in text and "can't listen there" in text
    assert agents.processes() == [] and not os.path.exists(f"{agents.folder}/a")


def refusal(agents: Agents, address: str, **environment: str) -> str:
    """What an agent ends with before it has begun: it needs no process of its own for that."""

    def serve_in_child() -> str:
        os.environ.update(agents.environment | environment)
        with pytest.raises((MemstoreError, ValueError)) as caught:
            serve(f"{agents.folder}/a", address)
        return str(caught.value)

    text = in_child(serve_in_child)
    assert not os.path.exists(f"{agents.folder}/a")
    return text


@pytest.mark.parametrize(
    ("address", "expected"), [("tcp://host:1", "an address is tcp://IP:PORT"), ("tcp://127.0.0.1:0", "port")]
)
def test_an_address_that_is_none_is_refused_before_anything_is_made(
    agents: Agents, address: str, expected: str
) -> None:
    assert expected in refusal(agents, address)


def test_a_secret_that_others_may_read_is_refused(agents: Agents) -> None:
    agents.secret.chmod(0o644)
    assert "mode 0644" in refusal(agents, "tcp://127.0.0.1:7411")


def test_without_a_secret_only_this_host_may_connect(agents: Agents) -> None:
    code, text = agents.start("a", address="tcp://192.0.2.1:7777", MEMSTORE_SECRET_FILE="").ended()
    assert code == REFUSED and "MEMSTORE_SECRET_FILE" in text and "--insecure" in text


def test_a_root_that_is_removed_ends_its_agent(agents: Agents) -> None:
    agent = agents.serve("a")
    shutil.rmtree(agent.root)
    code, text = agent.ended()
    assert code == REFUSED and "was removed or moved" in text
    assert agents.processes() == []


@pytest.mark.full
def test_a_root_that_is_no_store_is_refused(agents: Agents) -> None:
    os.mkdir(f"{agents.folder}/a", 0o700)
    Path(f"{agents.folder}/a/foreign").touch()
    code, text = agents.start("a").ended()
    assert code == REFUSED and "is no store, and not empty" in text


@pytest.mark.full
def test_an_address_that_somebody_else_takes_meanwhile_is_tried_again(agents: Agents, caller: Caller) -> None:
    agent = agents.serve("a")
    index = agent.index_process()
    ip, port = agent.address.removeprefix("tcp://").split(":")
    with stopped(agent.pid):
        os.kill(index, signal.SIGKILL)
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            eventually(lambda: is_bound(taken, ip, int(port)), "it is dead, and the address free")
            taken.listen()
            os.kill(agent.pid, signal.SIGCONT)
            eventually(lambda: "can't listen there" in agent.log(), "it says why")
    assert caller.report(agent).incarnation > 2
    assert agent.process.poll() is None


def is_bound(sock: socket.socket, ip: str, port: int) -> bool:
    try:
        sock.bind((ip, port))
    except OSError:
        return False
    return True


@pytest.mark.full
def test_another_host_can_end_it(agents: Agents, caller: Caller) -> None:
    agent = agents.serve("a")
    caller.call(agent, Halt())
    code, text = agent.ended()
    assert code == 0, text
    assert agents.processes() == []


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_root_on_a_disk_that_another_boot_left_is_refused(disk_root: str, tmp_path: Path) -> None:
    memstore.open(disk_root).close()
    lock = AgentLock(disk_root)
    lock.write(Note("0" * 32, 7))
    lock.close()
    made = Agents(Path(disk_root).parent, tmp_path)
    try:
        code, text = made.start("store").ended()
        assert code == REFUSED and "durability is 'process'" in text
        lock = AgentLock(disk_root)
        lock.write(Note("", 7))  # it had a clean end
        lock.close()
        made.serve("store").terminate()
        lock = AgentLock(disk_root)
        assert lock.read() == Note("", 8)
        lock.close()
    finally:
        made.close()


def test_a_lock_is_held_once(scratch: str) -> None:
    memstore.open(scratch).close()
    assert not is_served(scratch)
    lock = AgentLock(scratch)
    assert is_served(scratch) and lock.read() == Note("", 0)
    with pytest.raises(memstore.NotServedError, match=f"by pid {os.getpid()}"):
        AgentLock(scratch, patience=0.0)
    lock.write(Note("ab" * 16, 12))
    lock.close()
    lock = AgentLock(scratch)
    assert lock.read() == Note("ab" * 16, 12)
    lock.close()


@pytest.mark.parametrize("content", [b"", b"x", b"- y", b"\xff" * 80, b"1 2 3"])
def test_a_lock_with_any_content_can_be_read(scratch: str, content: bytes) -> None:
    memstore.open(scratch).close()
    Path(f"{scratch}/agent.lock").write_bytes(content)
    lock = AgentLock(scratch)
    assert lock.read() == Note("", 0)
    lock.close()


@pytest.mark.full
def test_a_store_that_has_deltas_is_served(agents: Agents) -> None:
    """They are put whole first. Who has had it open since before puts no other that shares files."""
    root = f"{agents.folder}/a"
    model = {f"layer.{i}": torch.full((1 << 16,), float(i)) for i in range(10)}
    with memstore.open(root) as store:
        store.put("model", model)
        store.put("model", {**model, "layer.3": model["layer.3"] + 1}, delta_of=True)
        assert len(store.info("model").files) == 2
        agent = agents.serve("a")
        for found in (store.get("model"), memstore.open(agent.root).get("model")):
            assert float(found["layer.3"][7]) == 4 and torch.equal(found["layer.9"], model["layer.9"])
        assert len(store.info("model").files) == 1
        store.put("model", model, delta_of=True)
        assert len(store.info("model").files) == 1 and torch.equal(store.get("model")["layer.3"], model["layer.3"])
        assert store.verify().ok
