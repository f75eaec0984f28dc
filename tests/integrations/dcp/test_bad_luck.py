"""Saves that are killed, fail or meet another, damaged and hostile checkpoints."""

from __future__ import annotations

import base64
import contextlib
import errno
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

import memstore
from memstore.errors import CorruptionError, FormatVersionError, MemstoreError, NotAStoreError, StoreFullError
from memstore.integrations import dcp
from memstore.integrations.dcp import StorageReader, StorageWriter, plans
from memstore.integrations.dcp.places import SaveTicket
from tests.children import in_child
from tests.integrations.dcp.states import load, number_in, save, save_number
from tests.small_tmpfs import fill, on_small_tmpfs
from tests.snapshot.test_hostile import broken, signed
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
    assert len(os.listdir(path)) == 2, (step, os.listdir(path))


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
    assert on_small_tmpfs(8, _fill_up) == (StoreFullError.__name__, 1.0, 3.0, 2)


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


def test_a_key_that_has_no_checkpoint(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("w", torch.ones(3))
        for key in ("w", "missing"):
            with pytest.raises(memstore.KeyNotFoundError):
                StorageReader(store, key=key).read_metadata()


def test_tickets_pickle() -> None:
    ticket = SaveTicket("0" * 16, 1, 2)
    assert in_child(_same, ticket) == ticket


def _same(value: Any) -> Any:
    return value
