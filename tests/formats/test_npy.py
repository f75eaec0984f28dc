"""numpy's files: what they may hold, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import memstore
from tests.examples import examples

REFUSALS = (memstore.CorruptionError, memstore.UnsupportedValueError)

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
    with pytest.raises(REFUSALS, match=r"x\.npy"):
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
    except REFUSALS:
        return
    assert np.array_equal(store.get("key").numpy(), np.load(path), equal_nan=False) or "f" in str(np.load(path).dtype)
