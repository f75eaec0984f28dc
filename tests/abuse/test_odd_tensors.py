"""Every odd tensor in every call that stores one: it is stored rightly, or refused by an error that names the leaf.

A tensor may have a shape and no bytes at its address. Who reads them all the same stores memory of the process that is
none of the tensor's, or dies. So this is a table: all kinds of tensors, and all calls.
"""

from __future__ import annotations

import asyncio
import gc
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import memstore
import memstore.integrations.torchstore as torchstore
from memstore.convert import convert
from memstore.deferred_init import deferred_init
from memstore.errors import UnsupportedValueError
from memstore.fake import fake_mode
from memstore.integrations import dcp
from memstore.structure import over, why_no_memory
from tests.snapshot.ranks import all_right, on_ranks
from tests.structure import classes

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|prototype|beta|uninitialized|invariant).*")

BASE = torch.arange(64.0).reshape(8, 8) + 1


# -- the tensors -------------------------------------------------------------------------------------------------------


def cut(nbytes: int) -> torch.Tensor:
    """FSDP frees parameters so between their uses."""
    made = BASE.clone()
    made.untyped_storage().resize_(nbytes)
    return made


def fake() -> torch.Tensor:
    with fake_mode():
        return torch.ones(8, 8)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return BASE.clone()


def small_integers(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(64, dtype=torch.uint8).reshape(8, 8).view(dtype)


class Nowhere(torch.Tensor):
    """A tensor whose storage has no memory, and which begins within it: torch gives it an address that isn't 0."""

    @staticmethod
    def __new__(cls) -> Nowhere:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, (8, 8), strides=(8, 1), storage_offset=4, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls()
        raise NotImplementedError(f"{func}")

    def __repr__(self, **_: Any) -> str:
        return "Nowhere()"


STORED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: BASE.clone(),
    "conjugated": lambda: torch.complex(BASE, BASE * 2).conj(),
    "negated": lambda: torch.complex(BASE, BASE * 2).conj().imag,
    "expanded": lambda: BASE[0].clone().expand(8, 8),
    "overlapping": lambda: torch.arange(15.0).as_strided((8, 8), (1, 1)),
    "transposed": lambda: BASE.t(),
    "inference": inference,
    "requires grad": lambda: BASE.clone().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(BASE.clone()),
    "two": lambda: TwoTensor(BASE.clone(), BASE * 2),
    "two of two": lambda: TwoTensor(TwoTensor(BASE.clone(), BASE * 2), TwoTensor(BASE * 3, BASE * 4)),
    "parameter of two": lambda: torch.nn.Parameter(TwoTensor(BASE.clone(), BASE * 2)),
    "int8 weight": lambda: classes.Int8Weight.of(BASE),
    "quantized": lambda: torch.quantize_per_tensor(BASE, 0.5, 1, torch.qint8),
    "sparse": lambda: BASE.to_sparse(),
    "sparse rows": lambda: BASE.to_sparse_csr(),
    "1-to-7-bit integers": lambda: small_integers(torch.uint4),
    "others of them": lambda: small_integers(torch.int3),
}
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "freed": (lambda: cut(0), "freed or cut"),
    "cut": (lambda: cut(64), "freed or cut"),
    "meta": (lambda: torch.empty(8, 8, device="meta"), "meta tensor"),
    "fake": (fake, "fake tensor|meta tensor"),
    "deferred": (lambda: deferred_init(torch.nn.Linear, 8, 8).weight, "fake tensor|deferred|meta tensor"),
    "mkldnn": (lambda: BASE.to_mkldnn(), "mkldnn"),
    "two, one freed": (lambda: TwoTensor(BASE.clone(), cut(0)), "freed or cut|is a TwoTensor"),
    "unknown subclass": (lambda: BASE.as_subclass(classes.Half), "Half"),
    "unknown, at an offset": (Nowhere, "Nowhere"),
    "unknown, whose operators copy": (lambda: classes.Copier(BASE), "Copier"),
}
UNKNOWN = ("unknown, at an offset", "unknown, whose operators copy")
WRAPPERS = ("two", "two of two", "parameter of two", "int8 weight")
# What some calls refuse, and others store.
ROWS = dict.fromkeys(("extend", "replay"), "rows are|can't be written in place")
NO_ROWS = {**dict.fromkeys(WRAPPERS, ROWS), **dict.fromkeys(("quantized", "sparse", "sparse rows"), ROWS)}
DCP = ("dcp", "dcp staged", "dcp store")
BITS = {**dict.fromkeys(DCP, r"view\(torch.uint8\)"), "export": r"view\(torch.uint8\)"}
EXCEPT: dict[str, dict[str, str]] = {
    **NO_ROWS,
    "int8 weight": ROWS | dict.fromkeys(DCP, "whose class lacks"),
    "1-to-7-bit integers": BITS,
    "others of them": BITS,
}


def values_of(tensor: Any) -> Any:
    """What it holds, whatever holds it; of one that wraps others its class, too."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if isinstance(tensor, memstore.TensorShard):
        tensor = tensor.local
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [type(tensor), *(values_of(getattr(tensor, name)) for name in names)]
    if tensor.dtype in (torch.uint4, torch.int3):
        return tensor.detach().view(torch.uint8).tolist()
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    return plain.detach().to_dense().resolve_conj().resolve_neg().clone().tolist()


def target_like(tensor: Any) -> Any:
    """A tensor that a checkpoint of this one can be loaded into, without its values."""
    if isinstance(tensor, DTensor):
        local = target_like(tensor.to_local())
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
    if isinstance(tensor, TwoTensor):
        return TwoTensor(target_like(tensor.a), target_like(tensor.b))
    if tensor.is_quantized:
        return torch.quantize_per_tensor(torch.zeros(8, 8), 0.5, 1, torch.qint8)
    made = torch.ones(8, 8, dtype=tensor.dtype)
    return made if tensor.layout is torch.strided else made.to_sparse(layout=tensor.layout)


# -- the calls ---------------------------------------------------------------------------------------------------------


class Holder(torch.nn.Module):
    def __init__(self, tensor: Any) -> None:
        super().__init__()
        if isinstance(tensor, torch.nn.Parameter):
            self.register_parameter("w", tensor)
        else:
            self.register_buffer("w", tensor)


class Calls:
    """All calls that store, each with what is got afterwards."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.store = memstore.open(f"{folder}/store")

    def put(self, w: Any) -> Any:
        self.store.put("put", {"w": w})
        return self.store.get("put")["w"]

    def put_many(self, w: Any) -> Any:
        self.store.put_many({"many": {"w": w}})
        return self.store.get("many")["w"]

    def put_sharded(self, w: Any) -> Any:
        self.store.put_sharded("sharded", {"w": w}, rank=0, world_size=1, attempt=uuid.uuid4().hex)
        return self.store.get("sharded")["w"]

    def save_model(self, w: Any) -> Any:
        self.store.save_model("model", Holder(w))
        return self.store.get("model")["model"]["w"]

    def extend(self, w: Any) -> Any:
        self.store.delete("rows", missing_ok=True)
        rows = self.store.create_dataset("rows", {"w": ((8,), w.dtype)}, capacity=8)
        rows.extend({"w": w})
        return rows.read_rows(slice(0, 8))["w"]

    def replay(self, w: Any) -> Any:
        self.store.delete("ring", missing_ok=True)
        ring = memstore.ReplayBuffer(self.store, "ring", {"w": ((8,), w.dtype)}, capacity=8, sampler="fifo")
        ring.extend({"w": w})
        return ring.sample(8)["w"]

    def take(self, w: Any) -> Any:
        memstore.Snapshot.take(f"{self.folder}/take", {"s": memstore.StateDict(w=w)}, durability="process")
        return memstore.Snapshot(f"{self.folder}/take").get_state_dict_for_key("s")["w"]

    def async_take(self, w: Any) -> Any:
        app_state = {"s": memstore.StateDict(w=w)}
        memstore.Snapshot.async_take(f"{self.folder}/async", app_state, durability="process").wait()
        return memstore.Snapshot(f"{self.folder}/async").get_state_dict_for_key("s")["w"]

    def dcp(self, w: Any, stage: Callable[[Any], Any] = lambda state: state) -> Any:
        path = f"{self.folder}/dcp"
        shutil.rmtree(path, ignore_errors=True)
        return self._dcp(w, stage, path, None)

    def dcp_staged(self, w: Any) -> Any:
        return self.dcp(w, dcp.Stager().stage)

    def dcp_store(self, w: Any) -> Any:
        return self._dcp(w, lambda state: state, self.store, "dcp")

    def _dcp(self, w: Any, stage: Callable[[Any], Any], place: Any, key: str | None) -> Any:
        writer, reader = dcp.StorageWriter(place, key=key, durability="process"), dcp.StorageReader(place, key=key)
        torch_dcp.save(stage({"w": w}), storage_writer=writer, planner=dcp.SavePlanner(), no_dist=True)
        target = {"w": target_like(w)}
        torch_dcp.load(target, storage_reader=reader, planner=dcp.LoadPlanner(), no_dist=True)
        return target["w"]

    def torchstore(self, w: Any) -> Any:
        async def put_and_get() -> Any:
            await torchstore.initialize()
            try:
                await torchstore.put("w", w)
                return await torchstore.get("w")
            finally:
                await torchstore.shutdown()

        return asyncio.run(put_and_get())

    def export(self, w: Any) -> Any:
        self.store.put("exported", {"w": w})
        path = f"{self.folder}/exported.pt"
        self.store.export("exported", path, format="torch")
        return torch.load(path, weights_only=False)["w"]


OF_ONE_PROCESS = (
    *("put", "put many", "put sharded", "save model", "extend", "replay", "take", "async take"),
    *DCP,
    *("torchstore", "export"),
)
OF_SHARDS = ("put sharded", "take", "async take")
OF_DTENSORS = ("put sharded", "save model", "take", "async take", *DCP)


def outcome(calls: Calls, call: str, w: Any) -> Any:
    """What was stored, or the text of the error that refused it."""
    try:
        return values_of(getattr(calls, call.replace(" ", "_"))(w))
    except UnsupportedValueError as error:
        return error.message
    except CheckpointException as error:
        (failure,) = error.failures.values()
        assert isinstance(failure[0], UnsupportedValueError), repr(failure[0])
        return failure[0].message


def check(found: Any, want: Any, refusal: str | None, what: str) -> None:
    if refusal is None:
        assert found == want, what
        return
    assert isinstance(found, str), f"{what}: it was stored, as {found!r:.200}"
    assert re.search(r"\['w'\]|\bw\b", found), f"{what}: the error names no leaf: {found}"
    assert re.search(refusal, found), f"{what}: {found}"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    made = Calls(str(tmp_path_factory.mktemp("odd")))
    yield made
    made.store.close()
    gc.collect()


@pytest.fixture(autouse=True)
def no_snapshots(calls: Calls) -> Iterator[None]:
    yield
    for name in ("take", "async", "dcp"):
        shutil.rmtree(f"{calls.folder}/{name}", ignore_errors=True)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("call", OF_ONE_PROCESS)
def test_it_is_stored_rightly_or_refused_by_name(calls: Calls, name: str, call: str) -> None:
    made = STORED[name]()
    check(outcome(calls, call, made), values_of(made), EXCEPT.get(name, {}).get(call), f"{name}, {call}")


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("call", OF_ONE_PROCESS)
def test_what_has_no_bytes_is_refused_by_name(calls: Calls, name: str, call: str) -> None:
    make, told = REFUSED[name]
    rows_have_it = name == "unknown subclass" and call in ROWS  # it has bytes, and rows are nothing but bytes
    if rows_have_it or (name == "unknown, whose operators copy" and call == "save model"):  # torch's state_dict copies
        check(outcome(calls, call, make()), BASE.tolist(), None, call)
        return
    found = outcome(calls, call, make())
    has_name = call != "torchstore"  # which is given no more than the tensor
    check(found if has_name or not isinstance(found, str) else f"w: {found}", None, told, f"{name}, {call}")


@pytest.mark.parametrize("call", OF_ONE_PROCESS)
def test_lazy_leaves_are_stored_as_what_they_show(calls: Calls, call: str) -> None:
    calls.store.put("shown", {"w": BASE})
    check(outcome(calls, call, calls.store.view("shown")["w"]), BASE.tolist(), None, call)


def test_a_module_of_lazy_leaves_is_saved_by_its_values(calls: Calls) -> None:
    calls.store.put("shown", {"weight": BASE, "bias": BASE[0]})
    module = torch.nn.Linear(8, 8)
    module.load_state_dict(calls.store.view("shown"), assign=True)
    dcp.save(module.state_dict(), checkpoint_id=f"{calls.folder}/dcp")
    assert torch.equal(memstore.Snapshot(f"{calls.folder}/dcp").view()["state"]["weight"].clone(), BASE)
    memstore.Snapshot(f"{calls.folder}/dcp").verify()


@pytest.mark.parametrize("name", ["freed", "meta", "fake", "mkldnn", "two, one freed", *UNKNOWN])
@pytest.mark.parametrize("call", OF_SHARDS)
def test_shards_without_bytes_are_refused_by_name(calls: Calls, name: str, call: str) -> None:
    make, told = REFUSED[name]
    local = make()
    shard = memstore.TensorShard(local, tuple(local.shape), (0, 0))
    check(outcome(calls, call, shard), None, told, f"{name}, {call}")


@pytest.mark.parametrize("name", ["plain", "conjugated", "negated", "expanded", "inference", "parameter", *WRAPPERS])
@pytest.mark.parametrize("call", OF_SHARDS)
def test_shards_are_stored_rightly(calls: Calls, name: str, call: str) -> None:
    local = STORED[name]()
    shard = memstore.TensorShard(local, tuple(local.shape), (0, 0))
    check(outcome(calls, call, shard), values_of(local), None, f"{name}, {call}")


@pytest.mark.parametrize("name", ["sparse", "sparse rows", "quantized"])
@pytest.mark.parametrize("call", OF_SHARDS)
def test_shards_of_other_layouts_are_refused_by_name(calls: Calls, name: str, call: str) -> None:
    local = STORED[name]()
    shard = memstore.TensorShard(local, tuple(local.shape), (0, 0))
    check(outcome(calls, call, shard), None, "to_dense|dequantize", f"{name}, {call}")


DTENSORS = ("plain", "conjugated", "negated", "expanded", "parameter", "two", "two of two")
REFUSED_DTENSORS = ("freed", "cut", "meta", "fake", "deferred", "two, one freed")


def _store_dtensors(rank: int, folder: str) -> list[tuple[str, Any, Any]]:
    calls, found = Calls(folder), list[tuple[str, Any, Any]]()
    mesh = init_device_mesh("cpu", (1,))
    for name in (*DTENSORS, *REFUSED_DTENSORS):
        for call in OF_DTENSORS:
            local = STORED[name]() if name in STORED else REFUSED[name][0]()
            made = DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False)
            want = values_of(local) if name in STORED else None
            found.append((f"{name}, {call}", outcome(calls, call, made), want))
            for taken in ("take", "async", "dcp"):
                shutil.rmtree(f"{folder}/{taken}", ignore_errors=True)
    calls.store.put("shown", {"w": BASE})
    lazy = calls.store.view("shown")["w"]
    for call in OF_DTENSORS:
        made = DTensor.from_local(lazy, mesh, [Shard(0)], run_check=False)
        found.append((f"lazy, {call}", outcome(calls, call, made), BASE.tolist()))
    calls.store.close()
    dist.barrier()
    return found


def test_so_are_dtensors(tmp_path: Path) -> None:
    (found,) = all_right(on_ranks(1, _store_dtensors, str(tmp_path)))
    assert len(found) == (len(DTENSORS) + len(REFUSED_DTENSORS) + 1) * len(OF_DTENSORS)
    for what, got, want in found:
        name = what.partition(", dcp")[0].rpartition(", ")[0] or what.partition(", dcp")[0]
        refusal = None if want is not None else REFUSED.get(name, REFUSED.get(what.partition(", dcp")[0], (0, "")))[1]
        check(got, want, refusal, what)


@pytest.mark.parametrize("name", ["plain", "two", "two of two", "quantized"])
def test_conversions_keep_them(calls: Calls, tmp_path: Path, name: str) -> None:
    w = STORED[name]()
    dcp.save({"w": w}, checkpoint_id=f"{calls.folder}/dcp")
    convert(f"{calls.folder}/dcp", tmp_path / "snapshot")
    got = memstore.Snapshot(tmp_path / "snapshot").get_state_dict_for_key("state")["w"]
    assert values_of(got) == values_of(w)


def test_no_storage_is_enlarged_for_a_tensor() -> None:
    storage = torch.zeros(4).untyped_storage()
    for offset, shape, stride in ((0, (5,), (1,)), (1, (4,), (1,)), (0, (2, 2), (3, 1))):
        with pytest.raises(UnsupportedValueError, match="freed or cut"):
            over(storage, torch.float32, offset, shape, stride)
    assert storage.nbytes() == 16
    assert over(storage, torch.float32, 1, (3,), (1,)).shape == (3,)
    with pytest.raises(UnsupportedValueError, match="without memory"):
        over(TwoTensor(BASE, BASE).untyped_storage(), torch.float32, 0, (8, 8), (8, 1))


def test_whether_there_is_memory_is_said_of_each() -> None:
    for name, make in STORED.items():
        is_plain = name not in (*WRAPPERS, "quantized", "sparse", "sparse rows")
        assert (why_no_memory(make()) is None) == is_plain, name
    for name, (make, _) in REFUSED.items():
        assert name == "unknown subclass" or why_no_memory(make()) is not None, name
