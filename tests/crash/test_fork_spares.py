"""What a root has mapped to fill it again is not a forked child's: no child may unmap what lies there by then."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

import memstore
from memstore.engine import syscalls
from tests.crash.forks import in_fork, reap
from tests.crash.values import LARGE, stamped
from tests.inside import root_of, spares_of
from tests.support.fork_server import ForkServer


@pytest.mark.parametrize("ended", ["replaced", "closed"])
def test_a_child_leaves_alone_what_lies_where_a_spare_was(ended: str, root: str, server: ForkServer) -> None:
    with server.start(_fork, root, ended) as worker:
        worker.join()


def _fork(_: object, path: str, ended: str) -> None:
    stores = [memstore.open(path)]
    old = root_of(stores[0])
    end: dict[str, Callable[[list[memstore.Store]], None]] = {"replaced": _replace, "closed": _close_during_put}
    end[ended](stores)
    spares = spares_of(old) or _spares
    assert spares, "this tests nothing"
    roots: list[Any] = [old]
    del old

    def child() -> None:
        address, size = spares[0]
        place = [syscalls.NOT_MAPPED]
        flags = syscalls._MAP_PRIVATE | syscalls._MAP_ANONYMOUS | syscalls._MAP_FIXED_NOREPLACE
        syscalls._map_into(place, address, -1, size, flags)
        assert place == [address]
        for store in stores:
            store.close()
        stores.clear()
        roots.clear()
        gc.collect()
        assert bytes(syscalls.memory_at(address, size)) == bytes(size)  # unmapped, it is a segmentation fault

    reap(in_fork(child))


_spares: list[tuple[int, int]] = []  # of a store that was replaced


def _replace(stores: list[memstore.Store]) -> None:
    """The folder is emptied, and another store made there."""
    path = stores[0].root
    stores[0].put("key", stamped(1, LARGE))
    _spares[:] = spares_of(root_of(stores[0]))
    for name in os.listdir(path):
        shutil.rmtree(f"{path}/{name}") if os.path.isdir(f"{path}/{name}") else os.unlink(f"{path}/{name}")
    stores.append(memstore.open(path))


def _close_during_put(stores: list[memstore.Store]) -> None:
    """The store is closed when a put is published, and its mapping not kept yet: another thread may do so."""
    put = import_module("memstore.engine.protocols.put")
    publish = put.publish

    def close_afterwards(*arguments: Any) -> list[int]:
        versions = publish(*arguments)
        stores[0].close()
        return versions

    put.publish = close_afterwards
    stores[0].put("key", stamped(1, LARGE))
