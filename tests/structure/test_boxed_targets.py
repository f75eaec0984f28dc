"""get of entries in boxes, and into targets that hold a part of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

import memstore
from memstore import TensorShard
from memstore.sharding import Box, narrow_to
from memstore.structure import get_into
from tests.boxed import BoxedStore, grid, partitions
from tests.examples import examples
from tests.structure.roundtrip import stored
from tests.support.equality import assert_same

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.uint4)
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@pytest.fixture
def boxed(root: str) -> Iterator[BoxedStore]:
    with memstore.open(root, inline_limit=0) as store:
        yield BoxedStore(store)


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if dtype == torch.uint4:
        return torch.arange(count).remainder(16).to(torch.uint8).reshape(shape).view(dtype)
    return torch.arange(count).remainder(120).reshape(shape).to(dtype)


def state() -> dict[str, Any]:
    shared = torch.randn(5, 7)
    return {
        "w": torch.nn.Parameter(torch.randn(8, 6)),
        "tied": [shared, {"again": shared}],
        "td": TensorDict(a=torch.randn(4, 3), b=torch.arange(4), batch_size=4),
        "step": 7,
        "scalar": torch.tensor(2.5),
        "half": torch.randn(9, 2).bfloat16(),
    }


def shard(tensor: torch.Tensor, box: Box) -> TensorShard:
    """A part to be filled: zeros."""
    local = torch.zeros_like(narrow_to(tensor, box).contiguous())
    return TensorShard(local, tuple(tensor.shape), box.offsets)


# --- whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [grid(3), grid(1, 2), grid(2, 3), grid(1)])
def test_a_value_is_put_together(boxed: BoxedStore, layout: Any) -> None:
    value = state()
    boxed.put("key", value, layout)
    assert_same(value, boxed.store.get("key"))
    assert_same(value, boxed.store.get_many(["key"])["key"])
    assert_same(value, boxed.store.ref("key").get())


def test_a_bare_tensor_is_put_together(boxed: BoxedStore) -> None:
    value = torch.randn(64, 5)
    boxed.put("key", value, grid(4))
    got = boxed.store.get("key")
    assert torch.equal(got, value)
    got.add_(1)  # it is the getter's own
    assert torch.equal(boxed.store.get("key"), value)
    assert boxed.store.get("key", dtype=torch.float64).dtype == torch.float64


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_any_partition_is_put_together(boxed: BoxedStore, data: Any, shape: tuple[int, ...], dtype: Any) -> None:
    value = numbered(shape, dtype)
    boxes = data.draw(partitions(shape))
    boxed.put("key", [value, 3], lambda i, _: boxes, in_order=data.draw(st.booleans()))
    assert_same([value, 3], boxed.store.get("key"))


def test_boxes_that_lie_in_order_are_not_copied(boxed: BoxedStore, reads: Callable[[], Any]) -> None:
    value = {"rows": torch.randn(8, 5), "columns": torch.randn(8, 6)}
    boxed.put("key", value, lambda i, shape: (grid(4) if i == 0 else grid(1, 2))(i, shape), in_order=True)
    with reads() as count:
        assert torch.equal(boxed.store.get("key")["rows"], value["rows"])
        assert count() == value["columns"].nbytes


# --- into shards --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_any_layout_is_read_into_any_other(
    boxed: BoxedStore, reads: Callable[[], Any], data: Any, shape: tuple[int, ...], dtype: Any
) -> None:
    value = numbered(shape, dtype)
    cut, wanted = data.draw(partitions(shape)), data.draw(partitions(shape))
    boxed.put("key", [value], lambda i, _: cut)
    expected = value.view(torch.uint8) if dtype == torch.uint4 else value
    for box in wanted:
        out = shard(value, box) if dtype != torch.uint4 else shard_of_bytes(value, box)
        with reads() as count:
            assert boxed.store.get("key", out=[out])[0] is out
            assert count() == out.local.nbytes
        got = out.local.view(torch.uint8) if dtype == torch.uint4 else out.local
        assert torch.equal(got, narrow_to(expected, box))
        like = boxed.store.get("key", like=[out])[0]
        assert like.offsets == out.offsets and like.local.data_ptr() != out.local.data_ptr() or not got.numel()
        assert_same(like.local, out.local)


def shard_of_bytes(tensor: torch.Tensor, box: Box) -> TensorShard:
    local = torch.zeros(box.shape, dtype=torch.uint8).view(tensor.dtype)
    return TensorShard(local, tuple(tensor.shape), box.offsets)


@pytest.mark.parametrize("layout", [grid(3), grid(1)], ids=["in boxes", "whole"])
def test_only_what_a_target_holds_is_read(boxed: BoxedStore, reads: Callable[[], Any], layout: Any) -> None:
    value = {"a": torch.randn(12, 10), "b": {"c": torch.randn(6)}, "n": 3}
    boxed.put("key", value, layout)
    out = {"a": shard(value["a"], Box((5, 2), (4, 3))), "b": {"c": shard(value["b"]["c"], Box((0,), (2,)))}, "n": 0}
    with reads() as count:
        boxed.store.get("key", out=out)
        assert count() == (4 * 3 + 2) * 4
    assert torch.equal(out["a"].local, value["a"][5:9, 2:5]) and out["n"] == 3
    assert torch.equal(out["b"]["c"].local, value["b"]["c"][:2])


def test_entries_that_were_put_whole_or_attached(
    store: memstore.Store, tmp_path: Any, reads: Callable[[], Any]
) -> None:
    value = {"a": torch.randn(12, 10)}
    torch.save(value, tmp_path / "a.pt")
    store.put("put", value)
    store.attach("attached", tmp_path / "a.pt")
    for key in ("put", "attached"):
        out = {"a": shard(value["a"], Box((5, 2), (4, 3)))}
        with reads() as count:
            assert store.get(key, out=out) is out
            assert count() == 4 * 3 * 4
        assert torch.equal(out["a"].local, value["a"][5:9, 2:5])
        assert_same(store.ref(key).get(like=out)["a"].local, out["a"].local)


def test_plain_targets_of_boxes(boxed: BoxedStore) -> None:
    value = state()
    boxed.put("key", value, grid(3))
    out = state()
    boxed.store.get("key", out=out)
    assert_same(value, out)
    boxed.store.get("key", out=state() | {"step": 1})
    like = boxed.store.get("key", like=state() | {"half": torch.zeros(9, 2, dtype=torch.float64)})
    assert torch.equal(like["half"], value["half"].double())
    assert like["tied"][0] is like["tied"][1]["again"]


def test_a_strided_target(boxed: BoxedStore) -> None:
    value = torch.randn(6, 4)
    boxed.put("key", [value], grid(2, 2))
    base = torch.zeros(4, 12)
    boxed.store.get("key", out=[base[:, ::2].T])
    assert torch.equal(base[:, ::2].T, value) and not base[:, 1::2].any()
    boxed.store.get("key", out=[TensorShard(base[:, 1::2].T[1:3], (6, 4), (3, 0))])
    assert torch.equal(base[:, 1::2].T[1:3], value[3:5])


def test_a_target_of_a_rank_may_lack_what_others_hold(boxed: BoxedStore) -> None:
    value = {"first": torch.randn(4, 2), "second": torch.randn(4, 2), "epoch": 3}
    boxed.put("key", value, grid(2))
    out = {"second": shard(value["second"], Box((0, 0), (2, 2)))}
    assert torch.equal(boxed.store.get("key", out=out)["second"].local, value["second"][:2])
    assert torch.equal(boxed.store.get("key", like=out)["second"].local, value["second"][:2])
    with pytest.raises(memstore.StructureMismatchError, match=r"\['first'\].*\n.*\['epoch'\]"):
        boxed.store.get("key", out={"second": torch.zeros(4, 2)})
    with pytest.raises(memstore.StructureMismatchError, match=r"\['third'\]: a tensor in out, but none is stored"):
        boxed.store.get("key", out=out | {"third": out["second"]})


def test_all_differences_are_told_by_the_shapes_of_the_whole(boxed: BoxedStore) -> None:
    value = {"a": torch.randn(4, 2), "b": torch.randn(4), "c": torch.ones(3)}
    boxed.put("key", value, grid(2))
    out = {
        "a": TensorShard(torch.zeros(2, 2), (5, 2), (0, 0)),
        "b": TensorShard(torch.zeros(2, dtype=torch.float64), (4,), (0,)),
        "c": shard(value["c"], Box((0,), (2,))),
    }
    with pytest.raises(memstore.StructureMismatchError) as error:
        boxed.store.get("key", out=out)
    assert "stored with shape [4, 2], here [5, 2]" in str(error.value)
    assert "stored as torch.float32, here torch.float64" in str(error.value)
    assert not any(one.local.any() for one in out.values())
    with pytest.raises(memstore.StructureMismatchError, match=r"here \[5, 2\]"):
        boxed.store.get("key", like=out)
    assert (
        boxed.store.get("key", like=out | {"a": shard(value["a"], Box((0, 0), (1, 2)))})["b"].local.dtype
        == torch.float64
    )


def test_a_part_that_is_none(boxed: BoxedStore) -> None:
    boxed.put("key", [torch.randn(4)], grid(2))
    with pytest.raises(memstore.StructureMismatchError, match="does not lie within the whole"):
        boxed.store.get("key", out=[TensorShard(torch.zeros(2), (4,), (3,))])


def test_targets_that_share_memory(boxed: BoxedStore) -> None:
    value = {"a": torch.randn(4, 2), "b": torch.randn(4, 2)}
    boxed.put("key", value, grid(2))
    base = torch.zeros(4, 2)
    with pytest.raises(memstore.StructureMismatchError, match="it shares memory"):
        boxed.store.get("key", out={"a": TensorShard(base, (4, 2), (0, 0)), "b": TensorShard(base[1:], (4, 2), (0, 0))})
    assert not base.any()
    columns = {"a": TensorShard(base[:, :1], (4, 2), (0, 0)), "b": TensorShard(base[:, 1:], (4, 2), (0, 1))}
    boxed.store.get("key", out=columns)
    assert torch.equal(base, torch.stack([value["a"][:, 0], value["b"][:, 1]], 1))
    same = value | {"b": value["a"]}
    boxed.put("same", same, grid(2))
    one = TensorShard(base[:2], (4, 2), (2, 0))
    boxed.store.get("same", out={"a": one, "b": one})
    assert torch.equal(base[:2], value["a"][2:])
    other = TensorShard(base[:2], (4, 2), (1, 0))  # the same memory for other rows
    with pytest.raises(memstore.StructureMismatchError, match="it shares memory"):
        boxed.store.get("same", out={"a": one, "b": other})


def test_shared_memory_far_apart() -> None:
    """Two pairs of targets that overlap, one in small memory and one in large, which lie far from one another."""
    small, large = torch.zeros(6), torch.zeros(5_000_000)
    value = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4_000_000), "d": torch.ones(4_000_000)}
    out = {"a": small[:4], "b": small[2:], "c": large[:4_000_000], "d": large[1_000_000:]}
    get_into(*stored(value), out)
    assert small.all() and large.all()


def test_what_only_a_template_has_beside_boxes(boxed: BoxedStore) -> None:
    value = {"a": torch.randn(4, 2)}
    boxed.put("key", value, grid(2))
    like = {"a": torch.zeros(4, 2), "b": torch.arange(3.0), "c": TensorShard(torch.ones(2, 2), (4, 2), (2, 0))}
    got = boxed.store.get("key", like=like, strict=False)
    assert torch.equal(got["a"], value["a"]) and torch.equal(got["b"], like["b"])
    assert torch.equal(got["c"].local, torch.ones(2, 2)) and got["c"].local is not like["c"].local


def test_a_freed_part(boxed: BoxedStore) -> None:
    boxed.put("key", [torch.randn(4, 2)], grid(2))
    local = torch.zeros(2, 2)
    local.untyped_storage().resize_(0)
    with pytest.raises(memstore.StructureMismatchError, match="storage was freed"):
        boxed.store.get("key", out=[TensorShard(local, (4, 2), (0, 0))])


def test_under_the_modes_of_torch(boxed: BoxedStore) -> None:
    value = {"a": torch.randn(4, 2)}
    boxed.put("key", value, grid(2))
    for mode in (torch.inference_mode, torch.no_grad, FakeTensorMode):
        out = {"a": shard(value["a"], Box((1, 0), (3, 2)))}
        with mode():
            boxed.store.get("key", out=out)
            whole = boxed.store.get("key")["a"]
            like = boxed.store.get("key", like=out)["a"].local
        assert torch.equal(out["a"].local, value["a"][1:]) and torch.equal(like, out["a"].local)
        assert torch.equal(whole, value["a"]) and not whole.is_inference()
    with torch.inference_mode():
        inference = TensorShard(torch.zeros(4, 2), (4, 2), (0, 0))
    boxed.store.get("key", out={"a": inference})
    assert torch.equal(inference.local, value["a"])


# --- checksums and damage -----------------------------------------------------------------------------------------


def test_checksums_of_boxes(root: str) -> None:
    value = {"a": torch.ones(8, 4), "b": torch.ones(3)}
    with memstore.open(root, checksum=True, verify=True, inline_limit=0) as store:
        boxed = BoxedStore(store)
        boxed.put("key", value, lambda i, shape: grid(4)(i, shape) if i == 0 else None)
        assert_same(store.get("key"), value)
        (path,) = store.info("key").files
        with open(path, "r+b") as file:
            start = file.read().index(torch.ones(8).numpy().tobytes())
            file.seek(start + 64 * 2 + 5)  # the third box
            file.write(b"\x01")
        with pytest.raises(memstore.CorruptionError, match=r"its box at \[4, 0\], of shape \[2, 4\], put by rank 2"):
            store.get("key")
        for options in ({"out": {"a": torch.zeros(8, 4), "b": torch.zeros(3)}}, {"like": value}):
            with pytest.raises(memstore.CorruptionError, match=r"its box at \[4, 0\]"):
                store.get("key", **options)
            assert not options.get("out", {"a": torch.zeros(1)})["a"].any()
        sound = shard(value["a"], Box((0, 1), (4, 2)))
        assert store.get("key", out={"a": sound})["a"].local.all()
        with pytest.raises(memstore.CorruptionError, match=r"its box at \[4, 0\]"):
            store.get("key", out={"a": shard(value["a"], Box((3, 1), (2, 2)))})


@pytest.mark.parametrize(
    "change",
    [
        lambda box: box._replace(place=1 << 40),
        lambda box: box._replace(place=-64),
        lambda box: box._replace(place=box.place + 1),
        lambda box: box._replace(box=Box((7, 0), (2, 4))),
        lambda box: box._replace(box=Box((0, 0), (0, 4))),
        lambda box: box._replace(box=Box((0,), (2,))),
        lambda box: box._replace(checksum=b"1"),
        lambda box: box._replace(box=Box((0, 0), (1, 4))),
    ],
)
def test_hostile_boxes(boxed: BoxedStore, change: Any) -> None:
    boxed.put("key", [torch.ones(8, 4)], grid(4))
    boxed.change_boxes("key", lambda found: {0: (change(found[0][0]), *found[0][1:])})
    for get in (boxed.store.get, lambda key: boxed.store.get(key, out=[torch.zeros(8, 4)]), boxed.store.view):
        with pytest.raises(memstore.CorruptionError, match="'key'.*the boxes of the value are damaged"):
            get("key")
    assert not boxed.store.verify().ok
    boxed.change_boxes("key", lambda found: {5: found[0]})
    with pytest.raises(memstore.CorruptionError, match="boxes of a leaf that doesn't exist"):
        boxed.store.get("key")


def test_a_part_that_no_box_has(boxed: BoxedStore) -> None:
    boxed.put("key", [torch.ones(8, 4)], grid(4))
    boxed.change_boxes("key", lambda found: {0: (found[0][0], found[0][0], *found[0][2:])})
    with pytest.raises(memstore.CorruptionError, match=r"'key'.*no box of leaf \(0,\) has .*offsets=\(2, 0\)"):
        boxed.store.get("key")
