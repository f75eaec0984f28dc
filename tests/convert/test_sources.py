"""What others have written: torchsnapshot, older versions of torch, and safetensors with metadata or parts."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
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
from memstore.convert import files as convert_files
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from tests.convert.values import weights, write
from tests.support.equality import assert_same

# --- folders that torchsnapshot has written: those of torchsnapshot-0.1.0.tar.xz by that version ----------------------


KEPT = Path(__file__).parent / "torchsnapshot-0.1.0.tar.xz"


@pytest.fixture
def kept(folder: str) -> str:
    with tarfile.open(KEPT) as archive:
        archive.extractall(folder, filter="data")
    return folder


def of_one_rank() -> dict[str, Any]:
    return {
        "model": {
            "w": torch.arange(200.0).reshape(20, 10),
            "b": torch.arange(5).to(torch.float16),
            "scalar": torch.tensor(3),
            "c": torch.ones(2, dtype=torch.complex64),
            "flags": torch.tensor([True, False]),
        },
        "progress": {
            "epoch": 7,
            "lr": 0.1,
            "name": "späte / 100%",
            "raw": b"\0\1",
            "done": False,
            "none": None,
            "nested": {"a/b%": [torch.ones(3), 2], 5: collections.OrderedDict(x=torch.zeros(2, 2))},
            "tuple": (1, 2),
        },
    }


def of_two_ranks() -> dict[str, Any]:
    return {"same": {"w": torch.ones(6), "n": 3}, "sharded": {"t": torch.arange(40.0).reshape(10, 4)}}


def converted(path: str, **options: Any) -> Any:
    convert(path, f"{path}.pt", **options)
    return torch.load(f"{path}.pt", weights_only=True)


def test_all_that_one_rank_had(kept: str) -> None:
    assert_same(of_one_rank(), converted(f"{kept}/one"))


def test_parts_of_two_ranks_are_put_together(kept: str) -> None:
    assert_same(of_two_ranks(), converted(f"{kept}/two-alike"))
    convert(f"{kept}/two-alike", f"{kept}/snapshot")
    assert_same(of_two_ranks(), converted(f"{kept}/snapshot"))


def test_values_that_differ_by_rank_are_named(kept: str) -> None:
    with pytest.raises(UnsupportedValueError, match="ranks 0 and 1 have different values at own/rank"):
        convert(f"{kept}/two", f"{kept}/target.pt")


def test_metadata_in_yaml_is_read_too(kept: str) -> None:
    """As versions before 0.1 wrote it."""
    yaml = pytest.importorskip("yaml")
    path = f"{kept}/one/.snapshot_metadata"
    with open(path) as file:
        found = json.load(file)
    with open(path, "w") as file:
        yaml.dump(found, file, sort_keys=False)
    assert_same(of_one_rank(), converted(f"{kept}/one"))


Change = Callable[[dict[str, Any]], Any]


def _shards(manifest: dict[str, Any], rank: int = 1) -> list[dict[str, Any]]:
    return manifest[f"{rank}/sharded/t"]["shards"]


CHANGES: dict[str, tuple[str, Change, str]] = {
    "out of the folder": ("one", lambda m: m["0/model/b"].update(location="../x"), "no file"),
    "missing": ("one", lambda m: m["0/model/b"].update(location="x"), "missing"),
    "beyond the end": ("one", lambda m: m["0/model/b"].update(byte_range=[0, 1 << 40]), "bytes"),
    "backwards": ("one", lambda m: m["0/model/b"].update(byte_range=[10, 0]), "part from"),
    "too large": ("one", lambda m: m["0/model/b"].update(shape=[500]), "bytes for"),
    "negative": ("one", lambda m: m["0/model/b"].update(shape=[-5]), "shape"),
    "quantized": ("one", lambda m: m["0/model/b"].update(dtype="torch.qint8"), "qint8"),
    "another way": ("one", lambda m: m["0/model/b"].update(serializer="zstd"), "zstd"),
    "no number": ("one", lambda m: m["0/progress/epoch"].update(serialized_value="many"), "no int"),
    "no type": ("one", lambda m: m["0/progress/epoch"].update(type="Custom"), "Custom"),
    "no rank": ("one", lambda m: m.update({"x/y": {"type": "int"}}), "no rank"),
    "a part missing": ("two-alike", lambda m: _shards(m, 0).clear(), "lack the elements"),
    "all parts missing": ("two-alike", lambda m: (_shards(m, 0).clear(), _shards(m, 1).clear()), "no shards"),
    "a rank's part missing": ("two-alike", lambda m: m.pop("1/sharded/t"), "rank 1 had a part of sharded/t"),
    "a part elsewhere": ("two-alike", lambda m: _shards(m)[0].update(offsets=[1, 0]), "overlap"),
    "other dimensions": ("two-alike", lambda m: _shards(m)[0].update(offsets=[1]), "dimensions"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_lies(kept: str, name: str) -> None:
    snapshot, change, match = CHANGES[name]
    path = f"{kept}/{snapshot}/.snapshot_metadata"
    with open(path) as file:
        found = json.load(file)
    change(found["manifest"])
    with open(path, "w") as file:
        json.dump(found, file)
    with pytest.raises(MemstoreError, match=match):
        convert(f"{kept}/{snapshot}", f"{kept}/target.pt")
    assert not os.path.exists(f"{kept}/target.pt")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', "a: [", '{"version":"0","world_size":1,"manifest":[]}']
)
def test_metadata_that_is_none(kept: str, text: str) -> None:
    with open(f"{kept}/one/.snapshot_metadata", "w") as file:
        file.write(text)
    with pytest.raises(CorruptionError, match="snapshot_metadata"):
        convert(f"{kept}/one", f"{kept}/target.pt")


# --- checkpoints of older versions of torch, made by hand as these versions wrote them --------------------------------


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


# --- what safetensors' files say beside their tensors; parts are refused ----------------------------------------------


def said(path: str) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def write_shards(folder: str, metadata: list[dict[str, str] | None]) -> None:
    """A checkpoint of several files and their index."""
    os.mkdir(folder)
    listed: dict[str, str] = {}
    for i, texts in enumerate(metadata):
        save_file({f"w{i}": torch.full((3,), float(i))}, f"{folder}/part{i}.safetensors", metadata=texts)
        listed[f"w{i}"] = f"part{i}.safetensors"
    with open(f"{folder}/model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {}, "weight_map": listed}, file)


@pytest.mark.parametrize("target", ["safetensors", "huggingface"])
def test_what_a_file_says_is_kept(folder: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_files, "_SHARD_SIZE", 12_100)  # bytes: so Hugging Face's are several files
    texts = {"format": "mlx", "ss_network_dim": "32", "note": "späte Epoche"}
    save_file(weights(), f"{folder}/source.safetensors", metadata=texts)
    convert(f"{folder}/source.safetensors", f"{folder}/target", target_as=target)
    files = [f"{folder}/target"]
    if target == "huggingface":
        files = [f"{folder}/target/{name}" for name in os.listdir(f"{folder}/target") if name.endswith(".safetensors")]
        assert len(files) > 1
    assert [said(file) for file in files] == [texts] * len(files)


def test_files_say_that_they_are_for_torch_if_they_say_nothing_else(folder: str) -> None:
    save_file(weights(), f"{folder}/source.safetensors", metadata={"note": "mine"})
    convert(f"{folder}/source.safetensors", f"{folder}/target.safetensors")
    assert said(f"{folder}/target.safetensors") == {"format": "pt", "note": "mine"}
    write(f"{folder}/source.pt", "torch", weights())
    convert(f"{folder}/source.pt", f"{folder}/plain.safetensors")
    assert said(f"{folder}/plain.safetensors") == {"format": "pt"}


def test_what_several_files_say_becomes_one(folder: str) -> None:
    write_shards(f"{folder}/source", [{"format": "pt", "a": "1"}, None, {"format": "pt", "b": "2"}])
    for i, source in enumerate(("source", "source/model.safetensors.index.json")):
        convert(f"{folder}/{source}", f"{folder}/{i}.safetensors")
        assert said(f"{folder}/{i}.safetensors") == {"format": "pt", "a": "1", "b": "2"}


@pytest.mark.parametrize("target", ["safetensors", "huggingface"])
def test_files_that_contradict_one_another_are_refused(folder: str, target: str) -> None:
    write_shards(f"{folder}/source", [{"note": "one", "same": "x"}, {"note": "two", "same": "x"}])
    before = os.listdir(folder)
    with pytest.raises(UnsupportedValueError, match=r"1 leaf .*\n  value\['__metadata__'\]\['note'\].*--to torch"):
        convert(f"{folder}/source", f"{folder}/target", target_as=target)
    assert os.listdir(folder) == before
    convert(f"{folder}/source", f"{folder}/x.pt")
    convert(f"{folder}/x.pt", f"{folder}/target", target_as=target)


def test_metadata_that_was_written_otherwise_is_found(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(weights(), f"{folder}/source.safetensors", metadata={"note": "mine"})
    header_of = convert_files.header_of
    monkeypatch.setattr(convert_files, "header_of", lambda tensors, metadata: header_of(tensors, {"note": "other"}))
    with pytest.raises(CorruptionError, match="__metadata__"):
        convert(f"{folder}/source.safetensors", f"{folder}/target.safetensors")
    assert os.listdir(folder) == ["source.safetensors"]


# -- files of torch's HuggingFaceStorageWriter -------------------------------------------------------------------------


def _save(path: str, **options: Any) -> None:
    value = {name: tensor for name, tensor in weights().items() if tensor.dim()}
    dcp.save(value, storage_writer=dcp.HuggingFaceStorageWriter(path, **options), no_dist=True)


def test_what_torch_saved_whole_is_converted(folder: str) -> None:
    _save(f"{folder}/source")
    convert(f"{folder}/source", f"{folder}/target.safetensors")
    assert said(f"{folder}/target.safetensors") == {"format": "pt"}
    assert torch.equal(load_file(f"{folder}/target.safetensors")["w"], weights()["w"])


def test_parts_that_ranks_saved_are_refused_as_such(folder: str) -> None:
    """Not taken for whole tensors, by themselves or together."""
    _save(f"{folder}/source", save_distributed=True)
    (name,) = os.listdir(f"{folder}/source")
    sources = [f"{folder}/source", f"{folder}/source/{name}"]
    os.mkdir(f"{folder}/two")
    for i, start in enumerate((0, 50)):
        shards = {"w": {"saved_offsets": [start, 0]}}
        texts = {"DCP_SHARDING_INFO": json.dumps(shards), "DCP_VERSION": "1.0", "format": "pt"}
        save_file({"w": weights()["w"]}, f"{folder}/two/shard-0000{i + 1}-model.safetensors", metadata=texts)
    sources += [f"{folder}/two", f"{folder}/two/shard-00001-model.safetensors"]
    before = sorted(os.listdir(folder))
    for source in sources:
        for format in (None, "huggingface"):
            with pytest.raises(UnsupportedValueError, match="has parts of tensors.*enable_consolidation"):
                convert(source, f"{folder}/target", source_as=format)
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize(
    "text", ["{}", '{"w0": 1}', '{"w0": {"saved_offsets": [3]}}', '{"w0": {"saved_offsets": "a"}}']
)
def test_places_of_parts_that_lie(folder: str, text: str) -> None:
    """Of files that an index lists."""
    write_shards(f"{folder}/source", [{"DCP_SHARDING_INFO": text}, {}])
    with pytest.raises(UnsupportedValueError, match="has parts of tensors"):
        convert(f"{folder}/source", f"{folder}/target")


def test_a_folder_of_several_files_without_an_index_says_so(folder: str) -> None:
    os.mkdir(f"{folder}/source")
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, f"{folder}/source/{name}.safetensors")
    with pytest.raises(UnsupportedValueError, match=r"several \*\.safetensors, convert one of them"):
        convert(f"{folder}/source", f"{folder}/target")
