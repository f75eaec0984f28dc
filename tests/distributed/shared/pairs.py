"""Two hosts of one store on a folder that both have, as tests of this folder see them.

They are two state folders of this machine, each with an agent at an address of its own. What takes two kernels, or two
mount tables, is in `test_hosts.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import memstore
from memstore.distributed.serving import Cluster
from memstore.engine.root.folder import Shared, new_settings
from memstore.engine.root.shared import STATE_VARIABLE, create_shared, new_shared
from tests.inside import root_of

GRACE = 0.4  # seconds


class Pair:
    """Args:
    folder: an empty one.
    grace: the store's, in seconds.
    hosts: how many there are.
    """

    def __init__(self, folder: Path, *, grace: float = GRACE, maps: bool = False, hosts: int = 2) -> None:
        self.folder = folder
        self.root = str(folder / "store")
        make_storage(self.root, grace=grace, maps=maps)
        self.addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(hosts)]
        self.stores: list[memstore.Store] = []
        self._names = itertools.count()

    def state(self, number: int) -> Path:
        """The folder of a host's state folders."""
        return self.folder / f"state{number}"

    @contextlib.contextmanager
    def on(self, number: int) -> Generator[None]:
        """What is opened or started meanwhile is that host's."""
        before = os.environ.get(STATE_VARIABLE)
        os.environ[STATE_VARIABLE] = str(self.state(number))
        os.environ["MEMSTORE_ADDRESS"] = self.addresses[number]
        try:
            yield
        finally:
            del os.environ["MEMSTORE_ADDRESS"]
            if before is None:
                del os.environ[STATE_VARIABLE]
            else:
                os.environ[STATE_VARIABLE] = before

    def join(self, number: int, **options: Any) -> Any:
        with self.on(number):
            return memstore.join(self.root, cluster=self.addresses[0], shared=True, **options)

    def open(self, number: int, mode: Any = "r+", **options: Any) -> memstore.Store:
        with self.on(number):
            return memstore.open(self.root, mode, **options)

    def status(self) -> memstore.ClusterStatus:
        with self.on(0):
            return Cluster(self.root).status()

    def key_at(self, number: int, name: str = "k") -> str:
        """A key of a group that nobody has used yet, which that host owns from now on."""
        group = f"{name}{next(self._names)}"
        self.stores[number].put(f"{group}/first", number)
        self.stores[number].delete(f"{group}/first")
        return f"{group}/k"

    def files(self, number: int) -> list[Path]:
        """What that host has on the storage."""
        return sorted(Path(root_of(self.stores[number]).segments).iterdir())

    def __enter__(self) -> Pair:
        try:
            for number in range(len(self.addresses)):
                self.join(number)
                self.stores.append(self.open(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for store in self.stores:
            store.close()
        with contextlib.suppress(memstore.MemstoreError), self.on(0):
            Cluster(self.root).stop()


def make_storage(root: str, *, grace: float, maps: bool = False) -> None:
    """As the first host does, with a grace time that tests can wait for."""
    os.mkdir(root, 0o700)
    chosen = new_settings(durability=None, checksum=True, inline_limit=None, file_mode=0o600, group=None)
    settings = new_shared(chosen, maps=maps)
    assert settings.shared is not None
    create_shared(root, type(settings)(**{**_fields(settings), "shared": Shared(settings.store, grace, maps)}))


def _fields(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
