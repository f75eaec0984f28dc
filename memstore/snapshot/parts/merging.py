"""The parts of all ranks as one manifest, and as the index that transformers reads. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from memstore.snapshot.format import Manifest, StoredBox, StoredFile, StoredTensor, StoredValue
from memstore.snapshot.parts.part import Part


def merge(parts: Sequence[Part]) -> Manifest:
    """Shared tensors of one path become one, with the boxes that all ranks wrote; values that are equal become one."""
    take = parts[0].take
    files: list[StoredFile] = []
    tensors: list[StoredTensor] = []
    values: list[StoredValue] = []
    shared: dict[str, int] = {}
    known: dict[Any, int] = {}
    ranks: list[dict[str, int]] = []
    for part in parts:
        places: list[int] = []
        for tensor in part.tensors:
            boxes = tuple(_moved(box, len(files)) for box in tensor.boxes)
            index = shared.setdefault(tensor.path, len(tensors)) if tensor.shared else len(tensors)
            if index == len(tensors):
                tensors.append(StoredTensor(tensor.path, tensor.dtype, tensor.shape, boxes))
            else:
                tensors[index] = msgspec.structs.replace(tensors[index], boxes=tensors[index].boxes + boxes)
            places.append(index)
        files += part.files
        found: dict[str, int] = {}
        for value in part.values:
            value = msgspec.structs.replace(value, tensors=tuple(places[i] for i in value.tensors))
            same = (value.key, value.structure, value.objects, value.tensors)
            found[value.key] = known.setdefault(same, len(values))
            if found[value.key] == len(values):
                values.append(value)
        ranks.append(found)
    return Manifest(
        take.id,
        take.created,
        take.writer,
        take.world_size,
        tuple(files),
        tuple(tensors),
        tuple(values),
        tuple(ranks),
    )


def _moved(box: StoredBox, files: int) -> StoredBox:
    return StoredBox(box.file + files, box.offset, box.nbytes, box.offsets, box.shape)


def index_of(parts: Iterable[Part], manifest: Manifest) -> bytes | None:
    """What transformers reads a model's files by; None if it needs none, or a tensor is in several parts."""
    places: dict[str, str] = {}
    total = 0
    stored = {tensor.path: tensor for tensor in manifest.tensors}
    for part in parts:
        for tensor in part.tensors:
            if not tensor.index_name or tensor.index_name in places:
                continue
            boxes = stored[tensor.path].boxes if tensor.shared else tensor.boxes
            if len(boxes) != 1 or boxes[0].shape != tensor.shape:
                return None
            files = manifest.files if tensor.shared else part.files
            places[tensor.index_name] = files[boxes[0].file].name
            total += boxes[0].nbytes
    if not places or set(places.values()) == {"model.safetensors"}:
        return None
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(document, indent=2).encode()
