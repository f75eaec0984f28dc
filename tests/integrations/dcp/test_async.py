"""Asynchronous saves: what is staged, and saves that nobody waits for."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from memstore.errors import UnsupportedValueError
from memstore.integrations import dcp
from memstore.integrations.dcp import Stager, StorageWriter


class Fresh(Mapping[str, torch.Tensor]):
    """Makes each tensor when it is asked for one, as lazy stacks do."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.full((3,), float(key))

    def __iter__(self) -> Iterator[str]:
        return iter(map(str, range(100)))

    def __len__(self) -> int:
        return 100


def test_tensors_that_are_made_on_access_are_staged_as_they_are() -> None:
    staged: Any = Stager().stage({"stack": Fresh()})
    assert all(torch.equal(tensor, torch.full((3,), float(key))) for key, tensor in staged["stack"].items())


def test_torchs_wrappers_of_shards_are_staged() -> None:
    parts = [torch.arange(6.0).view(3, 2), torch.arange(6.0, 12.0).view(3, 2)]
    expected = [part.clone() for part in parts]
    offsets = [(4, 0), (4, 2)]
    staged: Any = Stager().stage({"w": LocalShardsWrapper(parts, offsets), "none": LocalShardsWrapper([], [])})
    for part in parts:
        part.zero_()
    assert list(map(tuple, staged["w"].local_offsets())) == offsets
    assert all(torch.equal(one, other) for one, other in zip(staged["w"].local_shards(), expected, strict=True))
    assert staged["none"].local_shards() == []


def state(number: float) -> dict[str, Any]:
    return {"w": torch.full((100, 100), number), "n": number}


def number_in(path: str) -> float:
    target = state(0.0)
    dcp.load(target, checkpoint_id=path)
    assert torch.equal(target["w"], state(target["n"])["w"]), "parts of two saves"
    return target["n"]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes when saves begin and end. The first one ends when another one has begun, or half a second later."""
    told, begun = list[str](), threading.Event()
    real_set_up, real_finish = StorageWriter.set_up_storage_writer, StorageWriter.finish

    def set_up(self: Any, *args: Any, **kwargs: Any) -> None:
        if told:
            begun.set()
        told.append(f"{Path(self.checkpoint_id).name} begins")
        real_set_up(self, *args, **kwargs)

    def finish(self: Any, metadata: Any, results: Any) -> None:
        if len(told) == 1:
            begun.wait(0.5)
        real_finish(self, metadata, results)
        told.append(f"{Path(self.checkpoint_id).name} ends")

    monkeypatch.setattr(StorageWriter, "set_up_storage_writer", set_up)
    monkeypatch.setattr(StorageWriter, "finish", finish)
    yield told


def test_saves_that_overlap_are_done_one_after_the_other(scratch: str, held: list[str]) -> None:
    futures: list[Any] = [dcp.async_save(state(i), checkpoint_id=f"{scratch}/{i:g}") for i in (1.0, 2.0)]
    dcp.save(state(3.0), checkpoint_id=f"{scratch}/3")
    assert held == [f"{number} {what}" for number in (1, 2, 3) for what in ("begins", "ends")]
    assert all(future.done() for future in futures)
    assert [number_in(f"{scratch}/{number}") for number in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_of_saves_to_one_path_the_last_one_stays_and_one_that_fails_holds_up_none(scratch: str) -> None:
    futures: list[Any] = [dcp.async_save(state(i), checkpoint_id=scratch) for i in (1.0, 2.0)]
    unsaved: Any = dcp.async_save({"x": lambda: None}, checkpoint_id=scratch)
    futures.append(dcp.async_save(state(4.0), checkpoint_id=scratch))
    assert "memstore's planner doesn't pickle" in str(unsaved.exception())
    assert [future.exception() for future in futures] == [None] * 3
    assert number_in(scratch) == 4.0


def test_what_is_expanded_far_beyond_its_memory_is_refused_by_name(scratch: str) -> None:
    huge = {"model": {"w": torch.zeros(1).expand(1 << 40)}}
    with pytest.raises(UnsupportedValueError, match=r"\['model'\]\['w'\].* save what it is expanded from"):
        dcp.async_save(huge, checkpoint_id=scratch)


def test_one_process_is_no_reason_for_a_warning(scratch: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3):
            future: Any = dcp.async_save(state(float(number)), checkpoint_id=scratch)
        future.result()
        dcp.load(state(0.0), checkpoint_id=scratch)
    assert [str(one.message) for one in told if "torch.distributed is disabled" in str(one.message)] == []
