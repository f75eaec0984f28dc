"""How rows are copied: each way gives the same, the fastest lately is used, and page faults come to an end."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
import memstore.rows
from memstore.rows import SELECT, TAKE, Costs


@pytest.mark.parametrize("way", [SELECT, TAKE])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128])
def test_each_way_gives_the_rows(
    way: int, dtype: torch.dtype, store: memstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(64).view(64, 1, 1).expand(64, 16, 512).remainder(50).to(dtype)
    store.put("key", {"other": torch.zeros(100), "x": value.contiguous()})
    used: list[int] = []
    original = memstore.rows._copy_by
    monkeypatch.setattr(Costs, "choose", lambda self: way)
    monkeypatch.setattr(memstore.rows, "_copy_by", lambda chosen, *rest: (used.append(chosen), original(chosen, *rest)))
    rows = [62, 0, 5, 5, -2, 17] * 10
    assert torch.equal(memstore.read_rows(store.view("key")["x"][1:], rows[:-1]), value[1:][rows[:-1]])
    assert used == [way]


def remove(store: memstore.Store) -> None:
    shutil.rmtree(store.root)


def put_another_file_there(store: memstore.Store) -> None:
    (mapped,) = Path(store.root, "segments").glob("*.safetensors")
    store.put("other", torch.ones(64, 8192))
    (other,) = set(mapped.parent.glob("*.safetensors")) - {mapped}
    os.replace(other, mapped)


@pytest.mark.parametrize("change", [remove, put_another_file_there])
def test_rows_of_a_held_view_come_from_what_is_mapped(change: Callable[[memstore.Store], None], scratch: str) -> None:
    value = torch.arange(64.0).view(64, 1).expand(64, 8192).contiguous()
    with memstore.open(scratch) as store:
        store.put("key", value)
        view = store.view("key")
        change(store)
        files = len(os.listdir("/proc/self/fd"))
        for rows in ([62, 0, 5], list(range(64))):
            assert torch.equal(memstore.read_rows(view, rows), value[rows])
        assert len(os.listdir("/proc/self/fd")) == files


def test_the_way_that_took_the_least_lately_is_used() -> None:
    costs = Costs()
    for seconds in (3.0, 1.0):
        costs.note(costs.choose(), seconds)
    assert [costs.choose() for _ in range(5)] == [TAKE] * 5
    for _ in range(20):
        costs.note(TAKE, 4.0)
    assert costs.choose() == SELECT


def test_the_other_way_is_tried_again() -> None:
    costs = Costs()
    for seconds in (3.0, 1.0):
        costs.note(costs.choose(), seconds)
    chosen = [costs.choose() for _ in range(64 * 6)]
    assert chosen.count(SELECT) == 6
    assert chosen.count(TAKE) == 63 * 6


def test_a_way_that_is_far_slower_is_tried_again_more_seldom() -> None:
    costs = Costs()
    for seconds in (30.0, 1.0):
        costs.note(costs.choose(), seconds)
    chosen = [costs.choose() for _ in range(64 * 16 * 3)]
    assert chosen.count(SELECT) == 3


def faults_of(view: Any, rows: list[int], out: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memstore.read_rows(view, rows, out=out)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_leaf_that_rows_are_read_from_is_mapped_in_advance(
    disk_store: memstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk, where there are no huge pages: 256 far rows are at least 64 faults, of 64 KiB each."""
    disk_store.put("key", torch.zeros(2000, 4096))
    out, near, far = torch.zeros(256, 4096), list(range(256)), list(range(1700, 1956))
    monkeypatch.setattr(Costs, "choose", lambda self: TAKE)
    memstore.read_rows(disk_store.view("key"), near, out=out)  # what is imported then has faults as well
    assert faults_of(disk_store.view("key"), far, out) >= 64
    view = disk_store.view("key")
    for _ in range(5):
        memstore.read_rows(view, near, out=out)
    assert faults_of(view, far, out) < 16
