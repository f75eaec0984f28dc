"""What a missing key's error says: keys like it, or the leaf that was meant; and what it never does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstore
from memstore.listing.absent import near
from tests.store.backends import open_store

pytestmark = pytest.mark.embedded

NEAR = {
    "a letter is missing": ("plicy", ["policy", "value"], ["policy"]),
    "one too many": ("policcy", ["policy", "value"], ["policy"]),
    "two change places": ("polciy", ["policy", "value"], ["policy"]),
    "two are missing": ("plcy", ["policy", "value"], ["policy"]),
    "capitals": ("Policy", ["policy", "value"], ["policy"]),
    "another joint": ("run-3/step_4", ["run_3/step-4", "run_4"], ["run_3/step-4"]),
    "a plural": ("weight", ["weights", "hat"], ["weights"]),
    "a part of one": ("policy", ["policy/step 3/model", "value"], ["policy/step 3/model"]),
    "longer than one": ("policy/model", ["policy", "value"], ["policy"]),
    "nothing is like it": ("weights", ["policy", "value", "x"], []),
    "there are none": ("weights", [], []),
}


@pytest.mark.parametrize("case", NEAR)
def test_keys_that_may_be_meant(case: str) -> None:
    key, others, expected = NEAR[case]
    assert near(key, others) == expected


def test_the_likeliest_come_first_and_no_more_than_three() -> None:
    others = [f"layer.{number}" for number in range(100)]
    assert near("layer.x", others) == ["layer.0", "layer.1", "layer.2"]
    assert near("layer.1O", others) == ["layer.1"]


@given(st.text("ab/.", min_size=1, max_size=12), st.lists(st.text("ab/.", min_size=1, max_size=12), max_size=9))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_any_keys_can_be_compared(key: str, others: list[str]) -> None:
    found = near(key, others)
    assert set(found) <= set(others) and len(found) <= 3


@pytest.mark.parametrize("length", [100, 499])
def test_long_keys_are_compared_too(length: int) -> None:
    key = "ab/" * (length // 3 - 2) + "leaf"
    assert near(key, [f"{key}x", "other"]) == [f"{key}x"]


def advice(call: Callable[[], Any]) -> str:
    with pytest.raises(memstore.KeyNotFoundError) as caught:
        call()
    return str(caught.value)


def test_a_key_in_a_large_store_is_found_near_its_place(store: memstore.Store) -> None:
    store.put_many({f"run {number:05}/weights": number for number in range(5000)})
    assert "'run 04321/weights'" in advice(lambda: store.get("run 04321/wieghts"))
    assert "'run 04321/weights'" in advice(lambda: store.get("run 04321"))


def test_a_leaf_is_named_in_whatever_way_it_is_written(store: memstore.Store) -> None:
    store.put("model", {"encoder": {"0.weight": torch.ones(2)}, "heads": [torch.ones(1), torch.ones(1)]})
    for wrong, right in {
        "model/encoder/0.weight": "get('model')['encoder']['0.weight']",
        "model.encoder.0.weight": "get('model')['encoder']['0.weight']",
        "model/encoder": "get('model')['encoder']",
        "model/heads/1": "get('model')['heads'][1]",
    }.items():
        assert right in advice(lambda wrong=wrong: store.get(wrong))


def test_the_longest_key_is_taken(store: memstore.Store) -> None:
    store.put_many({"a": {"b/c": torch.ones(1)}, "a/b": {"c": torch.ones(1)}})
    assert "get('a/b')['c']" in advice(lambda: store.get("a/b/c"))


def test_rows_are_no_leaves_of_a_get(store: memstore.Store) -> None:
    store.create_dataset("frames", {"x": ((), torch.float32)}, capacity=3)
    assert advice(lambda: store.get("frames/x")) == "no key 'frames/x': did you mean 'frames'?"


def test_all_that_are_missing_are_named(store: memstore.Store) -> None:
    store.put("there", 1)
    names = [f"missing {number}" for number in range(20)]
    said = advice(lambda: store.get_many(["there", *names]))
    assert "'missing 9', ..., 20 of the 21" in said and "missing 10" not in said
    assert "20 of the 21" in advice(lambda: store.delete_many(["there", *names]))
    assert store.get("there") == 1


def test_a_key_that_has_parts_only_says_so(store: memstore.Store) -> None:
    store.put("there", 1)
    shard = memstore.TensorShard(torch.ones(1, 4), global_shape=(2, 4), offsets=(0, 0))
    store.put_sharded("halves", shard, attempt="first", rank=0, world_size=2, wait=False)
    with pytest.raises(memstore.PartialCommitError, match="waits for rank 1;"):
        store.get("halves")
    assert "no key 'halves'" in advice(lambda: store.version("halves"))
    for keys in (["halves"], ["halves", "there"], ["there", "halves"]):
        with pytest.raises(memstore.PartialCommitError, match="waits for rank 1;") as caught:
            store.get_many(keys)
        assert (caught.value.key, caught.value.missing_ranks) == ("halves", (1,))
    assert "no key 'nowhere'" in advice(lambda: store.get_many(["halves", "nowhere", "there"]))
    names = [f"missing {number}" for number in range(20)]
    assert "halves" not in advice(lambda: store.get_many(["halves", *names]))


def test_a_reader_is_told_too(root: str) -> None:
    open_store(root).close()
    with open_store(root, "r") as reader:
        assert advice(lambda: reader.get("policy")).startswith("no key 'policy': the store has none yet")
