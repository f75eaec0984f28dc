"""What a manifest must be, as far as it can be told without torch and without its files."""

from __future__ import annotations

import math
from typing import Any

from memstore.engine import ELEMENT_SIZES
from memstore.snapshot.format.manifest_nouns import Manifest, StoredFile, StoredTensor
from memstore.snapshot.format.names import is_file_name, is_id
from memstore.snapshot.storage import CHUNK, SUM_SIZE
from memstore.wording import short


class BrokenError(Exception):
    """A rule of the format that is broken."""


def _require(condition: bool, *complaint: Any) -> None:
    if not condition:
        raise BrokenError(" ".join(text if isinstance(text, str) else short(text) for text in complaint))


def check(manifest: Manifest) -> None:
    """Raises BrokenError."""
    _require(is_id(manifest.id), "the id is", [manifest.id])
    _require(
        len(manifest.ranks) == manifest.world_size,
        f"it has {len(manifest.ranks):,} ranks, and says {manifest.world_size:,}",
    )
    _check_files(manifest.files)
    ranges: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        if not _is_in_one_box(tensor, manifest.files):
            _check_tensor(tensor, manifest.files)
        for box in tensor.boxes:
            ranges[box.file].append((box.offset, box.offset + box.nbytes))
    for file, found in zip(manifest.files, ranges, strict=True):
        found.sort()
        end = 0
        for start, stop in found:
            if start < end:
                raise BrokenError(f"two tensors overlap in {file.name} at byte {start:,}")
            end = stop
    _check_values(manifest)


def _check_values(manifest: Manifest) -> None:
    for value in manifest.values:
        index = max(value.tensors, default=-1)
        _require(index < len(manifest.tensors), "the value", [value.key], f"has a tensor {index:,} that isn't there")
    for rank, values in enumerate(manifest.ranks):
        for key, index in values.items():
            there = index < len(manifest.values) and manifest.values[index].key == key
            _require(there, f"rank {rank} has a value", [key], "that isn't there")


def _check_files(files: tuple[StoredFile, ...]) -> None:
    _require(len({file.name for file in files}) == len(files), "a file stands there twice")
    _require(len({bool(file.sums) for file in files if file.size}) <= 1, "some files have checksums, and others don't")
    for file in files:
        _require(is_file_name(file.name), "no file of a snapshot is called", [file.name])
        chunks = -(-file.size // CHUNK)
        fits = len(file.sums) in (0, SUM_SIZE * chunks)
        _require(fits, file.name, f"has {len(file.sums):,} bytes of sums for {chunks:,} chunks")


def _is_in_one_box(tensor: StoredTensor, files: tuple[StoredFile, ...]) -> bool:
    """Whether all is right with a tensor that is one box, as most are: as `_check_tensor`, in a fifth of the time."""
    if len(tensor.boxes) != 1:
        return False
    box, shape, itemsize = tensor.boxes[0], tensor.shape, ELEMENT_SIZES.get(tensor.dtype)
    return (
        itemsize is not None
        and box.shape == shape
        and len(box.offsets) == len(shape)
        and not any(box.offsets)
        and box.file < len(files)
        and box.offset + box.nbytes <= files[box.file].size
        and 0 < box.nbytes == math.prod(shape) * itemsize
    )


def _check_tensor(tensor: StoredTensor, files: tuple[StoredFile, ...]) -> None:
    name = f"the tensor {short(tensor.path)}"
    numel, covered, itemsize = math.prod(tensor.shape), 0, ELEMENT_SIZES.get(tensor.dtype)
    _require(math.prod(max(size, 1) for size in tensor.shape) < 1 << 60, name, "is larger than any memory")
    for box in tensor.boxes:
        elements = math.prod(box.shape)
        covered += elements
        _require(len(box.offsets) == len(box.shape) == len(tensor.shape), name, "has a box of other dimensions")
        fits = all(o + n <= size for o, n, size in zip(box.offsets, box.shape, tensor.shape, strict=True))
        _require(fits and elements > 0, name, "has a box that doesn't lie in it")
        if itemsize is None:  # of a dtype that safetensors lacks: whoever makes tensors of it knows
            itemsize = max(box.nbytes // elements, 1)
        _require(
            box.nbytes == elements * itemsize, name, f"has a box of {box.nbytes:,} bytes for {elements:,} elements"
        )
        there = box.file < len(files) and box.offset + box.nbytes <= files[box.file].size
        _require(there, name, "has a box beyond the end of its file")
    _require(covered == numel, name, f"has {numel:,} elements, and its boxes {covered:,}")
