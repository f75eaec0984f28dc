"""Batches of rows: what indexing gives, in one pass into memory that is there, or an error and nothing written."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass
from torch._subclasses.fake_tensor import FakeTensorMode

import memstore
from memstore.engine import syscalls
from tests.examples import examples
from tests.support.equality import assert_same
from tests.view.strategies import tensors

quick = settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
Pair = namedtuple("Pair", ["x", "y"])


@tensorclass
class Frame:
    pixels: torch.Tensor
    label: str


def value(n: int = 50) -> TensorDict:
    inner = TensorDict({"b": torch.arange(n), "c": torch.rand(n, 3) > 0.5}, [n])
    return TensorDict({"a": torch.rand(n, 4, 2), "n": inner, "half": torch.rand(n, 2).bfloat16()}, [n], names=["time"])


@st.composite
def rows(draw: st.DrawFn, n: int) -> Any:
    kind = draw(st.sampled_from(("list", "tensor", "array", "int32", "mask", "mask array", "slice", "range")))
    if "mask" in kind:
        mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        return np.array(mask, bool) if kind == "mask array" else torch.tensor(mask, dtype=torch.bool)
    if kind == "slice":
        return slice(draw(st.integers(-n, n)), draw(st.none() | st.integers(-n, n)), draw(st.integers(1, 3)))
    if kind == "range":
        return range(draw(st.integers(0, n)), n)
    found = draw(st.lists(st.integers(-n, n - 1), max_size=8)) if n else []
    if kind == "array":
        return np.array(found, np.int64)
    return found if kind == "list" else torch.tensor(found, dtype=torch.int32 if kind == "int32" else torch.int64)


def plain_index(index: Any) -> Any:
    if isinstance(index, (list, range)):
        return torch.tensor(list(index), dtype=torch.int64)
    return index if isinstance(index, slice) else torch.as_tensor(index)


@quick
@given(data=st.data())
def test_rows_are_what_indexing_gives(any_store: memstore.Store, data: st.DataObject) -> None:
    any_store.put("key", data.draw(tensors(least=1)))
    plain, lazy = any_store.get("key"), any_store.view("key")
    if plain.ndim > 1 and data.draw(st.booleans()):
        plain, lazy = plain.transpose(0, 1), lazy.transpose(0, 1)
    index = data.draw(rows(len(plain)))
    expected = plain[plain_index(index)]
    before = memstore.bytes_read()
    found = memstore.read_rows(lazy, index)
    assert memstore.bytes_read() - before == expected.nbytes
    assert type(found) is torch.Tensor
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found, expected)
    out = torch.empty((*expected.shape, 2), dtype=expected.dtype)[..., 0]
    assert memstore.read_rows(lazy, index, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(memstore.read_rows(plain, index), expected)


@pytest.mark.parametrize("disk", [False, True])
def test_rows_of_a_tensordict(disk: bool, request: pytest.FixtureRequest) -> None:
    store = request.getfixturevalue("disk_store" if disk else "store")
    store.put("key", value())
    view, index = store.view("key"), [49, -50, 7, 7]
    memstore.prefetch_rows(view, index)
    found = memstore.read_rows(view, index)
    assert_same(store.get("key")[index], found)
    out = value(4)
    leaf = out["n", "b"]
    assert memstore.read_rows(view, torch.tensor(index), out=out) is out
    assert out["n", "b"] is leaf
    assert_same(found, out)
    assert_same(store.get("key")[10:40][index[2:]], memstore.read_rows(view[10:40], index[2:]))
    assert memstore.read_rows(view, []).batch_size == (0,)


def test_other_containers(store: memstore.Store) -> None:
    stack = LazyStackedTensorDict(*[TensorDict({"x": torch.full((2,), i)}) for i in range(3)], stack_dim=0)
    texts = NonTensorStack("zero", "one", "two")
    store.put(
        "key",
        {
            "list": [torch.arange(3), 7, None],
            "pair": Pair(torch.rand(3), (torch.rand(3, 2),)),
            "frame": Frame(pixels=torch.rand(3, 2), label="one", batch_size=[3]),
            "stack": stack,
            "td": TensorDict({"texts": texts, "same": NonTensorData("all", [3]), "x": torch.arange(3)}, [3]),
        },
    )
    view = store.view("key")
    assert isinstance(view["frame"], Frame)
    found = memstore.read_rows(view, [2, 0])
    assert found["list"][0].tolist() == [2, 0]
    assert found["list"][1:] == [7, None]
    assert type(found["pair"]) is Pair
    assert torch.equal(found["pair"].y[0], view["pair"].y[0].clone()[[2, 0]])
    assert type(found["frame"]) is Frame
    assert (found["frame"].label, found["frame"].batch_size) == ("one", (2,))
    assert torch.equal(found["frame"].pixels, view["frame"].pixels.clone()[[2, 0]])
    assert found["stack"]["x"].tolist() == [[2, 2], [0, 0]]
    assert found["td"]["texts"] == ["two", "zero"]
    assert found["td"]["same"] == "all"
    again = memstore.read_rows(view, [2, 0], out=memstore.read_rows(view, [0, 1]) | {"td": found["td"]})
    assert torch.equal(again["frame"].pixels, found["frame"].pixels)
    assert torch.equal(again["pair"].x, found["pair"].x)
    with pytest.raises(ValueError, match="texts"):
        memstore.read_rows(view["td"], [0, 1], out=found["td"])


def test_rows_go_to_a_device(store: memstore.Store) -> None:
    store.put("key", value())
    found = memstore.read_rows(store.view("key"), [1, 2], device="meta")
    assert {leaf.device.type for leaf in found.values(True, True)} == {"meta"}
    assert found.device == torch.device("meta")
    assert memstore.read_rows(store.view("key", device="meta"), [1])["a"].device.type == "meta"
    assert memstore.read_rows(store.view("key", device="meta"), [1], device="cpu")["a"].device.type == "cpu"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([0, 50], IndexError, r"row 50 of value, which has 50: rows are from -50 to 49"),
        ([-51, 0], IndexError, "row -51 .* from -50 to 49"),
        (torch.zeros(49, dtype=torch.bool), IndexError, r"a mask of 49 for value, which has 50 rows"),
        (torch.tensor([1.0]), TypeError, "float32 is no index of rows"),
        (torch.tensor([1], dtype=torch.uint8), TypeError, "uint8"),
        (np.array([1.5]), TypeError, "float64 is no index"),
        (["a"], TypeError, "no index"),
        (3, TypeError, "the number 3 is no index"),
        (None, TypeError, "a NoneType is no index"),
        (torch.tensor([[1]]), ValueError, r"one dimension, and not 2: shape \(1, 1\)"),
        (torch.tensor(1), ValueError, "one dimension, and not 0"),
        ([[1, 2], [3]], (TypeError, ValueError), "inhomogeneous"),
        (np.array([2**64 - 1], np.uint64), IndexError, "no tensor has so many"),
        (torch.tensor([2**63], dtype=torch.uint64), IndexError, "no tensor has so many"),
        (range(10**12), IndexError, "row 999,999,999,999 of value"),
        (range(-(2**70), 2**70), IndexError, "rows are from -50 to 49"),
        (torch.tensor([1], device="meta"), TypeError, "on meta is no index"),
        (torch.tensor([1]).to_sparse(), TypeError, "sparse_coo on cpu is no index"),
    ],
)
def test_a_bad_index_is_an_error(index: Any, error: Any, message: str, store: memstore.Store) -> None:
    store.put("key", value())
    out = value(1)
    expected = out.clone()
    for call in (memstore.read_rows, memstore.prefetch_rows):
        with pytest.raises(error, match=message):
            call(store.view("key"), index)
    with pytest.raises(error, match=message):
        memstore.read_rows(store.view("key"), index, out=out)
    assert_same(expected, out)


@pytest.mark.parametrize(
    ("held", "error", "message"),
    [
        (deque([torch.ones(3)]), TypeError, r"value\['v'\] is a deque: rows are those of"),
        (Namespace(a=[torch.ones(3)]), TypeError, r"value\['v'\] is a Namespace: rows"),
        (torch.eye(3).to_sparse(), TypeError, r"value\['v'\] is a quantized, nested or sparse tensor"),
    ],
)
def test_what_has_no_rows_is_named(held: Any, error: Any, message: str, store: memstore.Store) -> None:
    store.put("key", {"x": torch.arange(3), "v": held})
    with pytest.raises(error, match=message):
        memstore.read_rows(store.view("key"), [1])


def test_an_empty_leaf_has_no_rows(store: memstore.Store) -> None:
    store.put("key", torch.rand(0, 3))
    assert memstore.read_rows(store.view("key"), []).shape == (0, 3)
    with pytest.raises(IndexError, match="none, for it is empty"):
        memstore.read_rows(store.view("key"), [0])


def overlapping() -> TensorDict:
    buffer = torch.zeros(4, 8)
    return TensorDict({"x": buffer[:2, :4], "y": buffer[1:3, 2:6]}, [2])


BAD_OUTS = {
    "layout": (lambda: TensorDict({"x": torch.zeros(2, 4).to_sparse(), "y": torch.zeros(2, 4)}), "can't be filled"),
    "shape": (lambda: TensorDict({"x": torch.zeros(2, 4), "y": torch.zeros(2, 5)}), r"value\['y'\].*\(2, 4\)"),
    "count": (lambda: TensorDict({"x": torch.zeros(2, 4), "y": torch.zeros(3, 4)}), r"value\['y'\].*\(3, 4\)"),
    "dtype": (lambda: TensorDict({"x": torch.zeros(2, 4), "y": torch.zeros(2, 4).double()}), "float64"),
    "missing": (lambda: TensorDict({"x": torch.zeros(2, 4)}), r"missing \['y'\]"),
    "too many": (lambda: TensorDict({k: torch.zeros(2, 4) for k in "xyz"}), r"too many \['z'\]"),
    "tensor": (lambda: torch.zeros(2, 4), "entries by name"),
    "itself": (lambda: TensorDict({"x": torch.zeros(2, 4), "y": torch.zeros(1, 4).expand(2, 4)}), "one in memory"),
    "each other": (overlapping, "overlap in memory"),
}


@pytest.mark.parametrize("name", BAD_OUTS)
def test_a_bad_out_is_an_error_before_anything_is_written(name: str, store: memstore.Store) -> None:
    make, message = BAD_OUTS[name]
    store.put("key", TensorDict({"x": torch.ones(9, 4), "y": torch.ones(9, 4)}, [9]))
    out = make()
    with pytest.raises(ValueError, match=message):
        memstore.read_rows(store.view("key"), [0, 1], out=out)
    assert not any(leaf.to_dense().any() for leaf in ([out] if isinstance(out, torch.Tensor) else out.values()))


@pytest.mark.parametrize("source", ["w", b"w", None, 3, np.ones(3), [1, 2], {}, {"a": "b"}, (), object()])
def test_what_has_no_tensor_has_no_rows(source: Any) -> None:
    for call in (memstore.read_rows, memstore.prefetch_rows):
        with pytest.raises(TypeError, match=f"type {type(source).__qualname__} without a tensor has no rows"):
            call(source, [1])


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_tensors_whose_elements_are_elsewhere_are_refused(store: memstore.Store) -> None:
    """torch ended the process that looked for them by their address."""
    store.put("quantized", torch.quantize_per_tensor(torch.ones(50, 2), 0.1, 0, torch.qint8))
    store.put("jagged", torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged))
    for source in (store.view("quantized"), store.view("jagged"), torch.eye(3).to_sparse()):
        for call in (memstore.read_rows, memstore.prefetch_rows):
            with pytest.raises(TypeError, match=r"value\['it'\] is a quantized, nested or sparse tensor"):
                call({"it": source}, [1])


@pytest.mark.parametrize("index", [range(0), range(49, -1, -7), range(-50, 50), range(3, 2**70, 2**70)])
def test_a_range_is_its_numbers(store: memstore.Store, index: range) -> None:
    store.put("key", torch.arange(50.0))
    assert memstore.read_rows(store.view("key"), index).tolist() == torch.arange(50.0)[list(index)].tolist()


def test_an_ordered_dict_stays_one(store: memstore.Store) -> None:
    store.put("key", OrderedDict(b=torch.arange(3), a=torch.arange(3)))
    found = memstore.read_rows(store.view("key"), [2])
    assert type(found) is OrderedDict
    assert_same(OrderedDict(b=torch.tensor([2]), a=torch.tensor([2])), found)


def test_columns_of_one_matrix_are_no_overlap(store: memstore.Store) -> None:
    store.put("key", TensorDict({"x": torch.ones(9, 4), "y": torch.full((9, 2), 2)}, [9]))
    buffer = torch.zeros(2, 6, dtype=torch.int64)
    out = TensorDict({"x": buffer.view(torch.float32)[:, :4], "y": buffer[:, 2:4]}, [2])
    memstore.read_rows(store.view("key"), [0, 1], out=out)
    assert out["x"].sum() == 8
    assert buffer[:, 2:].tolist() == [[2, 2, 0, 0]] * 2


def test_what_is_read_is_not_written(store: memstore.Store) -> None:
    store.put("key", torch.arange(9))
    plain, index = torch.arange(9), torch.tensor([3, 1, 2])
    with pytest.raises(ValueError, match="overlaps what is read"):
        memstore.read_rows(plain, [0, 1], out=plain[5:7])
    with pytest.raises(ValueError, match="overlaps what is read"):
        memstore.read_rows(store.view("key"), index, out=index)
    with pytest.raises(ValueError, match="a lazy leaf of a view"):
        memstore.read_rows(store.view("key"), [0, 1], out=store.view("key")[:2])
    with pytest.raises(TypeError, match="out= has a device"):
        memstore.read_rows(plain, [0], out=torch.zeros(1), device="cpu")
    with pytest.raises(ValueError, match="no dimension"):
        memstore.read_rows(store.view("key")[3], [0])
    with pytest.raises(ValueError, match="without a batch dimension"):
        memstore.read_rows(TensorDict({"x": plain}), [0])


# --- pages ------------------------------------------------------------------------------------------------------------


def drop_from_memory(path: str) -> None:
    import os

    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # what is dirty stays
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def test_cold_rows_are_asked_for_at_once(disk_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = syscalls.will_need

    def will_need(addresses: list[int], sizes: list[int]) -> None:
        asked.extend(sizes)
        original(addresses, sizes)

    monkeypatch.setattr(syscalls, "will_need", will_need)
    with memstore.open(disk_root) as store:
        store.put("key", torch.arange(2000.0).repeat_interleave(4096).view(2000, 4096))
        file = store.info("key").files[0]  # mapped until the store is closed: pages that are stay in memory
    with memstore.open(disk_root) as store:
        index = [1999, 5, 6, 1000, 5]
        drop_from_memory(file)
        assert memstore.read_rows(store.view("key"), index)[:, 0].tolist() == index
        assert asked == [2 * 16384, 16384, 16384]
        asked.clear()
        assert memstore.read_rows(store.view("key"), index)[:, 7].tolist() == index  # warm by now
        assert not asked
        drop_from_memory(file)
        memstore.prefetch_rows(store.view("key"), index)
        assert len(asked) == 3


@pytest.mark.parametrize(
    ("use", "sizes"),
    [
        (lambda view: view[5:7].sum(), [2 * 16384]),
        (lambda view: view[5:10:2, 1024:2048].sum(), [4096] * 3),
        (lambda view: view[[5, -1, 6]], [2 * 16384, 16384]),
        (lambda view: view[torch.tensor([5, 6])], [2 * 16384]),
    ],
)
def test_cold_boxes_are_asked_for_by_their_runs(
    use: Any, sizes: list[int], disk_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(syscalls, "will_need", lambda addresses, sizes: asked.extend(sizes))
    with memstore.open(disk_root) as store:
        store.put("key", torch.arange(2000.0).repeat_interleave(4096).view(2000, 4096))
        file = store.info("key").files[0]
    with memstore.open(disk_root) as store:
        view = store.view("key")
        drop_from_memory(file)
        use(view)
        assert asked == sizes
        use(view)  # warm by now
        assert asked == sizes


@pytest.mark.parametrize("kind", ["fake", "meta", "sparse", "freed", "cut", "lazy"])
def test_out_without_memory_is_refused_before_anything_is_written(store: memstore.Store, kind: str) -> None:
    store.put("key", {"a": torch.ones(900, 4), "b": torch.ones(900, 3)})
    view = store.view("key")
    bad = torch.zeros(2, 3, device="meta" if kind == "meta" else "cpu")
    if kind == "fake":
        with FakeTensorMode():
            bad = torch.zeros(2, 3)
    elif kind in ("freed", "cut"):
        bad.untyped_storage().resize_(8 if kind == "cut" else 0)
    elif kind == "sparse":
        bad = bad.to_sparse()
    elif kind == "lazy":
        bad = view["b"][:2]
    whole = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"value\['b'\] of out is"):
        memstore.read_rows(view, [1, 2], out={"a": whole, "b": bad})
    assert not whole.any()
