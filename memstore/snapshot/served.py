"""The files of a snapshot, mapped: views, and entries of a store that lie in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memstore import modes, structure
from memstore.engine import Content, ExternalFiles, check_header, decode_external, map_external, opened
from memstore.errors import MemstoreError, UnsupportedValueError
from memstore.sharding import Box
from memstore.snapshot.manifest import StoredTensor
from memstore.snapshot.progress import SILENT
from memstore.snapshot.reading import Want, read_into
from memstore.snapshot.restoring import state_dict_of
from memstore.snapshot.stored import Stored, Value
from memstore.snapshot.targets import new_target
from memstore.structure import DTYPES, ExternalValue, traits


def describe_snapshot(key: str, path: str | os.PathLike[str], format: object, *, allow_pickle: bool) -> Content:
    """What a record says of rank 0's state dicts, which lie in the files of a snapshot.

    Args:
        key: for errors.
        format: not used: the arguments are those of `formats.describe_files`.
    """
    try:
        stored = Stored(os.path.abspath(path))
        values = _values(stored, 0)
        sources = ExternalFiles()
        bases = _add_files(stored, sources)
        places: list[int] = []
        for value in values:
            for name, tensor in value.paths():
                start = _place(tensor)
                if start is None:
                    raise UnsupportedValueError(
                        f"{stored.path}: the parts of {name} lie in several places: attach it with copy=True"
                    )
                places.append(bases[tensor.boxes[0].file] + start if tensor.boxes else 0)
        keys = [value.key for value in values]
        joined = structure.join_external(keys, [ExternalValue(value.plan, value.objects) for value in values], places)
        check_header(key, len(joined.plan.description) + len(joined.objects))
    except MemstoreError as error:
        error.key = key
        raise
    return Content(joined.plan.description, joined.objects, joined.plan.nbytes, adopted=sources.encode())


def load_snapshot(key: str, path: str | os.PathLike[str], format: object, *, allow_pickle: bool) -> Any:
    """Rank 0's state dicts in new memory, compared with their checksums."""
    try:
        stored = Stored(os.path.abspath(path))
        values = _values(stored, 0)
        return {value.key: state_dict_of(stored, value, allow_pickle=allow_pickle) for value in values}
    except MemstoreError as error:
        error.key = key
        raise


@modes.put_aside()
def view(stored: Stored, rank: int, *, allow_pickle: bool) -> dict[str, Any]:
    """As `Snapshot.view`."""
    sources = ExternalFiles()
    bases = _add_files(stored, sources)
    mapping = map_external(decode_external(sources.encode()))
    memory = np.zeros(0, np.uint8) if mapping is None else np.asarray(mapping)
    return {
        value.key: stored.build(value, _mapped(stored, value, memory, mapping, bases), allow_pickle=allow_pickle)
        for value in _values(stored, rank)
    }


def _values(stored: Stored, rank: int) -> list[Value]:
    found = [stored.value(rank, key) for key in stored.keys(rank)]
    return [value for value in found if value is not None]


def _add_files(stored: Stored, sources: ExternalFiles) -> list[int]:
    """Where each file starts in the range of addresses that they are mapped to."""
    bases: list[int] = []
    for file in stored.manifest.files:
        stored.check_size(file)
        path = f"{os.path.realpath(stored.path)}/{file.name}"
        with opened(path) as (_, found):
            bases.append(sources.add(path, found))
    return bases


def _place(tensor: StoredTensor) -> int | None:
    """Where all elements lie in C order, in the file of the first box; None if they lie in several places."""
    if len(tensor.boxes) < 2:
        return tensor.boxes[0].offset if tensor.boxes else 0
    boxes = sorted(tensor.boxes, key=lambda box: box.offsets)
    end = boxes[0].offset
    for box in boxes:
        rows_only = Box(box.offsets[1:], box.shape[1:]) == Box((0,) * (len(tensor.shape) - 1), tensor.shape[1:])
        if box.file != boxes[0].file or box.offset != end or not rows_only:
            return None
        end += box.nbytes
    return boxes[0].offset


def _mapped(
    stored: Stored, value: Value, memory: Any, mapping: object | None, bases: Sequence[int]
) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    with torch.inference_mode(False):
        for i, tensor in enumerate(value.tensors):
            if i in value.plan.same:
                tensors.append(tensors[value.plan.same[i]])
                continue
            start = _place(tensor)
            if start is None or not tensor.boxes:
                made = new_target(tensor)
                read_into(stored, [Want(tensor, made.shards)], SILENT)
                found = made.value
            else:
                found = _over(memory, mapping, bases[tensor.boxes[0].file] + start, tensor)
            tensors.append(traits.with_traits(found, value.plan.traits[i]))
    return tensors


def _over(memory: Any, mapping: object | None, start: int, tensor: StoredTensor) -> torch.Tensor:
    dtype = DTYPES[tensor.dtype]
    part = memory[start : start + structure.count(tensor.shape) * dtype.itemsize]
    if start % dtype.itemsize:
        part = part.copy()
    storage = torch.from_numpy(part).untyped_storage()
    storage._memstore_mapping = mapping  # pyright: ignore[reportAttributeAccessIssue] - as structure's own leaves
    return traits.over(storage, dtype, 0, tensor.shape, traits.contiguous_stride(tensor.shape))
