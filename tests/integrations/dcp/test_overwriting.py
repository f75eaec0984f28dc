"""Loads beside a trainer that overwrites its checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

import memstore
from memstore import Snapshot, StateDict
from memstore.convert import convert
from memstore.errors import AlreadyExistsError, AmbiguousCheckpointError, CorruptionError, VersionGoneError
from memstore.integrations.dcp import StorageReader, StorageWriter
from memstore.snapshot import load_manifest
from tests.integrations.dcp.states import load, number_in, save, save_number


class Overtaken(StorageReader):
    """A reader that has opened the checkpoint when something happens to it."""

    happens: Any

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        found = super().read_metadata(*args, **kwargs)
        self.happens()
        return found


def load_beside(path: str, happens: Any, state: dict[str, Any]) -> BaseException:
    reader = Overtaken(path)
    reader.happens = happens
    with pytest.raises(CheckpointException) as raised:
        load(state, reader)
    return raised.value.failures[0][0]


@pytest.mark.parametrize("name", ["w", "n"])
def test_a_load_of_what_is_overwritten_meanwhile_is_not_told_of_damage(scratch: str, name: str) -> None:
    save_number(scratch, 1.0)
    state = {"w": torch.zeros(1000)} if name == "w" else {"n": 0.0}
    error = load_beside(scratch, lambda: save_number(scratch, 2.0), state)
    assert isinstance(error, VersionGoneError), error
    assert "was overwritten while it was read (the file is missing): open it again" in str(error)
    assert number_in(scratch) == 2.0


def test_a_load_of_what_is_removed_meanwhile_says_so(scratch: str) -> None:
    save_number(scratch, 1.0)
    error = load_beside(scratch, lambda: shutil.rmtree(scratch), {"w": torch.zeros(1000)})
    assert isinstance(error, VersionGoneError) and "was removed while it was read" in str(error)


def test_damage_is_damage_while_the_manifest_stays(scratch: str) -> None:
    save_number(scratch, 1.0)
    (file,) = [one.name for one in load_manifest(scratch).files]

    def damage() -> None:
        with open(f"{scratch}/{file}", "r+b") as found:
            found.truncate(100)

    assert isinstance(load_beside(scratch, damage, {"w": torch.zeros(1000)}), CorruptionError)


def test_snapshots_that_are_open_say_it_too(scratch: str) -> None:
    save_number(scratch, 1.0)
    snapshot = Snapshot(scratch)
    snapshot.get_manifest()
    save_number(scratch, 2.0)
    with pytest.raises(VersionGoneError, match="was overwritten"):
        snapshot.view()
    with pytest.raises(VersionGoneError, match="was overwritten"):
        snapshot.get_state_dict_for_key("state")
    snapshot.verify()


# --- checkpoints of other libraries in the folder ---------------------------------------------------------------------


def torch_saves(path: str, number: float) -> None:
    torch_dcp.save({"w": torch.full((1000,), number), "n": number}, checkpoint_id=path, no_dist=True)


def torch_loads(path: str) -> float:
    target = {"w": torch.zeros(1000), "n": 0.0}
    torch_dcp.load(target, checkpoint_id=path, no_dist=True)
    return target["n"]


def failure_of(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(CheckpointException) as raised:
        call()
    return raised.value.failures[0][0]


def test_a_save_without_overwrite_refuses_torchs_checkpoint(scratch: str) -> None:
    torch_saves(scratch, 1.0)
    before = sorted(os.listdir(scratch))
    error = failure_of(lambda: save({"n": 2.0}, StorageWriter(scratch, overwrite=False)))
    assert isinstance(error, AlreadyExistsError) and ".metadata" in str(error)
    assert sorted(os.listdir(scratch)) == before and torch_loads(scratch) == 1.0


def test_a_save_replaces_torchs_checkpoint_whole_and_nothing_else(scratch: str) -> None:
    torch_saves(scratch, 1.0)
    for name in ("notes.txt", "model.safetensors", "__x.distcp"):
        open(f"{scratch}/{name}", "w").close()
    save_number(scratch, 2.0)
    names = set(os.listdir(scratch))
    assert {"notes.txt", "model.safetensors", "__x.distcp"} < names
    assert not {".metadata", "__0_0.distcp"} & names
    assert number_in(scratch) == 2.0
    with pytest.raises(CheckpointException):
        torch_loads(scratch)


def test_a_rank_that_saves_by_itself_replaces_torchs_checkpoint_too(scratch: str) -> None:
    torch_saves(scratch, 1.0)
    writer = StorageWriter(scratch, overwrite=False)
    with pytest.raises(AlreadyExistsError, match="torch"):
        torch_dcp.save({"n": 2.0}, storage_writer=writer, use_collectives=False)
    torch_dcp.save({"n": 2.0}, storage_writer=StorageWriter(scratch), use_collectives=False)
    assert os.listdir(scratch) == ["rank-0"]
    target = {"n": 0.0}
    torch_dcp.load(target, storage_reader=StorageReader(scratch), no_dist=True)
    assert target["n"] == 2.0
    torch_dcp.save({"n": 3.0}, checkpoint_id=scratch, use_collectives=False)
    error = failure_of(lambda: torch_dcp.load({"n": 0.0}, storage_reader=StorageReader(scratch), no_dist=True))
    assert isinstance(error, AssertionError) and "two checkpoints" in str(error), error


def test_a_save_that_is_killed_before_torchs_metadata_goes_leaves_both_and_readers_say_so(
    scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state in between; the next save mends it."""
    torch_saves(scratch, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr("memstore.snapshot.publishing.remove_torchs", lambda path, durable: None)
        save_number(scratch, 2.0)
    assert torch_loads(scratch) == 1.0
    error = failure_of(lambda: load({"n": 0.0}, StorageReader(scratch)))
    assert "two checkpoints are there" in str(error), error
    save_number(scratch, 3.0)
    assert number_in(scratch) == 3.0 and not os.path.exists(f"{scratch}/.metadata")


def test_readers_of_a_folder_that_torch_saved_over_say_that_two_are_there(scratch: str) -> None:
    path = f"{scratch}/latest"
    save_number(path, 1.0)
    torch_saves(path, 2.0)
    with memstore.open(f"{scratch}/store") as store:
        calls: list[Callable[[], Any]] = [
            lambda: StorageReader(path).read_metadata(),
            lambda: Snapshot(path).restore({"m": StateDict()}),
            lambda: Snapshot(path).view(),
            lambda: Snapshot(path).verify(),
            lambda: store.attach("k", path),
            lambda: store.attach("k", path, copy=True),
            lambda: convert(path, f"{scratch}/new"),
            lambda: convert(path, f"{scratch}/new", source_as="memstore-dcp"),
        ]
        for call in calls:
            with pytest.raises(AmbiguousCheckpointError, match=r"latest/memstore_snapshot\.json.*latest/\.metadata"):
                call()
        assert "k" not in store
    error = failure_of(lambda: save({"n": 3.0}, StorageWriter(path, overwrite=False)))
    assert isinstance(error, AlreadyExistsError)
    convert(path, f"{scratch}/torchs.pt", source_as="dcp")
    assert torch.load(f"{scratch}/torchs.pt")["n"] == 2.0
    os.remove(f"{path}/.metadata")
    assert number_in(path) == 1.0


@pytest.mark.parametrize("mark", [".metadata", "__3.metadata", ".snapshot_metadata"])
def test_no_snapshot_is_taken_beside_another_librarys_checkpoint(scratch: str, mark: str) -> None:
    os.makedirs(f"{scratch}/c")
    open(f"{scratch}/c/{mark}", "w").close()
    for take in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(AlreadyExistsError, match=mark.replace(".", r"\.")):
            take(f"{scratch}/c", {"m": StateDict(w=torch.ones(3))})
    assert os.listdir(f"{scratch}/c") == [mark]


def test_a_take_that_another_library_overtakes_is_refused_and_leaves_nothing(scratch: str) -> None:
    class Late(StateDict):
        def state_dict(self) -> dict[str, Any]:  # after the take has looked at the folder
            torch_saves(f"{scratch}/c", 1.0)
            return super().state_dict()

    for take in (Snapshot.take, lambda *given: Snapshot.async_take(*given).wait()):
        shutil.rmtree(f"{scratch}/c", ignore_errors=True)
        with pytest.raises(AlreadyExistsError, match="saved there meanwhile"):
            take(f"{scratch}/c", {"m": Late(w=torch.ones(3))})
        assert sorted(os.listdir(f"{scratch}/c")) == [".metadata", "__0_0.distcp"]


def test_a_save_never_replaces_a_snapshot_of_torchsnapshot(scratch: str) -> None:
    os.mkdir(scratch)
    open(f"{scratch}/.snapshot_metadata", "w").close()
    error = failure_of(lambda: save_number(scratch, 1.0))
    assert isinstance(error, AlreadyExistsError) and "torchsnapshot" in str(error)
    assert os.listdir(scratch) == [".snapshot_metadata"]
