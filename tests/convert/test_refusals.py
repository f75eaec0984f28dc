"""What a target can't express is named, each leaf with its reason, and nothing is written."""

from __future__ import annotations

import datetime
import io
import os
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

import memstore
import memstore.fake
from memstore import RNGState, Snapshot, StateDict
from memstore.convert import FORMATS, WRITTEN, convert
from memstore.convert.converting import draft_target
from memstore.convert.leaves import Rules, SourceValue
from memstore.convert.naming import unread_by_torch
from memstore.errors import UnsupportedValueError
from memstore.integrations import dcp
from tests.support.equality import assert_same

TIED = torch.ones(4)


def refused(folder: str, value: Any, target: str, **options: Any) -> str:
    torch.save(value, f"{folder}/source.pt")
    before = os.listdir(folder)
    with pytest.raises(memstore.errors.UnsupportedValueError) as caught:
        convert(f"{folder}/source.pt", f"{folder}/target", target_as=target, **options)
    assert os.listdir(folder) == before
    return str(caught.value)


@pytest.mark.parametrize("target", ["safetensors", "huggingface"])
def test_all_that_safetensors_lacks_is_named_at_once(folder: str, target: str) -> None:
    value = {
        "fine": torch.ones(2),
        "lr": 0.1,
        "nested": {"names": ["a"], "none": None},
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.ones(2, dtype=torch.complex128),
        3: torch.ones(1),
        "one": TIED,
        "two": TIED,
        "__metadata__": torch.ones(1),
    }
    said = refused(folder, value, target)
    for name in ("lr", "nested']['names", "nested']['none", "sparse", "complex", "3", "two", "__metadata__"):
        assert f"[{name!r}]" in said.replace('"', "'") or f"['{name}']" in said or f"[\"'{name}'\"]" in said, name
    assert "fine" not in said and "8 leaves" in said
    assert "--untie" in said and ": float, and no tensor" in said


@pytest.mark.parametrize(
    ("value", "target", "reason"),
    [
        ([torch.ones(1)], "dcp", "a list"),
        ({"a": {}}, "dcp", "without entries"),
        ({"a": (torch.ones(1), 2)}, "memstore-dcp", "tuple with tensors"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "dcp", "is called 'a.b' as well"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "safetensors", "is called 'a.b' as well"),
        ({0: torch.ones(1)}, "dcp", "no text"),
        ({"x": [torch.ones(1)]}, "memmap", "a list with tensors"),
        ({"x": {1: torch.ones(1)}}, "memmap", "no text"),
        (torch.ones(3), "memmap", "a Tensor"),
        ({"a": TIED[:3], "b": TIED[1:]}, "dcp", "shares memory"),
    ],
)
def test_what_others_lack_is_named(folder: str, value: Any, target: str, reason: str) -> None:
    assert reason in refused(folder, value, target)


def test_a_long_list_is_cut(folder: str) -> None:
    said = refused(folder, {f"k{i}": i for i in range(1000)}, "safetensors")
    assert "1,000 leaves" in said and "980 more" in said and len(said) < 3000


def test_tied_tensors_are_stored_one_by_one_if_asked(folder: str) -> None:
    torch.save({"one": TIED, "two": TIED}, f"{folder}/source.pt")
    convert(f"{folder}/source.pt", f"{folder}/x.safetensors", untie=True)
    convert(f"{folder}/x.safetensors", f"{folder}/back.pt")
    assert_same({"one": TIED, "two": TIED.clone()}, torch.load(f"{folder}/back.pt"))


def test_formats_that_keep_ties_keep_them(folder: str) -> None:
    value = {"one": TIED, "two": TIED, "part": TIED[1:]}
    torch.save({"one": TIED, "two": TIED}, f"{folder}/source.pt")
    convert(f"{folder}/source.pt", f"{folder}/snapshot")
    convert(f"{folder}/snapshot", f"{folder}/back.pt")
    assert_same({"one": TIED, "two": TIED}, torch.load(f"{folder}/back.pt"))
    torch.save(value, f"{folder}/views.pt")
    convert(f"{folder}/views.pt", f"{folder}/again.pt")
    assert_same(value, torch.load(f"{folder}/again.pt"))
    assert os.path.getsize(f"{folder}/again.pt") < os.path.getsize(f"{folder}/views.pt") + 200


@pytest.mark.parametrize("make", [lambda: torch.eye(4).to_sparse(), lambda: torch.ones(2, dtype=torch.complex128)])
def test_torch_and_snapshots_have_special_tensors(folder: str, make: Callable[[], torch.Tensor]) -> None:
    torch.save({"x": make()}, f"{folder}/source.pt")
    convert(f"{folder}/source.pt", f"{folder}/snapshot")
    convert(f"{folder}/snapshot", f"{folder}/back.pt")
    assert torch.equal(torch.load(f"{folder}/back.pt")["x"].to_dense(), make().to_dense())


# --- the call itself ------------------------------------------------------------------------------------------------


def test_a_target_that_is_there_stays_as_it_is(folder: str) -> None:
    torch.save({"x": torch.ones(3)}, f"{folder}/source.pt")
    os.mkdir(f"{folder}/empty")
    with open(f"{folder}/file", "w") as file:
        file.write("mine")
    os.symlink("nowhere", f"{folder}/link")
    for name in ("source.pt", "empty", "file", "link"):
        for target in ("torch", "snapshot"):
            with pytest.raises(memstore.errors.AlreadyExistsError, match=name):
                convert(f"{folder}/source.pt", f"{folder}/{name}", target_as=target)
    assert sorted(os.listdir(folder)) == ["empty", "file", "link", "source.pt"]


def test_a_target_in_its_source_is_refused(folder: str) -> None:
    torch.save({"x": torch.ones(3)}, f"{folder}/source.pt")
    convert(f"{folder}/source.pt", f"{folder}/snapshot")
    with pytest.raises(ValueError, match="lies in the source"):
        convert(f"{folder}/snapshot", f"{folder}/snapshot/model.pt")


def test_paths_and_formats_that_are_wrong(folder: str) -> None:
    torch.save({"x": torch.ones(3)}, f"{folder}/source.pt")
    os.mkdir(f"{folder}/nothing")
    for format in (None, *FORMATS):
        with pytest.raises(FileNotFoundError, match="no such file or folder: '.*missing'"):
            convert(f"{folder}/missing", f"{folder}/target", source_as=format)
    with pytest.raises(memstore.errors.NotAStoreError, match="--from"):
        convert(f"{folder}/nothing", f"{folder}/target")
    with pytest.raises(memstore.errors.NotAStoreError, match="make it first"):
        convert(f"{folder}/source.pt", f"{folder}/no/such/target")
    with pytest.raises(ValueError, match="'torchsnapshot' is no format"):
        convert(f"{folder}/source.pt", f"{folder}/target", target_as="torchsnapshot")
    with pytest.raises(ValueError, match="'gguf'"):
        convert(f"{folder}/source.pt", f"{folder}/target", source_as="gguf")


# --- pickle ---------------------------------------------------------------------------------------------------------


class Custom:
    """Only pickle has a way to store it."""

    def __init__(self, number: int = 7) -> None:
        self.number = number


def test_pickle_is_read_only_where_it_is_allowed(folder: str) -> None:
    assert "allow_pickle=True" in refused(folder, {"x": torch.ones(1), "y": Custom()}, "snapshot")
    convert(f"{folder}/source.pt", f"{folder}/again.pt", allow_pickle=True)
    assert torch.load(f"{folder}/again.pt", weights_only=False)["y"].number == 7


def test_objects_of_checkpoints_need_it_too(folder: str) -> None:
    torch.distributed.checkpoint.save({"x": torch.ones(1), "y": Custom()}, checkpoint_id=f"{folder}/c", no_dist=True)
    with pytest.raises(memstore.errors.UnsupportedValueError, match=r"'y'.*allow_pickle=True"):
        convert(f"{folder}/c", f"{folder}/target.pt")
    convert(f"{folder}/c", f"{folder}/target.pt", allow_pickle=True)
    assert torch.load(f"{folder}/target.pt", weights_only=False)["y"].number == 7


# --- values without an end --------------------------------------------------------------------------------------------


def within_itself(kind: type) -> Any:
    value: Any = {"w": torch.ones(2)} if kind is dict else [torch.ones(2)]
    if kind is dict:
        value["me"] = value
    else:
        value.append(value)
    return value if kind is dict else {"list": value}


def nested(levels: int) -> Any:
    value: Any = {"w": torch.ones(2)}
    for _ in range(levels):
        value = {"a": value}
    return value


def shared_on_each_level(levels: int) -> Any:
    """A file of some kilobytes, whose leaves are 2**levels."""
    value: Any = {"w": torch.ones(2)}
    for _ in range(levels):
        value = {"a": value, "b": value}
    return value


def endless(kind: str) -> tuple[Any, str]:
    if kind == "dict":
        return within_itself(dict), r"value\['me'\]: a container that contains itself: value"
    if kind == "list":
        return within_itself(list), r"value\['list'\]\[1\]: a container that contains itself: value\['list'\]"
    if kind == "deep":
        return nested(2000), r"value\['a'\]\['a'\]\['a'\]\.\.\.: more than 200 levels of containers"
    return shared_on_each_level(60), "stand in so many places"


KINDS = ["dict", "list", "deep", "shared"]


@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_without_an_end_is_named(folder: str, kind: str, target: str) -> None:
    value, said = endless(kind)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # for torch.save, which the file comes from
    try:
        torch.save(value, f"{folder}/source.pt")
    finally:
        sys.setrecursionlimit(limit)
    with pytest.raises(memstore.UnsupportedValueError, match=said) as caught:
        convert(f"{folder}/source.pt", f"{folder}/target", target_as=target)
    assert f"{folder}/source.pt" in str(caught.value) and os.listdir(folder) == ["source.pt"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_that_stores_a_value_runs_out_of_stack(folder: str, kind: str) -> None:
    value, said = endless(kind)
    with memstore.open(f"{folder}/store") as store:
        calls: list[Callable[[], Any]] = [
            lambda: store.put("k", value),
            lambda: store.put_many({"k": value}),
            lambda: memstore.Snapshot.take(f"{folder}/s", {"a": memstore.StateDict(value)}),
            lambda: memstore.Snapshot.async_take(f"{folder}/s", {"a": memstore.StateDict(value)}),
            lambda: dcp.save(value, checkpoint_id=f"{folder}/s"),
            lambda: dcp.async_save(value, checkpoint_id=f"{folder}/s"),
            lambda: memstore.fake.fake_like(value),
        ]
        for call in (
            calls[4:] if kind == "shared" else calls
        ):  # others walk a while; test_refusals of structure has them
            with pytest.raises((memstore.UnsupportedValueError, CheckpointException)) as caught:
                call()
            errors = [one[0] for one in getattr(caught.value, "failures", {0: [caught.value]}).values()]
            assert all(isinstance(error, memstore.UnsupportedValueError) for error in errors)
            assert re.search("itself|more than 200 levels|so many places", str(errors[0])), errors
        assert list(store.keys()) == []
    assert os.listdir(folder) == ["store"]


def test_two_hundred_levels_are_fine(folder: str) -> None:
    torch.save(nested(199), f"{folder}/source.pt")
    convert(f"{folder}/source.pt", f"{folder}/target.pt")
    dcp.save(nested(199), checkpoint_id=f"{folder}/c")


# --- tensors of a few bytes, and of any size --------------------------------------------------------------------------


@pytest.mark.parametrize("target", WRITTEN)
def test_a_tensor_that_is_expanded_beyond_measure_is_named_before_anything_is_written(folder: str, target: str) -> None:
    said = refused(folder, {"b": torch.ones(2), "w": torch.ones(1).expand(2**40)}, target)
    assert "value['w'] is expanded: its elements take 4,398,046,511,104 bytes, and lie in 4" in said
    assert "max_expanded is 17,179,869,184" in said


@pytest.mark.parametrize("target", ["torch", "safetensors", "memstore-dcp"])
def test_how_much_may_be_expanded_is_for_the_caller_to_say(folder: str, target: str) -> None:
    """All tensors together: many small ones are as large as one."""
    value = {f"w{i}": torch.full((1,), float(i)).expand(1000) for i in range(5)}
    text = refused(folder, value, target, max_expanded=5 * 3996 - 1)
    assert "19,980 bytes more than the source, and max_expanded is 19,979" in text
    convert(f"{folder}/source.pt", f"{folder}/target", target_as=target, max_expanded="20kB")
    with pytest.raises(ValueError, match="a size is a positive number"):
        convert(f"{folder}/source.pt", f"{folder}/other", target_as=target, max_expanded="much")


def test_no_call_that_writes_elements_writes_an_expansion_for_hours(folder: str) -> None:
    value = {"w": torch.ones(1).expand(2**40)}
    with memstore.open(f"{folder}/store") as store:
        store.put("k", value)
        assert store.get("k")["w"].stride() == (0,)
        calls: list[Callable[[], Any]] = [
            lambda: store.export("k", f"{folder}/x.safetensors"),
            lambda: store.export("k", f"{folder}/x", format="memmap"),
            lambda: memstore.Snapshot.take(f"{folder}/x", {"a": memstore.StateDict(value)}),
            lambda: memstore.Snapshot.async_take(f"{folder}/x", {"a": memstore.StateDict(value)}),
        ]
        for call in calls:
            with pytest.raises(memstore.UnsupportedValueError, match=r"w.*4,398,046,511,104 bytes, and lie in 4"):
                call()
        with pytest.raises(CheckpointException, match="w: a tensor .* expanded"):
            dcp.save(value, checkpoint_id=f"{folder}/x")
        assert os.listdir(folder) == ["store"]
        store.export("k", f"{folder}/x.pt", format="torch")
        torch.save(value, f"{folder}/source.pt")
        store.attach("copy", f"{folder}/source.pt", copy=True)
        assert store.get("copy")["w"].stride() == (0,)
    assert torch.load(f"{folder}/x.pt")["w"].stride() == (0,)


# --- leaves that a target could have only as pickles ------------------------------------------------------------------


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


def refused_leaves(folder: str, source: str, target: str) -> str:
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
    check_rich(refused_leaves(folder, "source", target))


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
    said = refused_leaves(folder, "source", target)
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
        said = refused_leaves(folder, "source.pt", target)
    assert "2 leaves" in said and "value['one']: " in said and "value['two'][1]['three']: " in said


def test_streams_are_items_of_memstores_checkpoints(folder: str) -> None:
    stream = io.BytesIO(b"pickled by the trainer")
    stream.seek(3)
    dcp.save({"x": torch.ones(2), "stream": stream}, checkpoint_id=f"{folder}/source")
    convert(f"{folder}/source", f"{folder}/again", target_as="memstore-dcp")
    loaded: dict[str, Any] = {"x": torch.zeros(2), "stream": None}
    dcp.load(loaded, checkpoint_id=f"{folder}/again")
    assert loaded["stream"].getvalue() == stream.getvalue() and loaded["stream"].tell() == 3
    assert "value['stream']: of the class _io.BytesIO" in refused_leaves(folder, "source", "torch")


def test_what_tensordict_would_pickle_is_refused(folder: str) -> None:
    Snapshot.take(f"{folder}/source", {"state": StateDict(x=torch.ones(1), took=datetime.timedelta(hours=1))})
    assert "value['took']" in (said := refused_leaves(folder, "source", "memmap")) and "allow_pickle=True" in said


# -- what is a pickle --------------------------------------------------------------------------------------------------

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
