"""initialize_spmd on two hosts: what ranks put on one of them, ranks get on the other."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import pytest

from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from memstore.testing.hosts import Hosts, why_unavailable

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_ranks_on_two_hosts_have_one_store_until_the_shutdown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(secrets.token_bytes(32))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEMSTORE_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"}
    environment.pop(ROOT_VARIABLE, None)
    with Hosts(2) as hosts:
        output = [tmp_path / f"output{number}" for number in range(2)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        where = ["--master-addr", hosts[0].address, "--master-port", "29511"]
        running = []
        for number, file in enumerate(output):
            command = [*torchrun, *where, "--node-rank", str(number), "examples/torchstore_spmd.py"]
            with open(file, "wb") as out:
                running.append(
                    hosts[number].popen(
                        command, cwd=ROOT, env={**environment, "GLOO_SOCKET_IFNAME": "eth0"}, stdout=out, stderr=out
                    )
                )
        codes = [process.wait(timeout=200) for process in running]
        texts = [file.read_text() for file in output]
        assert codes == [0, 0], texts
        assert all(f"rank {rank} got tensor([123])" in texts[rank // 2] for rank in range(4)), texts
        left = [host.run(["find", "/dev/shm", "-name", "memstore.json"], capture_output=True) for host in (*hosts,)]
        assert [done.stdout for done in left] == [b"", b""]
