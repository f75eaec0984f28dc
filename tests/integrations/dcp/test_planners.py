"""Bytes items are stored without pickle, and nothing that is loaded runs code."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from memstore.integrations import dcp
from memstore.integrations.dcp import LoadPlanner, StorageReader, StorageWriter
from memstore.integrations.dcp.planners import decode_object, encode_object
from tests.integrations.dcp.states import load, save
from tests.support.equality import assert_same


@dataclass
class Settings:
    rate: float
    names: tuple[str, ...]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        1.5,
        "é",
        b"\0",
        (1, [2, {"x": 3.0}]),
        OrderedDict(a=1),
        np.arange(6).reshape(2, 3),
        {"inner": torch.arange(3), 5: torch.ones(2).bfloat16()},
        torch.float16,
        timedelta(days=1),
        {1, 2},
    ],
    ids=repr,
)
def test_objects_come_back(value: Any) -> None:
    assert_same(value, decode_object("x", encode_object("x", value)))


def test_streams_come_back_where_they_were(scratch: str) -> None:
    stream = io.BytesIO(b"what a trainer has pickled itself")
    stream.seek(5)
    target: dict[str, Any] = {"losses": None, "empty": None}
    dcp.save({"losses": stream, "empty": io.BytesIO()}, checkpoint_id=scratch)
    dcp.load(target, checkpoint_id=scratch)
    assert target["losses"].tell() == 5 and target["losses"].getvalue() == stream.getvalue()
    assert target["empty"].getvalue() == b""
    with pytest.raises(CorruptionError, match="it is cut"):
        decode_object("losses", encode_object("losses", stream)[:20])


def test_what_only_pickle_could_store_is_refused_by_name(scratch: str) -> None:
    with pytest.raises(CheckpointException, match="run.setting: .*memstore's planner doesn't pickle") as raised:
        dcp.save({"run": {"setting": io.StringIO()}}, checkpoint_id=scratch)
    assert isinstance(raised.value.failures[0][0], UnsupportedValueError)


def test_items_of_torchs_planner_are_read_without_running_code(scratch: str) -> None:
    save({"epoch": 3, "betas": [0.9, "x"]}, StorageWriter(scratch))
    target = {"epoch": 0, "betas": [0.0, ""]}
    dcp.load(target, checkpoint_id=scratch)
    assert target == {"epoch": 3, "betas": [0.9, "x"]}


class Evil:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def test_a_pickle_that_runs_code_is_refused(scratch: str) -> None:
    save({"x": Evil(f"{scratch}-made")}, StorageWriter(scratch))
    with pytest.raises(CheckpointException, match="saved by another planner, with pickle") as raised:
        dcp.load({"x": None}, checkpoint_id=scratch)
    assert isinstance(raised.value.failures[0][0], UnsupportedValueError)
    assert not os.path.exists(f"{scratch}-made")
    with pytest.raises(CheckpointException):
        load({"x": None}, StorageReader(scratch), planner=LoadPlanner())
    assert not os.path.exists(f"{scratch}-made")


_WHOLE = encode_object("x", {"a": [1, 2.0, "three"], "t": torch.arange(4)})


@given(st.data())
def test_changed_bytes_are_read_or_refused(data: st.DataObject) -> None:
    changed = bytearray(_WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    try:
        decode_object("x", bytes(changed[:cut] if data.draw(st.booleans()) else changed))
    except MemstoreError as error:
        assert isinstance(error, CorruptionError | UnsupportedValueError)


def test_an_item_without_bytes_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="EOFError"):  # which torch raises without a word
        decode_object("x", b"")


class Whole(LoadPlanner, _EmptyStateDictLoadPlanner):
    """As docs/coming-from/dcp.md makes it."""


def test_what_save_wrote_is_loaded_without_a_template(scratch: str) -> None:
    state = {"model": {"w": torch.randn(4, 3), "layers": [torch.ones(2), "text"]}, "epoch": 3, "of": Settings(0.1, ())}
    dcp.save(state, checkpoint_id=scratch)
    planner = Whole()
    load({}, StorageReader(scratch), planner=planner)
    assert_same(state, planner.original_state_dict)
    part = Whole(keys={"model.w", "epoch"})
    load({}, StorageReader(scratch), planner=part)
    assert_same({"model": {"w": state["model"]["w"]}, "epoch": 3}, part.original_state_dict)


def test_torchs_planners_cannot_read_what_save_wrote_of_objects(scratch: str) -> None:
    dcp.save({"epoch": 3}, checkpoint_id=scratch)
    with pytest.raises(CheckpointException, match="UnpicklingError"):
        load({}, StorageReader(scratch), planner=_EmptyStateDictLoadPlanner())
