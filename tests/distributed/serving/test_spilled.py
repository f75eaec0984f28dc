"""A host with a disk for its values, and a quota, through the life of its agent: restarts, repairs, drains, returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memstore
from memstore.distributed.serving import Cluster
from memstore.errors import CrossHostError, QuotaExceededError
from tests.distributed.serving.agents import Agent, Agents, eventually
from tests.distributed.serving.test_recovery import die
from tests.distributed.serving.test_returns import again, until_back

MIB, ROOM = 1 << 20, 4


def value(number: int) -> torch.Tensor:
    return torch.full((MIB // 4,), float(number))


def fill(agent: Agent, disk: str | None, group: str, count: int) -> list[str]:
    """Puts values there, of which most move to the disk."""
    keys = [f"{group}/{number}" for number in range(count)]
    with memstore.open(agent.root, "r+", capacity=ROOM * (MIB + 8192), spill=disk) as store:
        for number, key in enumerate(keys):
            store.put(key, value(number))
        assert store.stats().spilled_bytes > (count - ROOM - 1) * MIB
    return keys


def check(agent: Agent, keys: list[str]) -> None:
    with memstore.open(agent.root, "r+", timeout=60.0) as store:
        for number, key in enumerate(keys):
            assert torch.equal(store.get(key), value(number)), key


def spilled(agent: Agent, at: Agent) -> int:
    (found,) = [host.spilled_bytes for host in Cluster(agent.root).status().hosts if host.address == at.address]
    return found


@pytest.mark.full
def test_moved_values_outlive_restarts_and_repairs_and_leave_with_a_drain(agents: Agents, tmp_path: Path) -> None:
    seed = agents.serve("a")
    host = agents.serve("b", join=seed, members=2)
    disk = f"{tmp_path}/disk"
    with memstore.open(seed.root) as store:
        store.put("away/first", 0)
    keys = [fill(host, disk, group, 2 * ROOM) for group in ("away", "own")]
    assert spilled(seed, host) > 2 * ROOM * MIB and spilled(seed, seed) == 0
    shown = subprocess.run(
        [sys.executable, "-m", "memstore", "status", seed.root], env=agents.environment, capture_output=True, text=True
    )
    assert "to its disk" in " ".join(shown.stdout.split())
    for agent in (seed, host):
        for some in keys:
            check(agent, some)

    os.kill(host.index_process(), 9)  # and again with a whole new agent, and a repair in between
    check(seed, keys[0])
    host.terminate()
    assert memstore.repair(host.root).lost == ()
    host = agents.start("b", join=seed, address=host.address).wait_until_serving(2)
    for agent in (seed, host):
        for some in keys:
            check(agent, some)
    with memstore.open(host.root, "r+") as store:
        assert store.verify().ok and store.stats().spilled_bytes > 2 * ROOM * MIB

    with memstore.open(seed.root, "r+") as store:
        store.delete("away/0")
    Cluster(seed.root).drain(host.address, timeout=120.0)
    assert host.ended()[0] == 0 and os.listdir(disk) == []
    with memstore.open(seed.root, "r+") as store:
        assert "away/0" not in store
    check(seed, keys[1])


@pytest.mark.full
def test_moved_values_of_a_removed_host_come_back_to_a_folder_with_the_same_disk(
    agents: Agents, tmp_path: Path
) -> None:
    seed = agents.serve("a")
    other = agents.serve("c", join=seed, members=2)
    dies = agents.serve("b", join=seed, members=3)
    disk = f"{tmp_path}/disk"
    keys = fill(dies, disk, "run", 2 * ROOM)
    die(dies)
    Cluster(seed.root).remove(dies.address)
    eventually(lambda: not Cluster(seed.root).status().recovering, "nothing waits for it")
    with memstore.open(other.root, "r+", timeout=60.0) as store:
        for number in range(3, len(keys)):  # so few come back that they fit at once
            store.put(keys[number], value(number))
    back = again(agents, dies, seed)
    until_back(back)
    for agent in (seed, back, other):
        check(agent, keys)
    assert fill(back, None, "more", ROOM + 2), "it has the disk of the one before"
    check(seed, keys)
    left = [name for name in os.listdir(os.path.dirname(back.root)) if ".left-" in name or ".removed-" in name]
    assert left == ["b.left-1"] and len(os.listdir(disk)) == 2  # what was put anew meanwhile stays, and can be exported
    with memstore.open(f"{back.root}.left-1", "r") as store:
        assert torch.equal(store.get(keys[3]), value(3))


def test_a_quota_is_set_anywhere_and_counted_by_the_owner(agents: Agents) -> None:
    seed = agents.serve("a")
    host = agents.serve("b", join=seed, members=2)
    with memstore.open(seed.root) as owner, memstore.open(host.root) as other:
        owner.put("run/first", 0)
        for prefix in ("", "run"):
            with pytest.raises(CrossHostError, match="set a quota for each group, such as 'run"):
                other.set_quota(prefix, "1MiB")
        found = other.set_quota("run/a/", "2.5MiB")
        assert found is not None and (found.prefix, found.quota, found.used) == ("run/a/", 5 * MIB // 2, 0)
        other.put("run/a/0", value(0))
        owner.put("run/a/1", value(1))
        for store in (other, owner):
            with pytest.raises(QuotaExceededError) as raised:
                store.put("run/a/2", value(2))
            assert raised.value.prefix == "run/a/" and raised.value.used > 2 * MIB
            del raised
            (row,) = store.quotas()
            assert 2 * MIB < row.used < 5 * MIB // 2
        os.kill(seed.index_process(), 9)
        with pytest.raises(QuotaExceededError):
            other.put("run/a/2", value(2), timeout=60.0)
        assert other.set_quota("run/a/", None) is None and owner.quotas() == ()
        other.put("run/a/2", value(2))
