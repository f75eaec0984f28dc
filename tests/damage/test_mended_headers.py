"""Whatever bit of a header is flipped, a repair mends it by the record: nothing is lost.

Many files have one flipped bit each, and one repair, so that every bit has its turn in minutes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memstore
from tests.damage.stores import content_of, flip, header_size, paths
from tests.support.equality import is_same

FILES = 128
STRIDE = 337  # bits; odd, so that all bits of a byte have their turn


def tensors(number: int) -> Any:
    return {"a": torch.arange(number, number + 301), "b": torch.ones(3, 5), "c": torch.full((7,), 2.5)}


def with_objects(number: int) -> Any:
    """Small ones, which the record has too."""
    return [torch.arange(number, number + 700), "text " * 50, {"n": number, "none": None}]


@pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("make", [tensors, with_objects], ids=["tensors", "objects"])
def test_a_repair_mends_each_flipped_bit(scratch: str, make: Any, stride: int) -> None:
    expected = {f"key {number:03}": make(number) for number in range(FILES)}
    with memstore.open(scratch, checksum=True) as store:
        store.put_many(expected)
    files = paths(scratch)
    (size,) = {header_size(path) for path in files.values()}
    bits = range(0, 8 * size, stride)
    for first in range(0, len(bits), FILES):
        flips = dict(zip(files, bits[first : first + FILES], strict=False))
        for key, bit in flips.items():
            flip(files[key], bit)
        report = memstore.repair(scratch)
        assert report.lost == () and set(report.recovered) == set(expected), [flips.get(key) for key in report.lost]
        with memstore.open(scratch, verify=True) as store:
            found = store.verify()
            assert found.ok, [(error.key, flips.get(str(error.key)), error.detail) for error in found.damaged]
            assert all(is_same(expected[key], store.get(key)) for key in flips), flips
    assert {key: paths(scratch)[key] for key in files} == files
    assert all(content_of(path)[8:].startswith(b'{"__metadata__"') for path in files.values())
