"""Checkpoints of DCP that share with an earlier one what is unchanged: in folders, in buckets, by ranks, and killed."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import memstore
from memstore.errors import NotAStoreError
from memstore.integrations import dcp
from memstore.integrations.dcp import SavePlanner, StorageReader, StorageWriter
from memstore.snapshot.objects import storage_at
from tests.children import in_child
from tests.integrations.dcp import on_ranks
from tests.ranks.launcher import Ranks
from tests.support import faults
from tests.support.buckets import FaultProxy, Request

LEAVES, EACH = 30, 2000


def state(each: int = EACH) -> dict[str, Any]:
    return {"model": {f"w{i}/%": torch.full((each,), float(i)) for i in range(LEAVES)}, "n": 0, "name": "é"}


def change(values: dict[str, Any], leaf: int) -> None:
    values["model"][f"w{leaf}/%"] += 1
    values["n"] += 1


def save(values: dict[str, Any], path: str, **options: Any) -> None:
    dcp.save(values, storage_writer=StorageWriter(path, **options), no_dist=True)


def check(values: dict[str, Any], path: str, **options: Any) -> None:
    found = {"model": {name: torch.zeros_like(x) for name, x in values["model"].items()}, "n": -1, "name": ""}
    dcp.load(found, storage_reader=StorageReader(path, **options), no_dist=True)
    assert found["n"] == values["n"] and found["name"] == "é"
    assert all(torch.equal(found["model"][name], x) for name, x in values["model"].items())
    memstore.Snapshot(path, **options).verify()


def written(path: str) -> int:
    """Bytes of tensors that only this checkpoint has."""
    found = [os.stat(f"{path}/{name}") for name in os.listdir(path) if name.endswith(".safetensors")]
    return sum(status.st_size for status in found if status.st_nlink == 1)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_unchanged_is_not_written_and_the_base_may_go(scratch: str, is_async: bool) -> None:
    values = state()
    save(values, f"{scratch}/1")
    for step in (2, 3):
        change(values, step)
        base = "latest" if step == 2 else f"{scratch}/2"
        if is_async:
            writer = StorageWriter(f"{scratch}/{step}", base=base)
            dcp.async_save(values, storage_writer=writer, no_dist=True).result(60)
        else:
            save(values, f"{scratch}/{step}", base=base)
        assert 4 * EACH <= written(f"{scratch}/{step}") < 6 * EACH
    shutil.rmtree(f"{scratch}/1")
    shutil.rmtree(f"{scratch}/2")
    check(values, f"{scratch}/3")


def test_a_checkpoint_is_the_base_of_the_one_that_takes_its_place(scratch: str) -> None:
    values = state()
    inode = 0
    for step in range(6):
        change(values, step)
        save(values, scratch, base="latest")
        check(values, scratch)
        found = {os.stat(f"{scratch}/{name}").st_ino: name for name in os.listdir(scratch)}
        largest = max(found, key=lambda one: os.stat(f"{scratch}/{found[one]}").st_size)
        assert inode in (0, largest)
        inode = largest
    assert not [name for name in os.listdir(scratch) if name.endswith((".save", ".claim"))]
    assert len(os.listdir(scratch)) < 12


def test_ranks_that_save_by_themselves_have_bases_of_their_own(scratch: str) -> None:
    values = state()
    for step, base in ((1, None), (2, "latest"), (3, f"{scratch}/2")):
        change(values, step)
        writer = StorageWriter(f"{scratch}/{step}", base=base)
        dcp.save(values, storage_writer=writer, no_dist=True, use_collectives=False)
    assert os.listdir(f"{scratch}/3") == ["rank-0"] and written(f"{scratch}/3/rank-0") < 6 * EACH


def test_ranks_share_their_own_parts(ranks4: Ranks, scratch: str) -> None:
    assert ranks4.run(on_ranks.save_and_add, scratch, 2) == [1.0, 1.0, 2.0, 1.0]
    files = [name for name in os.listdir(f"{scratch}/2") if name.endswith(".safetensors")]
    assert sorted(os.stat(f"{scratch}/2/{name}").st_nlink for name in files) == [1, 2, 2, 2]
    memstore.Snapshot(f"{scratch}/2").verify()


def is_copy(request: Request) -> bool:
    return request.method == "PUT" and "x-amz-copy-source" in request.headers


def test_in_a_bucket_the_service_copies_what_is_unchanged(
    url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    run, each, options = url.rpartition("/")[0], 20_000, {"storage_options": s3_options}
    values = state(each)
    save(values, f"{run}/step-1", **options)
    for step, is_again in ((2, False), (2, True), (3, False)):
        change(values, step)
        s3_proxy.clear()
        save(values, f"{run}/step-{step}", base="latest", **options)
        assert is_again or any(map(is_copy, s3_proxy.requests))  # what was copied there once may be there
        assert sum(one.sent for one in s3_proxy.requests) < 3 * 4 * each
    for step in (1, 2):
        there = storage_at(f"{run}/step-{step}", s3_options)
        there.remove_all(there.names())
    check(values, f"{run}/step-3", **options)


# --- bad luck ---------------------------------------------------------------------------------------------------------


def _die_at(path: str, number: int) -> None:
    values = state()
    change(values, 3)
    with faults.at_step(number, faults.die, after=True):
        save(values, path, base="latest")


def test_a_kill_leaves_the_earlier_checkpoint_or_the_new_one_and_links_that_the_next_save_removes(scratch: str) -> None:
    values, names = state(), _names(scratch)
    links, published = [i + 1 for i, name in enumerate(names) if name == "link"], names.index("replace") + 1
    for number in sorted({*links[-3:], published - 1, published, published + 1}):
        path = f"{scratch}/killed-{number}/1"
        save(values, path)
        with pytest.raises(RuntimeError, match="-9"):
            in_child(_die_at, path, number)
        now = state()
        if number >= published:
            change(now, 3)
        check(now, path)
        save(values, path)
        check(values, path)
        assert len(os.listdir(path)) == 3, (number, names[number - 1], os.listdir(path))


def _names(scratch: str) -> list[str]:
    values = state()
    save(values, f"{scratch}/recorded/1")
    change(values, 3)
    return faults.record(lambda: save(values, f"{scratch}/recorded/1", base="latest"))


class Failing(SavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ArithmeticError("no data")


def _fail(path: str) -> None:
    with pytest.raises(CheckpointException, match="no data"):
        dcp.save(state(), storage_writer=StorageWriter(path), planner=Failing(), no_dist=True)


def test_what_a_save_that_lives_has_linked_is_not_swept_by_others(scratch: str) -> None:
    class Late(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            in_child(_fail, f"{scratch}/2")
            super().finish(metadata, results)

    values = state()
    save(values, f"{scratch}/1")
    change(values, 1)
    dcp.save(values, storage_writer=Late(f"{scratch}/2", base="latest"), no_dist=True)
    check(values, f"{scratch}/2")


def test_a_base_that_is_damaged_or_gone(scratch: str, caplog: pytest.LogCaptureFixture) -> None:
    values = state()
    save(values, f"{scratch}/2", base="latest")  # there is none
    with open(f"{scratch}/2/memstore_snapshot.json", "ab") as manifest:
        manifest.write(b"x")
    save(values, f"{scratch}/3", base="latest")
    assert "can't be the base" in caplog.text
    check(values, f"{scratch}/3")
    with pytest.raises(CheckpointException) as caught:
        save(values, f"{scratch}/4", base=f"{scratch}/nowhere")
    assert isinstance(caught.value.failures[0][0], NotAStoreError) and not os.path.exists(f"{scratch}/4")


def test_arguments_that_cannot_be_meant(scratch: str) -> None:
    with pytest.raises(ValueError, match="base= is for checkpoints in folders and buckets"):
        StorageWriter(scratch, key="k", base="latest")
    with pytest.raises(ValueError, match="an increment compares checksums"):
        StorageWriter(scratch, checksum=False, base="latest")
    with pytest.raises(CheckpointException, match="can't share files"):
        save(state(), f"{scratch}/1", base="memory://run/1")
