"""What writes files gets the bytes: `torch.save` and its kin store plain tensors, which need no store to be loaded."""

from __future__ import annotations

import copy
import io
import pickle
import shelve
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.staging as staging
from tensordict import LazyStackedTensorDict, TensorDict

import memstore
from memstore import StoredTensor
from tests.support.equality import assert_same

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Any:
    return MODES[request.param]


def value() -> dict[str, Any]:
    whole = torch.rand(50, 40)
    return {
        "w": whole,
        "tied": whole,
        "parameter": torch.nn.Parameter(torch.rand(300)),
        "frozen": torch.nn.Parameter(torch.rand(3), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.rand(3)),
        "transposed": torch.rand(30, 20).T,
        "bf16": torch.rand(50).bfloat16(),
        "float8": torch.rand(50).to(torch.float8_e4m3fn),
        "complex": torch.rand(50, dtype=torch.complex64),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "nested": TensorDict({"a": torch.rand(5, 3), "b": TensorDict({"c": torch.arange(5)}, [5])}, [5]),
        "list": [torch.arange(3), 5, "text", None],
    }


def saved(what: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(what, file, **options)
    file.seek(0)
    return file


def test_torch_save_of_a_view_stores_its_bytes(scratch: str, mode: Any) -> None:
    with memstore.open(scratch) as store:
        store.put("key", value())
        expected = copy.deepcopy(store.get("key"))
        with mode():
            file = saved(store.view("key"))
        store.delete("key")
        store.gc()
    loaded = torch.load(file, weights_only=True)
    assert_same(loaded, expected)
    assert type(loaded["w"]) is torch.Tensor
    assert loaded["w"].data_ptr() == loaded["tied"].data_ptr()  # as for the value itself
    assert loaded["transposed"].stride() == (1, 20)


@pytest.mark.parametrize("inline_limit", [0, 1 << 16])
def test_a_part_is_saved_without_the_rest(root: str, inline_limit: int, mode: Any) -> None:
    with memstore.open(root, inline_limit=inline_limit) as store:
        store.put("key", torch.rand(100, 50))
        plain = store.get("key")
        parts = [
            lambda x: x[3:7],
            lambda x: x[3],
            lambda x: x[2:9].T,
            lambda x: x[::10, ::5],
            lambda x: x[::10, :1].expand(10, 400),
            lambda x: x[:1].expand(80, 50),
            lambda x: x[7:7],
            lambda x: x[5, 5],
            lambda x: x[4].view(torch.int32),
        ]
        for part in parts:
            with mode():
                file = saved(part(store.view("key")))
            assert len(file.getvalue()) < 4000
            loaded = torch.load(file, weights_only=True)
            assert type(loaded) is torch.Tensor
            assert torch.equal(loaded, part(plain))
            assert loaded.stride() == part(plain).stride() or part in parts[3:5]
        received = pickle.loads(pickle.dumps(store.view("key")))
        assert torch.equal(torch.load(saved(received), weights_only=True), plain)
        del received, plain


def test_whole_leaves_are_written_from_the_mapping(disk_store: memstore.Store, reads: Any) -> None:
    """Without a copy of all of them in memory."""
    disk_store.put("key", {"w": torch.rand(1000), "b": torch.rand(1000)})
    view = disk_store.view("key")
    leaves = [view[name] for name in "wb"]
    from memstore.view.views import plain_tensor

    with reads() as count:
        assert [plain_tensor(leaf).data_ptr() for leaf in leaves] == [
            leaf.stored.tensor(leaf.shown).data_ptr() for leaf in leaves
        ]
        assert count() == 8000


def test_saving_verifies_what_it_writes(root: str) -> None:
    with memstore.open(root, checksum=True, inline_limit=0) as store:
        store.put("key", torch.rand(20_000))
        (path,) = store.info("key").files
    with memstore.open(root, verify=True) as store:
        with open(path, "r+b") as file:
            file.seek(50_000)
            file.write(b"?")
        with pytest.raises(memstore.CorruptionError, match="checksum"):
            saved(store.view("key"))


def test_the_legacy_format_has_the_bytes_too(store: memstore.Store) -> None:
    stored = {"w": torch.rand(50), "p": torch.nn.Parameter(torch.rand(5))}
    store.put("key", stored)
    file = saved(store.view("key"), _use_new_zipfile_serialization=False)
    assert_same(torch.load(file, weights_only=True), stored)


def test_modules_and_optimizers_of_lazy_leaves_are_saved_whole(store: memstore.Store) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    store.put("key", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    view = store.view("key")
    lazy = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    lazy.load_state_dict(view["model"], assign=True)
    assert type(lazy[0].weight) is StoredTensor
    for one in (lazy, copy.deepcopy(lazy)):
        assert_same(torch.load(saved(one.state_dict()), weights_only=True), model.state_dict())
        loaded = torch.load(saved(one), weights_only=False)
        assert type(loaded[0].weight) is torch.nn.Parameter
        assert_same(loaded.state_dict(), model.state_dict())
    assert_same(torch.load(saved(view["optimizer"]), weights_only=True), optimizer.state_dict())


def test_lazy_stacks_are_saved_with_their_bytes(store: memstore.Store) -> None:
    stack = LazyStackedTensorDict(TensorDict({"w": torch.rand(3)}), TensorDict({"w": torch.rand(3)}))
    store.put("key", stack)
    assert_same(torch.load(saved(store.view("key")), weights_only=True), stack)


def test_what_is_sent_stays_a_reference(store: memstore.Store) -> None:
    """Also by who holds a file that was saved, and from an object whose state a file is made of."""
    store.put("key", torch.rand(5000))
    view = store.view("key")
    saved(view)
    assert len(pickle.dumps(view)) < 600
    assert type(pickle.loads(pickle.dumps({"a": view}))["a"]) is StoredTensor


class Inner:
    """An object that pickles its own state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return pickle.loads, (pickle.dumps(self.state),)


def test_what_an_object_pickles_while_it_is_saved_goes_to_the_file(store: memstore.Store) -> None:
    store.put("key", torch.rand(50))
    loaded = torch.load(saved({"inner": Inner(store.view("key"))}), weights_only=False)
    assert type(loaded["inner"]) is torch.Tensor


@pytest.mark.parametrize("kind", ["files", "safetensors"])
@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_has_the_bytes(kind: str, scratch: str, tmp_path: Path) -> None:
    stored = {"w": torch.rand(60, 40), "b": torch.arange(60), "part": torch.rand(9)}
    with memstore.open(scratch) as store:
        store.put("key", stored)
        view = store.view("key")
        checkpoint = {**view, "part": view["part"][2:5]}
        if kind == "files":
            dcp.save(checkpoint, checkpoint_id=tmp_path, no_dist=True)
        else:
            pytest.importorskip("safetensors")
            dcp.save(checkpoint, storage_writer=dcp.HuggingFaceStorageWriter(path=str(tmp_path)), no_dist=True)
        del view, checkpoint
        store.delete("key")
    target = {"w": torch.zeros(60, 40), "b": torch.zeros(60, dtype=torch.int64), "part": torch.zeros(3)}
    if kind == "files":
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    else:
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(path=str(tmp_path)), no_dist=True)
    assert_same(target, {**stored, "part": stored["part"][2:5]})


def test_other_writers_of_files(store: memstore.Store, tmp_path: Path) -> None:
    store.put("key", {"w": torch.rand(60)})
    view, plain = store.view("key"), store.get("key")
    np.save(tmp_path / "w.npy", view["w"])
    assert np.array_equal(np.load(tmp_path / "w.npy"), plain["w"].numpy())
    with shelve.open(tmp_path / "shelf") as shelf:
        shelf["key"] = view
        assert type(shelf["key"]["w"]) is torch.Tensor
    joblib = pytest.importorskip("joblib")
    joblib.dump(view, tmp_path / "joblib")
    assert_same(joblib.load(tmp_path / "joblib"), plain)


NOT_PINNED = staging.StagingOptions(False, False, False, False)
REFUSED: dict[str, Callable[[Any, Path], Any]] = {
    "safetensors": lambda view, folder: pytest.importorskip("safetensors.torch").save_file(view, folder / "file"),
    "safetensors in memory": lambda view, folder: pytest.importorskip("safetensors.torch").save(view),
    "a lazy stack": lambda view, folder: lazy_stack().__setitem__(slice(None), TensorDict(view, [2])),
    "a pointer": lambda view, folder: view["w"].data_ptr(),
    "a storage's pointer": lambda view, folder: view["w"].untyped_storage().data_ptr(),
    "a storage's bytes": lambda view, folder: bytes(view["w"].untyped_storage()),
    "a storage, saved": lambda view, folder: saved(view["w"].untyped_storage()),
    "a storage, sent": lambda view, folder: pickle.dumps(view["w"].untyped_storage()),
    "staging": lambda view, folder: staging.DefaultStager(NOT_PINNED).stage(view),
}


def lazy_stack() -> Any:
    return LazyStackedTensorDict(*[TensorDict({"w": torch.zeros(3)}) for _ in range(2)])


@pytest.mark.parametrize("name", REFUSED)
def test_what_asks_for_a_pointer_is_told_what_to_do(
    name: str, store: memstore.Store, tmp_path: Path, reads: Any, mode: Any
) -> None:
    store.put("key", {"w": torch.rand(2, 3)})
    with mode(), reads() as count:
        with pytest.raises(memstore.ReadOnlyError, match=r"'key' has no memory of its own.*clone\(\)") as caught:
            REFUSED[name](store.view("key"), tmp_path)
        assert count() == 0
    assert caught.value.key == "key"
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), RuntimeError)  # which torch and others look for


# --- what else becomes of a view: the rows of docs/views.md -----------------------------------------------------------


def test_what_is_loaded_from_a_view_is_as_from_the_value(store: memstore.Store, mode: Any) -> None:
    stored = {"w": torch.rand(4, 3), "b": torch.rand(4)}
    store.put("key", stored)
    view = store.view("key")
    with mode():
        target = torch.nn.Linear(3, 4)
        target.load_state_dict({"weight": view["w"], "bias": view["b"]})
        filled = TensorDict({"w": torch.zeros(4, 3), "b": torch.zeros(4)}, [4])
        filled[:] = TensorDict(view, [4])
        again = filled.clone().zero_().update_(TensorDict(view, [4]))
        batch = torch.utils.data.default_collate([{"w": view["w"][i], "b": view["b"][i]} for i in range(4)])
        copied = torch.zeros(4, 3).copy_(view["w"])
    assert_same(dict(target.state_dict()), {"weight": stored["w"], "bias": stored["b"]})
    for found in (filled.to_dict(), again.to_dict(), batch, {"w": copied, "b": stored["b"]}):
        assert_same(found, stored)


def test_what_holds_a_view_refuses_the_first_write_into_it(store: memstore.Store) -> None:
    parameter = torch.nn.Parameter(torch.rand(4))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    parameter.grad = torch.ones(4)
    optimizer.step()
    store.put("key", optimizer.state_dict())
    optimizer.load_state_dict(store.view("key"))
    with pytest.raises(memstore.ReadOnlyError, match=r"clone\(\)"):
        optimizer.step()
    optimizer.load_state_dict(store.get("key"))
    optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"][0] == 1.9


def test_copies_of_containers(store: memstore.Store, reads: Any) -> None:
    store.put("key", {"td": TensorDict({"w": torch.rand(4)}, [4]), "w": torch.rand(4)})
    view = store.view("key")
    with reads() as count:
        for one in (copy.copy(view), {"td": copy.copy(view["td"]), "w": copy.copy(view["w"])}):
            assert type(one["td"]["w"]) is type(one["w"]) is StoredTensor
        assert type(copy.deepcopy(view)["w"]) is StoredTensor
        assert count() == 16  # of the TensorDict, whose deep copy is loaded
