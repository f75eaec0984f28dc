"""Hosts with mount tables of their own, which see one folder: that is mounted read-only on one, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.engine.root.shared import STATE_VARIABLE
from tests.distributed.hosts.clusters import LONG, PORT, SOURCES, new_secret
from tests.support.hosts import Hosts, need_hosts

pytestmark = pytest.mark.full

_PUT = """
import sys, torch, memstore
with memstore.open(sys.argv[1]) as store:
    try:
        print(store.put(sys.argv[2], torch.ones(50_000)) > 0)
    except memstore.MemstoreError as error:
        print(type(error).__name__, getattr(error, "errno", ""), error)
"""
_GET = """
import sys, memstore
try:
    with memstore.open(sys.argv[1]) as store:
        print(float(store.get(sys.argv[2]).sum()))
except memstore.MemstoreError as error:
    print(type(error).__name__, error)
"""

# Of these keys some are at home on the host that has lost the storage.
_GO_ON = """
import sys, torch, memstore
done = []
with memstore.open(sys.argv[1], timeout=10) as store:
    for number in range(12):
        try:
            store.put(f"c{number}/k", torch.ones(50_000), timeout=0.5)
            done.append(float(store.get(f"c{number}/k", timeout=0.5).sum()))
        except memstore.MemstoreError:
            pass
print(len(done) > 0 and set(done) == {50000.0})
"""


class Mounted:
    """Two hosts that serve one folder of the machine's file system; each has its state in its own /dev/shm."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.root = hosts, str(folder / "store")
        secret = new_secret(folder)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "MEMSTORE_SECRET_FILE": str(secret),
            STATE_VARIABLE: "/dev/shm/state",
        }

    def join(self, number: int) -> None:
        seed = f"tcp://{self.hosts[0].address}:{PORT}"
        code = f"import memstore; memstore.join({self.root!r}, cluster={seed!r}, shared=True)"
        assert self.run(number, code) == ""

    def run(self, number: int, code: str, *words: str) -> str:
        command = [sys.executable, "-c", code, *words]
        host = self.hosts[number]
        done = host.run(command, env=self._environment, timeout=LONG, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    def mount(self, number: int, *words: str) -> None:
        self.hosts[number].run(["mount", *words], check=True, timeout=LONG)


@pytest.fixture
def mounted() -> Iterator[Mounted]:
    need_hosts()
    folder = Path(tempfile.mkdtemp(prefix="mounted-"))
    try:
        with Hosts(2, shm_bytes=128 << 20) as hosts:
            made = Mounted(hosts, folder)
            for number in range(2):
                made.join(number)
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_one_host_has_it_read_only_and_then_not_at_all(mounted: Mounted) -> None:
    assert mounted.run(0, _PUT, mounted.root, "a/k") == "True"
    assert mounted.run(1, _GET, mounted.root, "a/k") == "50000.0"
    mounted.mount(1, "--bind", mounted.root, mounted.root)
    mounted.mount(1, "-o", "remount,bind,ro", mounted.root)
    assert mounted.run(1, _GET, mounted.root, "a/k") == "50000.0"
    said = mounted.run(1, _PUT, mounted.root, "b/k")
    assert said.startswith("StorageError 30 ") and "read-only" in said and "host1" in said, said
    mounted.mount(1, "-t", "tmpfs", "tmpfs", mounted.root)
    said = mounted.run(1, _GET, mounted.root, "a/k")
    assert said.startswith(("NotAStoreError", "StorageError", "PermissionDeniedError")), said
    assert mounted.run(0, _GO_ON, mounted.root) == "True"
