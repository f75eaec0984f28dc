"""What tests let processes of their hosts do, by large values. See tests/distributed/hosts/actions.py."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

import memstore
from memstore import TensorShard
from memstore._info import HostStatus
from memstore.distributed.serving import Cluster

MIB = 1 << 20


def hosts_of(store: memstore.Store) -> tuple[HostStatus, ...]:
    """How they are."""
    return Cluster(store.root).status().hosts


def numbers(mib: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + (mib * MIB >> 3))


def put(store: memstore.Store, key: str, mib: int, first: int = 0) -> int:
    return store.put(key, numbers(mib, first))


def get(store: memstore.Store, key: str, mib: int, first: int = 0) -> bool:
    return torch.equal(store.get(key), numbers(mib, first))


def get_while_told(channel: Connection, root: str, key: str, mib: int, timeout: float) -> None:
    """What came of it, and after how many seconds."""
    with memstore.open(root, "r+", timeout=timeout) as store:
        channel.send("begins")
        started = time.monotonic()
        try:
            came = "whole" if torch.equal(store.get(key), numbers(mib)) else "torn"
        except memstore.MemstoreError as error:
            came = type(error).__name__
        channel.send((came, time.monotonic() - started))


def get_columns(store: memstore.Store, key: str, columns: int) -> bool:
    """Half of the columns of a view."""
    value = numbers(32).view(-1, columns)
    found = store.view(key)[:, : columns // 2].clone()
    return torch.equal(found, value[:, : columns // 2])


def put_columns(store: memstore.Store, key: str, columns: int) -> None:
    store.put(key, numbers(32).view(-1, columns))


def put_part(store: memstore.Store, key: str, rank: int, mib: int) -> None:
    """One of two ranks' rows."""
    rows = mib * MIB // 2 // 8
    part = TensorShard(numbers(mib // 2, rank * rows), (2 * rows,), (rank * rows,))
    store.put_sharded(key, {"w": part}, attempt="a", rank=rank, world_size=2, wait=False)


def get_parts(store: memstore.Store, key: str, mib: int) -> bool:
    return torch.equal(store.get(key)["w"], numbers(mib))
