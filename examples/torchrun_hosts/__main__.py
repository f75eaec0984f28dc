"""Makes several hosts on this machine, and starts torchrun on each, as a scheduler does on a cluster.

`ranks.py` shows the use of memstore, and all that your own script needs. Started by `examples/torchrun_hosts.sh`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.hosts import Hosts, why_unavailable

ROOT = "/dev/shm/torchrun"  # on each host, in a /dev/shm of its own
RANKS = Path(__file__).with_name("ranks.py")
REPOSITORY = RANKS.parents[2]
PORT, PATIENCE = 29500, 280.0
SHM_BYTES = 128 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="examples/torchrun_hosts.sh")
    parser.add_argument("--hosts", type=int, default=2, help="how many (2)")
    parser.add_argument("--ranks", type=int, default=2, help="on each host (2)")
    parser.add_argument("--steps", type=int, default=10, help="of training: weights and batches that are put (10)")
    options = parser.parse_args()
    reason = why_unavailable()
    if reason is not None:
        print(f"skipped: this machine can't have hosts of its own: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as folder, Hosts(options.hosts, shm_bytes=SHM_BYTES) as hosts:
        secret = Path(folder) / "secret"
        secret.touch(0o600)
        secret.write_bytes(secrets.token_bytes(32))
        print(f"on each host, with MEMSTORE_SECRET_FILE:\n  {shown(command(0, hosts[0].address, options))}")
        launched = [
            host.popen(command(host.number, hosts[0].address, options), env=environment(secret)) for host in hosts
        ]
        return wait_for(launched)


def command(node: int, master: str, options: argparse.Namespace) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(options.hosts), "--node-rank", str(node), "--nproc-per-node", str(options.ranks)),
        *("--master-addr", master, "--master-port", str(PORT)),
        *(str(RANKS), ROOT, "--steps", str(options.steps)),
    ]


def shown(words: list[str]) -> str:
    return shlex.join(["torchrun", *words[3:]]).replace(f"{REPOSITORY}/", "")


def environment(secret: Path) -> dict[str, str]:
    return {
        **os.environ,
        "MEMSTORE_SECRET_FILE": str(secret),
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "LOGLEVEL": "CRITICAL",  # the first host of torchrun may end before the others have said goodbye
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its rendezvous warns of addresses without names
    }


def wait_for(launched: list[subprocess.Popen[Any]]) -> int:
    """Until all have ended. What fails on one host ends it on all: the others would wait for it."""
    try:
        codes = [process.wait(PATIENCE) for process in launched]
    except subprocess.TimeoutExpired:
        print(f"the ranks have not ended in {PATIENCE:g} s", file=sys.stderr)
        return 1
    return int(any(codes))


if __name__ == "__main__":
    raise SystemExit(main())
