"""Readers of checkpoints that are pickled or copied once they were used: as references, without what is open here."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

import memstore
from memstore.errors import VersionGoneError
from memstore.integrations.dcp import LoadPlanner, StorageReader, StorageWriter
from tests.integrations.dcp.states import load, save


def unpickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("in_store", [False, True], ids=["folder", "store"])
@pytest.mark.parametrize("copied", [unpickled, copy.deepcopy, copy.copy])
def test_a_reader_that_was_used_can_be_copied(scratch: str, copied: Any, in_store: bool) -> None:
    key = "checkpoint" if in_store else None
    if in_store:
        memstore.open(scratch).close()
    save({"w": torch.ones(3)}, StorageWriter(scratch, key=key))
    reader, target = StorageReader(scratch, key=key), {"w": torch.zeros(3)}
    load(target, reader)
    other = copied(reader)
    del reader
    with open(f"{scratch}.log", "w") as log:  # has the number of the folder that was closed
        load(target, other)
        save({"w": torch.full((3,), 2.0)}, StorageWriter(scratch, key=key))
        again = copied(other)
        load(target, again)
        assert torch.equal(target["w"], torch.full((3,), 2.0))
        del other, again
        log.write("still open")
    assert Path(f"{scratch}.log").read_text() == "still open"


def test_a_reader_that_is_sent_during_a_load_reads_the_same_checkpoint(scratch: str) -> None:
    save({"w": torch.ones(3)}, StorageWriter(scratch))
    reader, planner, target = StorageReader(scratch), DefaultLoadPlanner(), {"w": torch.zeros(3)}
    planner.set_up_planner(target, reader.read_metadata(), True)
    (plan,) = reader.prepare_global_plan([planner.create_local_plan()])
    sent = pickle.dumps(reader)
    pickle.loads(sent).read_data(plan, planner).wait()
    assert torch.equal(target["w"], torch.ones(3))
    save({"w": torch.full((3,), 2.0)}, StorageWriter(scratch))
    late = pickle.loads(sent)
    with pytest.raises(VersionGoneError, match="was overwritten while it was about to be read: load it again"):
        late.read_data(plan, planner).wait()
    load(target, late)
    assert torch.equal(target["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize("in_store", [False, True], ids=["folder", "store"])
def test_a_copied_reader_of_what_a_rank_saved_by_itself_reads_that(scratch: str, in_store: bool) -> None:
    key = "checkpoint" if in_store else None
    if in_store:
        memstore.open(scratch).close()
    save({"w": torch.ones(3)}, StorageWriter(scratch, key=key))
    if in_store:
        save({"w": torch.full((3,), 2.0)}, StorageWriter(scratch, key="checkpoint/rank-0"))
    else:
        save({"w": torch.full((3,), 2.0)}, StorageWriter(f"{scratch}/rank-0"))
    reader, planner, target = StorageReader(scratch, key=key), DefaultLoadPlanner(), {"w": torch.zeros(3)}
    planner.set_up_planner(target, reader.read_metadata(rank=0), True)
    (plan,) = reader.prepare_global_plan([planner.create_local_plan()])
    copy.deepcopy(reader).read_data(plan, planner).wait()
    assert torch.equal(target["w"], torch.full((3,), 2.0))


def test_a_reader_of_a_store_that_is_only_read_can_be_copied(scratch: str) -> None:
    memstore.open(scratch).close()
    save({"w": torch.ones(3)}, StorageWriter(scratch, key="checkpoint"))
    with memstore.open(scratch, "r") as store:
        reader, target = StorageReader(store, key="checkpoint"), {"w": torch.zeros(3)}
        load(target, reader)
        for copied in (unpickled, copy.deepcopy, copy.copy):
            target["w"].zero_()
            load(target, copied(reader))
            assert target["w"].tolist() == [1.0] * 3


def test_ranks_that_only_read_are_told_if_they_have_opened_two_versions(scratch: str) -> None:
    memstore.open(scratch).close()
    readers = [StorageReader(scratch, key="checkpoint") for _ in range(2)]
    for number, reader in enumerate(readers):
        save({"w": torch.full((3,), float(number))}, StorageWriter(scratch, key="checkpoint"))
        reader.read_metadata()
    (plan,) = readers[0].prepare_global_plan([LoadPlan([])])
    readers[0].read_data(unpickled(plan), LoadPlanner()).wait()
    with pytest.raises(VersionGoneError, match="have versions 1 and 2: load again"):
        readers[1].read_data(unpickled(plan), LoadPlanner()).wait()
