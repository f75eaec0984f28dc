"""Containers: two pid namespaces don't share a store, since mutex and LMDB tell owners by their numbers."""

from __future__ import annotations

import errno
import struct

import pytest
import torch

import memstore
from memstore.engine import syscalls
from tests.children import Child, Wire
from tests.namespaces import MOUNTS, PIDS, in_namespaces

VALUE = torch.arange(1000)
NAMESPACE_AT = syscalls.MUTEX_SIZE + 5 * 8  # in the lock page, behind magic, boot id, device and inode


def in_a_container(root: str, mode: str = "a", number: int = 0) -> int:
    """As process 1 of another pid namespace: puts `number` if the mode allows, returns the number that was there."""
    return in_namespaces(PIDS | MOUNTS, _put_and_get, root, mode, number)


def _put_and_get(root: str, mode: str, number: int) -> int:
    with memstore.open(root, mode, timeout=5.0) as store:
        found = int(store.get("key")[0])
        if mode != "r":
            store.put("key", VALUE + number)
            assert _written_for(root) == syscalls.pid_namespace()
        return found


def _written_for(root: str) -> int:
    """The pid namespace whose processes may use the lock page."""
    with open(f"{root}/lock", "rb") as file:
        return struct.unpack_from("<Q", file.read(), NAMESPACE_AT)[0]


def _hold(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", VALUE)
        wire.send("open")
        wire.receive()


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_a_store_that_others_have_open_is_refused_with_the_reason(root: str, mode: str) -> None:
    with Child(_hold, root) as holder:
        holder.receive()
        with pytest.raises(memstore.ResourceLimitError, match=r"lock: .*another pid namespace.*--pid=") as caught:
            in_a_container(root, mode)
        assert caught.value.errno == errno.EAGAIN
        with memstore.open(root, timeout=5.0) as store:  # of one namespace with the holder: not disturbed
            assert (store.get("key") == VALUE).all()


@pytest.mark.parametrize("death", ["close", "kill"])
def test_a_store_that_others_had_open_changes_hands(root: str, death: str) -> None:
    with Child(_hold, root) as holder:
        holder.receive()
        if death == "close":
            holder.send()
            holder.receive()
    assert in_a_container(root, "r") == 0
    assert in_a_container(root, number=7) == 0
    assert in_a_container(root, number=8) == 7  # each time another namespace
    with memstore.open(root, timeout=5.0) as store:
        assert (store.get("key") == VALUE + 8).all()
        store.put("key", VALUE)
