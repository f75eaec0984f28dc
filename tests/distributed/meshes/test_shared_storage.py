"""memstore.serve of a store that was made on storage that the hosts of a mesh share: each host joins there."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import memstore
from memstore.engine.root.shared import STATE_VARIABLE
from tests.distributed.meshes.conftest import HOSTS, MeshHosts
from tests.distributed.meshes.owners import needs_monarch
from tests.distributed.serving.agents import eventually
from tests.distributed.shared.pairs import make_storage

pytestmark = [needs_monarch, pytest.mark.full]

STATE = "/dev/shm/state-of-mesh"  # each host has a /dev/shm of its own


@pytest.fixture
def root(mesh: MeshHosts) -> Iterator[str]:
    """A store on a folder that all hosts see, which no host serves yet."""
    folder = Path(tempfile.mkdtemp(prefix="mesh-"))
    make_storage(str(folder / "store"), grace=60.0)
    yield str(folder / "store")
    for number in range(HOSTS):
        for pid in mesh.agents(number, str(folder)):  # where the test has failed
            os.kill(pid, signal.SIGKILL)
    for host in mesh.hosts:
        host.run(["rm", "-rf", STATE])
    shutil.rmtree(folder)


def test_hosts_read_from_the_storage_what_others_have_put(mesh: MeshHosts, root: str) -> None:
    workers = [mesh.work(number, **{STATE_VARIABLE: STATE}) for number in range(HOSTS)]
    with mesh.another_owner(0, **{STATE_VARIABLE: STATE}) as owner:
        mesh.attach(*workers, owner=owner)
        hosts = owner.call("serve", root)
        assert len(hosts) == HOSTS
        status: memstore.ClusterStatus = owner.call("status")
        assert {host.transport for host in status.hosts} == {"shared"} and all(host.alive for host in status.hosts)
        owner.call("spawn", 1)
        assert owner.call("put_in_actors", root, "a/w") == [root] * HOSTS
        assert [total for _, total in owner.call("get_in_actors", root, "a/w")] == [1000.0] * HOSTS
        assert len(os.listdir(f"{root}/segments")) >= HOSTS
        assert not Path(f"{root}/secret").exists(), "the secret lies in each host's state folder"
        assert owner.call("serve", root) == hosts  # again
        owner.call("stop")
        eventually(lambda: not any(mesh.agents(number, root) for number in range(HOSTS)), "no agent is left")


def test_rdma_is_refused_there(mesh: MeshHosts, root: str) -> None:
    workers = [mesh.work(number, **{STATE_VARIABLE: STATE}) for number in range(2)]
    with mesh.another_owner(0, **{STATE_VARIABLE: STATE}) as owner:
        mesh.attach(*workers, owner=owner)
        with pytest.raises(memstore.NotServedError, match="hosts read files there"):
            owner.call("serve", root, transport="monarch")
