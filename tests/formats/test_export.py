"""Exports: what others read is what was put, and a target is whole or not there."""

from __future__ import annotations

import errno
import gc
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictParams, UnbatchedTensor

import memstore
from memstore import structure
from memstore.engine.format.records import Leaf
from memstore.errors import AlreadyExistsError
from memstore.formats import has_devices
from memstore.structure.traits import Traits
from tests.children import in_child
from tests.formats.files import WRITERS
from tests.formats.test_memmap import VALUES as MEMMAPS
from tests.formats.test_memmap import sample
from tests.small_tmpfs import free_bytes, on_small_tmpfs
from tests.support.equality import assert_same
from tests.support.faults import at_step, raising, record


def test_nothing_but_a_file_is_replaced(store: memstore.Store, tmp_path: Path) -> None:
    store.put("key", {"w": torch.ones(3)})
    fifo, null = tmp_path / "fifo", tmp_path / "null"
    os.mkfifo(fifo)
    null.symlink_to("/dev/null")
    with open(tmp_path / "a file", "wb") as file:
        for path in (fifo, null, f"/proc/self/fd/{file.fileno()}"):
            for format in ("torch", "safetensors"):
                with pytest.raises(AlreadyExistsError, match="no ordinary file"):
                    store.export("key", path, format=format)
    with pytest.raises(AlreadyExistsError, match="no ordinary file"):
        store.export("key", "/dev/memstore-test-new", format="torch")
    assert not os.path.lexists("/dev/memstore-test-new")
    assert stat.S_ISFIFO(fifo.stat().st_mode) and null.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a file", "fifo", "null"]


def nested() -> dict[str, Any]:
    w = torch.arange(3000.0).reshape(50, 60)
    return {"w": w, "n": {"b": w.t(), "tied": w, "step": torch.tensor(7), "none": torch.empty(0, 3)}}


def joined(value: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, entry in value.items():
        found |= joined(entry, f"{prefix}{name}.") if isinstance(entry, dict) else {f"{prefix}{name}": entry}
    return found


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


# --- safetensors ------------------------------------------------------------------------------------------------------


def test_safetensors_reads_the_tensors_by_their_joined_names(store: memstore.Store, folder: Path) -> None:
    value = nested()
    store.put("key", value)
    store.export("key", folder / "x.safetensors")
    assert same_tensors(load_file(folder / "x.safetensors"), joined(value))
    with safe_open(folder / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    header = int.from_bytes((folder / "x.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0


def test_nothing_of_the_segment_is_left(store: memstore.Store, folder: Path) -> None:
    """Pads, slack, key, slots."""
    store.put(
        "key", {f"odd{i}": torch.ones(i, dtype=torch.uint8) for i in range(1, 40)} | {"large": torch.ones(3 << 20)}
    )
    store.export("key", folder / "x.safetensors")
    loaded = load_file(folder / "x.safetensors")
    assert sorted(loaded) == sorted(store.get("key"))
    size = (folder / "x.safetensors").stat().st_size
    assert size == sum(tensor.nbytes for tensor in loaded.values()) + 8 + int.from_bytes(
        (folder / "x.safetensors").read_bytes()[:8], "little"
    )


def test_tensors_of_every_look_are_written_in_order(store: memstore.Store, folder: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "transposed": base.t(),
        "expanded": torch.arange(3.0).expand(5, 3),
        "column": base[:, 1],
        "parameter": torch.nn.Parameter(base.clone()),
        "conjugated": torch.complex(base, base).conj(),
        "number": torch.tensor(3.0),
    }
    store.put("key", value)
    store.export("key", folder / "x.safetensors")
    loaded = load_file(folder / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor.detach().resolve_conj()) for name, tensor in value.items())


def test_a_single_tensor_has_a_name(store: memstore.Store, folder: Path) -> None:
    store.put("key", torch.ones(3))
    store.export("key", folder / "x.safetensors")
    assert list(load_file(folder / "x.safetensors")) == ["tensor"]


def test_what_a_module_keeps_beside_its_state_is_left_out(store: memstore.Store, folder: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
    store.put("key", state)
    store.export("key", folder / "x.safetensors")
    assert same_tensors(load_file(folder / "x.safetensors"), dict(state))


REFUSED: dict[str, tuple[Any, str]] = {
    "object": ({"a": {"lr": 0.5, "w": torch.ones(3)}}, r"value\['a'\]\['lr'\]"),
    "text in a TensorDict": (TensorDict(a="x"), r"value\['a'\]"),
    "array": ({"a": np.ones(3)}, r"value\['a'\]"),
    "dtype": ({"a": [torch.ones(3, dtype=torch.complex128)]}, r"value\['a'\]\[0\].*complex128"),
    "two of one name": ({"a.b": torch.ones(3), "a": {"b": torch.ones(3)}}, r"value\['a'\]\['b'\]"),
    "metadata": ({"__metadata__": torch.ones(3)}, "__metadata__"),
    "jagged": ({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}, r"value\['a'\]"),
    "unbatched": (TensorDict(a=UnbatchedTensor(torch.ones(3))), r"value\['a'\]"),
    "strided nested": ({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, r"value\['a'\]"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_safetensors_has_not_is_refused_by_name(store: memstore.Store, folder: Path, reason: str) -> None:
    value, message = REFUSED[reason]
    store.put("key", value)
    with pytest.raises(memstore.UnsupportedValueError, match=message) as caught:
        store.export("key", folder / "x.safetensors")
    assert caught.value.key == "key"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("limit", [1, 5000, "13kB", "5GB", None])
def test_a_checkpoint_is_read_by_its_index(store: memstore.Store, folder: Path, limit: int | str | None) -> None:
    value = nested()
    store.put("key", value)
    store.export("key", f"{folder}/out/", max_shard_size=limit)
    files = sorted(path.name for path in (folder / "out").iterdir())
    if limit in ("5GB", None):
        assert files == ["model.safetensors"]
    else:
        index = json.loads((folder / "out/model.safetensors.index.json").read_text())
        count = len(files) - 1
        assert set(index["weight_map"].values()) == {
            f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
        }
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in joined(value).values())
        for name, file in index["weight_map"].items():
            assert name in load_file(folder / "out" / file)
        shards = [load_file(folder / "out" / file) for file in files[:-1]]
        room = {1: 1, 5000: 5000, "13kB": 13000}[limit]
        assert all(len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= room for shard in shards)
    store.attach("back", folder / "out")
    assert same_tensors(store.get("back"), joined(value))


@pytest.mark.full
def test_transformers_loads_a_checkpoint(store: memstore.Store, folder: Path) -> None:
    pytest.importorskip("transformers")
    in_child(_round_trip_by_transformers, store, folder)  # its thousand modules stay out of this process


def _round_trip_by_transformers(store: memstore.Store, folder: Path) -> None:
    import transformers

    small = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(small)
    store.put("key", model.state_dict())
    store.export("key", folder / "out", max_shard_size="20kB")
    small.save_pretrained(folder / "out")
    again = transformers.GPT2LMHeadModel.from_pretrained(folder / "out")
    assert same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    model.save_pretrained(folder / "theirs", max_shard_size="20kB")
    store.attach("theirs", folder / "theirs")
    again.load_state_dict(store.get("theirs"), strict=False)
    del again


# --- memmap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEMMAPS)
def test_load_memmap_reads_what_memmap_would_have_written(store: memstore.Store, folder: Path, name: str) -> None:
    if name.startswith("only") or name == "stack of lists":
        pytest.skip("no tensors: not what an export is for")
    value = MEMMAPS[name]()
    value.memmap(folder / "theirs")
    store.put("key", value)
    store.export("key", folder / "ours", format="memmap")
    for which in ("theirs", "ours"):
        store.put(which, TensorDict.load_memmap(folder / which, mode="r", allow_pickle=False))
    assert_same(store.get("theirs"), store.get("ours"))


def test_dicts_become_tensordicts(store: memstore.Store, folder: Path) -> None:
    store.put("key", {**nested(), "lr": 0.5, "td": TensorDict(a=torch.ones(3, 2), batch_size=[3])})
    store.export("key", folder / "out", format="memmap")
    loaded = TensorDict.load_memmap(folder / "out", mode="r")
    assert torch.equal(loaded["n", "b"], nested()["n"]["b"])
    assert (loaded["lr"], loaded["td"].batch_size, loaded.batch_size) == (0.5, (3,), ())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), "value: a Tensor"),
        ([torch.ones(3)], "value: a list"),
        ({"a": {3: torch.ones(3)}}, r"value\['a'\]\[3\]"),
        ({"a": [torch.ones(3)]}, r"value\['a'\]"),
        ({"a": np.ones(3)}, r"value\['a'\]"),
        ({"a": {"shape": torch.ones(3)}}, r"value\['a'\]\['shape'\]"),
        ({"a": torch.ones(3).to(torch.float8_e5m2)}, r"value\['a'\].*float8"),
        ({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}, r"value\['a'\]"),
        (TensorDict(a=UnbatchedTensor(torch.ones(3))), "UnbatchedTensor"),
        ({"a": {"s": slice(1, 2)}}, r"value\['a'\]\['s'\].*allow_pickle"),
        (NonTensorStack(slice(1, 2), slice(1, 3)), "allow_pickle"),
    ],
)
def test_what_memmap_has_not_is_refused_by_name(store: memstore.Store, folder: Path, value: Any, message: str) -> None:
    store.put("key", value)
    with pytest.raises(memstore.UnsupportedValueError, match=message):
        store.export("key", folder / "out", format="memmap")
    assert list(folder.iterdir()) == []


def test_pickled_objects_are_written_where_pickle_is_allowed(store: memstore.Store, folder: Path) -> None:
    store.put("key", TensorDict(a=torch.ones(3), s=NonTensorData(slice(1, 2))))
    with memstore.open(store.root, allow_pickle=True) as trusting:
        trusting.export("key", folder / "out", format="memmap")
    assert TensorDict.load_memmap(folder / "out", mode="r", allow_pickle=True)["s"] == slice(1, 2)


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        nested(),
        torch.ones(3),
        {"a": [1, (torch.ones(3), None)], "s": "x", "p": torch.nn.Parameter(torch.ones(2))},
        TensorDict(a=torch.ones(3, 2), n=TensorDict(b=torch.ones(3), batch_size=[3]), batch_size=[3]),
    ],
    ids=["nested", "tensor", "mixed", "TensorDict"],
)
def test_torch_load_reads_it_safely(store: memstore.Store, folder: Path, value: Any) -> None:
    store.put("key", value)
    store.export("key", folder / "x.pt", format="torch")
    assert_same(store.get("key"), torch.load(folder / "x.pt", weights_only=True))
    assert (folder / "x.pt").stat().st_size < 16_000  # tied tensors once


def test_what_torch_refuses_is_refused(store: memstore.Store, folder: Path) -> None:
    w = torch.arange(4, dtype=torch.int32)
    store.put("key", {"w": w, "bytes": w.view(torch.uint8)})
    with pytest.raises(memstore.UnsupportedValueError, match=r"torch\.save"):
        store.export("key", folder / "x.pt", format="torch")
    assert list(folder.iterdir()) == []


# --- all formats ------------------------------------------------------------------------------------------------------

EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "safetensors": ("x.safetensors", {}),
    "shards": ("out", {"max_shard_size": 13_000}),
    "memmap": ("out", {"format": "memmap"}),
    "torch": ("x.pt", {"format": "torch"}),
}


@pytest.fixture(params=EXPORTS)
def export(request: pytest.FixtureRequest, store: memstore.Store, folder: Path) -> tuple[Callable[..., None], Path]:
    """Exports a value into a target."""
    name, options = EXPORTS[request.param]
    store.put("key", nested())
    return lambda **more: store.export("key", folder / name, **options, **more), folder / name


Export = tuple[Callable[..., None], Path]


def test_files_are_replaced_and_full_folders_refused(export: Export) -> None:
    run, target = export
    if target.suffix:
        target.write_text("old")
        run()
        assert target.stat().st_size > 3000
        target.unlink()
        target.mkdir()
        if target.suffix == ".pt":
            with pytest.raises(memstore.AlreadyExistsError):
                run()
        else:  # a checkpoint then
            run()
            assert (target / "model.safetensors").exists()
        return
    target.mkdir()
    run()
    before = sorted(target.rglob("*"))
    with pytest.raises(memstore.AlreadyExistsError):
        run()
    assert sorted(target.rglob("*")) == before
    for path in sorted(target.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    target.rmdir()
    target.write_text("a file")
    with pytest.raises(memstore.AlreadyExistsError):
        run()
    assert target.read_text() == "a file"


def test_progress_grows_to_the_end(export: Export) -> None:
    run, _ = export
    calls: list[tuple[int, int]] = []
    run(progress=lambda done, total: calls.append((done, total)))
    totals = {total for _, total in calls}
    assert len(totals) == 1
    assert calls[-1][0] == totals.pop() >= 12_000
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_callback_that_raises_stops_it(export: Export, folder: Path) -> None:
    run, _ = export

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(progress=stop)
    assert list(folder.iterdir()) == []


def test_an_error_at_any_step_leaves_nothing(export: Export, folder: Path) -> None:
    run, target = export
    steps = record(run)
    assert steps.count("rename") + steps.count("replace") >= 1
    _remove(target)
    for number in range(1, len(steps) + 1):
        if steps[number - 1] in ("close", "unlink", "unlock"):
            continue
        with at_step(number, raising(OSError(errno.EIO, "injected"))):
            try:
                run()
            except OSError as error:
                assert error.errno == errno.EIO
                assert list(folder.iterdir()) == [], steps[number - 1]
            else:
                _remove(target)


def _remove(target: Path) -> None:
    for path in sorted(target.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    target.rmdir() if target.is_dir() else target.unlink()


@pytest.mark.parametrize("name", EXPORTS)
def test_a_full_disk_is_an_error(name: str) -> None:
    on_small_tmpfs(4, _export_too_much, name)


def _export_too_much(small: str, name: str) -> None:
    target, options = EXPORTS[name]
    with memstore.open("/dev/shm/memstore-full-disk-test") as store:
        store.put("key", {"a": torch.ones(3 << 20), "b": torch.ones(3 << 20)})
        free = free_bytes(small)
        with pytest.raises(OSError) as caught:
            store.export("key", f"{small}/{target}", **options)
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(small) == []
        del caught  # its traceback holds mappings of what was begun
        gc.collect()
        assert free_bytes(small) == free
        store.delete("key")
    import shutil

    shutil.rmtree("/dev/shm/memstore-full-disk-test")


def test_files_have_the_callers_mode(export: Export) -> None:
    run, target = export
    old = os.umask(0o027)
    try:
        run()
    finally:
        os.umask(old)
    for path in [target, *target.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640)


@pytest.mark.parametrize("name", EXPORTS)
def test_a_durable_store_syncs_what_it_exports(disk_store: memstore.Store, name: str) -> None:
    disk_store.put("key", nested())
    target, options = EXPORTS[name]
    steps = record(lambda: disk_store.export("key", f"{disk_store.root}-{target}", **options))
    files = [path for path in Path(f"{disk_store.root}-{target}").rglob("*") if path.is_file()]
    last = max(i for i, step in enumerate(steps) if step in ("rename", "replace"))
    assert steps[:last].count("sync") == max(len(files), 1)
    assert "sync_folder" in steps[last:]
    _remove(Path(f"{disk_store.root}-{target}"))


def test_what_is_no_option_is_refused(store: memstore.Store, folder: Path) -> None:
    store.put("key", torch.ones(3))
    with pytest.raises(ValueError, match="size"):
        store.export("key", folder / "x", max_shard_size=0)
    for path in ("", b"x", None):
        with pytest.raises(TypeError):
            store.export("key", path)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", WRITERS)
def test_an_adopted_value_is_exported_like_any(store: memstore.Store, folder: Path, name: str) -> None:
    path, _ = WRITERS[name](folder)
    store.attach("key", path)
    store.export("key", folder / "out.pt", format="torch")
    assert_same(store.get("key"), torch.load(folder / "out.pt", weights_only=True))


def test_a_tensorclass_is_exported_by_name(store: memstore.Store, folder: Path) -> None:
    store.put("key", sample(3))
    store.export("key", folder / "out", format="memmap")
    store.attach("back", folder / "out")
    assert store.get("back").label == "cat"


def test_parameters_are_exported_as_tensors(store: memstore.Store, folder: Path) -> None:
    store.put("key", TensorDictParams(TensorDict(a=torch.ones(3))))
    store.export("key", folder / "x.safetensors")
    assert load_file(folder / "x.safetensors")["a"].sum() == 3


def test_values_of_other_devices_are_read_without_them() -> None:
    leaf = Leaf((), "float32", (3,), None, 0, 12)
    for device in (None, "cuda:0"):
        found = structure.describe_external_tree(0, [leaf], leaf_traits=[Traits(0, False, device)])
        assert has_devices(found.plan.description) == (device is not None)


def test_shards_are_filled_to_their_limit(store: memstore.Store, folder: Path) -> None:
    store.put("key", {f"{i}": torch.ones(1000) for i in range(7)})
    store.export("key", folder / "out", max_shard_size=10_000)
    shards = [load_file(path) for path in sorted((folder / "out").glob("*.safetensors"))]
    assert [len(shard) for shard in shards] == [2, 2, 2, 1]


def test_progress_is_told_of_nothing_too(store: memstore.Store, folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    store.put("key", {})
    store.export("key", folder / "x.safetensors", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 0)]
