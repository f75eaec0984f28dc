"""What `dumps`, `loads` and `state_dict` of a replay buffer do with the rows of a MemstoreStorage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import memstore

data = pytest.importorskip("torchrl.data", reason="`make test-torchrl` has torchrl in an environment of its own")

from memstore.integrations.torchrl import (  # noqa: E402
    CopyCheckpointer,
    InPlaceCheckpointer,
    MemstoreStorage,
    MemstoreWriter,
)


def batch(count: int, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + count)
    return TensorDict({"x": number.float()[:, None].expand(count, 3).clone(), "n": {"y": number}}, [count])


def buffer(store: memstore.Store, key: str = "rows", checkpointer: Any = None, slots: int = 10) -> Any:
    storage = MemstoreStorage(slots, store=store, key=key)
    options = {"writer": MemstoreWriter(), "checkpointer": checkpointer, "batch_size": 4}
    return data.TensorDictReplayBuffer(storage=storage, **options)


def numbers(rb: Any) -> list[int]:
    return rb[:]["n", "y"].tolist()


@pytest.mark.parametrize("count", [7, 13])
@pytest.mark.parametrize("into", ["another", "the same"])
def test_a_buffer_is_loaded_as_it_was_saved(store: memstore.Store, tmp_path: Path, count: int, into: str) -> None:
    rb = buffer(store)
    rb.extend(batch(count))
    rb.dumps(tmp_path)
    expected, cursor = numbers(rb), rb.writer._cursor
    rb.extend(batch(3, 100))
    other = rb if into == "the same" else buffer(store, "other")
    other.loads(tmp_path)
    assert numbers(other) == expected
    assert (other.writer._cursor, other.write_count, other.storage._last_cursor) == (cursor, count, (count - 1) % 10)
    assert other.extend(batch(1))[0] == cursor


def test_a_checkpoint_is_written_over(store: memstore.Store, tmp_path: Path) -> None:
    rb = buffer(store)
    for start in (0, 50):
        rb.extend(batch(10, start))
        rb.dumps(tmp_path)
    other = buffer(store, "other")
    other.loads(tmp_path)
    assert numbers(other) == list(range(50, 60))


def test_files_are_torchrls_own_in_both_directions(store: memstore.Store, tmp_path: Path) -> None:
    theirs = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(10), batch_size=4)
    theirs.extend(batch(7))
    theirs.dumps(tmp_path / "theirs")
    ours = buffer(store)
    ours.loads(tmp_path / "theirs")
    assert numbers(ours) == list(range(7))
    ours.extend(batch(2, 7))
    ours.dumps(tmp_path / "ours")
    theirs.storage.loads(tmp_path / "ours" / "storage")
    assert numbers(theirs) == list(range(9))
    assert ours[:]["index"].tolist() == list(range(9)), "an entry of TorchRL's own writer, which ours fills then too"


def test_plain_tensors_are_loaded_where_there_are_some(store: memstore.Store, tmp_path: Path) -> None:
    rb = data.ReplayBuffer(storage=MemstoreStorage(10, store=store, key="rows"), writer=MemstoreWriter(), batch_size=4)
    rb.extend(torch.arange(6))
    rb.dumps(tmp_path)
    rb.extend(torch.arange(50, 58))
    rb.loads(tmp_path)
    assert rb[:].tolist() == list(range(6))


def test_hooks_are_called(store: memstore.Store, tmp_path: Path) -> None:
    rb = buffer(store)
    rb.extend(batch(10))
    rb.register_save_hook(lambda rows, path: rows + 1)
    rb.dumps(tmp_path)
    other = buffer(store, "other")
    other.register_load_hook(lambda rows, out: rows + 1)
    other.loads(tmp_path)
    assert numbers(other) == list(range(2, 12))


def test_a_checkpoint_in_place_refers_to_the_rows(store: memstore.Store, tmp_path: Path) -> None:
    rb = buffer(store, checkpointer=InPlaceCheckpointer())
    rb.extend(batch(7))
    rb.dumps(tmp_path)
    rb.extend(batch(2, 7))
    again = buffer(store, checkpointer=InPlaceCheckpointer())
    again.loads(tmp_path)
    assert numbers(again) == list(range(9)) and again.writer._cursor == 9
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2000
    other = buffer(store, "other", InPlaceCheckpointer())
    with pytest.raises(memstore.StructureMismatchError, match="refers to the rows under the key 'rows'"):
        other.loads(tmp_path)
    store.delete("rows")
    anew = buffer(store, checkpointer=InPlaceCheckpointer())
    anew.extend(batch(7))
    with pytest.raises(memstore.StructureMismatchError, match="they are lost"):
        anew.loads(tmp_path)


def test_state_dicts_are_those_of_other_storages_too(store: memstore.Store) -> None:
    rb = buffer(store)
    rb.extend(batch(13))
    state = rb.state_dict()
    rb.extend(batch(5, 50))
    other = buffer(store, "other")
    other.load_state_dict(state)
    assert numbers(other) == [10, 11, 12, *range(3, 10)] and other.writer._cursor == 3
    theirs = data.LazyTensorStorage(10)
    theirs.set(range(4), batch(4))
    third = MemstoreStorage(10, store=store, key="third")
    third.load_state_dict(theirs.state_dict())
    assert third[:]["n", "y"].tolist() == [0, 1, 2, 3]
    third.load_state_dict(data.LazyTensorStorage(10).state_dict())
    assert len(third) == 0


def test_an_empty_buffer_has_nothing_to_save(store: memstore.Store, tmp_path: Path) -> None:
    rb = buffer(store)
    assert len(rb) == 0
    for checkpointer in (CopyCheckpointer(), InPlaceCheckpointer()):
        rb.storage.checkpointer = checkpointer
        with pytest.raises(RuntimeError, match="non-initialized"):
            rb.storage.dumps(tmp_path)


@pytest.mark.parametrize("text", [b"nothing", b"{}", b'{"is_pytree": false, "len": -1}'])
def test_files_that_are_no_checkpoint_are_told(store: memstore.Store, tmp_path: Path, text: bytes) -> None:
    (tmp_path / "storage_metadata.json").write_bytes(text)
    (tmp_path / "memstore_reference.json").write_bytes(text)
    storage = MemstoreStorage(10, store=store, key="rows")
    for checkpointer in (CopyCheckpointer(), InPlaceCheckpointer()):
        storage.checkpointer = checkpointer
        with pytest.raises(memstore.CorruptionError, match="no checkpoint of a storage"):
            storage.loads(tmp_path)
    assert not storage.initialized


def test_flushed_rows_are_there_in_another_boot(disk_store: memstore.Store) -> None:
    """Of the store; the bytes that a crash leaves are the datasets' own tests'."""
    rb = buffer(disk_store)
    rb.extend(batch(7))
    rb.storage.flush()
    assert disk_store.open_dataset("rows")._entry.page.flushed == 7
