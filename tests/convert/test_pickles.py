"""Leaves that a target could have only as pickles: all are named and nothing is written, unless pickle is allowed."""

from __future__ import annotations

import datetime
import io
import os
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import memstore
from memstore import RNGState, Snapshot, StateDict
from memstore.convert import convert
from memstore.convert.converting import draft_target
from memstore.convert.leaves import Rules, SourceValue
from memstore.convert.naming import unread_by_torch
from memstore.errors import UnsupportedValueError
from memstore.integrations import dcp
from tests.support.equality import assert_same


@dataclass
class Config:
    """What trainers put beside their weights."""

    width: int = 3


def rich() -> dict[str, Any]:
    """What memstore stores without pickle, and torch with."""
    return {
        "weight": torch.ones(3),
        "stats": {"mean": np.arange(4.0), "names": np.array(["a", "b"])},
        "when": datetime.datetime(2026, 5, 1, tzinfo=datetime.timezone.utc),
        "took": datetime.timedelta(hours=3),
        "days": [datetime.date(2026, 5, 1), 1],
        "config": Config(),
        "loss": np.float64(0.5),
        "lr": 0.1,
    }


NAMED = ("stats']['mean", "stats']['names", "when", "took", "config", "loss")


def refused(folder: str, source: str, target: str) -> str:
    before = sorted(os.listdir(folder))
    with pytest.raises(UnsupportedValueError) as caught:
        convert(f"{folder}/{source}", f"{folder}/target", target_as=target)
    assert sorted(os.listdir(folder)) == before and folder not in str(caught.value)
    return str(caught.value)


def check_rich(said: str) -> None:
    assert "7 leaves" in said and "nothing was written" in said and "allow_pickle=True" in said
    for name in NAMED:
        assert f"value['{name}']: of the class " in said, name
    assert "value['days']" in said and "datetime.timedelta" in said and f"{__name__}.Config" in said
    assert "weight" not in said and "'lr'" not in said


@pytest.mark.parametrize("target", ["torch", "dcp"])
@pytest.mark.parametrize("source", ["snapshot", "memstore-dcp", "store"])
def test_all_that_torch_would_pickle_is_named(folder: str, source: str, target: str) -> None:
    value = rich()
    if source == "memstore-dcp":
        dcp.save(value, checkpoint_id=f"{folder}/source")
    elif source == "snapshot":
        Snapshot.take(f"{folder}/source", {"state": StateDict(value)})
    else:
        with memstore.open(f"{folder}/store", "a") as store:
            store.put("key", value)
            Snapshot.take(f"{folder}/source", {"state": StateDict(store.get("key"))})
    check_rich(refused(folder, "source", target))


@pytest.mark.parametrize("target", ["torch", "dcp"])
def test_all_of_it_is_written_where_pickle_is_allowed(folder: str, target: str) -> None:
    dcp.save(rich(), checkpoint_id=f"{folder}/source")
    convert(f"{folder}/source", f"{folder}/target", target_as=target, allow_pickle=True)
    if target == "torch":
        assert_same(rich(), torch.load(f"{folder}/target", weights_only=False))
    else:
        loaded: dict[str, Any] = {"config": None, "stats": {"mean": None}, "days": None}
        torch_dcp.load(loaded, checkpoint_id=f"{folder}/target", no_dist=True)
        assert loaded["config"] == Config() and loaded["days"] == rich()["days"]
        assert np.array_equal(loaded["stats"]["mean"], rich()["stats"]["mean"])


@pytest.mark.parametrize("target", ["torch", "dcp"])
def test_the_random_state_is_named(folder: str, target: str) -> None:
    Snapshot.take(f"{folder}/source", {"random": RNGState(), "progress": StateDict(epoch=3)})
    said = refused(folder, "source", target)
    assert "1 leaf " in said and "value['random']['numpy']['state']['key']: of the class numpy.ndarray" in said


def test_a_file_that_a_store_has_exported_says_how_it_is_read(folder: str) -> None:
    with memstore.open(f"{folder}/store", "a") as store:
        store.put("key", rich())
        store.export("key", f"{folder}/source.pt", format="torch")
    with pytest.raises(UnsupportedValueError, match=r"source\.pt.*allow_pickle=True"):
        convert(f"{folder}/source.pt", f"{folder}/target")
    convert(f"{folder}/source.pt", f"{folder}/target", allow_pickle=True)
    assert_same(rich(), Snapshot(f"{folder}/target").get_state_dict_for_key("state"))


class Opaque:
    """Only pickle has a way to store it."""


@pytest.mark.parametrize("target", ["snapshot", "memstore-dcp"])
def test_all_that_memstore_would_pickle_is_named(folder: str, target: str) -> None:
    value = {"x": torch.ones(1), "one": Opaque(), "two": [1, {"three": Opaque()}]}
    torch.save(value, f"{folder}/source.pt")
    with torch.serialization.safe_globals([Opaque]):
        said = refused(folder, "source.pt", target)
    assert "2 leaves" in said and "value['one']: " in said and "value['two'][1]['three']: " in said


def test_streams_are_items_of_memstores_checkpoints(folder: str) -> None:
    stream = io.BytesIO(b"pickled by the trainer")
    stream.seek(3)
    dcp.save({"x": torch.ones(2), "stream": stream}, checkpoint_id=f"{folder}/source")
    convert(f"{folder}/source", f"{folder}/again", target_as="memstore-dcp")
    loaded: dict[str, Any] = {"x": torch.zeros(2), "stream": None}
    dcp.load(loaded, checkpoint_id=f"{folder}/again")
    assert loaded["stream"].getvalue() == stream.getvalue() and loaded["stream"].tell() == 3
    assert "value['stream']: of the class _io.BytesIO" in refused(folder, "source", "torch")


def test_what_tensordict_would_pickle_is_refused(folder: str) -> None:
    Snapshot.take(f"{folder}/source", {"state": StateDict(x=torch.ones(1), took=datetime.timedelta(hours=1))})
    assert "value['took']" in (said := refused(folder, "source", "memmap")) and "allow_pickle=True" in said


# --- what is a pickle -------------------------------------------------------------------------------------------------

READ: list[Any] = [None, True, 1, 1 << 2038, 1.5, 2j, "ä", b"a", bytearray(b"a"), {1, (2, "a")}, Counter("ab")]
READ += [torch.Size([1]), torch.device("cpu"), torch.float32, torch.strided, OrderedDict(a=1), torch.nn.Parameter()]
NOT_READ: list[Any] = [
    1 << 2039,
    frozenset({1}),
    {1, frozenset()},
    range(3),
    slice(1),
    Path("a"),
    np.int64(1),
    Config(),
]


@pytest.mark.parametrize("value", READ + NOT_READ, ids=lambda value: type(value).__name__)
def test_torch_reads_what_is_said_of_it(value: Any) -> None:
    """This torch: a version that reads more or less is found here."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    if any(value is one for one in READ):
        assert isinstance(value, OrderedDict) or unread_by_torch(value) is None
        torch.load(stream, weights_only=True)
    else:
        assert unread_by_torch(value)
        with pytest.raises(Exception, match="(?i)weights"):
            torch.load(stream, weights_only=True)


def test_classes_that_torch_was_told_to_trust_are_written(folder: str) -> None:
    Snapshot.take(f"{folder}/source", {"state": StateDict(config=Config(5))})
    with torch.serialization.safe_globals([Config]):
        convert(f"{folder}/source", f"{folder}/target.pt")
        assert torch.load(f"{folder}/target.pt", weights_only=True)["config"] == Config(5)


def test_keys_and_attributes_of_dicts_are_looked_at() -> None:
    state = OrderedDict(a=torch.ones(1))
    state._metadata = {"": {"made": datetime.date(2026, 5, 1)}}  # type: ignore[attr-defined] - as modules have it
    with pytest.raises(UnsupportedValueError) as caught:
        draft_target("torch", SourceValue({"model": state, "by": {Path("a"): 1, 1 << 3000: 2}}), Rules(), "/target.pt")
    said = str(caught.value)
    assert "3 leaves" in said and "['model']['_metadata']['']['made']" in said and said.count("its key is ") == 2
