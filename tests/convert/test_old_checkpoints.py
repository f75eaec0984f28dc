"""Checkpoints of older versions of torch, made by hand as these versions wrote them."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING, TensorProperties
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from memstore.convert import convert
from memstore.errors import UnsupportedValueError
from tests.support.equality import assert_same


class _Of311(pickle.Pickler):
    """As Python 3.11.0 to 3.11.3 pickle members of enumerations."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, MEM_FORMAT_ENCODING) else NotImplemented


def _saved(value: Any) -> bytes:
    """As torch.save wrote it before torch 2.1: the zip has only the pickle, the storages and a version."""
    stream, old = io.BytesIO(), io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as new, zipfile.ZipFile(old, "w") as made:
        for name in new.namelist():
            if name.endswith(("/data.pkl", "/data/0", "/version")):
                made.writestr(name, new.read(name))
    return old.getvalue()


def _write_checkpoint(path: str, pickler: type[pickle.Pickler]) -> dict[str, Any]:
    """As torch 2.0 to 2.2 saved it, of two ranks: its metadata has classes of another module than today."""
    weight, counts = torch.arange(24.0).reshape(6, 4), torch.arange(5)
    counts_at = ChunkStorageMetadata(torch.Size([0]), counts.shape)
    halves = [ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([3, 4])) for start in (0, 3)]
    described: dict[str, Any] = {
        "model.weight": TensorStorageMetadata(TensorProperties(torch.float32), weight.shape, halves),
        "model.counts": TensorStorageMetadata(TensorProperties(torch.int64), counts.shape, [counts_at]),
        "epoch": BytesStorageMetadata(),
    }
    os.mkdir(path)
    where: dict[MetadataIndex, Any] = {}
    for rank, items in enumerate(
        [
            {MetadataIndex("model.weight", [0, 0]): weight[:3].clone(), MetadataIndex("epoch"): 7},
            {MetadataIndex("model.weight", [3, 0]): weight[3:].clone(), MetadataIndex("model.counts", [0]): counts},
        ]
    ):
        with open(f"{path}/__{rank}_0.distcp", "wb") as file:
            for index, value in items.items():
                data = _saved(value)
                where[index] = filesystem._StorageInfo(f"__{rank}_0.distcp", file.tell(), len(data))
                file.write(data)
    paths = {"model.weight": ("model", "weight"), "model.counts": ("model", "counts"), "epoch": ("epoch",)}
    metadata = Metadata(described, planner_data=paths, storage_data=where)
    for later in ("storage_meta", "version"):
        metadata.__dict__.pop(later, None)
    with open(f"{path}/.metadata", "wb") as file:
        pickler(file, protocol=4).dump(metadata)
    return {"model": {"weight": weight, "counts": counts}, "epoch": 7}


@pytest.mark.parametrize("pickler", [pickle.Pickler, _Of311])
def test_a_checkpoint_of_torch_before_2_3_is_read(folder: str, pickler: type[pickle.Pickler]) -> None:
    expected = _write_checkpoint(f"{folder}/source", pickler)
    with open(f"{folder}/source/.metadata", "rb") as file:
        metadata = file.read()
    assert b"torch.distributed._shard.sharded_tensor.metadata" in metadata
    assert (b"getattr" in metadata) == (pickler is _Of311)
    assert convert(f"{folder}/source", f"{folder}/target.pt").source_format == "dcp"
    assert_same(expected, torch.load(f"{folder}/target.pt", weights_only=True))


def test_a_checkpoint_of_torch_before_2_is_refused_as_such(folder: str) -> None:
    os.mkdir(f"{folder}/source")
    with open(f"{folder}/source/.metadata", "wb") as file:
        file.write(b"\x80\x04ctorch.distributed._shard.checkpoint.metadata\nMetadata\n)\x81.")
    with pytest.raises(UnsupportedValueError, match=r"a torch before 2\.0"):
        convert(f"{folder}/source", f"{folder}/target.pt")
