"""initialize_spmd on two hosts: what ranks put on one of them, ranks get on the other."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import pytest

from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from tests.support.hosts import Hosts, why_unavailable

ROOT = Path(__file__).parents[2]


_KILLED = """
import asyncio, os, signal, torch, torch.distributed as dist
import memstore.integrations.torchstore as ts

async def main():
    dist.init_process_group("gloo")
    await ts.initialize_spmd(strategy=ts.LocalRankStrategy())
    dist.barrier()
    if dist.get_rank() == 0:
        await ts.put("of the killed job", torch.zeros(1))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_ranks_on_two_hosts_have_one_store_until_the_shutdown(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        codes, texts = _torchrun(hosts, tmp_path, "examples/torchstore_spmd.py")
        assert codes == [0, 0], texts
        assert all(f"rank {rank} got tensor([123])" in texts[rank // 2] for rank in range(4)), texts
        assert _stores(hosts) == [b"", b""]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_job_whose_ranks_were_killed_is_started_again(tmp_path: Path) -> None:
    """Its agents outlive the ranks, and have the ports that the next job wants."""
    (tmp_path / "killed.py").write_text(_KILLED)
    with Hosts(2) as hosts:
        codes, texts = _torchrun(hosts, tmp_path, str(tmp_path / "killed.py"))
        assert 0 not in codes, texts
        assert all(found != b"" for found in _stores(hosts)), texts
        codes, texts = _torchrun(hosts, tmp_path, "examples/torchstore_spmd.py")
        assert codes == [0, 0], texts
        assert _stores(hosts) == [b"", b""]


def _stores(hosts: Hosts) -> list[bytes]:
    """The stores that are left on each host."""
    find = ["find", "/dev/shm", "-name", "memstore.json"]
    return [host.run(find, capture_output=True).stdout for host in (*hosts,)]


def _torchrun(hosts: Hosts, folder: Path, script: str) -> tuple[list[int], list[str]]:
    """Two ranks on each host. Exit codes and output, of each host."""
    secret = folder / "secret"
    if not secret.exists():
        secret.touch(0o600)
        secret.write_bytes(secrets.token_bytes(32))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEMSTORE_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"}
    environment.pop(ROOT_VARIABLE, None)
    output = [folder / f"output{number}" for number in range(2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    where = ["--master-addr", hosts[0].address, "--master-port", "29511"]
    running = []
    for number, file in enumerate(output):
        command = [*torchrun, *where, "--node-rank", str(number), script]
        with open(file, "wb") as out:
            running.append(
                hosts[number].popen(
                    command, cwd=ROOT, env={**environment, "GLOO_SOCKET_IFNAME": "eth0"}, stdout=out, stderr=out
                )
            )
    return [process.wait(timeout=200) for process in running], [file.read_text() for file in output]
