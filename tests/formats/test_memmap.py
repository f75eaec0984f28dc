"""Folders of TensorDict.memmap, and numpy's files: what they may hold, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictParams, tensorclass

import memstore
from tests.examples import examples
from tests.formats.files import contents
from tests.support.equality import assert_same

REFUSALS = (memstore.CorruptionError, memstore.UnsupportedValueError, FileNotFoundError)


@tensorclass
class Sample:
    image: torch.Tensor
    label: str
    extra: object = None


@tensorclass
class Watchful:
    image: torch.Tensor

    def __post_init__(self) -> None:
        made.append(self)


made: list[Any] = []


def sample(size: int) -> Sample:
    return Sample(image=torch.arange(float(size)).reshape(size, 1), label="cat", batch_size=[size])


def lazy(*sizes: int) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*(TensorDict(q=torch.ones(size), s=f"{size}") for size in sizes), stack_dim=0)


VALUES: dict[str, Callable[[], Any]] = {
    "nested": lambda: TensorDict(a=TensorDict(b=TensorDict(c=torch.ones(2)))),
    "batches": lambda: TensorDict(a=TensorDict(b=torch.ones(2, 3), batch_size=[2, 3]), c=torch.ones(2), batch_size=[2]),
    "empty": lambda: TensorDict(batch_size=[3]),
    "empty inside": lambda: TensorDict(a=TensorDict(batch_size=[3]), batch_size=[3]),
    "no elements": lambda: TensorDict(a=torch.empty(3, 0), b=torch.empty(3, 2, 0, dtype=torch.int16), batch_size=[3]),
    "a number": lambda: TensorDict(a=torch.tensor(3.0)),
    "dtypes": lambda: TensorDict(
        {str(d): torch.ones(3).to(d) for d in (torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.uint16)}
    ),
    "names": lambda: TensorDict(
        a=torch.ones(2, 3),
        n=TensorDict(b=torch.ones(2, 3), batch_size=[2, 3]),
        t="x",
        batch_size=[2, 3],
        names=["x", None],
    ),
    "keys": lambda: TensorDict(
        {key: torch.ones(2) for key in ("a/b", "..", ".", "a b", "%", "100%", "\u00e9", "meta", "data")}
    ),
    "keys of folders": lambda: TensorDict(
        {key: TensorDict(x=torch.ones(2)) for key in ("a/b", "..", "a b", "_tensordict")}
    ),
    "leaf and folder": lambda: TensorDict({"a": torch.ones(2), "a.memmap ": TensorDict(b=torch.ones(3))}),
    "text": lambda: TensorDict(
        a="hello", b=NonTensorData(None), c=NonTensorData(3.5), d=NonTensorData({"x": [1, None]})
    ),
    "text in a batch": lambda: TensorDict(a="hello", n=TensorDict(b="x", batch_size=[2, 3]), batch_size=[2]),
    "stack of texts": lambda: TensorDict(a=NonTensorStack("a", "b", 3), batch_size=[3]),
    "stack of stacks": lambda: TensorDict(
        a=NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")), batch_size=[2]
    ),
    "stack of lists": lambda: NonTensorStack(NonTensorData([1, 2]), NonTensorData("x")),
    "only text": lambda: NonTensorData("hello"),
    "only texts": lambda: NonTensorStack("a", "b"),
    "lazy": lambda: lazy(2, 2, 3),
    "lazy inside": lambda: TensorDict(l=lazy(2, 3), batch_size=[2]),
    "lazy on dim 1": lambda: LazyStackedTensorDict(*(TensorDict(q=torch.ones(2), batch_size=[2]),) * 3, stack_dim=1),
    "tensorclass": lambda: sample(3),
    "tensorclass inside": lambda: TensorDict(s=sample(3), batch_size=[3]),
    "params": lambda: TensorDictParams(TensorDict(a=torch.ones(3), b=TensorDict(c=torch.ones(2)))),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_get_gives_what_load_memmap_does(store: memstore.Store, folder: Path, name: str) -> None:
    VALUES[name]().memmap(folder / "td")
    before = contents(folder / "td")
    store.attach("key", folder / "td")
    store.put("loaded", TensorDict.load_memmap(folder / "td", mode="r", allow_pickle=False))
    assert_same(store.get("loaded"), store.get("key"))
    assert contents(folder / "td") == before


def test_folders_of_older_writers(store: memstore.Store, folder: Path) -> None:
    """Without percent codes in names, and without a version."""
    TensorDict({"a b": torch.ones(3), "c d": TensorDict(x=torch.zeros(2))}).memmap(folder / "td", robust_key=False)
    assert (folder / "td/a b.memmap").exists()
    for file in (folder / "td").rglob("meta.json"):
        meta = json.loads(file.read_text())
        file.write_text(
            json.dumps({key: meta[key] for key in meta if key not in ("_format_version", "_class", "_names")})
        )
    store.attach("key", folder / "td")
    value = store.get("key")
    assert value["a b"].sum() == 3
    assert value["c d", "x"].shape == (2,)


def test_rows_that_were_appended_since_are_told(store: memstore.Store, folder: Path) -> None:
    TensorDict(a=torch.ones(3), batch_size=[3]).memmap(folder / "td")
    store.attach("key", folder / "td")
    with open(folder / "td/a.memmap", "ab") as file:
        file.write(b"\0" * 4)
    with pytest.raises(memstore.CorruptionError, match="changed"):
        store.get("key")
    store.attach("key", folder / "td")  # as load_memmap: more bytes than the shape says are no fault
    assert store.get("key")["a"].shape == (3,)


def test_a_tensorclass_comes_without_its_post_init(store: memstore.Store, folder: Path) -> None:
    Watchful(image=torch.ones(3), batch_size=[3]).memmap(folder / "td")
    made.clear()
    store.attach("key", folder / "td")
    assert type(store.get("key")) is Watchful
    assert made == []


class Opened:
    """Unpickled, it leaves a mark."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (marker[0],)


marker = [""]


@pytest.mark.parametrize("where", ["data", "stack", "field"])
def test_pickles_need_permission(store: memstore.Store, folder: Path, where: str) -> None:
    marker[0] = str(folder / "unpickled")
    value: Any = {
        "data": lambda: TensorDict(a=NonTensorData(slice(1, 2))),
        "stack": lambda: NonTensorStack(slice(1, 2), slice(2, 3)),
        "field": lambda: Sample(image=torch.ones(3), label="x", extra=slice(1, 2), batch_size=[3]),
    }[where]()
    value.memmap(folder / "td")
    pickles = [*(folder / "td").rglob("*.pickle"), *(folder / "td").rglob("*.pkl")]
    assert pickles
    with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
        store.attach("key", folder / "td")
    with memstore.open(store.root, allow_pickle=True) as trusting:
        trusting.attach("key", folder / "td")
        trusting.put("loaded", TensorDict.load_memmap(folder / "td", mode="r", allow_pickle=True))
        assert_same(trusting.get("loaded"), trusting.get("key"))


def test_links_are_refused(store: memstore.Store, folder: Path) -> None:
    value = TensorDict(a=torch.ones(3), n=TensorDict(b=torch.ones(2)))
    for name in ("a.memmap", "meta.json", "n", "n/b.memmap", "n/meta.json"):
        shutil.rmtree(folder / "td", ignore_errors=True)
        value.memmap(folder / "td")
        (folder / "td" / name).rename(folder / "elsewhere")
        (folder / "td" / name).symlink_to(folder / "elsewhere")
        with pytest.raises(REFUSALS, match="link"):
            store.attach("key", folder / "td")
        shutil.rmtree(folder / "elsewhere", ignore_errors=True)
        (folder / "elsewhere").unlink(missing_ok=True)
    value.memmap(folder / "whole")
    (folder / "named").symlink_to(folder / "whole")  # but what the caller names may be one
    store.attach("key", folder / "named")
    assert store.get("key")["n", "b"].sum() == 2


LEAF = {"device": "cpu", "shape": [3], "dtype": "torch.float32", "is_nested": False}
HOSTILE: dict[str, dict[str, Any]] = {
    "shape is no list": {"a": {**LEAF, "shape": 3}},
    "shape of floats": {"a": {**LEAF, "shape": [3.0]}},
    "negative": {"a": {**LEAF, "shape": [-3]}},
    "two negatives": {"a": {**LEAF, "shape": [-3, -1]}},
    "huge": {"a": {**LEAF, "shape": [1 << 61]}},
    "overflow": {"a": {**LEAF, "shape": [1 << 62, 8]}},
    "overflow to nothing": {"a": {**LEAF, "shape": [1 << 62, 1 << 62, 0]}},
    "more than there is": {"a": {**LEAF, "shape": [4]}},
    "unknown dtype": {"a": {**LEAF, "dtype": "torch.float33"}},
    "dtype is a number": {"a": {**LEAF, "dtype": 3}},
    "quantized": {"a": {**LEAF, "dtype": "torch.quint8"}},
    "nested tensor": {"a": {**LEAF, "is_nested": True}},
    "missing file": {"b": LEAF},
    "missing folder": {"b": {"type": "TensorDict"}},
    "path": {"../a": LEAF},
    "absolute path": {"/etc/passwd": LEAF},
    "batch is no shape": {"shape": "x"},
    "batch of negatives": {"shape": [-1]},
    "device": {"device": "cuda:0"},
    "device is a number": {"device": 0},
    "names": {"_names": [3]},
    "too many names": {"_names": ["a", "b", "c"]},
    "later version": {"_format_version": 1 << 40},
    "no class": {"_type": None, "_class": None},
    "class is a list": {"_type": ["x"], "_class": ["x"]},
    "unknown class": {"_type": "<class 'os.system'>", "_class": "os:system"},
    "a stack of none": {"_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>", "_class": "", "stack_dim": 0},
    "a stack nowhere": {"_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>", "_class": "", "stack_dim": -1},
    "no data": {"_type": "<class 'tensordict.tensorclass.NonTensorData'>", "_class": ""},
    "no list": {"_type": "<class 'tensordict.tensorclass.NonTensorStack'>", "_class": "", "data": 3},
    "empty list": {"_type": "<class 'tensordict.tensorclass.NonTensorStack'>", "_class": "", "data": []},
    "empty lists": {"_type": "<class 'tensordict.tensorclass.NonTensorStack'>", "_class": "", "data": [[], []]},
    "pickle elsewhere": {
        "_type": "<class 'tensordict.tensorclass.NonTensorStack'>",
        "_class": "",
        "data": "/etc/x.pkl",
    },
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_metadata_is_refused(store: memstore.Store, folder: Path, fault: str) -> None:
    TensorDict(a=torch.ones(3)).memmap(folder / "td")
    meta = folder / "td/meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **HOSTILE[fault]}))
    (folder / "a.memmap").write_bytes(b"\0" * 12)
    with pytest.raises(REFUSALS, match=str(folder)):
        store.attach("key", folder / "td")


def test_what_is_missing_or_short_is_named(store: memstore.Store, folder: Path) -> None:
    TensorDict(a=torch.ones(3), n=TensorDict(b=torch.ones(2))).memmap(folder / "td")
    leaf = folder / "td/n/b.memmap"
    os.truncate(leaf, 7)
    with pytest.raises(memstore.CorruptionError) as caught:
        store.attach("key", folder / "td")
    assert caught.value.path == str(leaf)
    leaf.unlink()
    with pytest.raises(memstore.CorruptionError) as caught:
        store.attach("key", folder / "td")
    assert caught.value.path == str(leaf)


def test_folders_nest_no_deeper_than_values(store: memstore.Store, folder: Path) -> None:
    here = folder / "td"
    for _ in range(250):
        here.mkdir()
        (here / "meta.json").write_text('{"a":{"type":"TensorDict"},"_type":"","_class":"tensordict:TensorDict"}')
        here = here / "a"
    with pytest.raises(memstore.UnsupportedValueError, match="levels"):
        store.attach("key", folder / "td")


@hypothesis.settings(max_examples=examples(50), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_damaged_metadata_never_gives_other_bytes(store: memstore.Store, folder: Path, data: st.DataObject) -> None:
    shutil.rmtree(folder / "td", ignore_errors=True)
    value = TensorDict(
        a=torch.ones(3), s="x", n=TensorDict(b=torch.ones(3, dtype=torch.float64), batch_size=[3]), batch_size=[3]
    )
    value.memmap(folder / "td")
    file = data.draw(st.sampled_from(sorted((folder / "td").rglob("meta.json"))))
    text = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        if data.draw(st.booleans()):
            text[at] = data.draw(st.sampled_from(b'0123456789-[]{}",:ntf'))
        else:
            del text[at : at + data.draw(st.integers(1, 20))]
        if not text:
            break
    file.write_bytes(text)
    try:
        store.attach("key", folder / "td")
        got = store.get("key")
    except REFUSALS:
        return
    for tensor in dict(got.items(include_nested=True, leaves_only=True)).values() if hasattr(got, "items") else ():
        tensor.clone()


# --- numpy's files ----------------------------------------------------------------------------------------------------


REFUSALS_OF_ARRAYS = (memstore.CorruptionError, memstore.UnsupportedValueError)

NAMES = ("float16", "float32", "float64", "complex64", "complex128", "bool", "int8", "int64", "uint16", "uint64")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_as_they_are(store: memstore.Store, folder: Path, name: str, order: str) -> None:
    for shape in ((), (0,), (3, 0, 2), (5,), (3, 4), (2, 3, 4)):
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(name, order=order)
        path = folder / f"{len(shape)}{array.size}.npy"
        np.save(path, array)
        store.attach("key", path)
        got = store.get("key")
        assert type(got) is torch.Tensor
        assert got.numpy().dtype == array.dtype
        assert np.array_equal(got.numpy(), array)
        if array.size > 1:
            assert got.numpy().strides == array.strides


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4).astype(">i4"),
        np.array([object()], object),
        np.array(["text"]),
        np.array([b"x"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(3, [("a", "i4"), ("b", "f8")]),
        np.zeros(3, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_that_no_tensor_is_are_refused(store: memstore.Store, folder: Path, array: np.ndarray) -> None:
    np.save(folder / "x.npy", array, allow_pickle=True)
    with pytest.raises(memstore.UnsupportedValueError, match=r"x\.npy"):
        store.attach("key", folder / "x.npy")


def test_files_of_another_length_are_refused(store: memstore.Store, folder: Path) -> None:
    for change in (-928, -923, -919, -868, -801, -1, 1):
        np.save(folder / "x.npy", np.arange(100))
        wrong = (folder / "x.npy").stat().st_size + change
        os.truncate(folder / "x.npy", wrong)
        with pytest.raises(memstore.CorruptionError):
            store.attach("key", folder / "x.npy")


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 3,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387904, 4)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999999,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}",
        "{'descr': '<f8', 'fortran_order': 3, 'shape': (1,)}",
        "{'descr': '<f8', 'fortran_order': False}",
        "{'descr': 'x' * 9, 'fortran_order': False, 'shape': (1,)}",
        "{'descr': ['<f8'], 'fortran_order': False, 'shape': (1,)}",
        "__import__('os').mkdir('opened')",
        "(" * 3000,
        "",
    ],
)
def test_hostile_headers_are_refused(store: memstore.Store, folder: Path, header: str) -> None:
    text = header.encode().ljust(5000) + b"\n"
    (folder / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 8)
    with pytest.raises(REFUSALS_OF_ARRAYS, match=r"x\.npy"):
        store.attach("key", folder / "x.npy")


@hypothesis.settings(max_examples=examples(60), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_what_is_accepted_is_what_numpy_reads(store: memstore.Store, folder: Path, data: st.DataObject) -> None:
    path = folder / "x.npy"
    path.unlink(missing_ok=True)
    np.save(path, np.arange(12, dtype="<i4").reshape(3, 4))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        content[data.draw(st.integers(0, 127))] = data.draw(
            st.sampled_from(b"0123456789<>|fiubc8(), {}':TF\x00\x01\x02\x03")
        )
    path.write_bytes(content)
    try:
        store.attach("key", path, format="npy")
    except REFUSALS_OF_ARRAYS:
        return
    assert np.array_equal(store.get("key").numpy(), np.load(path), equal_nan=False) or "f" in str(np.load(path).dtype)
