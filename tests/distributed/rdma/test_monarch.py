"""Index processes read each other's registered memory through Monarch, over its TCP fallback. Real agents."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import memstore
from memstore.distributed.serving import status_at
from memstore.info import HostStatus
from tests.distributed.serving.agents import Agents, agents_in, eventually

pytestmark = pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed")

MIB = 1 << 20


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as path,
        agents_in(Path(path), tmp_path) as made,
    ):
        monkeypatch.setenv("MEMSTORE_SECRET_FILE", str(made.secret))
        yield made


def statuses(root: str) -> list[HostStatus]:
    found = status_at(root)
    assert found is not None
    return list(found.hosts)


def wait_for(root: str, *transports: str) -> None:
    eventually(lambda: tuple(one.transport for one in statuses(root)) == transports, f"{transports}: {statuses(root)}")


def test_a_value_of_another_host_is_got_by_registered_memory(agents: Agents) -> None:
    """The whole path, and what `status` says of it."""
    there = agents.start("there", "--transport", "monarch")
    here = agents.serve("here", "--transport", "monarch", "--no-homes", join=there, members=2)
    wait_for(here.root, "monarch", "monarch")
    weights = torch.arange(2 * MIB)
    with memstore.open(there.root, "r+") as owner, memstore.open(here.root, "r+") as reader:
        owner.put("policy/weights", {"w": weights, "step": 7})
        got = reader.get("policy/weights")
        assert torch.equal(got["w"], weights) and got["step"] == 7
    sent, received = statuses(here.root)
    assert 16 * MIB <= sent.sent < 17 * MIB and 16 * MIB <= received.received < 17 * MIB
    assert received.sent < MIB, "what goes on to a process of the host is not sent to others"
    assert "Monarch listens too: it authenticates nobody" in here.log()
    here.terminate()
    assert not Path(f"{here.root}/transport").exists()
