"""Index processes read each other's registered memory through Monarch, over its TCP fallback. Real agents."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import memstore
from memstore._info import HostStatus
from memstore.distributed.serving import Cluster
from tests.distributed.serving.agents import SOURCES, Agents, agents_in, eventually

pytestmark = pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed")

MIB = 1 << 20
FAKED = Path(__file__).parent.parent / "serving/faked"


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as path,
        agents_in(Path(path), tmp_path) as made,
    ):
        monkeypatch.setenv("MEMSTORE_SECRET_FILE", str(made.secret))
        yield made


def statuses(root: str) -> list[HostStatus]:
    return list(Cluster(root).status().hosts)


def counted(root: str, nbytes: int) -> list[HostStatus] | None:
    """Those of the host that has sent so much and of the one that has received it; None: not yet."""
    sent, received = statuses(root)
    return [sent, received] if sent.sent >= nbytes <= received.received else None


def wait_for(root: str, *transports: str) -> None:
    eventually(lambda: tuple(one.transport for one in statuses(root)) == transports, f"{transports}: {statuses(root)}")


def test_a_value_of_another_host_is_got_by_registered_memory(agents: Agents) -> None:
    """The whole path, and what `status` says of it."""
    there = agents.start("there", "--transport", "monarch")
    here = agents.serve("here", "--transport", "monarch", "--no-owner", join=there, members=2)
    wait_for(here.root, "monarch", "monarch")
    weights = torch.arange(2 * MIB)
    with memstore.open(there.root, "r+") as owner, memstore.open(here.root, "r+") as reader:
        owner.put("policy/weights", {"w": weights, "step": 7})
        got = reader.get("policy/weights")
        assert torch.equal(got["w"], weights) and got["step"] == 7
    found = eventually(lambda: counted(here.root, 16 * MIB), "a transfer is counted at its end")
    assert found is not None
    sent, received = found
    assert sent.sent < 17 * MIB and received.received < 17 * MIB
    assert received.sent < MIB, "what goes on to a process of the host is not sent to others"
    assert "Monarch listens too: it authenticates nobody" in here.log()
    here.terminate()
    assert not Path(f"{here.root}/transport").exists()


@pytest.mark.full
def test_hosts_with_other_versions_of_monarch_take_tcp(agents: Agents) -> None:
    path = f"{FAKED}:{SOURCES}"
    there = agents.start("there", "--transport", "monarch", PYTHONPATH=path, FAKED_VERSIONS="torchmonarch=0.6.9")
    here = agents.serve("here", "--transport", "monarch", "--no-owner", join=there, members=2)
    wait_for(here.root, "monarch", "monarch")
    assert comes_over_tcp(there.root, here.root)


@pytest.mark.full
def test_where_monarch_does_not_start_all_goes_over_tcp(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "broken/monarch").mkdir(parents=True)
    (tmp_path / "broken/monarch/__init__.py").write_text("raise ImportError('a library is missing')")
    there = agents.start("there", "--transport", "monarch")
    here = agents.serve(
        "here", "--transport", "monarch", "--no-owner", join=there, members=2, PYTHONPATH=f"{tmp_path}/broken:{SOURCES}"
    )
    wait_for(here.root, "monarch", "tcp")
    eventually(lambda: "sends bytes over TCP: a library is missing" in here.log(), "it says so")
    assert comes_over_tcp(there.root, here.root) and comes_over_tcp(here.root, there.root)


def comes_over_tcp(there: str, here: str) -> bool:
    """A value of the one on the other."""
    before = sum(one.received for one in statuses(here))
    with memstore.open(there, "r+") as owner, memstore.open(here, "r+") as reader:
        owner.put("large/k", torch.arange(MIB))
        assert torch.equal(reader.get("large/k"), torch.arange(MIB))
    return sum(one.received for one in statuses(here)) - before < MIB  # of index processes: TCP goes past them
