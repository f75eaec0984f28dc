"""Saves that are killed, fail or meet another, damaged and hostile checkpoints, and errors in any call."""

from __future__ import annotations

import base64
import contextlib
import errno
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import memstore
from memstore.errors import CorruptionError, FormatVersionError, MemstoreError, NotAStoreError, StoreFullError
from memstore.integrations import dcp
from memstore.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter, plans
from memstore.integrations.dcp.places import SaveTicket
from tests.children import in_child
from tests.integrations.dcp import on_ranks
from tests.integrations.dcp.states import Place, load, number_in, save, save_number
from tests.ranks.launcher import Ranks
from tests.small_tmpfs import fill, on_small_tmpfs
from tests.snapshot.test_damage import broken
from tests.snapshot.test_damage import signed_rest as signed
from tests.support import faults

MANIFEST = "memstore_snapshot.json"


# --- deaths and failures ----------------------------------------------------------------------------------------------


def _steps(chosen: frozenset[str] = faults.STEPS) -> list[str]:
    """Those of a save in the place of an earlier one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        save_number(f"{folder}/s", 1.0)
        return faults.record(lambda: save_number(f"{folder}/s", 2.0), names=chosen)


def _die_at(path: str, step: int) -> None:
    with faults.at_step(step, faults.die, after=True):
        save_number(path, 2.0)


def test_a_save_that_is_killed_leaves_the_earlier_checkpoint_or_the_new_one(scratch: str) -> None:
    names = _steps()
    published = names.index("replace") + 1
    for step in sorted({3, names.index("truncate") + 1, published - 1, published, published + 1, len(names)}):
        _kill_at(f"{scratch}-{step}", step, published)


@pytest.mark.full
def test_at_every_step(scratch: str) -> None:
    names = _steps()
    for step in range(1, len(names) + 1):
        _kill_at(f"{scratch}-{step}", step, names.index("replace") + 1)


def _kill_at(path: str, step: int, published: int) -> None:
    save_number(path, 1.0)
    with pytest.raises(RuntimeError, match="-9"):
        in_child(_die_at, path, step)
    assert number_in(path) == (2.0 if step >= published else 1.0), step
    save_number(path, 3.0)
    assert number_in(path) == 3.0
    assert len(os.listdir(path)) == 3, (step, os.listdir(path))


@pytest.mark.full
def test_a_save_that_fails_at_any_step_leaves_one_of_the_two(scratch: str) -> None:
    chosen = faults.STEPS - faults.CLEANUPS
    for step in range(1, len(_steps(chosen)) + 1):
        path = f"{scratch}-{step}"
        save_number(path, 1.0)
        failing = faults.at_step(step, faults.raising(OSError(errno.EIO, "injected")), names=chosen)
        with contextlib.suppress(CheckpointException), failing:
            save_number(path, 2.0)
        assert number_in(path) in (1.0, 2.0)


def _fill_up(folder: str) -> tuple[str, float, float, int]:
    path = f"{folder}/s"
    save_number(path, 1.0, durability="process")
    ballast = fill(folder, leave=1 << 20)
    told = ""
    try:
        save({"w": torch.ones(1 << 20), "n": 2.0}, StorageWriter(path, durability="process"))
    except CheckpointException as error:
        told = type(error.failures[0][0]).__name__
    first = number_in(path)
    os.remove(ballast)
    save_number(path, 3.0, durability="process")
    return told, first, number_in(path), len(os.listdir(path))


def test_a_full_disk_leaves_the_earlier_checkpoint(scratch: str) -> None:
    assert on_small_tmpfs(8, _fill_up) == (StoreFullError.__name__, 1.0, 3.0, 3)


def test_a_store_that_is_full_keeps_the_earlier_checkpoint(scratch: str) -> None:
    with memstore.open(scratch, capacity="3MiB") as store:
        save({"w": torch.ones(1000)}, StorageWriter(store, key="c"))
        with pytest.raises(CheckpointException) as raised:
            save({"w": torch.ones(1 << 20)}, StorageWriter(store, key="c"))
        assert isinstance(raised.value.failures[0][0], StoreFullError)
        target = {"w": torch.zeros(1000)}
        load(target, StorageReader(store, key="c"))
        assert torch.equal(target["w"], torch.ones(1000))


def test_two_saves_at_once_leave_one_of_the_two(scratch: str) -> None:
    """The second begins, and ends, between the first one's files and its publication."""

    class Late(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            save_number(scratch, 2.0)
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match="another save to this checkpoint removed it"):
        save({"w": torch.ones(1000), "n": 1.0}, Late(scratch))
    assert number_in(scratch) == 2.0


# --- damage -----------------------------------------------------------------------------------------------------------


def _file(path: str) -> Path:
    (found,) = Path(path).glob("*.safetensors")
    return found


def test_missing_and_cut_files(scratch: str) -> None:
    save_number(scratch, 1.0)
    os.truncate(_file(scratch), 100)
    _expect(scratch, "it has 100 bytes, and the manifest says")
    os.remove(_file(scratch))
    _expect(scratch, "the file is missing")
    os.remove(f"{scratch}/{MANIFEST}")
    with pytest.raises(NotAStoreError, match="no memstore_snapshot.json"):
        StorageReader(scratch).read_metadata()
    with pytest.raises(CheckpointException, match="metadata is None"):
        number_in(scratch)


def _expect(path: str, text: str) -> None:
    with pytest.raises(CheckpointException, match=text) as raised:
        number_in(path)
    assert isinstance(raised.value.failures[0][0], CorruptionError)


def test_a_damaged_checkpoint_may_be_overwritten(scratch: str) -> None:
    save_number(scratch, 1.0)
    Path(scratch, MANIFEST).write_bytes(b"{}")
    with pytest.raises(CorruptionError):
        StorageReader(scratch).read_metadata()
    save_number(scratch, 2.0)
    assert number_in(scratch) == 2.0


def _document(path: str) -> Any:
    found = json.loads(Path(path, MANIFEST).read_text())
    del found["memstore_snapshot"], found["checksum"]
    return found


def _described(document: Any) -> Any:
    """Where the description of torch's metadata is in the manifest: its objects."""
    (value,) = [one for one in document["values"] if one["key"] == "dcp"]
    return value


def _with_description(document: Any, **changes: Any) -> bytes:
    value = _described(document)
    raw, *others = msgspec.msgpack.decode(base64.b64decode(value["objects"]))
    described = msgspec.msgpack.decode(raw) | changes
    objects = msgspec.msgpack.encode([msgspec.msgpack.encode(described), *others])
    value["objects"] = base64.b64encode(objects).decode()
    return signed(json.dumps(document)[1:])


def test_metadata_of_other_versions(scratch: str) -> None:
    save_number(scratch, 1.0)
    text = Path(scratch, MANIFEST).read_bytes()
    document = _document(scratch)
    Path(scratch, MANIFEST).write_bytes(_with_description(document, format=plans.DESCRIPTION_FORMAT + 1, more=1))
    with pytest.raises(FormatVersionError, match="description of format 3, and this memstore reads 1 to 2"):
        StorageReader(scratch).read_metadata()
    newer = b'{"memstore_snapshot":2,"checksum":"0000000000000000",' + json.dumps(_document_of(text))[1:].encode()
    newer = newer.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(newer).encode(), 1)
    Path(scratch, MANIFEST).write_bytes(newer)
    with pytest.raises(FormatVersionError, match="a snapshot of format 2, and this memstore reads 1"):
        StorageReader(scratch).read_metadata()
    Path(scratch, MANIFEST).write_bytes(_with_description(_document_of(text), version="0.9"))
    assert StorageReader(scratch).read_metadata().version == "0.9"


def _document_of(text: bytes) -> Any:
    found = json.loads(text)
    del found["memstore_snapshot"], found["checksum"]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"order": ["w"]},
        {"order": ["w", "n", "more"]},
        {"order": ["w", "n", "n"]},
        {"order": 5},
        {"properties": {"w": [False, False, "torch.sideways"]}},
        {"properties": {"w": "x"}},
        {"paths": {"w": [1.5]}},
        {"more": 1},
        {"format": "1"},
    ],
    ids=str,
)
def test_descriptions_that_no_save_wrote(scratch: str, changes: dict[str, Any]) -> None:
    save_number(scratch, 1.0)
    Path(scratch, MANIFEST).write_bytes(_with_description(_document(scratch), **changes))
    with pytest.raises(CorruptionError, match="what torch says of it"):
        StorageReader(scratch).read_metadata()


@given(st.data())
@settings(max_examples=25)
def test_hostile_manifests_are_read_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        state = {"w": torch.arange(20.0), "e": torch.empty(0, 2), "n": [1, {"x": "y"}]}
        dcp.save(state, checkpoint_id=folder)
        Path(folder, MANIFEST).write_bytes(signed(json.dumps(data.draw(broken(_document(folder))))[1:]))
        reader = StorageReader(folder)
        try:
            reader.read_metadata()
        except MemstoreError:
            return
        with contextlib.suppress(CheckpointException):
            dcp.load({"w": torch.zeros(20), "n": [0, {"x": ""}]}, checkpoint_id=folder)


@given(st.binary(max_size=200))
@settings(max_examples=25)
def test_hostile_descriptions_are_read_or_refused(raw: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        dcp.save({"w": torch.arange(20.0)}, checkpoint_id=folder)
        document = _document(folder)
        value = _described(document)
        _, *others = msgspec.msgpack.decode(base64.b64decode(value["objects"]))
        value["objects"] = base64.b64encode(msgspec.msgpack.encode([raw, *others])).decode()
        Path(folder, MANIFEST).write_bytes(signed(json.dumps(document)[1:]))
        with pytest.raises(MemstoreError):
            StorageReader(folder).read_metadata()


def test_tickets_pickle() -> None:
    ticket = SaveTicket("0" * 16, 1, 2)
    assert in_child(_same, ticket) == ticket


def _same(value: Any) -> Any:
    return value


# --- errors in any call of a planner or a storage: torch tells them, the earlier checkpoint stays ---------------------


def failing(kind: Any, name: str) -> Any:
    """A class whose method of this name fails."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ArithmeticError(f"in {name}")

    return type(kind.__name__, (kind,), {name: fail})


def check_failed_save(place: Place, kind: Any, planner: Any, name: str) -> None:
    save_number(place, 1.0)
    state = {"w": torch.full((1000,), 2.0), "n": 2.0}
    with pytest.raises(CheckpointException, match=f"in {name}") as raised:
        save(state, kind(place.source, key=place.key), planner=planner())
    assert isinstance(raised.value.failures[0][0], ArithmeticError)
    assert number_in(place) == 1.0
    del raised
    gc.collect()  # the error refers to the writer, by its traceback
    save_number(place, 3.0)
    assert number_in(place) == 3.0 and place.leftovers() == []


@pytest.mark.parametrize(
    "name", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "lookup_object"]
)
def test_a_planner_that_fails_in_a_save(place: Place, name: str) -> None:
    check_failed_save(place, StorageWriter, failing(DefaultSavePlanner, name), name)


@pytest.mark.parametrize("name", ["resolve_data", "transform_object"])
def test_memstores_planner_that_fails_in_a_save(place: Place, name: str) -> None:
    check_failed_save(place, StorageWriter, failing(SavePlanner, name), name)


@pytest.mark.parametrize(
    "name",
    ["storage_meta", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"],
)
def test_a_writer_that_fails(place: Place, name: str) -> None:
    check_failed_save(place, failing(StorageWriter, name), DefaultSavePlanner, name)


def check_failed_load(place: Place, kind: Any, planner: Any, name: str) -> None:
    save_number(place, 1.0)
    target = {"w": torch.zeros(1000), "n": 0.0}
    with pytest.raises(CheckpointException, match=f"in {name}"):
        load(target, kind(place.source, key=place.key), planner=planner())
    assert number_in(place) == 1.0 and place.leftovers() == []


@pytest.mark.parametrize(
    "name", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes"]
)
def test_a_planner_that_fails_in_a_load(place: Place, name: str) -> None:
    check_failed_load(place, StorageReader, failing(DefaultLoadPlanner, name), name)


@pytest.mark.parametrize("name", ["resolve_tensor", "commit_tensor", "load_bytes"])
def test_memstores_planner_that_fails_in_a_load(place: Place, name: str) -> None:
    check_failed_load(place, StorageReader, failing(LoadPlanner, name), name)


@pytest.mark.parametrize(
    "name", ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"]
)
def test_a_reader_that_fails(place: Place, name: str) -> None:
    check_failed_load(place, failing(StorageReader, name), DefaultLoadPlanner, name)


# -- values under the key that no save has put -------------------------------------------------------------------------

GOOD = {"description": b"", "planner_data": None}


@pytest.mark.parametrize(
    "value",
    [
        {"dcp": 5},
        {"dcp": GOOD},
        {"dcp": GOOD | {"description": b"\x80"}},
        {"dcp": GOOD, "state": torch.ones(2)},
        {"dcp": GOOD, "state": {"w": "text"}},
        {"dcp": GOOD, "state": {5: torch.ones(2)}},
        {"dcp": torch.ones(3), "bytes": [torch.ones(2)]},
    ],
    ids=str,
)
def test_entries_that_are_no_checkpoints_are_refused(scratch: str, value: Any) -> None:
    with memstore.open(scratch) as store:
        store.put("w", value)
        with pytest.raises(MemstoreError):
            StorageReader(store, key="w").read_metadata()
        with pytest.raises(CheckpointException, match="global metadata read failed"):
            load({"w": torch.zeros(2)}, StorageReader(store, key="w"))


def test_entries_whose_tensors_are_others_are_refused(scratch: str) -> None:
    with memstore.open(scratch) as store:
        save({"w": torch.ones(3)}, StorageWriter(store, key="w"))
        found = store.get("w")
        for state in ({}, {"w": torch.ones(3), "more": torch.ones(1)}, torch.ones(3), {"w": {"w": torch.ones(3)}}):
            store.put("other", found | {"state": state})
            with pytest.raises(CorruptionError):
                StorageReader(store, key="other").read_metadata()
        store.put("other", found)
        assert list(StorageReader(store, key="other").read_metadata().state_dict_metadata) == ["w"]


def test_a_damaged_checkpoint_is_not_replaced_by_what_a_rank_saved_by_itself(scratch: str) -> None:
    save({"w": torch.zeros(3)}, StorageWriter(scratch), use_collectives=False)
    save({"w": torch.ones(3)}, StorageWriter(scratch))
    manifest = f"{scratch}/memstore_snapshot.json"
    with open(manifest, "r+b") as file:
        file.write(b"{}")
    with pytest.raises(CheckpointException, match="rank local metadata read failed: .*memstore_snapshot.json"):
        load({"w": torch.zeros(3)}, StorageReader(scratch))


# -- on one rank of several --------------------------------------------------------------------------------------------


def test_torch_tells_which_rank_failed_in_a_save_and_the_earlier_checkpoint_stays(
    ranks4: Ranks, scratch: str, key: str | None
) -> None:
    expected = [([(one.rank, True)], 1.0) for one in on_ranks.SAVES]
    assert ranks4.run(on_ranks.fail_saves, scratch, key) == [expected] * 4
    if key is None:
        assert len(os.listdir(scratch)) == 6, "what the saves that failed have left is gone"
        return
    with memstore.open(scratch) as store:
        assert store.pending() == () and list(store.keys()) == [key]


def test_torch_tells_which_rank_failed_in_a_load(ranks4: Ranks, scratch: str, key: str | None) -> None:
    expected = [([(one.rank, True)], 1.0) for one in on_ranks.LOADS]
    assert ranks4.run(on_ranks.fail_loads, scratch, key) == [expected] * 4


@pytest.mark.parametrize("rank", [0, 2])
def test_a_save_that_fails_on_one_rank_leaves_no_folder_on_any(ranks4: Ranks, scratch: str, rank: int) -> None:
    """The ranks that have written give up as well, and the last of them finds the files of all."""
    os.makedirs(scratch, exist_ok=True)
    assert ranks4.run(on_ranks.save_in_vain, f"{scratch}/run/step-1", rank) == [True] * 4
    assert os.listdir(scratch) == []
