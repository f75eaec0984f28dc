"""The files of a store, read by others: each segment by the safetensors library, the slots as the format says."""

from __future__ import annotations

import json
import os
import re

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from tensordict import TensorDict

import memstore
from memstore.structure import iter_tensors
from tests.examples import examples
from tests.support.equality import assert_same
from tests.support.strategies import values

SLOTS = re.compile(
    r"put=([0-9a-f]{16}) state=live    version=([0-9a-f]{16}) batch=([0-9a-f]{16})/([0-9a-f]{8}) check=.*"
)


def segments(store: memstore.Store) -> list[str]:
    folder = f"{store.root}/segments"
    return [f"{folder}/{name}" for name in sorted(os.listdir(folder))]


VARIED = {
    "floats": {"a": torch.randn(30, 40), "b": torch.randn(500, dtype=torch.float64)},
    "tensordict": TensorDict({"x": torch.randn(7, 99), "deep": {"y": torch.arange(7)}}, [7]),
    "large": torch.randn(700_000),
    "../we ird\n🐍": torch.ones(2000, dtype=torch.bfloat16),
    "halves": {"h": torch.randn(1001).half(), "i": torch.arange(77, dtype=torch.int16), "t": torch.ones(3).bool()},
    "names": {"a.b": torch.ones(900), "a": {"b": torch.zeros(900)}, "__metadata__": torch.ones(5), "__pad__": torch.ones(3)},  # noqa: E501
    "objects": [torch.ones(1000), {"lr": 0.1, 3: None, "text": 'quo"te\\'}],
}  # fmt: skip


@pytest.mark.embedded
def test_each_is_a_safetensors_file_with_the_tensors_under_their_names(store: memstore.Store) -> None:
    store.put_many(VARIED)
    assert len(segments(store)) == len(VARIED)
    read = {}
    for path in segments(store):
        with safetensors.safe_open(path, "pt") as file:
            key = file.metadata()["key"]
            read[key] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert set(read) == set(VARIED)
    for key, found in read.items():
        expected = {".".join(map(str, leaf.name)): leaf for leaf in store.info(key).leaves}
        assert expected.keys() <= found.keys() or key in ("names", "large", "../we ird\n🐍")
        for _, leaf in iter_tensors(store.get(key)):
            assert any(leaf.dtype == other.dtype and torch.equal(leaf, other) for other in found.values()), key
    assert_same(VARIED["floats"]["a"], read["floats"]["a"])
    assert_same(VARIED["tensordict"]["deep", "y"], read["tensordict"]["deep.y"])
    names = read["names"]
    assert names["a.b"].sum() + names["a.b#1"].sum() == 900 and "__metadata__#1" in names


@pytest.mark.embedded
def test_their_slots_say_what_the_catalog_says(store: memstore.Store) -> None:
    version = store.put("alone", torch.ones(1000))
    versions = store.put_many({"a": torch.ones(1000), "inline": 1, "b": torch.zeros(1000)})
    found = {}
    for path in segments(store):
        with safetensors.safe_open(path, "np") as file:
            match = SLOTS.fullmatch(file.metadata()["memstore"])
            assert match, file.metadata()["memstore"]
            found[file.metadata()["key"]] = [int(text, 16) for text in match.groups()]
            assert file.metadata()["store"] == json.load(open(f"{store.root}/memstore.json"))["store"]  # noqa: SIM115
    assert {key: slots[1] for key, slots in found.items()} == {
        "alone": version, "a": versions["a"], "b": versions["b"],
    }  # fmt: skip
    assert found["a"][2] == found["b"][2] == found["a"][0] and found["a"][3] == found["b"][3] == 2
    assert found["alone"][2] == found["alone"][0] and found["alone"][3] == 1
    assert len({slots[0] for slots in found.values()}) == 3


@pytest.mark.embedded
def test_their_length_is_header_data_and_little_slack(store: memstore.Store) -> None:
    store.put_many(VARIED)
    for key in VARIED:
        (path,) = store.info(key).files
        with open(path, "rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
        assert header % 4096 == 0
        room = os.path.getsize(path) - header - store.info(key).nbytes
        assert 0 <= room <= max(4096, store.info(key).nbytes // 8)


@pytest.mark.embedded
@given(value=values())
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_values_segment_is_a_safetensors_file(store: memstore.Store, value: object) -> None:
    store.delete("key", missing_ok=True)
    store.gc()
    store.put("key", [value, torch.zeros(2000)])
    (path,) = segments(store)
    with safetensors.safe_open(path, "np") as file:
        names = list(file.keys())
        assert len(names) == len(set(names)) > 0
        assert file.metadata()["key"] == "key"


@pytest.mark.embedded
def test_twenty_thousand_leaves_are_a_file_too(store: memstore.Store) -> None:
    value = [torch.full((1,), float(number)) for number in range(20_000)]
    store.put("key", value)
    with safetensors.safe_open(store.info("key").files[0], "pt") as file:
        assert file.get_tensor("12345") == 12345
    assert store.get("key")[-1] == 19_999


@pytest.mark.embedded
def test_a_header_beyond_the_formats_limit_is_refused(store: memstore.Store) -> None:
    with pytest.raises(memstore.UnsupportedValueError, match="100,000,000") as caught:
        store.put("key", {"t": torch.zeros(1000), "text": "x" * 80_000_000})
    assert caught.value.key == "key"
    assert list(store) == [] and segments(store) == []


@pytest.mark.embedded
def test_no_key_becomes_a_path(store: memstore.Store) -> None:
    before = set(os.listdir(os.path.dirname(store.root)))
    for key in ("../escape", "/tmp/escape", "a/../../b", "..", "segments/x", "x\n"):
        store.put(key, torch.ones(1000))
    assert all(re.fullmatch(r"[0-9a-f]{16}\.safetensors", os.path.basename(path)) for path in segments(store))
    assert set(os.listdir(os.path.dirname(store.root))) == before
