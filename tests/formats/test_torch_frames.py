"""Tensors that torch.save wrote into larger files: what is read around one is known of the next, and not too much."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

from memstore.errors import MemstoreError
from memstore.formats import Frames, PlacedTensor

SIMILAR = [  # of one size, as files of torch.save too
    torch.zeros(2, 8),
    torch.ones(2, 8),
    torch.zeros(8, 2),
    torch.zeros(4, 4),
    torch.zeros(4, 4, dtype=torch.int32),
    torch.zeros(4, 4).t(),
    torch.nn.Parameter(torch.zeros(4, 4)),
    torch.zeros(1, dtype=torch.float64),
    torch.zeros(0, 3),
]


def saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def test_tensors_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    """As in a checkpoint: tensors one behind the other, some of them as one that was there before."""
    parts = [saved(tensor) for tensor in SIMILAR * 2]
    path = tmp_path / "file"
    path.write_bytes(b"".join(parts))
    frames, known = Frames(), 0
    with path.open("rb") as file:
        memory, start = memoryview(path.read_bytes()), 0
        for part in parts:
            found = frames.locate(memory, start, len(part))
            known += found is not None
            found = found or frames.read(str(path), file.fileno(), start, len(part))
            assert found == Frames().read(str(path), file.fileno(), start, len(part))
            start += len(part)
    assert known >= len(SIMILAR)


def test_where_any_byte_differs_nothing_else_is_found_than_by_reading_it(tmp_path: Path) -> None:
    """But for the checksums, a byte that was looked at makes it another frame; what was not changes nothing."""
    path, data = tmp_path / "file", saved(torch.arange(16.0))
    path.write_bytes(data)
    frames = Frames()
    with path.open("r+b", buffering=0) as file:
        found = frames.read(str(path), file.fileno(), 0, len(data))
        assert frames.locate(memoryview(data), 0, len(data)) == found
        unlike = 0
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1
            os.pwrite(file.fileno(), changed[at : at + 1], at)
            again = frames.locate(memoryview(changed), 0, len(data))
            assert again in (None, found)
            if again is None:
                unlike += 1
            else:
                assert located(path, file.fileno(), len(data)) == again
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert unlike > 500  # the directory, the headers, the pickle


def located(path: Path, fd: int, size: int) -> PlacedTensor | None:
    try:
        return Frames().read(str(path), fd, 0, size)
    except MemstoreError:
        return None


def test_a_frame_that_was_cut_off_is_none_that_is_known(tmp_path: Path) -> None:
    data = saved(torch.arange(16.0))
    path = tmp_path / "file"
    path.write_bytes(data)
    frames = Frames()
    with path.open("rb") as file:
        frames.read(str(path), file.fileno(), 0, len(data))
        assert frames.locate(memoryview(data)[:-1], 0, len(data)) is None
        assert frames.locate(memoryview(data), 1, len(data)) is None
        path.write_bytes(data[:-1])
        with pytest.raises(MemstoreError, match="truncated"):
            frames.read(str(path), file.fileno(), 0, len(data))
