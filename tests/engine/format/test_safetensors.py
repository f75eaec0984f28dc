"""The rules of safetensors' headers, by bytes alone. Hostile headers are in tests/damage/test_headers.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from memstore.engine.format import headers
from memstore.engine.format.headers import SAFETENSORS_DTYPES, header_size, make_header, read_tensors, split_header
from memstore.errors import CorruptionError, UnsupportedValueError


def read(text: bytes, nbytes: int) -> tuple[dict[str, str], dict[str, headers.HeaderEntry]]:
    metadata, values = split_header(text)
    return metadata, read_tensors(values, nbytes)


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_what_is_made_is_read() -> None:
    tensors = [("b", "float64", (2, 3), 48), ('a "quoted": name', "bfloat16", (), 2), ("c", "bool", (0,), 0)]
    header = make_header(tensors)
    assert header_size(header[:8], len(header) + 50) == len(header)
    assert len(header) % 8 == 0
    metadata, entries = read(header[8:], 50)
    assert metadata == {"format": "pt"}
    found = [(name, one.dtype, one.shape, one.data_offsets) for name, one in entries.items()]
    assert found == [
        ("b", "F64", (2, 3), (0, 48)),
        ('a "quoted": name', "BF16", (), (48, 50)),
        ("c", "BOOL", (0,), (50, 50)),
    ]


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES)
def test_elements_have_torch_s_sizes(dtype: str) -> None:
    size = getattr(torch, dtype).itemsize
    _, entries = read(make_header([("a", dtype, (3,), 3 * size)])[8:], 3 * size)
    assert entries["a"].data_offsets == (0, 3 * size)
    with pytest.raises(CorruptionError, match="takes"):
        read(make_header([("a", dtype, (3,), 3 * size + 1)])[8:], 3 * size + 1)


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = {"c": entry("U8", [4], 4, 8), "empty": entry("U8", [0], 4, 4), "a": entry("F32", [1], 0, 4)}
    _, entries = read(json.dumps(header).encode(), 8)
    assert list(entries) == ["a", "empty", "c"]


def test_a_file_that_ends_within_its_header_is_truncated() -> None:
    header = make_header([("a", "uint8", (1,), 1)])
    for size in (0, 7, 8, len(header) - 1):
        with pytest.raises(CorruptionError, match="truncated"):
            header_size(header[: min(size, 8)], size)


def test_headers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    header = make_header([("a", "uint8", (1,), 1)])
    monkeypatch.setattr(headers, "HEADER_LIMIT", len(header) - 9)
    with pytest.raises(CorruptionError, match="limit"):
        header_size(header[:8], len(header) + 1)
    with pytest.raises(UnsupportedValueError, match="fit into a header"):
        make_header([("a", "uint8", (1,), 1)])


def test_a_dtype_that_torch_lacks_is_no_damage() -> None:
    with pytest.raises(UnsupportedValueError, match="F33"):
        read(json.dumps({"a": entry("F33", [1], 0, 1)}).encode(), 1)
