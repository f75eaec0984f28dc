"""What safetensors' files say beside their tensors is kept where the target has a place for it; parts are refused."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from memstore.convert import convert
from memstore.convert import files as convert_files
from memstore.errors import CorruptionError, UnsupportedValueError
from tests.convert.values import weights, write


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


# --- files of torch's HuggingFaceStorageWriter ------------------------------------------------------------------------


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
