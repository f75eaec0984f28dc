"""Loads beside a trainer that overwrites its checkpoint."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from memstore import Snapshot
from memstore.errors import CorruptionError, VersionGoneError
from memstore.integrations.dcp import StorageReader, StorageWriter
from memstore.snapshot import load_manifest
from tests.integrations.dcp.states import load, save


def save_number(path: str, number: float) -> None:
    save({"w": torch.full((100, 100), number), "n": number}, StorageWriter(path))


def number_in(path: str) -> float:
    target = {"w": torch.zeros(100, 100), "n": 0.0}
    load(target, StorageReader(path))
    assert torch.equal(target["w"], torch.full((100, 100), target["n"])), "parts of two saves"
    return target["n"]


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
    state = {"w": torch.zeros(100, 100)} if name == "w" else {"n": 0.0}
    error = load_beside(scratch, lambda: save_number(scratch, 2.0), state)
    assert isinstance(error, VersionGoneError), error
    assert "was overwritten while it was read (the file is missing): open it again" in str(error)
    assert number_in(scratch) == 2.0


def test_a_load_of_what_is_removed_meanwhile_says_so(scratch: str) -> None:
    save_number(scratch, 1.0)
    error = load_beside(scratch, lambda: shutil.rmtree(scratch), {"w": torch.zeros(100, 100)})
    assert isinstance(error, VersionGoneError) and "was removed while it was read" in str(error)


def test_damage_is_damage_while_the_manifest_stays(scratch: str) -> None:
    save_number(scratch, 1.0)
    (file,) = [one.name for one in load_manifest(scratch).files]

    def damage() -> None:
        with open(f"{scratch}/{file}", "r+b") as found:
            found.truncate(100)

    assert isinstance(load_beside(scratch, damage, {"w": torch.zeros(100, 100)}), CorruptionError)


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
