"""What hosts put on storage that they share, and read there."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore import TensorShard
from tests.distributed.shared.pairs import GRACE, Pair

SIZE = 1 << 16  # elements


def put_both(pair: Pair, name: str, put_by: int) -> list[str]:
    """A key at home on each host, put by one of them."""
    keys = [pair.key_at(home, name) for home in range(2)]
    for key in keys:
        pair.stores[put_by].put(key, {"w": torch.full((SIZE,), float(put_by)), "n": put_by})
    return keys


@pytest.mark.parametrize("put_by", [0, 1])
def test_each_host_reads_the_files_that_another_has_put(pair: Pair, put_by: int) -> None:
    for key in put_both(pair, f"read{put_by}", put_by):
        for store in pair.stores:
            value = store.get(key)
            assert value["n"] == put_by and bool((value["w"] == put_by).all())
            (file,) = store.info(key).files
            assert file in map(str, pair.files(put_by)), "it lies where its host has put it, and nowhere else"


def test_nothing_of_a_value_goes_over_the_network(pair: Pair) -> None:
    before = sum(host.sent for host in pair.status().hosts)
    for key in put_both(pair, "network", 0):
        assert pair.stores[1].get(key)["w"].nbytes == 4 * SIZE
    status = pair.status()
    assert sum(host.sent for host in status.hosts) - before < SIZE
    assert {host.transport for host in status.hosts} == {"shared"}


def test_small_values_and_no_values_come_too(pair: Pair) -> None:
    here, there = pair.stores
    for key in ("small0/k", "small1/k", "small2/k"):
        here.put(key, {"n": 3, "x": torch.ones(2)})
        assert there.get(key)["n"] == 3
        assert there.version(key) == here.version(key) and key in there
        assert there.delete(key) and here.get(key, None) is None
    with pytest.raises(memstore.KeyNotFoundError):
        there.get("small9/k")


def test_many_are_put_and_got_at_once(pair: Pair) -> None:
    values = {f"many/{number}": torch.full((5000,), float(number)) for number in range(40)}
    pair.stores[0].put_many(values)
    found = pair.stores[1].get_many(values)
    assert all(bool((found[key] == value).all()) for key, value in values.items())
    assert list(pair.stores[1].keys("many/")) == sorted(values)


def test_a_view_reads_the_bytes_that_are_asked_for(pair: Pair) -> None:
    for key in put_both(pair, "view", 0):
        before = memstore.bytes_read()
        view = pair.stores[1].view(key)
        assert float(view["w"][10:20].sum()) == 0.0
        assert memstore.bytes_read() - before < SIZE
        rows: Any = memstore.read_rows(view["w"], torch.tensor([5, SIZE - 1]))
        assert rows.tolist() == [0.0, 0.0]


def test_a_get_fills_what_is_there(pair: Pair) -> None:
    for key in put_both(pair, "out", 1):
        target = {"w": torch.full((SIZE,), 9.0), "n": 0}
        pair.stores[0].get(key, out=target, strict=False)
        assert bool((target["w"] == 1).all())


def test_a_version_that_is_replaced_can_be_read_for_its_grace_time(pair: Pair) -> None:
    here, there = pair.stores
    (_, key) = put_both(pair, "grace", 0)
    view, held = there.view(key), there.get(key)
    (file,) = [one for one in pair.files(0) if str(one) in there.info(key).files]
    began = time.monotonic()
    here.put(key, {"w": torch.full((SIZE,), 5.0), "n": 5})
    here.gc()
    try:
        is_kept = float(view["w"][7]) == 0.0 and file.exists()
    except memstore.VersionGoneError:
        is_kept = False
    assert is_kept or time.monotonic() - began > 0.9 * GRACE, "it was removed before its time"
    deadline = time.monotonic() + 20
    while file.exists():
        assert time.monotonic() < deadline, "nobody removes it, though nobody puts"
        time.sleep(0.05)
    with pytest.raises(memstore.VersionGoneError, match="grace"):
        float(view["w"][8])
    assert bool((held["w"] == 0).all()), "a value that is held was copied"
    assert there.get(key)["n"] == 5


def test_a_replaced_file_is_kept_that_long_by_its_host_alone(pair: Pair) -> None:
    here, there = pair.stores
    (key, _) = put_both(pair, "kept", 1)
    (file,) = [one for one in pair.files(1) if str(one) in here.info(key).files]
    replaced = time.monotonic()
    here.delete(key)
    while file.exists():
        here.gc()  # which is about its own files
        assert time.monotonic() - replaced < 20
        time.sleep(0.05)
    assert time.monotonic() - replaced >= GRACE * 0.9
    there.gc()
    assert there.stats().reusable_bytes == 0


def test_ranks_on_both_hosts_put_one_value(pair: Pair) -> None:
    versions: list[Any] = [None, None]

    def put(rank: int) -> None:
        part = {"w": TensorShard(torch.full((2, 5000), float(rank)), (4, 5000), (2 * rank, 0))}
        versions[rank] = pair.stores[rank].put_sharded("ranks/k", part, attempt="a", rank=rank, world_size=2)

    threads = [threading.Thread(target=put, args=(rank,)) for rank in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert versions[0] == versions[1] > 0
    for store in pair.stores:
        whole = store.get("ranks/k")["w"]
        assert whole[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
        assert float(store.view("ranks/k")["w"][3].sum()) == 5000.0


def test_a_reference_goes_to_another_host(pair: Pair) -> None:
    for put_by in range(2):
        for key in put_both(pair, f"ref{put_by}", put_by):
            sent = pickle.dumps(pair.stores[0].ref(key))
            with pair.on(1):
                assert bool((pickle.loads(sent).get()["w"] == put_by).all())


def test_a_wait_ends_when_another_host_puts(pair: Pair) -> None:
    key = pair.key_at(1, "wait")
    found: list[int] = []
    waiter = threading.Thread(target=lambda: found.append(pair.stores[0].wait(key, timeout=20)))
    waiter.start()
    version = pair.stores[1].put(key, torch.ones(5000))
    waiter.join()
    assert found == [version]


@pytest.mark.full
def test_verify_and_gc_look_at_this_hosts_files(pair: Pair) -> None:
    put_both(pair, "verify", 0)
    for store in pair.stores:
        store.gc()
        report = store.verify()
        assert report.ok, report


def test_its_values_move_to_no_other_disk(pair: Pair, tmp_path: Path) -> None:
    with pair.on(0), pytest.raises(memstore.CrossHostError, match="storage that hosts share"):
        memstore.open(pair.root, spill=tmp_path / "disk")
    assert not (tmp_path / "disk").exists()
