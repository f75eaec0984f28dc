"""What ranks hold becomes one value: dicts merge by key, boxes cover their leaves, and who disagrees is named."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import memstore
from memstore import TensorShard, structure
from tests.support.equality import assert_same

numbers = iter(range(1_000_000))


@pytest.fixture(scope="module", params=[False, True], ids=["", "checksum"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[memstore.Store]:
    place = tmp_path_factory.mktemp("merge") / "store"
    with memstore.open(place, checksum=request.param, verify=True) as opened:
        yield opened


def put(store: memstore.Store, values: Sequence[Any], key: str = "key", **options: Any) -> int:
    """Each rank puts its value, in this process."""
    attempt, world_size = f"attempt {next(numbers)}", len(values)
    version: Any = 0
    for rank, value in enumerate(values):
        is_last = rank == world_size - 1
        version = store.put_sharded(
            key, value, attempt=attempt, rank=rank, world_size=world_size, wait=is_last, timeout=10, **options
        )
    assert not store.pending(key)
    return version


def rows(tensor: torch.Tensor, rank: int, world_size: int) -> TensorShard:
    size = -(-len(tensor) // world_size)
    start = min(rank * size, len(tensor))
    return TensorShard(tensor[start : start + size], tuple(tensor.shape), (start, *[0] * (tensor.ndim - 1)))


def test_ranks_may_hold_different_leaves(store: memstore.Store) -> None:
    stages = [{"layers": {str(rank): {"w": torch.full((3,), float(rank))}}, "step": 7} for rank in range(3)]
    put(store, stages)
    got = store.get("key")
    assert list(got) == ["layers", "step"] and list(got["layers"]) == ["0", "1", "2"] and got["step"] == 7
    assert all(torch.equal(got["layers"][str(rank)]["w"], stages[rank]["layers"][str(rank)]["w"]) for rank in range(3))


def test_a_state_dict_keeps_its_class_and_its_metadata(store: memstore.Store) -> None:
    def stage(rank: int) -> OrderedDict[str, Any]:
        value: Any = OrderedDict({f"{rank}.w": torch.ones(2)})
        value._metadata = OrderedDict({"": {"version": 1}, str(rank): {"version": rank}})
        return value

    put(store, [stage(0), stage(1)])
    got = store.get("key")
    assert type(got) is OrderedDict and list(got) == ["0.w", "1.w"]
    assert dict(got._metadata) == {"": {"version": 1}, "0": {"version": 0}, "1": {"version": 1}}


def test_tensordicts_merge_and_their_devices_are_left_out(store: memstore.Store) -> None:
    data = torch.arange(12.0).view(4, 3)
    values = [TensorDict({f"r{rank}": torch.ones(4, 2) * rank}, [4], device="cpu") for rank in range(2)]
    put(store, values)
    got = store.get("key")
    assert got.batch_size == torch.Size([4]) and sorted(got.keys()) == ["r0", "r1"] and got.device is None
    put(store, [{"td": values[0], "w": rows(data, rank, 2)} for rank in range(2)])
    assert torch.equal(store.get("key")["w"], data)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], r"a list of 1 on rank 0 and a list of 2 on rank 1"),
        ({"a": [torch.ones(1)]}, {"a": (torch.ones(1),)}, r"\['a'\] is a list of 1 on rank 0 and a tuple of 1"),
        ({"a": torch.ones(1)}, {"a": 3}, r"\['a'\] is a tensor on rank 0 and an object on rank 1"),
        ({"a": torch.ones(1)}, {"a": {"b": torch.ones(1)}}, r"\['a'\] is a tensor on rank 0 and a dict on rank 1"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, r"\['a'\] has shape \[2\] on rank 0 and \[3\] on rank 1"),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).int()}, r"\['a'\] has dtype float32 on rank 0 and int32 on rank 1"),
        (
            {"a": torch.ones(2)},
            {"a": TensorShard(torch.ones(2), (2,), (0,))},
            r"\['a'\] has kind whole tensor on rank 0 and shard on rank 1",
        ),
        (
            TensorDict({"a": torch.ones(2)}, [2]),
            TensorDict({"a": torch.ones(2)}, []),
            r"a TensorDict of batch size \[2\] on rank 0 and a TensorDict of batch size \[\]",
        ),
        (
            {"a": TensorShard(torch.ones(2), (4,), (0,))},
            {"a": TensorShard(torch.ones(2), (5,), (2,))},
            r"\['a'\] has shape \[4\] on rank 0 and \[5\] on rank 1",
        ),
        (
            {"a": TensorShard(torch.ones(2), (4,), (0,))},
            {"a": TensorShard(torch.ones(3), (4,), (1,))},
            r"\['a'\]: rank 0 holds \[0:2\] and rank 1 \[1:4\], which overlap",
        ),
        (
            {"a": TensorShard(torch.ones(4), (4,), (0,))},
            {"a": TensorShard(torch.zeros(4), (4,), (0,))},
            r"\['a'\]: ranks 0 and 1 hold \[0:4\] with different bytes",
        ),
    ],
)
def test_who_disagrees_is_named(store: memstore.Store, first: Any, second: Any, told: str) -> None:
    before = store.put("key", 1)
    with pytest.raises(memstore.ShardMismatchError, match=told) as caught:
        put(store, [first, second])
    assert caught.value.key == "key" and store.version("key") == before and store.stats().pending_bytes == 0


def test_what_nobody_holds_is_named(store: memstore.Store) -> None:
    before = store.put("key", 1)
    with pytest.raises(memstore.PartialCommitError, match=r"none holds value\['a'\]\[2:4, 0:3\]") as caught:
        put(store, [{"a": TensorShard(torch.ones(2, 3), (6, 3), (start, 0))} for start in (0, 4)])
    assert caught.value.missing_boxes == (("value['a']", (2, 0), (2, 3)),) and caught.value.missing_ranks == ()
    assert store.version("key") == before


def test_the_lowest_rank_s_plain_values_are_stored_and_others_are_told(
    store: memstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    values = [{"mean": torch.full((3,), float(rank)), "lr": rank // 2, "same": torch.ones(2)} for rank in range(3)]
    with caplog.at_level(logging.WARNING, "memstore"):
        put(store, values, key := f"key {next(numbers)}")  # what was told once of a key isn't told again
    assert_same(store.get(key), values[0])
    (text,) = [record.getMessage() for record in caplog.records]
    assert "value['mean'] (ranks 0, 1, 2), value['lr'] (ranks 0, 2)" in text and "same" not in text


def test_equal_values_are_told_of_by_nobody(store: memstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    value = {"nan": math.nan, "tensor": torch.tensor([math.nan]), "list": [1, (2, None)], "big": "x" * 5000}
    with caplog.at_level(logging.WARNING, "memstore"):
        put(store, [dict(value), dict(value)])
    assert caplog.records == []
    assert_same(store.get("key"), value)


def test_equal_boxes_are_stored_once(store: memstore.Store) -> None:
    data = torch.randn(100_000)
    alone = put(store, [{"w": TensorShard(data, (100_000,), (0,))}], "alone")
    put(store, [{"w": TensorShard(data, (100_000,), (0,))}, {"w": TensorShard(data.clone(), (100_000,), (0,))}])
    assert alone and torch.equal(store.get("key")["w"], data)
    assert len(store.info("key").leaves[0].shards) == 1


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_few_rows_for_many_ranks(store: memstore.Store, world_size: int) -> None:
    """Some ranks hold nothing of a leaf, some leaves have no elements."""
    ranks = range(world_size)
    value = {"w": torch.arange(6).view(3, 2), "none": torch.ones(0, 4), "scalar": torch.tensor(3.0)}
    put(
        store,
        [{name: rows(one, rank, world_size) if one.ndim else one for name, one in value.items()} for rank in ranks],
    )
    assert_same(store.get("key"), value)
    assert store.verify(["key"]).ok


def test_a_rank_may_hold_nothing(store: memstore.Store) -> None:
    put(store, [{}, {"w": torch.ones(2)}, {}])
    assert_same(store.get("key"), {"w": torch.ones(2)})
    put(store, [{"n": 1}, {"n": 1}])
    assert store.get("key") == {"n": 1} and store.verify(["key"]).ok


def test_tied_leaves_stay_tied(store: memstore.Store) -> None:
    weight = torch.randn(8, 4)

    def held(rank: int) -> dict[str, Any]:
        part, plain = rows(weight, rank, 2), torch.arange(10.0)
        return {"a": part, "b": part, "c": plain, "d": plain, "slice": plain[2:5]}

    put(store, [held(0), held(1)])
    got = store.get("key")
    assert torch.equal(got["a"], weight)
    got["a"][0, 0] = 99.0
    got["c"][3] = 98.0
    assert got["b"][0, 0] == 99.0 and got["d"][3] == 98.0 and got["slice"][1] == 98.0


def test_kinds_of_leaves_are_kept(store: memstore.Store) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    value = {"p": parameter, "j": jagged, "t": torch.randn(3, 4).t(), "e": torch.ones(1).expand(5)}
    put(store, [{"plain": value, "w": rows(torch.arange(8), rank, 2)} for rank in range(2)])
    got = store.get("key")
    assert_same(got["plain"], value)
    assert got["plain"]["t"].stride() == value["t"].stride() and isinstance(got["plain"]["p"], torch.nn.Parameter)


def test_a_cast_concerns_the_same_leaves_as_that_of_a_put(store: memstore.Store) -> None:
    jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    plain = {"f": torch.randn(5), "i": torch.arange(5), "j": jagged, "none": torch.ones(0)}
    store.put("plain", plain, dtype=torch.bfloat16)
    data = torch.randn(7, 3)
    put(store, [{"plain": plain, "w": rows(data, rank, 3)} for rank in range(3)], dtype=torch.bfloat16)
    got = store.get("key")
    assert_same(got["plain"], store.get("plain"))
    assert torch.equal(got["w"], data.to(torch.bfloat16))


def test_two_leaves_of_one_name_are_refused(store: memstore.Store) -> None:
    with pytest.raises(memstore.UnsupportedValueError, match="two leaves have this name"):
        put(store, [{1.0: torch.ones(1), "1.0": torch.ones(1)}])


def test_what_only_pickle_can_store_is_refused(store: memstore.Store) -> None:
    with pytest.raises(memstore.UnsupportedValueError, match="value\\['f'\\]"):
        put(store, [{"f": lambda: None, "w": rows(torch.ones(2), 0, 1)}])


@given(st.data())
def test_any_grid_of_boxes_gives_the_whole(store: memstore.Store, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.int8, torch.bfloat16, torch.complex64, torch.bool]))
    tensor = (torch.arange(math.prod(shape)) % 127).view(shape).to(dtype)
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for size in shape:
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))})
        sides = list(zip(cuts, cuts[1:], strict=False)) or [(0, 0)]
        boxes = [(*box, side) for box in boxes for side in sides]
    shards = [
        TensorShard(tensor[tuple(slice(*side) for side in box)], shape, tuple(start for start, _ in box))
        for box in boxes
    ]
    data.draw(st.randoms(use_true_random=False)).shuffle(shards)
    put(store, [{"w": shard, "all": torch.ones(2)} for shard in shards])
    assert torch.equal(store.get("key")["w"], tensor)
    assert torch.equal(store.view("key")["w"].clone(), tensor)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"rank": False}, TypeError, "rank is a whole number, and not False"),
        ({"rank": 0.0}, TypeError, "rank is a whole number"),
        ({"world_size": 10**10}, ValueError, "65,536 at most"),
        ({"world_size": True}, TypeError, "world_size is a whole number"),
        ({"attempt": "\ud800"}, ValueError, "lone surrogate"),
        ({"expect_version": True}, TypeError, "expect_version is a whole number"),
        ({"expect_version": 1.5}, TypeError, "expect_version is a whole number"),
        ({"lease": math.nan}, ValueError, "lease is seconds"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_written(
    store: memstore.Store, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    place = {"attempt": f"wrong {next(numbers)}", "rank": 0, "world_size": 1}
    with pytest.raises(error, match=told):
        store.put_sharded("wrong", torch.ones(2), **(place | options))
    assert store.pending() == () and store.stats().pending_bytes == 0 and "wrong" not in store


def test_numbers_of_other_kinds_are_taken(store: memstore.Store) -> None:
    options: Any = {"rank": np.int64(0), "world_size": torch.tensor(1), "expect_version": np.int64(store.put("n", 1))}
    assert store.put_sharded("n", torch.ones(2), attempt=f"numbers {next(numbers)}", **options)


def test_leaves_that_are_cut_alike_are_looked_at_once(store: memstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    read_leaf = structure.read_leaf
    monkeypatch.setattr(structure, "read_leaf", lambda *arguments: looked.append(arguments) or read_leaf(*arguments))
    data, new = torch.randn(8, 3), f"looked at {next(numbers)}"  # the process knows no merge of these names yet
    put(store, [{f"{new} {i}": rows(data, rank, 4) for i in range(50)} for rank in range(4)])
    assert 0 < len(looked) <= 4
    got = store.get("key")
    assert len(got) == 50 and all(torch.equal(leaf, data) for leaf in got.values())


def test_devices_are_left_out_of_trees_that_are_the_same(store: memstore.Store) -> None:
    value = {"td": TensorDict({"a": torch.ones(2)}, [2], device="cpu")}
    put(store, [value, value])
    assert store.get("key")["td"].device is None
