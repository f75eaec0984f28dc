"""Stores on disks: what was acknowledged is there when all processes of all hosts were killed, and hosts come back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import memstore
from tests.children import Child, Wire
from tests.distributed.client.hosts import cluster_of
from tests.distributed.serving.agents import Agent, agents_in, eventually, is_alive
from tests.support import faults

SIZE = 5000


def put_and_wait(wire: Wire, root: str, names: list[str]) -> None:
    with memstore.open(root, timeout=30.0) as store:
        for name in names:
            store.put(name, {"x": torch.full((SIZE,), 7.0), "small": name})
            store.put(f"{name}/inline", name)
        wire.send(len(names))
        wire.receive()


def kill_all(agents: list[Agent]) -> None:
    processes = [pid for agent in agents for pid in (agent.pid, agent.index_process())]
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    for agent in agents:
        agent.process.wait()
    eventually(lambda: not any(map(is_alive, processes)), "all are dead")


@pytest.mark.timeout(180)
def test_what_was_acknowledged_is_there_when_all_were_killed_and_come_back(
    disk_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(disk_root).parent
    for name in "ab":
        memstore.open(f"{folder}/{name}", durability="disk").close()
    with agents_in(folder, tmp_path) as agents:
        monkeypatch.setenv("MEMSTORE_SECRET_FILE", str(agents.secret))
        first = agents.serve("a")
        second = agents.serve("b", join=first, members=2)
        first.wait_until_serving(2)
        names = [f"{number}/k" for number in range(8)]  # some at home at each
        with Child(put_and_wait, second.root, names) as child:
            assert child.receive() == len(names)
            kill_all([first, second])
            child.kill()
        again = [agents.start("a", address=first.address), agents.start("b", join=first, address=second.address)]
        for agent in again:
            agent.wait_until_serving(2)
        for root in (first.root, second.root):
            with memstore.open(root, timeout=30.0) as store:
                for name in names:
                    value = store.get(name)
                    assert torch.equal(value["x"], torch.full((SIZE,), 7.0)) and value["small"] == name
                    assert store.get(f"{name}/inline") == name


def test_bytes_are_on_the_disk_before_their_home_is_asked_to_name_them(disk_root: str) -> None:
    """What a kill can't show."""
    for number in range(2):
        memstore.open(f"{disk_root}-{number}", durability="disk").close()
    with cluster_of(disk_root, False, True) as pair:
        here = pair.stores[0]
        here.put("k", torch.zeros(SIZE))
        names = faults.record(lambda: here.put("k", torch.ones(SIZE)))
    written = [name for name in names if name in {"write_at", "sync", "sync_data", faults.COMMIT}]
    assert written[:5] == [faults.COMMIT, "write_at", "sync", "write_at", "sync_data"], written
    assert written[5] == faults.COMMIT, "the lend, which comes before the message"
