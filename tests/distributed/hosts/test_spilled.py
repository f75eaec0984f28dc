"""Full hosts in networks of their own: values move to disks and are got from there, and quotas hold for all hosts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import memstore
from memstore.distributed.serving import Cluster
from memstore.engine import index
from memstore.errors import QuotaExceededError, StoreFullError
from tests.distributed.hosts.clusters import ROOT, ServedHosts, empty
from tests.inside import root_of
from tests.support.hosts import Hosts, need_hosts

MIB = 1 << 20
ROOM, COUNT = 64, 24  # MiB of a host's memory; values of 4 MiB


def value(number: int) -> torch.Tensor:
    return torch.full((MIB,), float(number))


def put_more_than_fits(store: memstore.Store, disk: str, group: str) -> int:
    """Returns how many bytes have moved."""
    memstore.open(store.root, spill=disk).close()
    for number in range(COUNT):
        store.put(f"{group}/{number}", value(number), timeout=60.0)
    return store.stats().spilled_bytes


def read_all(store: memstore.Store, group: str) -> list[float]:
    found: list[float] = []
    for number in range(COUNT):
        got = store.get(f"{group}/{number}", timeout=60.0)
        if bool((got == got[0]).all()):
            found.append(float(got[0]))
        del got
    return found


def put_until_the_disk_is_full(store: memstore.Store) -> list[str]:
    """Returns the keys, and then what the error says."""
    memstore.open(store.root, spill="/dev/shm/disk").close()  # which is full when the memory is
    keys: list[str] = []
    try:
        for number in range(COUNT):
            store.put(f"full/{number}", value(number), timeout=60.0)
            keys.append(f"full/{number}")
    except StoreFullError as error:
        return [*keys, str(error)]
    raise AssertionError("there is room for all")


def first_elements(store: memstore.Store, keys: list[str]) -> list[float]:
    return [float(store.get(key, timeout=60.0)[0]) for key in keys]


def moved_at(store: memstore.Store) -> dict[str, int]:
    return {host.address: host.spilled_bytes for host in Cluster(store.root).status().hosts}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_full_host_moves_values_and_others_get_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    need_hosts()
    disk = tmp_path_factory.mktemp("disks")
    with Hosts(3, shm_bytes=ROOM * MIB) as machines, empty(machines, tmp_path_factory.mktemp("spilled")) as hosts:
        for number in range(3):
            hosts.serve(number)
        hosts.wait_at(range(3), 3)
        away, own = hosts.group_of(0), hosts.group_of(1)
        hosts.call(1, put_more_than_fits, f"{disk}/1", away, timeout=120.0)
        moved = hosts.call(1, put_more_than_fits, f"{disk}/1", own, timeout=120.0)
        assert moved > (2 * COUNT * 4 - ROOM) * MIB
        assert hosts.call(0, moved_at)[hosts.address(1)] == moved
        for reader in (0, 2, 1):
            for group in (away, own):
                assert hosts.call(reader, read_all, group, timeout=120.0) == [float(one) for one in range(COUNT)]
        hosts.kill_agent(1)
        hosts.serve(1)
        hosts.wait_at(range(3), 3)
        assert hosts.call(2, read_all, own, timeout=120.0) == [float(one) for one in range(COUNT)]
        done = hosts.command(0, "drain", ROOT, hosts.address(1))
        assert "StoreFullError" in done.stderr or "room" in done.stderr, "no other host has room for all"
        for taker in (0, 2):
            hosts.call(taker, put_more_than_fits, f"{disk}/{taker}", f"of-{taker}", timeout=120.0)
        hosts.wait_at((0, 2), 2, timeout=240.0)
        for reader in (0, 2):
            for group in (away, own):
                assert hosts.call(reader, read_all, group, timeout=120.0) == [float(one) for one in range(COUNT)]
        assert not list(Path(disk, "1").rglob("*.safetensors"))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_host_whose_disk_is_full_too_says_so_and_loses_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    need_hosts()
    with Hosts(2, shm_bytes=ROOM * MIB) as machines, empty(machines, tmp_path_factory.mktemp("full")) as hosts:
        for number in range(2):
            hosts.serve(number)
        hosts.wait_at(range(2), 2)
        hosts.call(0, put_until_refused, "full/first/", 1)
        *keys, said = hosts.call(1, put_until_the_disk_is_full, timeout=120.0)
        assert "/dev/shm/disk" in said and len(keys) > 8
        for reader in (0, 1):
            assert hosts.call(reader, first_elements, keys) == [float(one) for one in range(len(keys))]


# --- quotas -----------------------------------------------------------------------------------------------------------

LIMIT = 8  # values


def set_quota(store: memstore.Store) -> None:
    """For so many values."""
    put_until_refused(store, "quota/one/", 1)
    record = index.find(root_of(store), b"quota/one/0")
    assert record is not None
    store.set_quota("quota/a/", LIMIT * record.held_bytes)


def end_quota(store: memstore.Store) -> None:
    store.set_quota("quota/a/", None)


def put_until_refused(store: memstore.Store, prefix: str, most: int = 100) -> int:
    for number in range(most):
        try:
            store.put(f"{prefix}{number}", torch.zeros(50_000, dtype=torch.uint8), timeout=60.0)
        except QuotaExceededError:
            return number
    return most


def count_keys(store: memstore.Store, prefix: str) -> int:
    return len(list(store.keys(prefix)))


def test_a_quota_that_is_reached_by_three_hosts_at_once_holds(cluster: ServedHosts) -> None:
    cluster.call(0, put_until_refused, "quota/first/", 1)
    cluster.call(2, set_quota)
    try:
        with ThreadPoolExecutor(3) as threads:
            ends = list(threads.map(lambda one: cluster.call(one, put_until_refused, f"quota/a/{one}-"), range(3)))
        assert sum(ends) == LIMIT == cluster.call(1, count_keys, "quota/a/")
    finally:
        cluster.call(0, end_quota)
    assert cluster.call(1, put_until_refused, "quota/a/more", 3) == 3
