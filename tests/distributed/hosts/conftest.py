"""Three hosts that serve one store. The tests of this folder share them, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.distributed.hosts.clusters import ServedHosts, served
from tests.support.hosts import Hosts, need_hosts

HOSTS = 3
_HERE = Path(__file__).parent


class Kept:
    """The cluster, made when a test asks for it first. One that can't be restored is not used again."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cluster: ServedHosts | None = None

    def take(self, logs: Path) -> ServedHosts:
        if self._cluster is None:
            hosts = self._stack.enter_context(Hosts(HOSTS, shm_bytes=64 << 20))
            self._cluster = self._stack.enter_context(served(hosts, logs))
        return self._cluster

    def give_back(self) -> None:
        assert self._cluster is not None
        try:
            self._cluster.restore()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._cluster = None
        self._stack.close()


_kept = Kept()


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHosts]:
    """As it was in the beginning; a test may kill and cut whatever it likes, but the folders."""
    need_hosts()
    yield _kept.take(tmp_path_factory.mktemp("hosts"))
    _kept.give_back()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Behind the last test of this folder that follows another: nothing runs on beside tests of other folders."""
    if nextitem is None or _HERE not in nextitem.path.parents:
        _kept.close()
