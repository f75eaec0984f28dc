"""What a process remembers of its saves, and plans that planners remember."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import memstore
from memstore.integrations.dcp import StorageReader, StorageWriter, storage
from tests.integrations.dcp.states import load, save


def test_a_path_may_have_bytes_that_are_no_text(scratch: str) -> None:
    path = os.fsdecode(os.fsencode(scratch) + b"/\xff")
    save({"w": torch.ones(3)}, StorageWriter(path), checkpoint_id=path)
    target = {"w": torch.zeros(3)}
    load(target, StorageReader(path))
    assert torch.equal(target["w"], torch.ones(3))
    meta = StorageReader(path).read_metadata().storage_meta
    assert meta is not None and meta.checkpoint_id == f"{scratch}/\ufffd"


class Caching(DefaultSavePlanner):
    def __init__(self, name: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = name  # torch takes the name of the class, for the whole process


def test_plans_that_a_planner_has_cached_of_another_storage_are_refused_with_the_reason(scratch: str) -> None:
    state = {"w": torch.ones(3)}
    save(state, FileSystemWriter(f"{scratch}/theirs"), planner=Caching(scratch))
    with pytest.raises(CheckpointException, match="a _StoragePrefix, of another storage: a planner that caches plans"):
        save(state, StorageWriter(f"{scratch}/ours"), planner=Caching(scratch))


def test_what_a_failed_save_with_cached_plans_told_its_ranks_is_gone_after_the_next_save(scratch: str) -> None:
    class Failing(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            raise ArithmeticError("in finish")

    state = {"w": torch.ones(3)}
    with memstore.open(scratch) as store:
        save(state, StorageWriter(store, key="c"), planner=Caching(scratch))
        writer = Failing(store, key="c")
        with pytest.raises(CheckpointException, match="in finish"):
            save(state, writer, planner=Caching(scratch))
        assert sorted(store.keys()) == ["c", "c/dcp-save"]
        writer.reset()
        save(state, StorageWriter(store, key="another"))
        assert sorted(store.keys()) == ["another", "c"] and store.pending() == ()


def test_a_cached_plan_that_is_used_stays_known_however_many_saves_come_between() -> None:
    mine = ("a save", 0)
    assert not storage.carry_out_plan(mine)
    for i in range(3):
        for other in range(3000):
            assert not storage.carry_out_plan((f"{i} {other}", 0))
        assert storage.carry_out_plan(mine)
    assert not storage.carry_out_plan(("0 0", 0)), "what is old is forgotten"


def test_saves_that_begin_at_once_give_back_each_earlier_one_once() -> None:
    given: list[str] = []
    place: Any = SimpleNamespace(abandon=given.append)
    names = [str(i) for i in range(2000)]
    for name in names:
        storage.coordinate_save(StorageWriter("/nowhere"), place, name)
    threads = [threading.Thread(target=storage.abandon_saves) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(names) <= set(given) and len(given) == len(set(given))
